"""The units of a sharded model, and the parameters that their modules have registered while they are sharded."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composer_fsdp2._torch.groups import drop_gradient, groups_of, has_gradient, state_of
from composer_fsdp2._torch.reset import reset_after_error
from composer_fsdp2._torch.unit import ParameterOverride, hooks_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitParameter:
    """One sharded parameter of a unit, and each (module, name) under which it is registered."""

    sharded: nn.Parameter  # a DTensor
    registrations: tuple[tuple[nn.Module, str], ...]

    def registered(self) -> list[nn.Parameter]:
        """The parameters that are currently registered under these names."""
        found = [module._parameters.get(name) for module, name in self.registrations]
        return [parameter for parameter in found if parameter is not None]

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.registrations:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:
                setattr(module, name, parameter)


def distinct_units(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """The units among ``modules``; only the first module of a unit that ``fully_shard`` made from several."""
    found: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), module)
    return list(found.values())


def is_inside_unit(module: nn.Module) -> bool:
    """Whether the module is a unit or belongs to one."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parameters_of_unit(unit: FSDPModule) -> list[UnitParameter]:
    """The parameters that a unit shards, each with all its registrations, including those outside of ``unit``.

    A tied parameter, or the parameter of a unit of several modules, has such registrations. Initializes the unit for
    its first forward, as ``unit.unshard`` does. Does not communicate.
    """
    found = []
    for group in groups_of(state_of(unit)):
        group.lazy_init()
        for parameter in group.fsdp_params:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            registrations = ((info.module, info.param_name), *shared)
            found.append(UnitParameter(sharded=parameter.sharded_param, registrations=registrations))
    return found


def owners_of_unit(unit: FSDPModule) -> list[nn.Module]:
    """The modules that register a unit's parameters. Does not require an initialized unit."""
    infos = [parameter._module_info for group in groups_of(state_of(unit)) for parameter in group.fsdp_params]
    return list(dict.fromkeys(owner for info in infos for owner in (info.module, *info.shared_modules)))


def has_unreduced_gradients(unit: FSDPModule) -> bool:
    """Whether the unit has gradients that a later microbatch will reduce."""
    return any(
        group._partial_reduce_output is not None or any(map(_has_gradient_unreduced, group.fsdp_params))
        for group in groups_of(state_of(unit))
    )


def _has_gradient_unreduced(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param") and has_gradient(parameter)


def drop_unreduced_gradients(unit: FSDPModule, parameters: Collection[nn.Parameter]) -> None:
    """Discard the unreduced gradients of these parameters."""
    for parameter in _unreduced(unit):
        if parameter.sharded_param in parameters:
            drop_gradient(parameter)


def unreduced_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """The unit's parameters with unreduced gradients."""
    return [parameter.sharded_param for parameter in _unreduced(unit)]


def _unreduced(unit: FSDPModule) -> list[Any]:
    return [each for group in groups_of(state_of(unit)) for each in group.fsdp_params if _has_gradient_unreduced(each)]


def is_in_forward_or_backward(unit: FSDPModule) -> bool:
    """Whether a forward or backward of the unit, or of its root, is running (or was ended by an error)."""
    state = state_of(unit)
    working = [state._training_state, *(group._training_state for group in groups_of(state))]
    return state._state_ctx.iter_forward_root is not None or any(each != TrainingState.IDLE for each in working)


def override_parameters(unit: FSDPModule, override: ParameterOverride) -> Callable[[], None]:
    """Register other parameters in place of the shards in a unit's modules while the unit is sharded.

    Forward and backward still all-gather the shards, and free the unsharded parameters afterwards, including the
    root's.

    Args:
        unit: Currently sharded.
    Returns:
        A function that registers the shards again. It also resets a forward or backward that an error interrupted.
    """
    state, hooks = state_of(unit), hooks_of(unit)
    hooks.override = override

    def end() -> None:
        hooks.override = None
        if is_in_forward_or_backward(unit):
            reset_after_error(_root_of(state)._modules[0])
        for group in groups_of(state):
            group._to_sharded()

    return end


def _root_of(state: Any) -> Any:
    """The state of the root of the current forward or backward."""
    context = state._state_ctx
    return context.iter_forward_root or next((each for each in context.all_states if each._is_root), state)
