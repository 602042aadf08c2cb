"""The sharding plan: which units, with which parameters, and what is done with them; decided before any change."""

import hashlib
import json
from collections.abc import Iterator
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
from composer_fsdp2.fsdp1.translate import UnitSettings, translate_unit_settings
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
    casts_buffers: bool = True
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
            "casts_buffers": self.casts_buffers,
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
    buffer_dtype: torch.dtype | None
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
            "buffer_dtype": None if self.buffer_dtype is None else str(self.buffer_dtype),
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
    units = tuple(
        _unit(unit, [selection.uses[i] for i in members], config)
        for unit, members in zip(selection.units, selection.members, strict=True)
    )
    if not any(unit.parameters for unit in units):
        raise PlanError(
            f"nothing to shard: {type(model).__name__} has no direct child with parameters that may be wrapped; FSDP1 "
            "wrapped the children of the model it was given, so pass the module that contains yours"
        )
    _check_parameters(units)
    if config.prefetch != Prefetch():
        registration = {path: i for i, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
        units = tuple(_with_prefetch(units, config.prefetch, registration))
    checkpointed = tuple(select_checkpointed(model)) if config.activation_checkpointing.enabled else ()
    return ShardingPlan(
        mesh=config.mesh,
        units=units,
        tie_groups=tuple(use.names for use in selection.uses if len(use.owners) > 1),
        left_out=selection.left_out,
        checkpointed=checkpointed,
        activation_checkpointing=config.activation_checkpointing,
        sync_module_states=config.sync_module_states,
        buffer_dtype=config.buffer_dtype,
        notes=selection.notes,
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


def _unit(unit: WrapUnit, uses: list[ParameterUse], config: ShardingConfig) -> ShardUnit:
    settings = translate_unit_settings(unit.settings, unit.paths[0], config) if unit.settings else UnitSettings()
    policy = _policy(unit, settings, config)
    reshard = config.reshard_after_forward if settings.reshard_after_forward is None else settings.reshard_after_forward
    offload = config.cpu_offload if settings.cpu_offload is None else settings.cpu_offload
    own_prefetch = (unit.paths[0],) if settings.backward_prefetch == 0 else None
    return ShardUnit(
        modules=unit.paths,
        parameters=tuple(
            ParameterSpec(names=use.names, shape=tuple(use.parameter.shape), dtype=use.parameter.dtype) for use in uses
        ),
        is_root=unit.is_root,
        # A root's parameters are used again at once when backward begins: FSDP1 kept them, torch 2.7 does, and later
        # versions do unless told otherwise.
        reshard_after_forward=False if unit.is_root else reshard,
        mixed_precision=policy,
        cpu_offload=offload,
        backward_prefetch=own_prefetch,
        casts_buffers=not unit.full_precision,
        reason=unit.reason,
    )


def _policy(unit: WrapUnit, settings: UnitSettings, config: ShardingConfig) -> MixedPrecisionPolicy:
    if unit.full_precision:
        # FSDP1 ran batch norms in fp32 and gave back what the modules around them work in (torch's MixedPrecision,
        # _module_classes_to_ignore).
        return MixedPrecisionPolicy(
            param_dtype=torch.float32, output_dtype=config.mixed_precision.param_dtype, cast_forward_inputs=True
        )
    policy = settings.mixed_precision or config.mixed_precision
    return replace(policy, cast_forward_inputs=config.cast_root_inputs) if unit.is_root else policy


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
    units: tuple[ShardUnit, ...], prefetch: Prefetch, registration: dict[str, int]
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
        if prefetch.forward is not None:
            forward |= _following(sorted(names, key=registration.__getitem__), prefetch.forward)
        if prefetch.backward is not None:
            # Naming itself replaces FSDP2's own choice by none: the unit is gathered by then.
            following = _following(names[::-1], prefetch.backward)
            backward |= {name: ahead or (name,) for name, ahead in following.items()}
    for unit in units:
        yield replace(
            unit,
            forward_prefetch=forward.get(unit.name, ()),
            backward_prefetch=unit.backward_prefetch or backward.get(unit.name),
        )


def _following(names: list[str], count: int) -> dict[str, tuple[str, ...]]:
    """For each name, the ``count`` names after it."""
    return {name: tuple(names[i + 1 : i + 1 + count]) for i, name in enumerate(names)}


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
