"""The supported combinations, checked on the plan, and the order in which the steps of a plan are executed.

[Note: legal order] Each step depends on the ones before it.

1. ``rebinding`` records ties and the optimizer's parameters: later steps replace parameters.
2. Context parallelism and tiled MLPs replace the forward of instances, which a wrapper would hide.
3. Parameters are frozen, before checkpointing looks for trained ones.
4. Activation checkpointing wraps blocks: the unit's all-gather must enclose the recomputation. A block that the script
   compiled stays inside of both.
5. Each unit, bottom-up: initial values, tensor parallelism, ties, ``fully_shard``. Tensor parallelism precedes
   sharding, and only one unit at a time is unsharded in memory.
6. The optimizer is rebound.
7. Hooks outside of recomputed blocks divide and gather sequences. Hooks that must run before a unit's all-gather are
   registered last, because ``fully_shard`` prepends its own: token exchange, idle experts and towers.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from composer_fsdp2._torch.capabilities import needs_even_shards
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.batches import make_batch_group, sync_random_states
from composer_fsdp2.parallel.experts import expert_problems, start_experts
from composer_fsdp2.parallel.idle_experts import start_idle_experts
from composer_fsdp2.parallel.idle_towers import start_idle_towers
from composer_fsdp2.parallel.replicated_gradients import compare_replicated_gradients
from composer_fsdp2.parallel.sequences import start_context
from composer_fsdp2.parallel.tiled_mlp import apply_tiling
from composer_fsdp2.sharding.apply import apply_agreed_plan
from composer_fsdp2.sharding.materialize import Initializers
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan
from composer_fsdp2.training.context import ContextGroup
from composer_fsdp2.training.guard import start_guard
from composer_fsdp2.training.run import Run, start_run


def refuse_illegal(plan: ShardingPlan) -> None:
    """Raise for a plan that the installed torch cannot execute, or that would train incorrectly.

    Raises:
        PlanError: every problem, with the module and an alternative.

    Call this on all ranks with the same plan. Does not communicate.
    """
    checks = (_nesting_problems, _tiling_problems, _layer_problems, expert_problems, _unit_problems)
    if problems := [text for check in checks for text in check(plan)]:
        raise PlanError("\n".join(problems))


def execute_plan(
    model: nn.Module, plan: ShardingPlan, initializers: Initializers, *, existing_meshes: Sequence[DeviceMesh] = ()
) -> Run:
    """Execute the plan on ``model``, in the required order ([Note: legal order]).

    Args:
        plan: Made or checked for this model, compared across ranks, and accepted by ``refuse_illegal``.
        initializers: Return the initializer of a module on the meta device.
        existing_meshes: Meshes to reuse if they equal the plan's.

    Returns:
        The state of the run, which is attached to the model.

    Called on all ranks, by ``prepare_fully_shard`` and ``apply_plan``. Creates process groups; may broadcast
    parameters.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    context: ContextGroup | None = None
    connect_context: Callable[[], None]

    def start_context_and_tiling() -> None:
        nonlocal context, connect_context
        context, connect_context = start_context(model, plan)
        if plan.config.tiled_mlp is not None:
            apply_tiling(model, plan.tiled, plan.config.tiled_mlp.chunks)

    meshes = apply_agreed_plan(
        model, plan, initializers, existing_meshes=existing_meshes, before_wrapping=start_context_and_tiling
    )
    run = start_run(model, plan, meshes)
    run.context, run.batch = context, make_batch_group(plan.config)
    if run.batch is not None:
        sync_random_states(run.batch)
    if plan.config.collective_guard is not None:
        start_guard(model, plan.config.collective_guard)
    connect_context()
    # With check_data: false, the ranks of the tensor axis may read different batches.
    if plan.mesh.tensor_degree > 1 and plan.config.check_data is not False:
        compare_replicated_gradients(model, plan, run, meshes)
    run.exchanging = tuple(start_experts(model, plan, modules))
    start_idle_experts(model, plan.expert_blocks, modules, plan.config.collective_guard)
    start_idle_towers(model, plan.tower_models, modules, plan.config.collective_guard)
    return run


def _nesting_problems(plan: ShardingPlan) -> Iterator[str]:
    """Messages about units that precede units inside them, and would therefore shard their parameters too."""
    earlier_units: dict[str, str] = {}
    for unit in plan.units:
        outer = next(
            (earlier_units[each] for path in unit.modules for each in ancestors_or_self(path) if each in earlier_units),
            None,
        )
        if outer is not None:
            yield (
                f"unit {unit.name} comes after {outer or 'the model'}, which it lies in; leave the units in the order "
                "of plan_sharding, bottom-up"
            )
        earlier_units |= dict.fromkeys(unit.modules, unit.name)


def _tiling_problems(plan: ShardingPlan) -> Iterator[str]:
    """Messages about tiled MLPs that contain units.

    Each chunk would all-gather them, and ranks with shorter sequences have fewer chunks than others.
    """
    for tiled in plan.tiled:
        if inside := [path for unit in plan.units for path in unit.modules if tiled in ancestors_or_self(path)[1:]]:
            yield (
                f"{tiled} is computed in pieces, and {and_more(inside)} in it would be gathered by each of them, on "
                f"ranks with sequences of other lengths another number of times; make {tiled} the unit, or leave it "
                "out of tiled_mlp"
            )


def _layer_problems(plan: ShardingPlan) -> Iterator[str]:
    """Messages about TP-sharded layers in no unit. A unit averages the gradients of its TP-sharded layers."""
    unsharded = {*plan.unsharded_names, *(name for spec in plan.replicated for name in spec.names)}
    for module in plan.split:
        if inside := sorted(name for name in unsharded if name.rpartition(".")[0] == module.path):
            yield (
                f"{and_more(inside)}: in the layer plan, and in no unit that shards it, so that its "
                "gradients would be averaged over no rank; take it out of the plan, or out of ignored_modules"
            )


def _unit_problems(plan: ShardingPlan) -> Iterator[str]:
    """Messages about limits of ``fully_shard`` for units whose parameters are also sharded along another axis."""
    kind, alternative = "tensor", "pad them, leave the module out of the layer plan"
    if not plan.split:
        kind, alternative = "expert", "split over more ranks"
    of_experts = {each.module for each in plan.split_experts}
    for unit in plan.units if plan.split else [unit for unit in plan.units if unit.name in of_experts]:
        where, mesh, size = unit.name or "the model", unit.mesh, unit.reshard_after_forward
        if plan.split and mesh != plan.mesh:
            yield f"{where} has a mesh or process_group of its own, beside tensor parallelism; leave it out"
        if type(size) is int:
            yield f"{where} reshards to {size} ranks, beside {kind} parallelism; use true or false"
        num_parts = mesh.shard_degree * mesh.split_degree
        for spec in unit.parameters if needs_even_shards() and mesh.is_resolved else ():
            if isinstance(spec.tensor_placement, Shard) and not spec.tensor_placement.dim and spec.shape[0] % num_parts:
                yield (
                    f"{spec.name} has {spec.shape[0]} rows, which this torch must divide evenly into {num_parts} "
                    f"({kind} {mesh.split_degree} x shard {mesh.shard_degree}); {alternative}, or install torch 2.13"
                )
