"""Carry a ``ShardingPlan`` out: the only caller of ``fully_shard``."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from composer_fsdp2._torch import (
    fill_unused_gradients,
    has_accelerator,
    keep_class_name,
    repair_cpu_collectives,
)
from composer_fsdp2.activation_checkpointing import wrap_activations
from composer_fsdp2.agreement import agree, require_process_group
from composer_fsdp2.buffers import cast_buffers
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError
from composer_fsdp2.materialize import Materializer, breadth_first, decide_initialisation, rank_zero_rng
from composer_fsdp2.mesh import device_mesh, device_of
from composer_fsdp2.plan import ShardingPlan, ShardUnit, refuse_sharded
from composer_fsdp2.tying import parameter_uses

__all__ = ["apply_plan", "reshard", "sharded_roots"]

# Methods beside forward through which Composer and Hugging Face enter a model; they matter only when the model itself
# is a unit, since their parameters are then gathered by its hooks.
_ENTRY_POINTS = ("eval_forward", "generate")


def apply_plan(model: nn.Module, plan: ShardingPlan) -> None:
    """Shard ``model`` in place as ``plan`` says: checkpointing wrappers, values, ``fully_shard`` bottom-up, checks.

    Args:
        model: The model that the plan was made for, not yet sharded.
        plan: From ``plan_sharding``; its mesh is made here.
    Raises:
        PlanError: the plan is another model's, or differs between ranks; nothing has been changed then.
        ConfigError: there is no process group, or the mesh does not fit the world size.

    Called on all ranks. It compares the plan across ranks, makes the mesh's process groups, and broadcasts parameters
    and buffers from rank 0 if the plan says ``sync_module_states`` (or some ranks have no values of their own).
    """
    require_process_group("apply_plan")
    plan = replace(plan, mesh=plan.mesh.resolve(dist.get_world_size()))
    modules = agree(lambda: _resolve(model, plan), lambda _: json.dumps(plan.to_json()))
    initialisation = decide_initialisation(model, plan.sync_module_states)
    if plan.mesh.device_type == "cpu":
        repair_cpu_collectives()
    mesh = device_mesh(plan.mesh)
    materializer = Materializer(model, device_of(mesh), initialisation)
    unit_modules = _unit_modules(plan, modules)
    agree(
        lambda: materializer.check(model, _left_out_names(plan)),
        lambda _: json.dumps(_describe_buffers(model, unit_modules) if initialisation.broadcast else []),
    )

    left_out = _left_out_parameters(model, plan)
    wrap_activations(
        model,
        list(plan.checkpointed),
        checkpoint=plan.activation_checkpointing.checkpoint,
        cpu_offload=plan.activation_checkpointing.cpu_offload,
        reentrant=plan.activation_checkpointing.reentrant,
    )
    sharded: dict[str, FSDPModule] = {}
    with rank_zero_rng() if initialisation.draw else contextlib.nullcontext():
        for unit in plan.units:
            materializer.make_real(unit_modules[unit.name], left_out)
            sharded[unit.name] = _shard(model, unit, mesh, left_out)
    cast_buffers({module: unit.buffer_dtype for unit in plan.units for module in unit_modules[unit.name]})
    _set_prefetch(plan, sharded)
    _open_entry_points(model)
    _verify(model, plan)


def sharded_roots(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost sharded modules with their paths; the model itself has the path ''."""
    if isinstance(model, FSDPModule):
        return [("", model)]
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        found.extend((f"{name}.{path}".rstrip("."), root) for path, root in sharded_roots(child))
    return found


def reshard(model: nn.Module) -> None:
    """Free gathered parameters everywhere, so that ``model.parameters()`` are the sharded ones again.

    After a forward without gradients a root keeps its parameters gathered, and ``named_parameters`` and state dicts
    would then show plain tensors. Call it between forward passes only; does not communicate.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _resolve(model: nn.Module, plan: ShardingPlan) -> dict[str, nn.Module]:
    """The modules that the plan names; raises if the model is not the one that was planned."""
    refuse_sharded(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    present = {use.names: use.parameter for use in parameter_uses(model)}
    problems = [f"no module {path!r}" for unit in plan.units for path in unit.modules if path not in modules]
    for spec in (spec for unit in plan.units for spec in unit.parameters):
        parameter = present.get(spec.names)
        if parameter is None:
            problems.append(f"no parameter {' = '.join(spec.names)}")
        elif tuple(parameter.shape) != spec.shape or parameter.dtype != spec.dtype:
            problems.append(
                f"parameter {spec.name} is {tuple(parameter.shape)} {parameter.dtype}, planned were {spec.shape} "
                f"{spec.dtype}"
            )
    planned = {names for unit in plan.units for spec in unit.parameters for names in spec.names} | _left_out_names(plan)
    problems.extend(f"parameter {names[0]} is in no unit" for names in present if planned.isdisjoint(names))
    if problems:
        raise PlanError("the plan was made for another model: " + "; ".join(problems[:5]))
    return modules


def _describe_buffers(model: nn.Module, unit_modules: Mapping[str, Sequence[nn.Module]]) -> list[str]:
    """What ranks must have alike for a broadcast of buffers, which the plan does not list; else one would wait."""
    inside = {module for modules in unit_modules.values() for module in modules}
    return [
        f"buffer {name} is {tuple(buffer.shape)} {buffer.dtype}"
        for path, module in model.named_modules()
        if module in inside
        for name, buffer in module.named_buffers(prefix=path, recurse=False)
    ]


def _left_out_names(plan: ShardingPlan) -> set[str]:
    return {name for left in plan.left_out for name in left.names}


def _left_out_parameters(model: nn.Module, plan: ShardingPlan) -> set[nn.Parameter]:
    names = _left_out_names(plan)
    return {parameter for name, parameter in model.named_parameters() if name in names}


def _unit_modules(plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """For each unit, the modules whose tensors it holds: those under it that no other unit takes, and none left out."""
    heads = {modules[path] for unit in plan.units for path in unit.modules}
    children = {name.split(".")[0] for name in _left_out_names(plan) if "." in name}
    units_at = {path.split(".")[0] for unit in plan.units for path in unit.modules}
    skipped = {modules[name] for name in children - units_at}
    return {unit.name: breadth_first([modules[path] for path in unit.modules], heads | skipped) for unit in plan.units}


def _shard(model: nn.Module, unit: ShardUnit, mesh: DeviceMesh, left_out: set[nn.Parameter]) -> FSDPModule:
    # Looked up again: a checkpointing wrapper may stand at the path by now, and FSDP(AC(block)) is FSDP1's nesting.
    targets = [_at_path(model, path) for path in unit.modules]
    fully_shard(
        targets if len(targets) > 1 else targets[0],
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=unit.mixed_precision,
        offload_policy=CPUOffloadPolicy(pin_memory=has_accelerator()) if unit.cpu_offload else OffloadPolicy(),
        ignored_params=left_out or None,
    )
    for target in targets:
        keep_class_name(target)
    head = targets[0]
    assert isinstance(head, FSDPModule)
    fill_unused_gradients(head)
    return head


def _at_path(model: nn.Module, path: str) -> nn.Module:
    """The module registered at ``path``, seen through checkpointing wrappers (but not through the last one)."""
    module = model
    for name in path.split(".") if path else []:
        module = getattr(module, name)  # wrappers hand on attributes that they have not
    return module


def _set_prefetch(plan: ShardingPlan, sharded: Mapping[str, FSDPModule]) -> None:
    for unit in plan.units:
        if unit.forward_prefetch:
            sharded[unit.name].set_modules_to_forward_prefetch([sharded[name] for name in unit.forward_prefetch])
        if unit.backward_prefetch is not None:
            sharded[unit.name].set_modules_to_backward_prefetch([sharded[name] for name in unit.backward_prefetch])


def _open_entry_points(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):
        for name in _ENTRY_POINTS:
            if callable(getattr(model, name, None)):
                register_fsdp_forward_method(model, name)


def _verify(model: nn.Module, plan: ShardingPlan) -> None:
    """Every tie that was planned still holds, and every planned parameter is sharded."""
    for names in plan.tie_groups:
        tied = {id(_parameter_at(model, name)) for name in names}
        if len(tied) > 1:
            raise ComposerFSDP2Error(
                f"{' = '.join(names)} came apart while sharding; this is a bug of composer_fsdp2, please report it"
            )
    for unit in plan.units:
        for spec in unit.parameters:
            if not isinstance(_parameter_at(model, spec.name), torch.distributed.tensor.DTensor):
                raise ComposerFSDP2Error(
                    f"{spec.name} was not sharded with {unit.name}; this is a bug of composer_fsdp2, please report it"
                )


def _parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    path, _, attribute = name.rpartition(".")
    return getattr(_at_path(model, path), attribute)
