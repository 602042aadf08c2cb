"""The sharding plan as a value: the units, their parameters, and the settings with which they are sharded."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import BroadcastBatch, ExpertBlock, SplitExperts, TowerModel
from composer_fsdp2.config.sharding import Accumulation, GradientSync, MixedPrecision, ShardingConfig
from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.value import Value, json_text
from composer_fsdp2.sharding.confirmation import summary_line
from composer_fsdp2.sharding.dtypes import dtype_bytes
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.select import LeftOut


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec(Value):
    """One parameter under all of its names (several if it is tied), with its full shape and dtype.

    Args:
        tensor_placement: Its placement along the mesh's tensor or expert axis. None if the parameter is a plain tensor
            along that axis, and thus replicated.
        expert_degree: The number of ranks over which the experts are divided, if the parameter belongs to experts. Each
            rank all-gathers only its own experts.
        is_trained: Whether it requires gradients after the plan's ``freeze``. Part of the plan because frozen
            parameters (the base model of LoRA adapters) have no gradients and optimizer state, and because ranks that
            train different parameters would wait for different reductions.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    tensor_placement: Placement | None = None
    expert_degree: int = 1
    is_trained: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def numel_of(self, split_degree: int) -> int:
        """The number of elements that a rank all-gathers at this TP degree; for experts, the mean over ranks."""
        numel = self.numel // split_degree if isinstance(self.tensor_placement, Shard) else self.numel
        return numel // self.expert_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModule(Value):
    """A TP-sharded module, and torch's name of its style.

    Args:
        parallelize: The style; None if the script has already applied it.
    """

    path: str
    style: str
    parallelize: ParallelStyle | None = field(default=None, compare=False, metadata={"json": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit(Value):
    """The arguments of one ``fully_shard`` call, and the parameters of its unit.

    Args:
        modules: The path of one module, or of several for a grouped unit.
        parameters: The parameters that are sharded.
        replicated: The unit's parameters that cannot be sharded with the others, because they are scalars, have no
            elements or have another dtype. They are replicated on every rank, and their gradients are averaged over
            ``mesh``.
        mesh: The device mesh, with all axes.
        is_root: Whether this is a root of ``fully_shard``.
        reshard_after_forward: As in ``fully_shard``.
        mixed_precision: The dtypes of the unit.
        cpu_offload: Whether shards and gradients are in host memory.
        forward_prefetch: The names of the units that its forward prefetches.
        backward_prefetch: The names of the units that its backward prefetches. None uses FSDP2's default; a unit that
            names itself prefetches nothing.
        reason: Why this is a unit.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> [unit] = plan_sharding(model, translate({}, device="cpu").config).units
        >>> unit.name, unit.is_root, unit.numel, unit.unsharded_bytes
        ('0', True, 10, 40)
    """

    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    replicated: tuple[ParameterSpec, ...] = ()
    mesh: MeshSpec
    is_root: bool
    reshard_after_forward: bool | int
    mixed_precision: MixedPrecision
    cpu_offload: bool
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] | None = None
    reason: str

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """The size in bytes of the unit's unsharded parameters on a rank."""
        dtype = self.mixed_precision.param_dtype
        degree = self.mesh.split_degree
        return sum(each.numel_of(degree) * dtype_bytes(dtype or each.dtype) for each in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(Value):
    """The plan that ``apply_plan`` applies: units in the order of the ``fully_shard`` calls, and other changes.

    Args:
        config: The model's configuration, with ignored modules as paths.
        units: The units, bottom-up.
        tie_groups: The names of each tied parameter.
        ignored: The names of the parameters of ignored modules.
        left_out: Parameters that belong to no unit, with the reasons.
        checkpointed: The modules whose activations are recomputed or offloaded, children before parents.
        caching: The modules whose KV cache is turned off in forwards that need gradients.
        frozen: The names of the parameters to freeze.
        sharded_before: The outermost modules that earlier calls sharded; they keep their units.
        split: The TP-sharded modules.
        split_experts: The modules whose experts are on different ranks.
        exchanging: The attention modules that exchange heads for sequence within a context-parallel group.
        tiled: The MLPs that are computed in chunks of the sequence.
        expert_blocks: Blocks in which every rank runs each expert once, on zero rows if it has no tokens for it.
        tower_models: Models with optional submodules, such as an image encoder. A rank whose batch has no input for
            such a tower runs the tower on an example if another rank runs it.
        notes: Messages for the user.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> plan = plan_sharding(model, translate({}, device="cpu").config)
        >>> plan.resolve(world_size=8).summary
        '2 units on FSDP2 (8 ranks, FULL_SHARD)'
    """

    config: ShardingConfig
    units: tuple[ShardUnit, ...]
    tie_groups: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    checkpointed: tuple[str, ...]
    caching: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    sharded_before: tuple[str, ...] = ()
    split: tuple[SplitModule, ...] = ()
    split_experts: tuple[SplitExperts, ...] = ()
    exchanging: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()
    expert_blocks: tuple[ExpertBlock, ...] = ()
    tower_models: tuple[TowerModel, ...] = ()
    notes: tuple[str, ...]

    @property
    def mesh(self) -> MeshSpec:
        return self.config.mesh

    @property
    def roots(self) -> tuple[ShardUnit, ...]:
        return tuple(unit for unit in self.units if unit.is_root)

    @property
    def replicated(self) -> tuple[ParameterSpec, ...]:
        return tuple(spec for unit in self.units for spec in unit.replicated)

    @property
    def unsharded_names(self) -> set[str]:
        """The names of all parameters that are replicated on every rank."""
        names = {name for spec in self.replicated for name in spec.names} | set(self.ignored)
        return names.union(*(left.names for left in self.left_out))

    def resolve(self, world_size: int) -> "ShardingPlan":
        """The plan with all open mesh degrees filled in.

        Raises:
            ConfigError: a mesh, or the number of ranks that share a batch, does not fit ``world_size``.
        """
        self.config.check_data_blocks(world_size)
        every = (self.mesh, *(unit.mesh for unit in self.units))
        meshes = {id(mesh): mesh for mesh in every}  # few distinct meshes in many units
        resolved = {number: mesh.resolve(world_size) for number, mesh in meshes.items()}
        if all(mesh == meshes[number] for number, mesh in resolved.items()):
            return self
        units = tuple(replace(unit, mesh=resolved[id(unit.mesh)]) for unit in self.units)
        return replace(self, config=replace(self.config, mesh=resolved[id(self.mesh)]), units=units)

    @cached_property
    def fingerprint(self) -> str:
        """The whole plan as lines of JSON. Ranks compare it before they apply the plan."""
        # Line by line: creating all objects of a large plan at once would trigger the garbage collector.
        units = "\n".join(map(json_text, self.units))
        return f"{units}\n{json_text(replace(self, units=()))}"

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan."""
        return hashlib.sha256(self.fingerprint.encode()).hexdigest()

    @property
    def summary(self) -> str:
        """One line with FSDP1's name of the strategy: "37 units on FSDP2 (8 ranks, FULL_SHARD)"."""
        return summary_line(len(self.units), self.mesh.size, self.strategy)

    @property
    def strategy(self) -> str:
        """FSDP1's name of the sharding strategy."""
        if self.mesh.shard_degree == 1:
            return "NO_SHARD"
        is_hybrid = self.mesh.replicate_degree > 1
        if self.config.reshard_after_forward:
            return "HYBRID_SHARD" if is_hybrid else "FULL_SHARD"
        return "_HYBRID_SHARD_ZERO2" if is_hybrid else "SHARD_GRAD_OP"

    def explain(self) -> str:
        """The plan as text: the mesh, one line per unit, ties, and the parameters that are left out, with reasons."""
        return "\n".join(_explain(self))

    def __str__(self) -> str:
        return self.explain()


def units_by_root(units: Sequence[ShardUnit]) -> dict[str, list[ShardUnit]]:
    """Group the units by the name of their root. Each list is bottom-up, with the root last."""
    found: dict[str, list[ShardUnit]] = {unit.name: [] for unit in units if unit.is_root}
    for unit in units:
        found[next(path for path in ancestors_or_self(unit.name) if path in found)].append(unit)
    return found


_SYNC_WORDS = {
    GradientSync.EVERY: "each",
    GradientSync.LAST: "the last of a batch",
    GradientSync.DEFER_REPLICA: "each, over replicas in the last of a batch",
}


def _explain(plan: ShardingPlan) -> Iterator[str]:
    total = sum(unit.numel for unit in plan.units)
    yield f"{len(plan.units)} units, {total:,} parameters on {plan.mesh}"
    yield from (_unit_line(unit, plan.mesh) for unit in plan.units)
    yield from _split_lines(plan)
    yield from _expert_lines(plan)
    yield from (f"  tied: {' = '.join(names)}" for names in plan.tie_groups)
    for spec in plan.replicated:
        why = f"{spec.dtype} beside another dtype" if spec.shape else "a scalar"
        why = why if spec.numel else "no elements"
        yield f"  replicated: {spec.name} [{why}]: unsharded on every rank, gradients averaged"
    unsharded = "unsharded on every rank, gradients not averaged"
    if ignored := tuple(map(str, plan.config.ignored_modules)):
        yield f"  ignored: {and_more(ignored)} ({len(plan.ignored)} parameters): {unsharded}"
    for left in plan.left_out:
        yield f"  left out: {and_more(left.names)} [{left.reason}]: {unsharded}"
    if plan.sharded_before:
        yield f"  sharded before: {and_more(plan.sharded_before)}"
    if plan.frozen:
        trained = (f"all but {each}" for each in plan.config.train_only)
        yield f"  frozen: {and_more(plan.frozen)} [{', '.join((*plan.config.freeze, *trained))}]"
    if plan.exchanging:
        yield (
            f"  context parallelism: {plan.config.context_parallel_degree} ranks share a batch, each computes a part "
            f"of every sequence; {and_more(plan.exchanging)} exchange heads for sequence"
        )
    yield from _checkpointing_line(plan)
    yield from _batches_line(plan.config)
    if plan.tiled and plan.config.tiled_mlp is not None:
        yield f"  tiled: {len(plan.tiled)} MLPs in {plan.config.tiled_mlp.chunks} pieces, first {plan.tiled[0]}"
    yield from _idle_lines(plan)
    accumulation, guard = plan.config.accumulation, plan.config.collective_guard
    if accumulation != Accumulation():
        kept = "" if accumulation.reshard_after_backward else ", parameters kept unsharded between them"
        yield f"  microbatches: gradients communicated in {_SYNC_WORDS[accumulation.gradient_sync]}{kept}"
    if guard is not None:
        yield f"  collective_guard: ranks compare their positions before each collective, waiting up to {guard:g} s"
    yield from (f"  note: {note}" for note in plan.notes)


def _unit_line(unit: ShardUnit, of_model: MeshSpec) -> str:
    role = "root" if unit.is_root else f"reshard {unit.reshard_after_forward}"
    offload = ", on the CPU" if unit.cpu_offload else ""
    mesh = f", {unit.mesh}" if unit.mesh != of_model else ""
    name = " + ".join(unit.modules) if unit.name else "(the model)"
    return f"  {name}: {unit.numel:,} parameters, {role}{offload}{mesh} [{unit.reason}]"


_BATCH_WORDS = {
    BroadcastBatch.OFF: "as their loaders give it to each of them",
    BroadcastBatch.FIRST: "that of the first of them",
    BroadcastBatch.GATHER: "the rows that all of them read",
}


def _batches_line(config: ShardingConfig) -> Iterator[str]:
    if config.data_block_size > 1:
        compared = "not compared" if config.check_data is False else "compared at first batches"
        how = _BATCH_WORDS[config.effective_broadcast_batch]
        yield f"  batches: each {config.data_block_size} ranks share one, {how}; {compared}"


def _split_lines(plan: ShardingPlan) -> Iterator[str]:
    """Yield the lines about TP-sharded modules: one line for all layers of a stack."""
    placements = {name: spec.tensor_placement for unit in plan.units for spec in unit.parameters for name in spec.names}
    alike = Counter[tuple[str, str, str]]()
    for module in plan.split:
        own = {name: placements.get(f"{module.path}.{name}") for name in ("weight", "bias")}
        text = ", ".join(f"{name} {placement!r}" for name, placement in own.items() if placement is not None)
        alike[_NUMBER.sub(".*", module.path), module.style, text] += 1
    for (path, style, text), count in alike.items():
        several = f" ({count} modules)" if count > 1 else ""
        yield f"  split over {plan.mesh.tensor_degree} ranks: {path or 'the model'}{several}: {text or style}"


def _expert_lines(plan: ShardingPlan) -> Iterator[str]:
    keys = ((_NUMBER.sub(".*", each.module), each.degree, each.num_experts) for each in plan.split_experts)
    alike = Counter(keys)
    for (path, ranks, num_experts), count in alike.items():
        several = f" ({count} modules)" if count > 1 else ""
        how = (
            f"{num_experts // ranks} of {num_experts} on each, tokens travel" if num_experts else "by the module itself"
        )
        yield f"  experts over {ranks} ranks: {path}{several}: {how}"


_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _checkpointing_line(plan: ShardingPlan) -> Iterator[str]:
    if not plan.checkpointed:
        return
    mode = plan.config.activation_checkpointing
    words = (
        ("recomputed" + (" (reentrant)" if mode.reentrant else ""), mode.checkpoint),
        ("offloaded to the CPU", mode.cpu_offload),
    )
    kind = " and ".join(word for word, is_on in words if is_on)
    kind += " by Transformer Engine" if mode.checkpoint and mode.transformer_engine else ""
    yield f"  activations {kind}: {len(plan.checkpointed)} modules, first {plan.checkpointed[0]}"


def _idle_lines(plan: ShardingPlan) -> Iterator[str]:
    if plan.expert_blocks:
        blocks = and_more([each.block or "the model" for each in plan.expert_blocks])
        num_experts = sum(len(each.experts) for each in plan.expert_blocks)
        yield f"  idle experts: {num_experts} in {blocks} run in order on every rank, on no rows where it has no token"
    for each in plan.tower_models:
        yield (
            f"  idle towers: {', '.join(each.towers)} run on an example where only other ranks' batches enter them; "
            f"ranks ask each other before {', '.join((*each.sync_points, 'the end'))} of {each.model or 'the model'}"
        )
