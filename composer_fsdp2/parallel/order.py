"""What may be combined, and in which order: checked on the plan, before anything is touched.

[Note: legal order] Freeze; note ties and the optimizer's parameters; split experts, then layers; slice the sequence;
wrap for activation checkpointing; ``fully_shard`` bottom-up; tie again; the optimizer follows; last, the hooks that
must run before a unit gathers, because ``fully_shard`` puts its own first.
"""

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from composer_fsdp2._torch.slices import needs_even_shards
from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit

_EXPERTS = "expert_parallel_degree"


def refuse_illegal(plan: ShardingPlan) -> None:
    """Raise for a plan that this torch cannot carry out, or that would train on wrong numbers.

    Raises:
        PlanError: every problem, with the module and the way out.

    Every rank must call this with the same plan; it does not communicate.
    """
    problems = [*_of_tensor_axis(plan)] if plan.split else []
    problems += _of_expert_axis(plan)
    if problems:
        raise PlanError("\n".join(problems))


def _of_tensor_axis(plan: ShardingPlan) -> Iterator[str]:
    unsharded = {*plan.unsharded_names, *(name for spec in plan.replicated for name in spec.names)}
    for module in plan.split:
        if inside := sorted(name for name in unsharded if name.rpartition(".")[0] == module.path):
            yield (
                f"{and_more(inside)}: in the layer plan, and in no unit that shards it, so that its "
                "gradients would be averaged over no rank; take it out of the plan, or out of ignored_modules"
            )
    for unit in plan.units:
        if unit.mesh != plan.mesh:
            where = unit.name or "the model"
            yield f"{where} has a mesh or process_group of its own, beside tensor parallelism; leave it out"
        yield from _of_shape(unit, "tensor")


def _of_expert_axis(plan: ShardingPlan) -> Iterator[str]:
    units = {path: unit for unit in plan.units for path in unit.modules}
    for each in plan.split_experts:
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
