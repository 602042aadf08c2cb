"""The FSDP2 target in plain, frozen values: what ``fully_shard`` is to be given, one field per decision."""

import enum
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.errors import ConfigError, GroupSizeError

__all__ = [
    "REPLICATE_AXIS",
    "SHARD_AXIS",
    "Accumulation",
    "ActivationCheckpointing",
    "BackwardPrefetch",
    "GradientSync",
    "GroupRule",
    "MeshSpec",
    "Prefetch",
    "RankGroups",
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


class GroupRule(enum.Enum):
    """How the ranks are divided into groups; the values are Composer's words."""

    CONSECUTIVE = "set"
    STRIDED = "mod"
    GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Along one axis of a mesh, which ranks belong together where not all do: FSDP1's ``process_group``.

    ``number`` is Composer's K: ``setK`` are groups of K consecutive ranks, ``modK`` the K groups of every K-th rank.
    Under ``GIVEN`` each rank knows its own group only, ``ranks``; those of the others are gathered when the mesh is
    made.
    """

    rule: GroupRule
    number: int = 0
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rule is GroupRule.GIVEN:
            if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
                raise ConfigError(f"process_group {list(self.ranks)} is no list of ranks: give each once, from 0 on")
        elif self.number < 1:
            raise ConfigError(f"process_group {self} is no division of the ranks; give a positive number")

    def check(self, world_size: int) -> None:
        """Raise if a world of this size cannot be divided so.

        Raises:
            ConfigError: names the numbers that would do, or the rank that does not exist.
        """
        if self.rule is GroupRule.GIVEN:
            if max(self.ranks) >= world_size:
                raise ConfigError(f"process_group names rank {max(self.ranks)}, but the world size is {world_size}")
        elif world_size % self.number:
            raise GroupSizeError(
                f"world size {world_size} is not a multiple of process_group {self}; use "
                f"{_divisors_text(world_size, self.rule.value)}"
            )

    def size(self, world_size: int) -> int:
        """How many ranks one group has."""
        return {
            GroupRule.CONSECUTIVE: self.number,
            GroupRule.STRIDED: world_size // max(self.number, 1),
            GroupRule.GIVEN: len(self.ranks),
        }[self.rule]

    def members(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The ranks of the group that ``rank`` belongs to, in ascending order."""
        if self.rule is GroupRule.GIVEN:
            return tuple(sorted(self.ranks))
        if self.rule is GroupRule.CONSECUTIVE:
            first = rank // self.number * self.number
            return tuple(range(first, first + self.number))
        return tuple(range(rank % self.number, world_size, self.number))

    def __str__(self) -> str:
        return "given by each rank" if self.rule is GroupRule.GIVEN else f"{self.rule.value}{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Over which ranks parameters are sharded and replicated, as plain numbers.

    ``replicate`` None means a 1-D mesh (every rank holds a shard), a number a 2-D one: ``replicate`` groups of
    ``shard`` ranks each. One of the two may be -1: whatever the world size leaves.

    Without ``shard_groups`` the mesh holds all ranks in order, replicas outermost. With them every rank has a mesh of
    its own group, and nothing passes between groups; a 2-D mesh then has ``replicate_groups``, too.
    """

    shard: int = -1
    replicate: int | None = None
    device_type: str = "cpu"
    shard_groups: RankGroups | None = None
    replicate_groups: RankGroups | None = None

    def __post_init__(self) -> None:
        for key, degree in self._degrees().items():
            if degree != -1 and degree < 1:
                raise ConfigError(f"{key} is {degree}; give a positive number, or -1 for the rest of the world size")
        if self.shard == -1 and self.replicate == -1 and not self.is_grouped:
            raise ConfigError(
                "data_parallel_shard_degree and data_parallel_replicate_degree are both -1; only one can be left open"
            )

    def _degrees(self) -> dict[str, int]:
        degrees = {"data_parallel_shard_degree": self.shard}
        return degrees if self.replicate is None else {"data_parallel_replicate_degree": self.replicate, **degrees}

    @classmethod
    def of_groups(
        cls, shard: RankGroups, replicate: RankGroups | None = None, *, device_type: str = "cpu"
    ) -> "MeshSpec":
        """One mesh for each group of ``shard``; a 2-D one, if ``replicate`` says which ranks hold the same shards."""
        return cls(
            shard=-1,
            replicate=None if replicate is None else -1,
            device_type=device_type,
            shard_groups=shard,
            replicate_groups=replicate,
        )

    @property
    def axis_groups(self) -> tuple[RankGroups, ...]:
        """The groups of each axis, replicas first; empty for the mesh of all ranks."""
        return tuple(groups for groups in (self.replicate_groups, self.shard_groups) if groups is not None)

    @property
    def is_grouped(self) -> bool:
        return self.shard_groups is not None

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

    def without_shards(self) -> "MeshSpec":
        """The same ranks, each with whole parameters: FSDP1's NO_SHARD.

        Raises:
            ConfigError: two axes of groups, which have no common group to average in.
        """
        if self.replicate_groups is not None:
            raise ConfigError("sharding_strategy NO_SHARD takes one process_group, not a pair of them")
        if self.shard_groups is None:
            return MeshSpec(replicate=self.size if self.is_resolved else -1, shard=1, device_type=self.device_type)
        alone = RankGroups(rule=GroupRule.CONSECUTIVE, number=1)
        return replace(self, replicate=self.shard, shard=1, shard_groups=alone, replicate_groups=self.shard_groups)

    def resolve(self, world_size: int) -> "MeshSpec":
        """The mesh with -1 filled in.

        Raises:
            ConfigError: the degrees or groups do not fit ``world_size``; names those that would.
        """
        if self.shard_groups is not None:
            for groups in self.axis_groups:
                groups.check(world_size)
            replicas = None if self.replicate_groups is None else self.replicate_groups.size(world_size)
            resolved = replace(self, shard=self.shard_groups.size(world_size), replicate=replicas)
            is_given = any(groups.rule is GroupRule.GIVEN for groups in self.axis_groups)
            if max(resolved.shape) == world_size and not is_given:  # one group, of all ranks
                return replace(resolved, shard_groups=None, replicate_groups=None)
            return resolved
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
        """Alike on all ranks: a group that each rank gives for itself has no shape here."""
        is_given = any(groups.rule is GroupRule.GIVEN for groups in self.axis_groups)
        return {
            "shape": None if is_given else list(self.shape),
            "axes": list(self.axis_names),
            "device_type": self.device_type,
            "groups": [str(groups) for groups in self.axis_groups],
        }

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        groups = f" (ranks: {', '.join(map(str, self.axis_groups))})" if self.is_grouped else ""
        return f"{self.device_type} mesh, {sizes}{groups}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """What is done with the activations of the modules that the model's hooks choose.

    ``transformer_engine``: recompute with Transformer Engine's checkpoint, which keeps fp8 state and, beginning with
    ``transformer_engine_seed``, its own random numbers; never reentrant.
    """

    checkpoint: bool = False
    cpu_offload: bool = False
    reentrant: bool = True
    transformer_engine: bool = False
    transformer_engine_seed: int = 1234

    @property
    def enabled(self) -> bool:
        return self.checkpoint or self.cpu_offload


class GradientSync(enum.Enum):
    """In which of a batch's backwards gradients are communicated; the values are what a configuration says."""

    EVERY = "every"
    LAST = "last"
    DEFER_REPLICA = "defer_replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """What is put off until the last microbatch of a batch; by default nothing, as under FSDP1 in Composer.

    ``gradient_sync``: ``LAST`` keeps whole gradients on every rank until then and communicates none, ``DEFER_REPLICA``
    reduces them over the shards of a replica each time, and over the replicas in the last one only.
    ``reshard_after_backward`` False keeps gathered parameters until then.
    """

    gradient_sync: GradientSync = GradientSync.EVERY
    reshard_after_backward: bool = True


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
    ``collective_guard``: for how many seconds ranks wait for each other before a collective; None: they do not compare.
    ``keep_low_precision_grads``: gradients stay in the dtype they are reduced in; where a plan finds that they cannot,
    it raises if ``strict``, else says so.
    ``shard_below_unwrapped``: what is chosen below a direct child with ``_fsdp_wrap = False`` is sharded, as under
    Composer's FSDP2; else such a child is left out whole, as under FSDP1.
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
    accumulation: Accumulation = field(default_factory=Accumulation)
    collective_guard: float | None = None
    sync_module_states: bool | None = False
    ignored_modules: tuple[nn.Module, ...] = ()
    shard_below_unwrapped: bool = False
    keep_low_precision_grads: bool = False
    strict: bool = True
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


def _divisors_text(number: int, prefix: str = "") -> str:
    if number > 2**16:  # no cluster that exists; a list would take for ever
        return f"{prefix} with a divisor of {number}".strip()
    divisors = [f"{prefix}{divisor}" for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(divisors[:-1]) + (" or " if len(divisors) > 1 else "") + divisors[-1]
