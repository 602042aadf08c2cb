"""The sharding plan: which units, with which parameters, and what is done with them; decided before any change."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2.activation_checkpointing import select_checkpointed
from composer_fsdp2.config import ActivationCheckpointing, MeshSpec, Prefetch, ShardingConfig
from composer_fsdp2.errors import PlanError
from composer_fsdp2.fsdp1.translate import translate_unit_settings, unit_notes
from composer_fsdp2.optimizer import Optimizers, check_optimizers
from composer_fsdp2.tying import ParameterUse
from composer_fsdp2.units import WrapUnit, ancestors_or_self
from composer_fsdp2.wrap import LeftOut, select_units

__all__ = ["ParameterSpec", "ShardUnit", "ShardingPlan", "plan_sharding", "refuse_sharded"]

_LOW_PRECISION = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter under all of its names (more than one if it is tied), with its full shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def to_json(self) -> dict[str, object]:
        return {"names": list(self.names), "shape": list(self.shape), "dtype": str(self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """The arguments of one ``fully_shard`` call, and the parameters that it will hold.

    ``modules`` has one path, or several for a group. ``backward_prefetch`` None leaves the choice to FSDP2; a unit
    that names itself gathers nothing ahead.
    """

    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    is_root: bool
    reshard_after_forward: bool | int
    mixed_precision: MixedPrecisionPolicy
    cpu_offload: bool
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] | None = None
    buffer_dtype: torch.dtype | None = None
    reason: str

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def to_json(self) -> dict[str, object]:
        policy = self.mixed_precision
        return {
            "modules": list(self.modules),
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "is_root": self.is_root,
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision": [
                str(policy.param_dtype),
                str(policy.reduce_dtype),
                str(policy.output_dtype),
                policy.cast_forward_inputs,
            ],
            "cpu_offload": self.cpu_offload,
            "forward_prefetch": list(self.forward_prefetch),
            "backward_prefetch": None if self.backward_prefetch is None else list(self.backward_prefetch),
            "buffer_dtype": None if self.buffer_dtype is None else str(self.buffer_dtype),
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """What ``apply_plan`` will do: units bottom-up (the order of the calls), and everything that goes with them."""

    mesh: MeshSpec
    units: tuple[ShardUnit, ...]
    tie_groups: tuple[tuple[str, ...], ...]
    left_out: tuple[LeftOut, ...]
    checkpointed: tuple[str, ...]
    activation_checkpointing: ActivationCheckpointing
    sync_module_states: bool | None
    notes: tuple[str, ...]

    @property
    def roots(self) -> tuple[ShardUnit, ...]:
        return tuple(unit for unit in self.units if unit.is_root)

    def to_json(self) -> dict[str, object]:
        return {
            "mesh": self.mesh.to_json(),
            "units": [unit.to_json() for unit in self.units],
            "tie_groups": [list(names) for names in self.tie_groups],
            "left_out": [{"names": list(left.names), "reason": left.reason} for left in self.left_out],
            "checkpointed": list(self.checkpointed),
            "activation_checkpointing": {
                "checkpoint": self.activation_checkpointing.checkpoint,
                "cpu_offload": self.activation_checkpointing.cpu_offload,
                "reentrant": self.activation_checkpointing.reentrant,
            },
            "sync_module_states": self.sync_module_states,
            "notes": list(self.notes),
        }

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan; ranks compare it before they communicate."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def explain(self) -> str:
        """The plan as text: the mesh, one line a unit, ties, what is left out and why."""
        return "\n".join(_explain(self))

    def __str__(self) -> str:
        return self.explain()


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
    policy = config.mixed_precision
    low_precision = bool({policy.param_dtype, policy.reduce_dtype, config.buffer_dtype} & _LOW_PRECISION)
    selection = select_units(model, low_precision=low_precision)
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
    _check_parameters(units)
    if any(own.prefetch != Prefetch() for own in configs):
        registration = {path: i for i, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
        prefetch = {unit.name: own.prefetch for unit, own in zip(units, configs, strict=True)}
        units = tuple(_with_prefetch(units, prefetch, registration))
    checkpointed = tuple(select_checkpointed(model)) if config.activation_checkpointing.enabled else ()
    return ShardingPlan(
        mesh=config.mesh,
        units=units,
        tie_groups=tuple(use.names for use in selection.uses if len(use.owners) > 1),
        left_out=selection.left_out,
        checkpointed=checkpointed,
        activation_checkpointing=config.activation_checkpointing,
        sync_module_states=config.sync_module_states,
        notes=(*selection.notes, *_notes_of_settings(selection.units)),
    )


def refuse_sharded(model: nn.Module) -> None:
    """Raise if some module is wrapped or sharded already.

    Raises:
        PlanError: names the module and how it was sharded.
    """
    for path, module in model.named_modules():
        for kind, name in (
            (FullyShardedDataParallel, "FSDP1 (FullyShardedDataParallel)"),
            (FSDPModule, "FSDP2 (fully_shard)"),
            (DistributedDataParallel, "DistributedDataParallel"),
        ):
            if isinstance(module, kind):
                where = f"module {path!r}" if path else "the model"
                raise PlanError(f"{where} is sharded already, by {name}; pass the model as it was built")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {name} is a DTensor already (tensor parallelism?), which is not supported yet; "
                "pass the model as it was built"
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
            own[unit] = replace(own[unit], mixed_precision=policy, buffer_dtype=None)
    return [own[unit] for unit in units]


def _unit(unit: WrapUnit, uses: list[ParameterUse], config: ShardingConfig) -> ShardUnit:
    """``config`` is the unit's own."""
    policy = config.mixed_precision
    return ShardUnit(
        modules=unit.paths,
        parameters=tuple(
            ParameterSpec(names=use.names, shape=tuple(use.parameter.shape), dtype=use.parameter.dtype) for use in uses
        ),
        is_root=unit.is_root,
        # A root's parameters are used again at once when backward begins: FSDP1 kept them, torch 2.7 does, and later
        # versions do unless told otherwise.
        reshard_after_forward=False if unit.is_root else config.reshard_after_forward,
        mixed_precision=replace(policy, cast_forward_inputs=config.cast_root_inputs) if unit.is_root else policy,
        cpu_offload=config.cpu_offload,
        buffer_dtype=config.buffer_dtype,
        reason=unit.reason,
    )


def _notes_of_settings(units: Sequence[WrapUnit]) -> Iterator[str]:
    """One line for each thing to say, however many modules said it."""
    said: dict[str, list[str]] = {}
    for unit in units:
        for note in unit_notes(unit.settings):
            said.setdefault(note, []).append(unit.paths[0])
    for note, paths in said.items():
        where = paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        yield f"in the settings of {where}: {note}"


def _check_parameters(units: tuple[ShardUnit, ...]) -> None:
    problems = []
    for unit in units:
        dtypes = sorted({str(parameter.dtype) for parameter in unit.parameters})
        if len(dtypes) > 1:
            example = {str(p.dtype): p.name for p in reversed(unit.parameters)}
            problems.append(
                f"unit {unit.name!r} holds parameters of {' and '.join(dtypes)} "
                f"({', '.join(example[dtype] for dtype in dtypes)}); one unit gathers one dtype: give the modules of "
                "one of them _fsdp_wrap = True, or cast them"
            )
        problems.extend(
            f"parameter {parameter.name} is a scalar, which cannot be sharded; make it a tensor of one element"
            for parameter in unit.parameters
            if not parameter.shape
        )
    if problems:
        raise PlanError("\n".join(problems))


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


def _explain(plan: ShardingPlan) -> Iterator[str]:
    total = sum(unit.numel for unit in plan.units)
    yield f"{len(plan.units)} units, {total:,} parameters on {plan.mesh}"
    for unit in plan.units:
        role = "root" if unit.is_root else f"reshard {unit.reshard_after_forward}"
        offload = ", on the CPU" if unit.cpu_offload else ""
        name = " + ".join(unit.modules) if unit.name else "(the model)"
        yield f"  {name}: {unit.numel:,} parameters, {role}{offload} [{unit.reason}]"
    yield from (f"  tied: {' = '.join(names)}" for names in plan.tie_groups)
    for left in plan.left_out:
        names = ", ".join(left.names[:3]) + (f" and {len(left.names) - 3} more" if len(left.names) > 3 else "")
        yield f"  left out: {names} [{left.reason}]: whole on every rank, gradients not averaged across ranks"
    if plan.checkpointed:
        mode = plan.activation_checkpointing
        kind = " and ".join(
            word
            for word, is_on in (
                ("recomputed" + (" (reentrant)" if mode.reentrant else ""), mode.checkpoint),
                ("offloaded to the CPU", mode.cpu_offload),
            )
            if is_on
        )
        yield f"  activations {kind}: {len(plan.checkpointed)} modules, first {plan.checkpointed[0]}"
    yield from (f"  note: {note}" for note in plan.notes)
