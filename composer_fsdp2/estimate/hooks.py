"""Record the order in which FSDP2's hooks would run, on a model that is not sharded."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.identity import call_after_backward, call_after_grads
from composer_fsdp2._torch.private_names import without_wrappers
from composer_fsdp2._torch.tensor_tree import tensors_in
from composer_fsdp2.estimate.events import Hook
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.sharding.plan import ShardingPlan

# (hook, unit, parameter of a GRADIENT hook) -> None
RecordHook = Callable[[Hook, str, str | None], None]


def _ignore(hook: Hook, unit: str, parameter: str | None) -> None:
    pass


@contextlib.contextmanager
def record_hooks(
    model: nn.Module,
    plan: ShardingPlan,
    record: RecordHook,
    *,
    blocks: Sequence[str] = (),
    record_block: RecordHook = _ignore,
) -> Iterator[None]:
    """In the block, call ``record`` at each point where a hook of ``fully_shard`` would run.

    The hooks are those of ``fully_shard``: before and after a unit's forward, at the first gradient of its outputs,
    after all gradients of its inputs, and after autograd has accumulated a parameter's gradient. A unit whose inputs
    need no gradient has no POST_BACKWARD; its backward finishes at END.

    Args:
        model: The plan's model, or a copy with fewer blocks; units that it lacks are skipped. Modules may have
            checkpointing wrappers. The model is not sharded, and all hooks are removed after the block.
        blocks: Paths of modules whose hooks call ``record_block``, as if they were units. PRE_FORWARD of a block runs
            before that of a unit of the same module, its other hooks run after.
    """
    of_units, of_blocks = _Step(record), _Step(_ignore)
    with contextlib.ExitStack() as handles:
        for unit in plan.units:
            modules = [module for path in unit.modules if (module := module_at(model, path)) is not None]
            if len(modules) == len(unit.modules):
                _hook(unit.name, modules, record, of_units, handles)
        for path in blocks:
            _hook(path, [at_path(model, path)], record_block, of_blocks, handles)
        for name, unit_name, parameter in _trained(model, plan):
            record_gradient = partial(_record_gradient, record, unit_name, name)
            handles.enter_context(parameter.register_post_accumulate_grad_hook(record_gradient))
        yield


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """As ``at_path``, but return None if the model lacks the module, because it is a copy with fewer blocks."""
    try:
        return at_path(model, path)
    except AttributeError:
        return None


def _trained(model: nn.Module, plan: ShardingPlan) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (FQN, unit name or "", parameter) of each parameter that requires a gradient.

    A tied parameter is yielded once.
    """
    first_names = {
        without_wrappers(name): (spec.name, unit.name)
        for unit in plan.units
        for spec in unit.parameters
        for name in spec.names
    }
    for name, parameter in model.named_parameters():
        plain_name = without_wrappers(name)
        if parameter.requires_grad:
            yield (*first_names.get(plain_name, (plain_name, "")), parameter)


def _record_gradient(record: RecordHook, unit: str, name: str, _: nn.Parameter) -> None:
    record(Hook.GRADIENT, unit, name)


class _Step:
    """Tracks which units have started backward, as ``fully_shard`` does, and records END once after each backward."""

    def __init__(self, record: RecordHook) -> None:
        self.record = record
        self.in_backward: set[str] = set()
        self._is_queued = False

    def begin_backward(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            call_after_backward(self._end)

    def _end(self) -> None:
        self._is_queued = False
        self.record(Hook.END, "", None)
        self.in_backward.clear()


def _hook(
    name: str, modules: Sequence[nn.Module], record: RecordHook, step: _Step, handles: contextlib.ExitStack
) -> None:
    """Hook the modules of one unit."""
    waiting: set[nn.Module] = set()  # modules of a group that have not run forward yet

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_first = not waiting
        if is_first:
            waiting.update(modules)
        if name in step.in_backward or not is_first:
            return args, kwargs  # recomputed in the unit's own backward, or another module of the group
        record(Hook.PRE_FORWARD, name, None)
        return call_after_grads((args, kwargs), end_backward)

    def after(module: nn.Module, _: Any, output: Any) -> None:
        waiting.discard(module)
        if name in step.in_backward or waiting:
            return
        record(Hook.POST_FORWARD, name, None)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)

    def begin_backward(_: torch.Tensor) -> None:
        step.begin_backward()
        if name not in step.in_backward:
            step.in_backward.add(name)
            record(Hook.PRE_BACKWARD, name, None)

    def end_backward() -> None:
        step.in_backward.discard(name)
        record(Hook.POST_BACKWARD, name, None)

    for module in modules:
        handles.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.enter_context(module.register_forward_hook(after))
