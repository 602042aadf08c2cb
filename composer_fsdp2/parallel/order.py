"""What may be combined, and in which order it is done: checked on the plan, then carried out.

[Note: legal order] Each step stands where it does because the next ones build on it.

1. Ties and the optimizer's parameters are noted, by ``rebinding``: what follows exchanges parameters.
2. Sequences are divided and MLPs tiled: both give instances another forward, which a wrapper would hide.
3. Parameters are frozen, before checkpointing asks which there are.
4. Checkpointing is wrapped around blocks, so that the unit's gather surrounds the recomputation. A block that the
   script compiled stays inside of both.
5. Each unit, bottom-up: values, layers split, experts split, tied again, ``fully_shard``. A part is sharded, never the
   other way round, and the whole of one unit alone is in memory.
6. The optimizer follows.
7. Hooks that must run before a unit gathers, as ``fully_shard`` puts its own first: tokens travel, idle experts and
   towers run.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from composer_fsdp2._torch.capabilities import needs_even_shards
from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.batches import draw_alike, make_batch_group
from composer_fsdp2.parallel.experts import start_experts
from composer_fsdp2.parallel.idle_experts import start_idle_experts
from composer_fsdp2.parallel.idle_towers import start_idle_towers
from composer_fsdp2.parallel.sequences import start_context
from composer_fsdp2.parallel.tiled_mlp import apply_tiling
from composer_fsdp2.sharding.apply import apply_agreed_plan
from composer_fsdp2.sharding.materialize import Initializers
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit
from composer_fsdp2.training.context import ContextGroup
from composer_fsdp2.training.guard import start_guard
from composer_fsdp2.training.run import Run, start_run

_EXPERTS = "expert_parallel_degree"


def refuse_illegal(plan: ShardingPlan) -> None:
    """Raise for a plan that this torch cannot carry out, or that would train on wrong numbers.

    Raises:
        PlanError: every problem, with the module and the way out.

    Every rank must call this with the same plan; it does not communicate.
    """
    problems = [*_of_nesting(plan)]
    problems += _of_tensor_axis(plan) if plan.split else ()
    problems += _of_expert_axis(plan)
    if problems:
        raise PlanError("\n".join(problems))


def carry_out(
    model: nn.Module, plan: ShardingPlan, initializers: Initializers, *, present: Sequence[DeviceMesh] = ()
) -> Run:
    """Do to ``model`` what the plan says, in the one order that is right ([Note: legal order]).

    Args:
        plan: Made or checked for this very model, compared across ranks, and not refused by ``refuse_illegal``.
        initializers: How modules on the meta device get their values.
        present: Meshes that are taken where they equal the plan's.

    Returns:
        What is kept of the model from here on.

    Called on all ranks, by ``prepare_fully_shard`` and ``apply_plan``. Makes process groups; may broadcast parameters.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    context: ContextGroup | None = None

    def divide() -> None:
        nonlocal context
        context = start_context(model, plan)
        if plan.config.tiled_mlp is not None:
            apply_tiling(model, plan.tiled, plan.config.tiled_mlp.chunks)

    meshes = apply_agreed_plan(model, plan, initializers, present=present, before_wrapping=divide)
    run = start_run(model, plan, meshes)
    run.context, run.batch = context, make_batch_group(plan.config)
    if run.batch is not None:
        draw_alike(run.batch)
    if plan.config.collective_guard is not None:
        start_guard(model, plan.config.collective_guard)
    start_experts(plan.split_experts, modules)
    start_idle_experts(model, plan.expert_blocks, modules, plan.config.collective_guard)
    start_idle_towers(model, plan.tower_models, modules, plan.config.collective_guard)
    return run


def _of_nesting(plan: ShardingPlan) -> Iterator[str]:
    """A unit that came before those inside it would take their parameters, too."""
    taken: dict[str, str] = {}
    for unit in plan.units:
        around = next((taken[each] for path in unit.modules for each in ancestors_or_self(path) if each in taken), None)
        if around is not None:
            yield (
                f"unit {unit.name} comes after {around or 'the model'}, which it lies in; leave the units in the order "
                "of plan_sharding, bottom-up"
            )
        taken |= dict.fromkeys(unit.modules, unit.name)


def _of_tensor_axis(plan: ShardingPlan) -> Iterator[str]:
    unsharded = {*plan.unsharded_names, *(name for spec in plan.replicated for name in spec.names)}
    for module in plan.split:
        if inside := sorted(name for name in unsharded if name.rpartition(".")[0] == module.path):
            yield (
                f"{and_more(inside)}: in the layer plan, and in no unit that shards it, so that its "
                "gradients would be averaged over no rank; take it out of the plan, or out of ignored_modules"
            )
    for unit in plan.units:
        if unit.mesh.axes_of(AxisRole.EXPERT):
            continue
        if unit.mesh != plan.mesh:
            where = unit.name or "the model"
            yield f"{where} has a mesh or process_group of its own, beside tensor parallelism; leave it out"
        yield from _of_shape(unit, "tensor")


def _of_expert_axis(plan: ShardingPlan) -> Iterator[str]:
    units = {path: unit for unit in plan.units for path in unit.modules}
    for each in plan.split_experts:
        if inside := [split.path for split in plan.split if each.module in ancestors_or_self(split.path)]:
            yield f"{and_more(inside)}: in the layer plan, and split by experts; take it out of the plan"
        unit = units.get(each.module)
        if unit is None or unit.modules != (each.module,) or not unit.mesh.axes_of(AxisRole.EXPERT):
            yield (
                f"{each.module}: its experts are to lie on different ranks, and it is no unit of its own, because it "
                "is ignored, left out, or shares its weights; leave expert_parallel_degree out, or make it one"
            )
            continue
        whole = [spec.name for spec in (*unit.parameters, *unit.replicated) if spec.tensor_placement is None]
        if whole or unit.replicated:
            names = and_more(whole or [spec.name for spec in unit.replicated])
            yield f"{names} in {each.module}, whose other weights are split by experts; hold it in another module"
        yield from _of_shape(unit, "expert")


def _of_shape(unit: ShardUnit, kind: str) -> Iterator[str]:
    """What ``fully_shard`` cannot do with a unit whose parameters are split along an axis of this kind."""
    mesh, size = unit.mesh, unit.reshard_after_forward
    if type(size) is int:
        yield f"{unit.name or 'the model'} reshards to {size} ranks, beside {kind} parallelism; use true or false"
    if not needs_even_shards() or not mesh.is_resolved:
        return
    ways_out = {"tensor": "pad them, leave the module out of the layer plan", "expert": f"use a larger {_EXPERTS}"}
    for spec in unit.parameters:
        placement = spec.tensor_placement
        num_parts = mesh.shard_degree * mesh.split_degree
        if isinstance(placement, Shard) and placement.dim == 0 and spec.shape[0] % num_parts:
            yield (
                f"{spec.name} has {spec.shape[0]} rows, which this torch must divide evenly into {num_parts} ({kind} "
                f"{mesh.split_degree} x shard {mesh.shard_degree}); {ways_out[kind]}, or install torch 2.13"
            )
