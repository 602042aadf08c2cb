"""From a model and a ``ShardingConfig`` to a ``ShardingPlan``: everything is decided before anything is changed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2._torch import own_parameters
from composer_fsdp2.activation_checkpointing import select_checkpointed
from composer_fsdp2.config import Prefetch, ShardingConfig
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.fsdp1.unit_settings import translate_unit_settings, unit_notes
from composer_fsdp2.optimizer import Optimizers, check_optimizers
from composer_fsdp2.plan import ParameterSpec, ShardingPlan, ShardUnit, and_more
from composer_fsdp2.tying import ParameterUse, join
from composer_fsdp2.units import WrapUnit, ancestors_or_self
from composer_fsdp2.wrap import main_dtype, select_units

__all__ = ["plan_sharding", "refuse_sharded"]

_LOW_PRECISION = {torch.float16, torch.bfloat16}
_SHARDED_BY: dict[type, str] = {
    FullyShardedDataParallel: "FSDP1 (FullyShardedDataParallel)",
    FSDPModule: "FSDP2 (fully_shard)",
    DistributedDataParallel: "DistributedDataParallel",
}


def plan_sharding(model: nn.Module, config: ShardingConfig, *, optimizers: Optimizers = None) -> ShardingPlan:
    """Choose the FSDP units of ``model`` without touching it.

    Units are ordered bottom-up, the order in which ``fully_shard`` must run. Modules tied by a parameter share one
    unit, because one group only can all-gather it ([Note: tied parameters] in ``units.py``).

    Args:
        model: Any module tree; parameters may be on the meta device. Its direct children are the roots, and their
            ``fsdp_wrap_fn``, ``activation_checkpointing_fn`` and the modules' ``_fsdp_wrap`` and
            ``_activation_checkpointing`` say what happens below, as they did to Composer's FSDP1.
        config: What ``translate`` gave.
        optimizers: Checked against the model, if given.
    Raises:
        PlanError: the model is sharded already, a wrap function failed, the optimizer is another model's, a parameter
            cannot be sharded, or there is nothing to shard.
        ConfigError: a wrap function's dict has an unknown key or a wrong value.

    Every rank must call this with the same model; it does not communicate and needs no process group.
    """
    refuse_sharded(model)
    check_optimizers(model, optimizers)
    ignored_modules = tuple(_paths_of(model, config.ignored_modules))
    policy = config.mixed_precision
    low_precision = bool({policy.param_dtype, policy.reduce_dtype, config.buffer_dtype} & _LOW_PRECISION)
    selection = select_units(
        model,
        low_precision=low_precision,
        ignored_modules=config.ignored_modules,
        shard_below_unwrapped=config.shard_below_unwrapped,
    )
    configs = _own_configs(selection.units, config)
    units = tuple(
        _unit(unit, [selection.uses[i] for i in members], own)
        for unit, members, own in zip(selection.units, selection.members, configs, strict=True)
    )
    if not any(unit.parameters for unit in units):
        raise PlanError(
            f"nothing to shard: {type(model).__name__} has no direct child with parameters that may be wrapped; FSDP1 "
            "wrapped the children of the model it was given, so pass the module that contains yours"
        )
    notes = list(_check_parameters(units, selection.uses, configs))
    if any(own.prefetch != Prefetch() for own in configs):
        registration = {path: i for i, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
        prefetch = {unit.name: own.prefetch for unit, own in zip(units, configs, strict=True)}
        units = tuple(_with_prefetch(units, prefetch, registration))
    checkpointed: tuple[str, ...] = ()
    if config.activation_checkpointing.enabled:
        checkpointed = tuple(select_checkpointed(model, below_unwrapped=config.shard_below_unwrapped))
    return ShardingPlan(
        mesh=config.mesh,
        units=units,
        tie_groups=tuple(use.names for use in selection.uses if len(use.owners) > 1),
        ignored_modules=ignored_modules,
        ignored=tuple(name for use in selection.ignored for name in use.names),
        left_out=selection.left_out,
        checkpointed=checkpointed,
        activation_checkpointing=config.activation_checkpointing,
        accumulation=config.accumulation,
        collective_guard=config.collective_guard,
        sync_module_states=config.sync_module_states,
        notes=(*selection.notes, *_notes_of_settings(selection.units), *notes, *_notes_of_groups(units)),
    )


def refuse_sharded(model: nn.Module) -> None:
    """Raise if some module is wrapped or sharded already.

    Raises:
        PlanError: names the module and how it was sharded.
    """
    for path, module in model.named_modules():
        if isinstance(module, tuple(_SHARDED_BY)):
            name = next(name for kind, name in _SHARDED_BY.items() if isinstance(module, kind))
            where = f"module {path!r}" if path else "the model"
            raise PlanError(f"{where} is sharded already, by {name}; pass the model as it was built")
        for attribute, parameter in own_parameters(module):
            if isinstance(parameter, DTensor):
                raise PlanError(
                    f"parameter {join(path, attribute)} is a DTensor already (tensor parallelism?), which is not "
                    "supported yet; pass the model as it was built"
                )


def _own_configs(units: Sequence[WrapUnit], config: ShardingConfig) -> list[ShardingConfig]:
    """For each unit the model's configuration as the unit's own settings change it."""
    own = {unit: translate_unit_settings(unit.settings, unit.paths[0], config) for unit in units}
    at_path = {path: own[unit] for unit in units if not unit.full_precision for path in unit.paths}
    for unit in units:
        if unit.full_precision:
            # FSDP1 ran batch norms in fp32, whatever was said of them, and gave back what the modules around them work
            # in (torch's MixedPrecision, _module_classes_to_ignore).
            around = next((at_path[path] for path in ancestors_or_self(unit.paths[0]) if path in at_path), config)
            policy = MixedPrecisionPolicy(
                param_dtype=torch.float32, output_dtype=around.mixed_precision.param_dtype, cast_forward_inputs=True
            )
            own[unit] = replace(own[unit], mixed_precision=policy, buffer_dtype=None, keep_low_precision_grads=False)
    return [own[unit] for unit in units]


def _paths_of(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[str]:
    paths = {module: path for path, module in model.named_modules()} if modules else {}
    for number, module in enumerate(modules):
        if module not in paths:
            raise PlanError(
                f"ignored_modules[{number}] ({type(module).__name__}) is no part of the model; pass the modules of the "
                "model that is sharded"
            )
        if not paths[module]:
            raise PlanError("ignored_modules holds the model itself, so there is nothing to shard")
        yield paths[module]


def _unit(unit: WrapUnit, uses: list[ParameterUse], config: ShardingConfig) -> ShardUnit:
    """``config`` is the unit's own."""
    policy = config.mixed_precision
    if unit.is_root:
        policy = replace(policy, cast_forward_inputs=config.cast_root_inputs)
    elif unit.of_other_dtype:
        # What comes in has the dtype of the modules around, which this one would not have been given to compute with.
        policy = replace(policy, cast_forward_inputs=policy.param_dtype is not None)
    dtype = main_dtype(uses)
    # torch shards a parameter without elements, and fails on its gradient.
    is_sharded = {use: use.parameter.dim() > 0 < use.parameter.numel() and use.parameter.dtype == dtype for use in uses}
    return ShardUnit(
        modules=unit.paths,
        parameters=tuple(_spec(use) for use in uses if is_sharded[use]),
        replicated=tuple(_spec(use) for use in uses if not is_sharded[use]),
        mesh=config.mesh,
        is_root=unit.is_root,
        # A root's parameters are used again at once when backward begins: FSDP1 kept them, torch 2.7 does, and later
        # versions do unless told otherwise.
        reshard_after_forward=False if unit.is_root else config.reshard_after_forward,
        mixed_precision=policy,
        cpu_offload=config.cpu_offload,
        buffer_dtype=config.buffer_dtype,
        reason=unit.reason,
    )


def _spec(use: ParameterUse) -> ParameterSpec:
    return ParameterSpec(names=use.names, shape=tuple(use.parameter.shape), dtype=use.parameter.dtype)


def _notes_of_settings(units: Sequence[WrapUnit]) -> Iterator[str]:
    """One line for each thing to say, however many modules said it."""
    said: dict[str, list[str]] = {}
    for unit in units:
        for note in unit_notes(unit.settings):
            said.setdefault(note, []).append(unit.paths[0])
    for note, paths in said.items():
        yield f"in the settings of {and_more(paths)}: {note}"


def _notes_of_groups(units: Iterable[ShardUnit]) -> Iterator[str]:
    said: dict[str, list[str]] = {}
    for unit in units:
        if unit.mesh.is_grouped and (unit.mesh.replicate_groups is None or unit.mesh.shard == 1):
            said.setdefault(" x ".join(map(str, unit.mesh.axis_groups)), []).append(unit.name or "the model")
    for groups, names in said.items():
        yield (
            f"{and_more(names)} on groups of ranks ({groups}): gradients are averaged within a group only, so that "
            "the parameters of different groups drift apart, as they did under FSDP1"
        )


def _check_parameters(
    units: Sequence[ShardUnit], uses: Sequence[ParameterUse], configs: Sequence[ShardingConfig]
) -> Iterator[str]:
    """Notes of what is done with unusual parameters.

    Raises:
        PlanError: parameters that their unit cannot hold.
        UnsupportedError: gradients that cannot stay in the dtype they are reduced in.
    """
    parameters = {use.names: use.parameter for use in uses}
    problems: list[str] = []
    cast: list[str] = []
    for unit, config in zip(units, configs, strict=True):
        problems.extend(_cannot_replicate(unit))
        if config.keep_low_precision_grads:
            cast.extend(_casts_gradients(unit, parameters))
    if problems:
        raise PlanError("\n".join(problems))
    if cast:
        text = (
            f"keep_low_precision_grads: {and_more(cast)}; fully_shard gives gradients the parameter's own dtype: cast "
            "the model to the dtype that gradients are reduced in, or leave the key out"
        )
        if any(config.strict for config in configs):
            raise UnsupportedError(f"{text}\n(strict: false in the same configuration turns this into a warning)")
        yield text
    whole = [spec.name for unit in units for spec in unit.replicated if spec.shape and spec.numel]
    if whole:
        yield f"{and_more(whole)} of another dtype than the rest of the module that holds them: whole on every rank"
    copied = [spec.name for unit in units for spec in unit.parameters if not parameters[spec.names].is_contiguous()]
    if copied:
        yield f"{and_more(copied)} not contiguous: fully_shard takes no other layout, so contiguous copies are sharded"


def _cannot_replicate(unit: ShardUnit) -> Iterator[str]:
    """Parameters whose dtype the unit would have to change for computation, which only sharded ones can."""
    dtype = unit.mixed_precision.param_dtype
    for spec in unit.replicated:
        if spec.shape and spec.numel and unit.parameters and dtype not in (None, spec.dtype):
            yield (
                f"parameter {spec.name} is {spec.dtype}, others of the module that holds it "
                f"{unit.parameters[0].dtype}, and mixed_precision computes in {dtype}: give it a module of its own, or "
                "the dtype of the others"
            )


def _casts_gradients(unit: ShardUnit, parameters: Mapping[tuple[str, ...], nn.Parameter]) -> Iterator[str]:
    policy = unit.mixed_precision
    for spec in unit.parameters:
        reduced = policy.reduce_dtype or policy.param_dtype or spec.dtype
        if parameters[spec.names].requires_grad and reduced != spec.dtype:
            yield f"{spec.name} is {spec.dtype} and its gradient is reduced in {reduced}"


def _with_prefetch(
    units: tuple[ShardUnit, ...], prefetch: Mapping[str, Prefetch], registration: Mapping[str, int]
) -> Iterator[ShardUnit]:
    """Fill in the explicit prefetch lists: the next units of the same root, in the order of registration.

    A unit is gathered where its forward begins, so forward takes the units in pre-order; its backward begins where its
    forward ended, so backward takes them in reversed bottom-up order.
    """
    roots = {unit.name for unit in units if unit.is_root}
    bottom_up: dict[str, list[str]] = {name: [] for name in roots}
    for unit in units:
        root = next(path for path in ancestors_or_self(unit.name) if path in roots)
        bottom_up[root].append(unit.name)
    forward: dict[str, tuple[str, ...]] = {}
    backward: dict[str, tuple[str, ...]] = {}
    for names in bottom_up.values():
        in_forward = sorted(names, key=registration.__getitem__)
        forward |= _following(in_forward, {name: prefetch[name].forward for name in names})
        following = _following(names[::-1], {name: prefetch[name].backward for name in names})
        # Naming itself replaces FSDP2's own choice by none: the unit is gathered by then.
        backward |= {name: ahead or (name,) for name, ahead in following.items()}
    for unit in units:
        yield replace(unit, forward_prefetch=forward.get(unit.name, ()), backward_prefetch=backward.get(unit.name))


def _following(names: list[str], counts: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """For each name with a count, so many of the names after it."""
    return {
        name: tuple(names[i + 1 : i + 1 + count]) for i, name in enumerate(names) if (count := counts[name]) is not None
    }
