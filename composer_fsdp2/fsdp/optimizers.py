"""Optimizers made before wrapping: with ``use_orig_params=True`` FSDP1 kept the parameter objects.

``fully_shard`` registers new parameters. Each optimizer is therefore noted in its constructor, and found by its
parameters when these are sharded.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composer_fsdp2._torch.unit_parameters import distinct_units, drop_unreduced_gradients, unreduced_parameters
from composer_fsdp2.errors import CallError, PlanError, UnsupportedError
from composer_fsdp2.sharding.optimizer import rebinding
from composer_fsdp2.sharding.placements import splitting_axes

_NOTED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_CHECKED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# Instances whose gradients may wait: from no_sync on, until none is found.
_ACCUMULATING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Set on a replaced parameter: its name.
_MARK = "_composer_fsdp2_sharded_as"


@functools.cache
def note_optimizers() -> None:
    """Note all optimizers that this process makes from now on.

    Called where a script imports the class, and by ``install_fsdp``. Wraps
    ``torch.optim.Optimizer.add_param_group``, which every optimizer calls for each group; torch has no hook for the
    construction. And ``zero_grad``, which clears the gradients of microbatches under ``no_sync`` too.
    """
    original = torch.optim.Optimizer.add_param_group
    original_zero_grad = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        _NOTED.add(self)
        _CHECKED.discard(self)

    @functools.wraps(original_zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original_zero_grad(self, *args, **kwargs)
        if _ACCUMULATING:
            clear_accumulated(_parameters_of(self))

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_check_step)


def optimizer_rebindings(model: nn.Module) -> list[Callable[[], None]]:
    """Functions to call after sharding ``model``: each moves a noted optimizer to the new parameters.

    State that an optimizer already has is cut to this rank's shard. Neither this nor the functions communicate; call
    them on all ranks.
    """
    own = set(model.parameters())
    return [rebinding(model, optimizer) for optimizer in list(_NOTED) if not own.isdisjoint(_parameters_of(optimizer))]


def note_accumulation(instance: nn.Module) -> None:
    """Note an instance whose gradients wait for a later microbatch."""
    _ACCUMULATING.add(instance)


def clear_accumulated(parameters: Iterable[nn.Parameter]) -> None:
    """Discard the gradients of backwards under ``no_sync``, which FSDP1 kept in ``.grad`` and ``fully_shard`` does not.

    A training step that is given up halfway (a loss that is not finite, the end of an epoch) would add them to the
    next one. Does not communicate.
    """
    cleared = set(parameters)
    for unit, _ in _waiting():
        drop_unreduced_gradients(unit, cleared)


def refuse_accumulated(parameters: Iterable[nn.Parameter], call: str) -> None:
    """Raise if gradients of these parameters wait for a backward outside of ``no_sync``.

    ``call`` would find none of them, or those of earlier backwards alone.
    """
    if any(not set(waiting).isdisjoint(parameters) for _, waiting in _waiting()):
        raise CallError(
            f"{call} while gradients that backwards under no_sync accumulated are not communicated yet; call it after "
            "a backward outside of no_sync, which runs the same modules, or clear them by zero_grad"
        )


def _waiting() -> list[tuple[FSDPModule, list[nn.Parameter]]]:
    """Units with the parameters whose gradients wait; instances without any are looked at no more."""
    found: list[tuple[FSDPModule, list[nn.Parameter]]] = []
    for instance in list(_ACCUMULATING):
        units = [(unit, unreduced_parameters(unit)) for unit in distinct_units(instance.modules())]
        of_instance = [(unit, waiting) for unit, waiting in units if waiting]
        if not of_instance and not instance._fsdp_in_no_sync:
            _ACCUMULATING.discard(instance)
        found += of_instance
    return found


def mark_replaced(names: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Mark parameters that shards have replaced, for optimizers and modules that still refer to them."""
    for name, parameter in names:
        setattr(parameter, _MARK, name)


def sharded_name(parameter: nn.Parameter) -> str | None:
    """The name of a parameter that a shard has replaced; None for any other."""
    return getattr(parameter, "__dict__", {}).get(_MARK)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Raise where a step would train nothing: before the first one of an optimizer that was made before this module was
    imported, and on gradients that are not communicated yet."""
    if torch.compiler.is_compiling():  # a step that torch.compile traces: it cannot trace these weak references
        return
    if _ACCUMULATING:
        refuse_accumulated(_parameters_of(optimizer), f"{type(optimizer).__name__}.step")
    if optimizer in _CHECKED:
        return
    _refuse_unfit(optimizer)
    if found := next((name for each in _parameters_of(optimizer) if (name := sharded_name(each))), None):
        raise PlanError(
            f"this {type(optimizer).__name__} holds {found} as it was before FullyShardedDataParallel sharded it, and "
            "would train nothing; import the class from composer_fsdp2.fsdp before making the optimizer, or make it "
            "after wrapping"
        )
    _CHECKED.add(optimizer)


def _refuse_unfit(optimizer: torch.optim.Optimizer) -> None:
    """Raise for norms, products and masks that torch does not compute on DTensors.

    Adafactor scales by ``parameter.norm().item()``, in torch 2.7 the norm of this rank's rows, so that each rank steps
    by another length, without an error. FSDP1 took it of this rank's part of a flat parameter: no numbers to keep.
    """
    name = type(optimizer).__name__
    if name not in ("Adafactor", "LBFGS", "Rprop"):  # of torch, and of transformers
        return
    sharded = [each for each in _parameters_of(optimizer) if getattr(each, "_fsdp_flattened", False)]
    if any(name != "LBFGS" or splitting_axes(each) for each in sharded):
        raise UnsupportedError(
            f"{name}: torch does not compute its step on DTensors, which sharded parameters are; choose another "
            "optimizer, such as AdamW or SGD"
        )
