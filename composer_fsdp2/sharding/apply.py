"""Apply a ``ShardingPlan``: the only module that calls ``fully_shard``."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.api import KNOWN_VERSIONS, require_known_torch
from composer_fsdp2._torch.capabilities import keeps_all_reduce_buffer
from composer_fsdp2._torch.private_names import keep_class_name, own_buffers, parent_mesh
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2._torch.strided_shard import patch_strided_shard
from composer_fsdp2._torch.unit import hooks_of, patch_unit
from composer_fsdp2._torch.unit_parameters import owners_of_unit
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError, UnsupportedError
from composer_fsdp2.sharding.activations import turn_off_caches, wrap_activations
from composer_fsdp2.sharding.agree import agree
from composer_fsdp2.sharding.buffers import cast_buffers
from composer_fsdp2.sharding.decide import refuse_sharded
from composer_fsdp2.sharding.dtypes import dtype_name, mixed_precision_policy, torch_dtype
from composer_fsdp2.sharding.frozen import freeze
from composer_fsdp2.sharding.full_values import accept_full_state_dicts
from composer_fsdp2.sharding.materialize import (
    Initializers,
    Materializer,
    breadth_first,
    decide_initialization,
    rank_zero_rng,
)
from composer_fsdp2.sharding.meshes import UnitMesh, device_of, unit_meshes
from composer_fsdp2.sharding.modules import at_path, parameter_at
from composer_fsdp2.sharding.parallelize import parallelize_unit
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit, units_by_root
from composer_fsdp2.sharding.sharded import sharded_roots
from composer_fsdp2.sharding.ties import parameter_uses

# Methods other than forward by which Composer and Hugging Face call a root. They may then call its submodules directly:
# an encoder, or the model inside an adapter. The root's hooks must all-gather its parameters there too.
_ENTRY_POINTS = ("eval_forward", "generate")


def apply_agreed_plan(
    model: nn.Module,
    plan: ShardingPlan,
    initializers: Initializers,
    *,
    existing_meshes: Sequence[DeviceMesh] = (),
    before_wrapping: Callable[[], object] = lambda: None,
) -> dict[str, UnitMesh]:
    """Shard ``model`` in place according to ``plan``: checkpoint wrappers, values, ``fully_shard`` bottom-up, checks.

    Args:
        plan: Made or checked for this model, and compared across ranks.
        initializers: Return the initializer of a module on the meta device.
        existing_meshes: Meshes to reuse if they equal the plan's; see ``unit_meshes``.
        before_wrapping: Called after all checks, before modules are wrapped and sharded.
    Returns:
        The mesh of each unit by the unit's name.

    Called on all ranks. Creates the process groups of the meshes, and broadcasts parameters and buffers if
    ``sync_module_states`` is set.
    """
    require_known_torch()
    plan = plan.resolve(dist.get_world_size())
    _refuse_offloaded_replicas(plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    initialization = decide_initialization(modules.values(), plan.config.sync_module_states)
    if plan.mesh.device_type == "cpu":
        repair_cpu_collectives()
    if plan.split or any(each.is_split for each in plan.split_experts):
        patch_strided_shard()
        existing_meshes = [*existing_meshes, *_parent_meshes(model)]
    made = unit_meshes([unit.mesh for unit in plan.units], existing_meshes)
    meshes = {unit.name: mesh for unit, mesh in zip(plan.units, made, strict=True)}
    unit_modules = _unit_modules(plan, modules)
    initialized_with_unit = _initialized_with_enclosing_unit(plan, modules)
    replicated = _parameters_named(model, {spec.name for spec in plan.replicated})
    ignored = _parameters_named(model, plan.unsharded_names) - replicated
    device = device_of(made[0].whole)
    materializer = Materializer(modules, device, initialization, initializers, ignored=ignored, in_place=replicated)
    agree(
        lambda: materializer.check({module for inside in unit_modules.values() for module in inside}),
        lambda _: json.dumps(_describe_buffers(model, unit_modules) if initialization.broadcast else []),
    )

    before_wrapping()
    freeze(_parameters_named(model, plan.frozen))
    turn_off_caches(model, plan.caching)
    wrap_activations(model, list(plan.checkpointed), plan.config.activation_checkpointing)
    styles = {modules[each.path]: each.parallelize for each in plan.split if each.parallelize is not None}
    sharded: dict[str, FSDPModule] = {}
    with (
        rank_zero_rng() if initialization.initialize else contextlib.nullcontext(),
        _restore_buffers(_unmanaged_modules(modules, unit_modules)),
    ):
        for unit in plan.units:
            mesh = meshes[unit.name]
            materializer.materialize(initialized_with_unit.get(unit.name, ()))
            materializer.materialize_unit(unit_modules[unit.name], mesh)
            of_unit = {module: styles.get(module) for module in unit_modules[unit.name]}
            parallelize_unit(unit, modules, of_unit, mesh.tensor, materializer.equal_on_all_ranks(of_unit))
            sharded[unit.name] = _shard(model, unit, mesh.fsdp, ignored)
    buffer_dtypes = {unit.name: torch_dtype(unit.mixed_precision.buffer_dtype) for unit in plan.units}
    cast_buffers({module: buffer_dtypes[name] for name, inside in unit_modules.items() for module in inside})
    _set_prefetch(plan, sharded)
    _average_replicated(model, plan, sharded, meshes)
    _open_entry_points(model)
    _verify(modules, plan)
    return meshes


def _parent_meshes(model: nn.Module) -> list[DeviceMesh]:
    """The parent meshes of parallelized parameters: ``fully_shard`` requires another slice of the same mesh."""
    slices = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return [parent_mesh(mesh) for mesh in dict.fromkeys(slices)]


def check_plan(model: nn.Module, plan: ShardingPlan) -> None:
    """Raise if the model is not the planned one, or the plan does not fit the world size.

    Raises:
        PlanError, ConfigError: as ``apply_plan``.
    """
    plan.resolve(dist.get_world_size())
    refuse_sharded(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    existing = {use.names: use.parameter for use in parameter_uses(model)}
    named = [path for unit in plan.units for path in unit.modules]
    named += [*map(str, plan.config.ignored_modules), *plan.checkpointed, *plan.caching, *plan.tiled, *plan.exchanging]
    named += [*(each.path for each in plan.split), *(each.module for each in plan.split_experts)]
    splits = any(each.parallelize is not None for each in plan.split)
    named += [path for each in plan.expert_blocks for path in (each.block, *each.experts)]
    named += [path for each in plan.tower_models for path in (each.model, *each.towers, *each.sync_points)]
    problems = [f"no module {path!r}" for path in dict.fromkeys(named) if path not in modules]
    for spec in (spec for unit in plan.units for spec in (*unit.parameters, *unit.replicated)):
        parameter = existing.get(spec.names)
        if parameter is None:
            problems.append(f"no parameter {' = '.join(spec.names)}")
        elif (tuple(parameter.shape), dtype_name(parameter.dtype)) != (spec.shape, spec.dtype):
            problems.append(
                f"parameter {spec.name} is {tuple(parameter.shape)} {dtype_name(parameter.dtype)}, planned were "
                f"{spec.shape} {spec.dtype}"
            )
        elif isinstance(parameter, DTensor) != (spec.tensor_placement is not None and not splits):
            problems.append(f"parameter {spec.name} is {'' if splits else 'not '}split already")
    ignored = {*plan.ignored}.union(*(left.names for left in plan.left_out))
    problems.extend(f"no parameter {name}" for name in sorted(ignored.difference(*existing)))
    names_present = {names[0] for names in existing}
    problems.extend(f"no parameter {name}, to be frozen" for name in plan.frozen if name not in names_present)
    planned = {names for unit in plan.units for spec in unit.parameters for names in spec.names} | plan.unsharded_names
    problems.extend(f"parameter {names[0]} is in no unit" for names in existing if planned.isdisjoint(names))
    if problems:
        raise PlanError("the plan was made for another model: " + "; ".join(problems[:5]))


def _refuse_offloaded_replicas(plan: ShardingPlan) -> None:
    """Raise if gradients would be silently wrong: replicas with CPU offload on GPUs, on an unknown torch version.

    Raises:
        UnsupportedError: names alternative settings.
    """
    if plan.mesh.device_type == "cpu" or keeps_all_reduce_buffer():
        return
    raced = next((unit for unit in plan.units if unit.cpu_offload and unit.mesh.has_replicas), None)
    if raced is not None:
        raise UnsupportedError(
            f"cpu_offload with replicas ({raced.mesh.text}) would train on wrong gradients: torch {torch.__version__} "
            "frees them while they are copied to the CPU (pytorch#180665). Leave cpu_offload off, shard over all "
            f"ranks, or install a torch from {KNOWN_VERSIONS}",
            keys=("cpu_offload",),
        )


def _describe_buffers(model: nn.Module, unit_modules: Mapping[str, Sequence[nn.Module]]) -> list[str]:
    """The name, shape and dtype of each buffer, for the comparison across ranks.

    The plan does not list buffers. If they differ between ranks, their broadcast hangs.
    """
    inside = {module for modules in unit_modules.values() for module in modules}
    return [
        f"buffer {name} is {tuple(buffer.shape)} {buffer.dtype}"
        for path, module in model.named_modules()
        if module in inside
        for name, buffer in module.named_buffers(prefix=path, recurse=False)
    ]


def _parameters_named(model: nn.Module, names: Collection[str]) -> set[nn.Parameter]:
    return {parameter for name, parameter in model.named_parameters() if name in names} if names else set()


def _unmanaged_modules(
    modules: Mapping[str, nn.Module], unit_modules: Mapping[str, Sequence[nn.Module]]
) -> list[nn.Module]:
    """The modules whose own tensors no unit manages: ignored, left out, or the model itself."""
    inside = {module for of_unit in unit_modules.values() for module in of_unit}
    return [module for module in modules.values() if module not in inside]


@contextlib.contextmanager
def _restore_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep the buffers of ``modules`` on their devices: ``fully_shard`` moves all buffers to the mesh's device."""
    buffers = {buffer: buffer.data for module in modules for _, buffer in own_buffers(module)}
    yield
    for buffer, data in buffers.items():
        buffer.data = data


def _unit_modules(plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """For each unit, the modules whose own tensors it manages: those below its modules, up to nested units.

    Excludes ignored and left out modules.
    """
    heads = {modules[path] for unit in plan.units for path in unit.modules}
    children = {name.split(".")[0] for left in plan.left_out for name in left.names if "." in name}
    units_at = {path.split(".")[0] for unit in plan.units for path in unit.modules}
    ignored = map(str, plan.config.ignored_modules)
    skipped = {modules[path] for path in (*(children - units_at), *ignored, *plan.sharded_before)}
    return {unit.name: breadth_first([modules[path] for path in unit.modules], heads | skipped) for unit in plan.units}


def _initialized_with_enclosing_unit(
    plan: ShardingPlan, modules: Mapping[str, nn.Module]
) -> dict[str, list[nn.Module]]:
    """For each unit that exists only because of expert parallelism, all modules that are initialized together with it.

    These are its own modules and those of the enclosing unit.
    """
    added = {each.module for each in plan.split_experts if each.is_added}
    if not added:
        return {}
    others = tuple(unit for unit in plan.units if unit.name not in added)
    around = _unit_modules(replace(plan, units=others), modules)
    return {name: next((each for each in around.values() if modules[name] in each), []) for name in added}


def _shard(model: nn.Module, unit: ShardUnit, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> FSDPModule:
    # Looked up again: a checkpoint wrapper may have replaced the module, and FSDP(AC(block)) is FSDP1's nesting.
    targets = [at_path(model, path) for path in unit.modules]
    unsharded = ignored.union(parameter_at(model, spec.name) for spec in unit.replicated)
    attributes_before = {spec.name: vars(parameter_at(model, spec.name)) for spec in unit.parameters}
    fully_shard(
        targets if len(targets) > 1 else targets[0],
        mesh=mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=mixed_precision_policy(unit.mixed_precision),
        # Pinning speeds up copies from and to a GPU. A CPU mesh needs none, even if the machine has GPUs.
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if unit.cpu_offload else OffloadPolicy(),
        ignored_params=unsharded or None,
    )
    for target in targets:
        keep_class_name(target)
    head = targets[0]
    assert isinstance(head, FSDPModule)
    patch_unit(head)
    accept_full_state_dicts(head, owners_of_unit(head))
    for name, attributes in attributes_before.items():
        vars(parameter_at(model, name)).update(attributes)  # attributes that a script set on it
    return head


def _set_prefetch(plan: ShardingPlan, sharded: Mapping[str, FSDPModule]) -> None:
    for unit in plan.units:
        if unit.forward_prefetch:
            sharded[unit.name].set_modules_to_forward_prefetch([sharded[name] for name in unit.forward_prefetch])
        if unit.backward_prefetch is not None:
            sharded[unit.name].set_modules_to_backward_prefetch([sharded[name] for name in unit.backward_prefetch])


def _average_replicated(
    model: nn.Module, plan: ShardingPlan, sharded: Mapping[str, FSDPModule], meshes: Mapping[str, UnitMesh]
) -> None:
    """Average the gradients of replicated parameters at the end of each root's backward."""
    for units in units_by_root(plan.units).values():
        replicated: dict[DeviceMesh, list[nn.Parameter]] = {}
        for unit in units:
            for spec in unit.replicated:
                replicated.setdefault(meshes[unit.name].fsdp, []).append(parameter_at(model, spec.name))
        for unit in units:  # torch ends a backward in the unit where it began
            hooks_of(sharded[unit.name]).replicated = replicated


def _open_entry_points(model: nn.Module) -> None:
    for _, root in sharded_roots(model):
        for name in _ENTRY_POINTS:
            if callable(getattr(root, name, None)):
                register_fsdp_forward_method(root, name)


def _verify(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> None:
    """Check after sharding that all planned ties still exist, and that every planned parameter is sharded.

    ``modules`` are the modules by their paths before sharding. Sharding and checkpointing do not change which module
    registers a parameter.
    """

    def registered_at(name: str) -> object:
        path, _, attribute = name.rpartition(".")
        return getattr(modules[path], attribute)

    for names in plan.tie_groups:
        tied = {id(registered_at(name)) for name in names}
        if len(tied) > 1:
            raise ComposerFSDP2Error(
                f"{' = '.join(names)} came apart while sharding; this is a bug of composer_fsdp2, please report it"
            )
    for unit in plan.units:
        for spec in unit.parameters:
            if not isinstance(registered_at(spec.name), DTensor):
                raise ComposerFSDP2Error(
                    f"{spec.name} was not sharded with {unit.name}; this is a bug of composer_fsdp2, please report it"
                )
