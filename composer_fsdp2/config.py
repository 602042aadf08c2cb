"""The FSDP2 target in plain, frozen values: what ``fully_shard`` is to be given, one field per decision."""

import enum
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.errors import ConfigError

__all__ = [
    "REPLICATE_AXIS",
    "SHARD_AXIS",
    "ActivationCheckpointing",
    "BackwardPrefetch",
    "MeshSpec",
    "Prefetch",
    "ShardingConfig",
    "ShardingStrategy",
]

# The names that Composer gives to the axes of its mesh (composer/core/state.py, 0.32.1), kept so that code which
# looks an axis up by name finds it.
REPLICATE_AXIS = "data_parallel_replicate"
SHARD_AXIS = "data_parallel_shard"


class ShardingStrategy(enum.Enum):
    """FSDP1's five sharding strategies, spelled as Composer spells them."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

    @property
    def reshards_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """When FSDP1 gathered the next unit in backward."""

    NONE = "NONE"
    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Over which ranks parameters are sharded and replicated, as plain numbers.

    ``replicate`` None means a 1-D mesh (every rank holds a shard), a number a 2-D one: ``replicate`` groups of
    ``shard`` ranks each. One of the two may be -1: whatever the world size leaves.
    """

    shard: int = -1
    replicate: int | None = None
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        for key, degree in self._degrees().items():
            if degree != -1 and degree < 1:
                raise ConfigError(f"{key} is {degree}; give a positive number, or -1 for the rest of the world size")
        if self.shard == -1 and self.replicate == -1:
            raise ConfigError(
                "data_parallel_shard_degree and data_parallel_replicate_degree are both -1; only one can be left open"
            )

    def _degrees(self) -> dict[str, int]:
        degrees = {"data_parallel_shard_degree": self.shard}
        return degrees if self.replicate is None else {"data_parallel_replicate_degree": self.replicate, **degrees}

    @property
    def is_resolved(self) -> bool:
        return -1 not in self._degrees().values()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.shard,) if self.replicate is None else (self.replicate, self.shard)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return (SHARD_AXIS,) if self.replicate is None else (REPLICATE_AXIS, SHARD_AXIS)

    @property
    def size(self) -> int:
        """How many ranks the mesh has (negative while a degree is open)."""
        return self.shard if self.replicate is None else self.shard * self.replicate

    def resolve(self, world_size: int) -> "MeshSpec":
        """The mesh with -1 filled in.

        Raises:
            ConfigError: the degrees do not give ``world_size``; names the degrees that would.
        """
        if self.is_resolved:
            if self.size != world_size:
                said = " x ".join(f"{key} {degree}" for key, degree in self._degrees().items())
                raise ConfigError(
                    f"{said} makes {self.size} ranks, but the world size is {world_size}; "
                    f"leave one degree at -1, or use {_divisors_text(world_size)}"
                )
            return self
        if self.shard == -1:
            given, key = self.replicate or 1, "data_parallel_replicate_degree"
        else:
            given, key = self.shard, "data_parallel_shard_degree"
        if world_size % given:
            raise ConfigError(
                f"world size {world_size} is not a multiple of {key} {given}; use {_divisors_text(world_size)}"
            )
        rest = world_size // given
        return replace(self, shard=rest) if self.shard == -1 else replace(self, replicate=rest)

    def to_json(self) -> dict[str, object]:
        return {"shape": list(self.shape), "axes": list(self.axis_names), "device_type": self.device_type}

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        return f"{self.device_type} mesh, {sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """What is done with the activations of the modules that the model's hooks choose."""

    checkpoint: bool = False
    cpu_offload: bool = False
    reentrant: bool = True

    @property
    def enabled(self) -> bool:
        return self.checkpoint or self.cpu_offload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """How many units ahead are gathered on request; None leaves it to FSDP2 (its own order, one ahead in backward)."""

    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """Everything that FSDP2 needs to know, translated from FSDP1's words.

    ``mixed_precision`` holds for every unit; the inputs are cast at roots when ``cast_root_inputs`` (FSDP1's way),
    and at every unit only when the policy's own ``cast_forward_inputs`` says so. ``buffer_dtype``: what floating
    point buffers are cast to. ``sync_module_states`` None: rank 0's values go out only where some ranks have none.
    """

    mesh: MeshSpec = field(default_factory=MeshSpec)
    reshard_after_forward: bool | int = True
    mixed_precision: MixedPrecisionPolicy = field(
        default_factory=lambda: MixedPrecisionPolicy(cast_forward_inputs=False)
    )
    cast_root_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    prefetch: Prefetch = field(default_factory=Prefetch)
    sync_module_states: bool | None = False
    precision: str = "fp32"
    verbose: bool = False

    def __post_init__(self) -> None:
        check_reshard_degree(self.reshard_after_forward, self.mesh)


def check_reshard_degree(reshard_after_forward: bool | int, mesh: MeshSpec, where: str = "") -> None:
    """Refuse an integer that does not divide the shard degree (when that is known).

    Raises:
        ConfigError: names the number and those that would do.
    """
    if isinstance(reshard_after_forward, bool):
        return
    place = f"{where}: " if where else ""
    if reshard_after_forward < 1:
        raise ConfigError(f"{place}reshard_after_forward is {reshard_after_forward}; give true, false or a group size")
    if mesh.shard != -1 and mesh.shard % reshard_after_forward:
        raise ConfigError(
            f"{place}reshard_after_forward {reshard_after_forward} does not divide the {mesh.shard} ranks that a "
            f"parameter is sharded over; use {_divisors_text(mesh.shard)}"
        )


def _divisors_text(number: int) -> str:
    if number > 2**16:  # no cluster that exists; a list would take for ever
        return f"a divisor of {number}"
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(map(str, divisors[:-1])) + (" or " if len(divisors) > 1 else "") + str(divisors[-1])
