"""The FSDP2 configuration as frozen values, with one field per decision."""

import enum
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.config.mesh import GROUPS_KEY, AxisRole, MeshSpec, divisors_text
from composer_fsdp2.config.parallel import BroadcastBatch, IdleExperts, TiledMLP
from composer_fsdp2.config.value import Value
from composer_fsdp2.config.wrap import Wrap
from composer_fsdp2.errors import ConfigError, UnsupportedError

DTYPES_BY_SHORT_NAME = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LOW_PRECISION = frozenset(("bfloat16", "float16"))


class GradientDtype(enum.Enum):
    """The dtype of sharded gradients in the optimizer's step."""

    OF_PARAMETER = "the parameter's own"
    AS_REDUCED = "the dtype they are reduced in"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision(Value):
    """The dtypes of a unit's computation and communication, as names of torch dtypes ("bfloat16"); None does not cast.

    Args:
        param_dtype: Dtype of the all-gather and of the computation.
        reduce_dtype: Dtype of the gradient reduction; None: ``param_dtype``.
        output_dtype: Dtype to which the unit's forward outputs are cast.
        buffer_dtype: Dtype to which floating-point buffers are cast.
        cast_forward_inputs: Cast the inputs of every unit to ``param_dtype``.
        cast_root_inputs: Cast the inputs of root units, as FSDP1 does.
        gradients: The required dtype of reduced gradients.

    Example:
        >>> MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32").output_dtype is None
        True
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    buffer_dtype: str | None = None
    cast_forward_inputs: bool = False
    cast_root_inputs: bool = True
    gradients: GradientDtype = GradientDtype.OF_PARAMETER


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing(Value):
    """Activation checkpointing and offloading, and the modules to which they apply.

    Args:
        classes: Names of module classes. Empty selects the model's ``_no_split_modules`` (transformers); without these,
            the classes of ``Wrap``. None calls the model's ``activation_checkpointing_fn``.
        transformer_engine: Recompute with Transformer Engine's checkpoint, which preserves fp8 state and uses a
            separate RNG, seeded with ``transformer_engine_seed``. It is never reentrant.

    Example:
        >>> ActivationCheckpointing(checkpoint=True, reentrant=False).enabled
        True
    """

    checkpoint: bool = False
    classes: tuple[str, ...] | None = None
    cpu_offload: bool = False
    reentrant: bool = True
    transformer_engine: bool = False
    transformer_engine_seed: int = 1234

    @property
    def enabled(self) -> bool:
        return self.checkpoint or self.cpu_offload


class GradientSync(enum.Enum):
    """The backwards of a batch in which gradients are reduced. Values are those of the configuration key.

    Example:
        >>> GradientSync("last")
        <GradientSync.LAST: 'last'>
    """

    EVERY = "every"
    LAST = "last"
    DEFER_REPLICA = "defer_replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation(Value):
    """Gradient accumulation: the communication that is deferred to the last microbatch of a batch.

    The default defers none, as FSDP1 in Composer.

    Args:
        gradient_sync: ``LAST`` accumulates unsharded gradients on every rank and reduces them in the last backward.
            ``DEFER_REPLICA`` reduce-scatters within a replica in every backward, and all-reduces between replicas only
            in the last.
        reshard_after_backward: False keeps parameters unsharded from one microbatch to the next.

    Example:
        >>> Accumulation(gradient_sync=GradientSync.LAST).reshard_after_backward
        True
    """

    gradient_sync: GradientSync = GradientSync.EVERY
    reshard_after_backward: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Value):
    """The number of units to prefetch explicitly. None is FSDP2's implicit prefetching: one unit in backward, in the
    reverse of the forward order.

    Example:
        >>> Prefetch(forward=2).backward is None
        True
    """

    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig(Value):
    """All settings of FSDP2, translated from FSDP1's keys.

    Args:
        sync_module_states: Broadcast rank 0's parameters and buffers. None does so only if parameters of some ranks are
            on the meta device.
        collective_guard: Before each collective, ranks compare which collective follows; this is the timeout in
            seconds. None: no comparison.
        freeze: Path prefixes of parameters that are not trained.
        train_only: Regular expressions for the names of trained parameters; empty: all are trained.
        expert_parallel_degree: Number of ranks over which a layer's experts are distributed.
        context_parallel_degree: Number of ranks over which the sequences of a batch are sharded.
        check_data: Whether ranks that must compute the same batch compare it; None: yes.
        broadcast_batch: How these ranks obtain the same batch; None: see ``effective_broadcast_batch``.
        idle_towers: Paths of submodules that some batches do not use. Empty detects them in transformers models. None
            requires that every batch uses all units.
        ignored_modules: Modules or module paths that are not sharded; in a plan, paths.
        shard_below_unwrapped: Shard modules that hooks choose below a direct child with ``_fsdp_wrap = False``, as in
            Composer's FSDP2. False excludes the child with all its submodules, as under FSDP1.

    Example:
        >>> config = ShardingConfig(mixed_precision=MixedPrecision(param_dtype="bfloat16"), cpu_offload=True)
        >>> plan_sharding(nn.Sequential(nn.Linear(4, 2)), config).units[0].cpu_offload
        True
    """

    mesh: MeshSpec = field(default_factory=MeshSpec)
    wrap: Wrap = field(default_factory=Wrap)
    reshard_after_forward: bool | int = True
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: bool = False
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    prefetch: Prefetch = field(default_factory=Prefetch)
    accumulation: Accumulation = field(default_factory=Accumulation)
    collective_guard: float | None = None
    sync_module_states: bool | None = False
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    expert_parallel_degree: int = 1
    context_parallel_degree: int = 1
    check_data: bool | None = None
    broadcast_batch: BroadcastBatch | None = None
    tiled_mlp: TiledMLP | None = None
    idle_experts: IdleExperts | None = None
    idle_towers: tuple[str, ...] | None = None
    ignored_modules: tuple[Any, ...] = ()
    shard_below_unwrapped: bool = False

    def __post_init__(self) -> None:
        check_reshard_degree(self.reshard_after_forward, self.mesh)
        if self.context_parallel_degree > 1:
            check_split_sequences(self.mesh)
        if self.expert_parallel_degree > 1:
            check_split_experts(self.mesh)
            check_expert_degree(self.expert_parallel_degree, self.mesh)

    @property
    def data_block_size(self) -> int:
        """The number of consecutive ranks that compute the same batch: TP degree times CP degree."""
        return self.mesh.degree(AxisRole.TENSOR) * self.context_parallel_degree

    @property
    def effective_broadcast_batch(self) -> BroadcastBatch:
        """``broadcast_batch``, or its default if it is None: GATHER under context parallelism, else OFF.

        ``prepare.py`` sets ``broadcast_batch`` to GATHER if the ranks of a tensor-parallel group read different data.
        """
        if self.broadcast_batch is not None:
            return self.broadcast_batch
        return BroadcastBatch.GATHER if self.context_parallel_degree > 1 else BroadcastBatch.OFF

    def check_data_blocks(self, world_size: int) -> None:
        """Check that the world size is a multiple of ``data_block_size``.

        Raises:
            ConfigError: it is not; the message names the TP and CP degrees, and valid products.
        """
        if world_size % self.data_block_size == 0:
            return
        raise ConfigError(
            f"world size {world_size} is not a multiple of the {self.data_block_size} ranks that share one batch "
            f"(tensor_parallel_degree {self.mesh.degree(AxisRole.TENSOR)} x context_parallel_degree "
            f"{self.context_parallel_degree}); let the product be {divisors_text(world_size)}",
            keys=("context_parallel_degree",),
        )


def check_split_sequences(mesh: MeshSpec, where: str = "the model") -> None:
    """Reject context parallelism with ``process_group``, because gradients would be averaged only within each group.

    Raises:
        ConfigError: ``mesh`` has groups; the message names them.
    """
    if mesh.is_grouped:
        raise ConfigError(
            f"context_parallel_degree: {where} is sharded over groups of ranks ({' x '.join(map(str, mesh.groups))}), "
            "and its gradients averaged within a group only; leave process_group out, since each rank has a part of a "
            "sequence only",
            keys=("context_parallel_degree", GROUPS_KEY),
        )


def check_split_experts(mesh: MeshSpec, *others: str) -> None:
    """Reject expert parallelism with ``process_group``.

    Args:
        others: Further problems, which are raised in the same error.
    Raises:
        UnsupportedError: ``mesh`` has groups, or ``others`` is not empty; the message has one line per problem.
    """
    grouped = "beside process_group: groups of ranks are no mesh of all ranks; leave one of the two out"
    if problems := [*([grouped] if mesh.is_grouped else []), *others]:
        key = "expert_parallel_degree"
        raise UnsupportedError("\n".join(f"{key}: {text}" for text in problems), keys=(key,))


def check_expert_degree(degree: int, mesh: MeshSpec) -> None:
    """Reject an expert parallel degree that does not divide the shard degree; no check if the shard degree is unknown.

    Raises:
        ConfigError: the message names the degree and valid degrees.
    """
    if mesh.shard_degree != -1 and mesh.shard_degree % degree:
        raise ConfigError(
            f"parameters are sharded over {mesh.shard_degree} ranks, which is not a multiple of "
            f"expert_parallel_degree {degree}; use {divisors_text(mesh.shard_degree)}",
            keys=("expert_parallel_degree",),
        )


def check_reshard_degree(reshard_after_forward: bool | int, mesh: MeshSpec, where: str = "") -> None:
    """Reject an integer ``reshard_after_forward`` that does not divide the shard degree; no check if the latter is
    unknown.

    Raises:
        ConfigError: the message names the integer and valid integers.
    """
    if isinstance(reshard_after_forward, bool):
        return
    place = f"{where}: " if where else ""
    if reshard_after_forward < 1:
        raise ConfigError(
            f"{place}reshard_after_forward is {reshard_after_forward}; give true, false or a group size",
            keys=("reshard_after_forward",),
        )
    shards = mesh.known_shard_degree
    if shards != -1 and shards % reshard_after_forward:
        raise ConfigError(
            f"{place}reshard_after_forward {reshard_after_forward} does not divide the {shards} ranks that "
            f"a parameter is sharded over; use {divisors_text(shards)}",
            keys=("reshard_after_forward",),
        )
