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
    held = {name: spec for unit in plan.units for spec in unit.parameters for name in spec.names}
    others = {name: spec for spec in plan.replicated for name in spec.names}
    for module in plan.split:
        inside = [name for name in (*others, *plan.unsharded_names) if name.rpartition(".")[0] == module.path]
        if inside and any(name not in held for name in inside):
            yield (
                f"{and_more(sorted(set(inside)))}: in the layer plan, and in no unit that shards it, so that its "
                "gradients would be averaged over no rank; take it out of the plan, or out of ignored_modules"
            )
    for unit in plan.units:
        where = unit.name or "the model"
        if unit.mesh != plan.mesh:
            yield f"{where} has a mesh or process_group of its own, beside tensor parallelism; leave it out"
        if type(unit.reshard_after_forward) is int:
            size = unit.reshard_after_forward
            yield f"{where} reshards to {size} ranks, beside tensor parallelism; use true or false"
        if needs_even_shards() and unit.mesh.is_resolved:
            yield from _uneven(unit)


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
        if type(unit.reshard_after_forward) is int:
            size = unit.reshard_after_forward
            yield f"{each.module} reshards to {size} ranks, beside expert parallelism; use true or false"
        if needs_even_shards() and unit.mesh.is_resolved:
            yield from _uneven(unit)


def _uneven(unit: ShardUnit) -> Iterator[str]:
    mesh = unit.mesh
    kind, way_out = "tensor", "pad them, leave the module out of the layer plan"
    if mesh.expert_degree > 1:
        kind, way_out = "expert", "use a larger expert_parallel_degree"
    for spec in unit.parameters:
        placement = spec.tensor_placement
        num_parts = mesh.shard_degree * mesh.split_degree
        if isinstance(placement, Shard) and placement.dim == 0 and spec.shape[0] % num_parts:
            yield (
                f"{spec.name} has {spec.shape[0]} rows, which this torch must divide evenly into {num_parts} ({kind} "
                f"{mesh.split_degree} x shard {mesh.shard_degree}); {way_out}, or install torch 2.13"
            )
