"""The FSDP2 target in plain, frozen values: what ``fully_shard`` is to be given, one field per decision."""

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
    """In which dtype an optimizer finds sharded gradients."""

    OF_PARAMETER = "the parameter's own"
    AS_REDUCED = "the dtype they are reduced in"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision(Value):
    """In which dtypes a unit computes and communicates; names of torch's dtypes ("bfloat16"), None to leave them.

    Args:
        param_dtype: Parameters are all-gathered and computed with in it.
        reduce_dtype: Gradients are reduced in it; None: in ``param_dtype``.
        output_dtype: What the unit's forward returns is cast to it.
        buffer_dtype: What floating point buffers are cast to.
        cast_forward_inputs: The inputs of every unit are cast to ``param_dtype``.
        cast_root_inputs: Those of roots are (FSDP1's way).
        gradients: What is asked of the dtype that gradients have in the end.
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
    """What is done with the activations of the chosen modules.

    ``classes``: those of the modules to choose, by name; empty for the ones that the model itself names (transformers'
    ``_no_split_modules``) or else its ``Wrap``; None: the model's hooks choose.
    ``transformer_engine``: recompute with Transformer Engine's checkpoint, which keeps fp8 state and, beginning with
    ``transformer_engine_seed``, its own random numbers; never reentrant.
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
    """In which of a batch's backwards gradients are communicated; the values are what a configuration says."""

    EVERY = "every"
    LAST = "last"
    DEFER_REPLICA = "defer_replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation(Value):
    """What is put off until the last microbatch of a batch; by default nothing, as under FSDP1 in Composer.

    ``gradient_sync``: ``LAST`` keeps unsharded gradients on every rank until then and communicates none,
    ``DEFER_REPLICA`` reduces them over the shards of a replica each time, and over the replicas in the last one only.
    ``reshard_after_backward`` False keeps unsharded parameters until then.
    """

    gradient_sync: GradientSync = GradientSync.EVERY
    reshard_after_backward: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Value):
    """How many units are prefetched (all-gathered early) on request; None leaves it to FSDP2, which prefetches one in
    backward, in the order that forward ran in."""

    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig(Value):
    """Everything that FSDP2 needs to know, translated from FSDP1's words.

    ``sync_module_states`` None: rank 0's values go out only where some ranks have none.
    ``collective_guard``: for how many seconds ranks wait for each other before a collective; None: they do not compare.
    ``freeze``: paths; parameters there and below are not trained.
    ``train_only``: regular expressions of the names of the parameters that are trained, if any are given.
    ``expert_parallel_degree``: over how many ranks the experts of a layer are split.
    ``context_parallel_degree``: over how many ranks the sequences of a batch are divided.
    ``check_data``: whether ranks that share a batch compare it; None: yes.
    ``broadcast_batch``: how they come to have the same one; None: as ``effective_broadcast_batch`` says.
    ``idle_towers``: the paths of parts that a batch may not enter; empty for those that transformers' models have, None
    where every batch enters all, or no unit lies in them.
    ``ignored_modules``: modules of the model, or their paths; a plan has the paths.
    ``shard_below_unwrapped``: what is chosen below a direct child with ``_fsdp_wrap = False`` is sharded, as under
    Composer's FSDP2; else such a child is left out with all below it, as under FSDP1.
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
        """How many ranks in a row share one batch: those that split its layers, or its sequences."""
        return self.mesh.degree(AxisRole.TENSOR) * self.context_parallel_degree

    @property
    def effective_broadcast_batch(self) -> BroadcastBatch:
        """How these ranks come to have the same batch: by default gathered where sequences are divided.

        A kind of parallelism whose configurations read different data on every rank sets ``broadcast_batch`` where it
        is None.
        """
        if self.broadcast_batch is not None:
            return self.broadcast_batch
        return BroadcastBatch.GATHER if self.context_parallel_degree > 1 else BroadcastBatch.OFF

    def check_data_blocks(self, world_size: int) -> None:
        """Raise where the ranks that share a batch are not a whole number of such groups.

        Raises:
            ConfigError: names the degrees, and which product would do.
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
    """Refuse sequences that are divided over ranks whose gradients are not averaged.

    Raises:
        ConfigError: names the groups.
    """
    if mesh.is_grouped:
        raise ConfigError(
            f"context_parallel_degree: {where} is sharded over groups of ranks ({' x '.join(map(str, mesh.groups))}), "
            "and its gradients averaged within a group only; leave process_group out, since each rank has a part of a "
            "sequence only",
            keys=("context_parallel_degree", GROUPS_KEY),
        )


def check_split_experts(mesh: MeshSpec, *others: str) -> None:
    """Refuse experts that are split beside groups of ranks.

    Args:
        others: Further problems, which the same error names.
    Raises:
        UnsupportedError: names what to leave out.
    """
    grouped = "beside process_group: groups of ranks are no mesh of all ranks; leave one of the two out"
    if problems := [*([grouped] if mesh.is_grouped else []), *others]:
        key = "expert_parallel_degree"
        raise UnsupportedError("\n".join(f"{key}: {text}" for text in problems), keys=(key,))


def check_expert_degree(degree: int, mesh: MeshSpec) -> None:
    """Refuse a degree that does not divide the ranks over which a parameter is sharded (when they are known).

    Raises:
        ConfigError: names the number and those that would do.
    """
    if mesh.shard_degree != -1 and mesh.shard_degree % degree:
        raise ConfigError(
            f"parameters are sharded over {mesh.shard_degree} ranks, which is not a multiple of "
            f"expert_parallel_degree {degree}; use {divisors_text(mesh.shard_degree)}",
            keys=("expert_parallel_degree",),
        )


def check_reshard_degree(reshard_after_forward: bool | int, mesh: MeshSpec, where: str = "") -> None:
    """Refuse an integer that does not divide the shard degree (when that is known).

    Raises:
        ConfigError: names the number and those that would do.
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
