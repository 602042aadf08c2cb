"""The order in which a step comes by FSDP2's hooks, recorded on a model that is not sharded."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.passing import after_backward, after_gradients_of, tensors_in
from composer_fsdp2.estimate.events import Hook
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.sharding.plan import ShardingPlan

# What is to be told of each moment: which, of which unit, and of which parameter's gradient.
Listener = Callable[[Hook, str, str | None], None]


def _silence(hook: Hook, unit: str, parameter: str | None) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Unit:
    """Where one unit is in its step, as ``fully_shard`` keeps it."""

    name: str
    modules: Sequence[nn.Module]
    is_in_backward: bool = False
    waiting: set[nn.Module] = field(default_factory=set)  # of a group, those that have still to run forward


@contextlib.contextmanager
def listen(
    model: nn.Module, plan: ShardingPlan, tell: Listener, *, blocks: Sequence[str] = (), tell_block: Listener = _silence
) -> Iterator[None]:
    """Call ``tell`` at each moment at which ``fully_shard`` would do something, in the block.

    The hooks stand where its own stand: before and after a unit's forward, where the first gradient of its outputs is
    there, where all gradients of its inputs are there, and where autograd has accumulated a parameter's gradient.
    A unit whose inputs need no gradient has no POST_BACKWARD; it is finished at END.

    Args:
        model: The model that the plan was made for, or a copy with fewer blocks: units that it lacks are passed over.
            Checkpointing wrappers may stand around modules. Nothing is sharded, and no hook is left behind.
        blocks: The paths of modules whose forward and backward ``tell_block`` is told of, as if they were units: their
            forward begins before that of a unit of the same module, and all else of theirs comes after.
    """
    handles: list[RemovableHandle] = []
    ends = _Ends(tell)
    for unit in plan.units:
        modules = [module for path in unit.modules if (module := module_at(model, path)) is not None]
        if len(modules) == len(unit.modules):
            handles += _hooks_of(_Unit(unit.name, modules), tell, ends)
    for path in blocks:
        handles += _hooks_of(_Unit(path, [at_path(model, path)]), tell_block, ends)
    for name, unit_name, parameter in _trained(model, plan):
        tell_gradient = partial(_tell_gradient, tell, unit_name, name)
        handles.append(parameter.register_post_accumulate_grad_hook(tell_gradient))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """As ``at_path``; None where the model, a copy with fewer blocks, has no such module."""
    try:
        return at_path(model, path)
    except AttributeError:
        return None


def _trained(model: nn.Module, plan: ShardingPlan) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The name of each parameter that needs a gradient, that of its unit ("" of none) and itself; a tied one once."""
    first_names = {
        name: (spec.name, unit.name) for unit in plan.units for spec in unit.parameters for name in spec.names
    }
    for name, parameter in model.named_parameters():
        plain_name = name.replace("_checkpoint_wrapped_module.", "")
        if parameter.requires_grad:
            yield (*first_names.get(plain_name, (plain_name, "")), parameter)


def _tell_gradient(tell: Listener, unit: str, name: str, _: nn.Parameter) -> None:
    tell(Hook.GRADIENT, unit, name)


class _Ends:
    """Tells END once for each backward, where autograd has run everything."""

    def __init__(self, tell: Listener) -> None:
        self.tell = tell
        self.units: list[_Unit] = []
        self._is_queued = False

    def expect(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            after_backward(self._end)

    def _end(self) -> None:
        self._is_queued = False
        self.tell(Hook.END, "", None)
        for unit in self.units:
            unit.is_in_backward = False


def _hooks_of(unit: _Unit, tell: Listener, ends: _Ends) -> list[RemovableHandle]:
    ends.units.append(unit)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_first = not unit.waiting
        if is_first:
            unit.waiting.update(unit.modules)
        if unit.is_in_backward or not is_first:
            return args, kwargs  # a recomputation inside of the unit's own backward, or a group's other module
        tell(Hook.PRE_FORWARD, unit.name, None)
        return after_gradients_of((args, kwargs), partial(_end_backward, unit, tell))

    def after(module: nn.Module, _: Any, output: Any) -> None:
        unit.waiting.discard(module)
        if unit.is_in_backward or unit.waiting:
            return
        tell(Hook.POST_FORWARD, unit.name, None)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)

    def begin_backward(_: torch.Tensor) -> None:
        ends.expect()
        if not unit.is_in_backward:
            unit.is_in_backward = True
            tell(Hook.PRE_BACKWARD, unit.name, None)

    return [
        handle
        for module in unit.modules
        for handle in (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
        )
    ]


def _end_backward(unit: _Unit, tell: Listener) -> None:
    unit.is_in_backward = False
    tell(Hook.POST_BACKWARD, unit.name, None)
