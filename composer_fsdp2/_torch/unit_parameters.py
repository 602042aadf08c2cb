"""The units of a sharded model, and what stands in their modules while they are not gathered."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composer_fsdp2._torch.groups import groups_of, has_gradient, put_in_place, state_of
from composer_fsdp2._torch.reset import reset_after_error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitParameter:
    """One sharded parameter of a unit, and each module and name under which it is registered."""

    sharded: nn.Parameter  # a DTensor
    places: tuple[tuple[nn.Module, str], ...]

    def standing(self) -> list[nn.Parameter]:
        """What is registered now, in the order of the places."""
        found = [module._parameters.get(name) for module, name in self.places]
        return [parameter for parameter in found if parameter is not None]

    def place(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:
                setattr(module, name, parameter)


def distinct_units(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """The units among ``modules``; of one unit that ``fully_shard`` made of several modules, the first."""
    found: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), module)
    return list(found.values())


def is_inside_unit(module: nn.Module) -> bool:
    """Whether a unit manages this module; also of the unit itself."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parameters_of_unit(unit: FSDPModule) -> list[UnitParameter]:
    """The parameters that a unit shards, with their places, also those outside of ``unit`` (ties, grouped modules).

    Makes the unit ready for its first forward, as ``unit.unshard`` does; does not communicate.
    """
    found = []
    for group in groups_of(state_of(unit)):
        group.lazy_init()
        for parameter in group.fsdp_params:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            places = ((info.module, info.param_name), *shared)
            found.append(UnitParameter(sharded=parameter.sharded_param, places=places))
    return found


def owners_of_unit(unit: FSDPModule) -> list[nn.Module]:
    """The modules in which a unit's parameters are registered; also before the unit is ready for a forward."""
    infos = [parameter._module_info for group in groups_of(state_of(unit)) for parameter in group.fsdp_params]
    return list(dict.fromkeys(owner for info in infos for owner in (info.module, *info.shared_modules)))


def has_unreduced_gradients(unit: FSDPModule) -> bool:
    """Whether gradients of the unit wait for a later microbatch to be communicated."""
    return any(
        group._partial_reduce_output is not None or any(map(_has_gradient_unreduced, group.fsdp_params))
        for group in groups_of(state_of(unit))
    )


def _has_gradient_unreduced(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param") and has_gradient(parameter)


def is_in_pass(unit: FSDPModule) -> bool:
    """Whether a forward or backward of the unit, or of its root, is under way (or was ended by an error)."""
    state = state_of(unit)
    working = [state._training_state, *(group._training_state for group in groups_of(state))]
    return state._state_ctx.iter_forward_root is not None or any(each != TrainingState.IDLE for each in working)


def show_instead_of_shards(
    unit: FSDPModule, *, before_gather: Callable[[bool], None], after_reshard: Callable[[], None]
) -> Callable[[], None]:
    """Have a caller register other parameters than the shards in a unit's modules while it is not gathered.

    Forward and backward work as ever: they gather the shards, and free what was gathered afterwards, the root's too.

    Args:
        unit: Not gathered now.
        before_gather: Called before each all-gather of the unit, with whether it is backward's; what it raises ends the
            forward or backward.
        after_reshard: Called once the shards are registered again.
    Returns:
        A function that ends it. A forward or backward that an error left under way is over then, too.
    """
    state = state_of(unit)
    groups = groups_of(state)
    shown = [_ShownInstead(group, before_gather, after_reshard) for group in groups]

    def end() -> None:
        for each in shown:
            each.end()
        if is_in_pass(unit):
            reset_after_error(_root_of(state)._modules[0])
        for group in groups:
            group._to_sharded()

    return end


def _root_of(state: Any) -> Any:
    """The state that began the forward or backward which this one is part of."""
    context = state._state_ctx
    return context.iter_forward_root or next((each for each in context.all_states if each._is_root), state)


class _ShownInstead:
    """Takes the place of some bound methods of one group and its parameters."""

    def __init__(self, group: Any, before_gather: Callable[[bool], None], after_reshard: Callable[[], None]) -> None:
        self.group = group
        self.before_gather = before_gather
        self.after_reshard = after_reshard
        self.is_over = False
        self._undo = [
            self._override(group, "unshard", self._unshard),
            self._override(group, "_to_sharded", self._to_sharded),
            # The root would stay gathered after a forward, and others as shards on fewer ranks.
            self._override(group, "reshard", lambda original: group._to_sharded()),
            # After load_state_dict and the like: it takes what is registered for the shards.
            *(self._override(each, "reset_sharded_param", lambda original: None) for each in group.fsdp_params),
        ]

    def end(self) -> None:
        self.is_over = True
        for undo in self._undo:
            undo()

    def _unshard(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.group._all_gather_result is None and not self.group.is_unsharded:
            self.before_gather(self.group._training_state == TrainingState.PRE_BACKWARD)
        original(*args, **kwargs)

    def _to_sharded(self, original: Callable[..., Any]) -> None:
        was_sharded = self.group.is_sharded
        original()
        if not was_sharded:
            self.after_reshard()

    def _override(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
        original = getattr(owner, name)  # or another replacement of ours

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.is_over else replacement(original, *args, **kwargs)

        return put_in_place(owner, name, call)
