"""Rebind optimizers that were created before wrapping to the sharded parameters.

FSDP1 with ``use_orig_params=True`` keeps the parameter objects, so an earlier optimizer remains valid. ``fully_shard``
registers new parameters. Optimizers are therefore tracked from their creation, and those with a parameter of the
wrapped module are updated when it is sharded.
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
from composer_fsdp2.sharding.placements import shard_axes

_NOTED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_CHECKED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# Instances that may have unreduced gradients: from no_sync until none is found.
_ACCUMULATING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Attribute of a replaced parameter with its name.
_MARK = "_composer_fsdp2_sharded_as"


@functools.cache
def note_optimizers() -> None:
    """Track all optimizers that this process creates after this call.

    Called when a script imports the class, and by ``install_fsdp``. Wraps ``torch.optim.Optimizer.add_param_group``,
    which every constructor calls; torch has no hook for constructors. Also wraps ``zero_grad``, which then clears
    gradients accumulated under ``no_sync``.
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
    """Return functions to call after ``model`` is sharded. Each rebinds one tracked optimizer to the new parameters.

    Existing optimizer state is sharded like its parameter. Called on all ranks; neither this nor the functions
    communicate.
    """
    own = set(model.parameters())
    return [rebinding(model, optimizer) for optimizer in list(_NOTED) if not own.isdisjoint(_parameters_of(optimizer))]


def note_accumulation(instance: nn.Module) -> None:
    """Track an FSDP instance that may have gradients accumulated under ``no_sync``."""
    _ACCUMULATING.add(instance)


def clear_accumulated(parameters: Iterable[nn.Parameter]) -> None:
    """Discard gradients that were accumulated under ``no_sync``.

    FSDP1 stores them in ``.grad``; ``fully_shard`` does not.

    If a step is abandoned (non-finite loss, end of an epoch), they would otherwise be added to the next step's
    gradients. Does not communicate.
    """
    cleared = set(parameters)
    for unit, _ in _waiting():
        drop_unreduced_gradients(unit, cleared)


def refuse_accumulated(parameters: Iterable[nn.Parameter], call: str) -> None:
    """Raise if ``parameters`` have gradients accumulated under ``no_sync`` that no later backward has reduced.

    Args:
        call: The caller's name for the message. It would find no gradients, or only those of earlier backwards.
    Raises:
        CallError: names ``call``.
    """
    if any(not set(waiting).isdisjoint(parameters) for _, waiting in _waiting()):
        raise CallError(
            f"{call} while gradients that backwards under no_sync accumulated are not communicated yet; call it after "
            "a backward outside of no_sync, which runs the same modules, or clear them by zero_grad"
        )


def _waiting() -> list[tuple[FSDPModule, list[nn.Parameter]]]:
    """Return the units whose gradients are not all reduced yet, with their parameters.

    Stops tracking instances in which all gradients are reduced.
    """
    found: list[tuple[FSDPModule, list[nn.Parameter]]] = []
    for instance in list(_ACCUMULATING):
        units = [(unit, unreduced_parameters(unit)) for unit in distinct_units(instance.modules())]
        of_instance = [(unit, waiting) for unit, waiting in units if waiting]
        if not of_instance and not instance._fsdp_in_no_sync:
            _ACCUMULATING.discard(instance)
        found += of_instance
    return found


def mark_replaced(names: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Mark the original parameters after sharding, to detect optimizers and modules that still refer to them."""
    for name, parameter in names:
        setattr(parameter, _MARK, name)


def sharded_name(parameter: nn.Parameter) -> str | None:
    """Return the name of a parameter that ``mark_replaced`` marked; None for any other."""
    return getattr(parameter, "__dict__", {}).get(_MARK)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Raise if ``optimizer.step()`` would not train the sharded parameters. Runs before the step.

    Raises:
        PlanError: the optimizer still has the original parameters, because it was created before this module was
            imported. Checked once.
        CallError: gradients accumulated under ``no_sync`` are not reduced yet. Checked at each step.
        UnsupportedError: see ``_refuse_unfit``.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace these weak references
        return
    if _ACCUMULATING:
        refuse_accumulated(_parameters_of(optimizer), f"{type(optimizer).__name__}.step")
    if optimizer in _CHECKED:
        return
    _refuse_unfit(optimizer)
    if found := next((name for each in _parameters_of(optimizer) if (name := sharded_name(each))), None):
        raise PlanError(
            f"this {type(optimizer).__name__} holds {found} from before FullyShardedDataParallel sharded it, and "
            "would train nothing; import the class from composer_fsdp2.fsdp before making the optimizer, or make it "
            "after wrapping"
        )
    _CHECKED.add(optimizer)


def _refuse_unfit(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for optimizers whose norms, products or masks torch computes incorrectly on DTensors.

    Adafactor scales by ``parameter.norm().item()``, which in torch 2.7 is the norm of this rank's rows: each rank uses
    a different step size, without an error. FSDP1 used the norm of this rank's part of a flat parameter, so neither
    result is correct.
    """
    name = type(optimizer).__name__
    if name not in ("Adafactor", "LBFGS", "Rprop"):  # from torch and transformers
        return
    sharded = [each for each in _parameters_of(optimizer) if getattr(each, "_fsdp_flattened", False)]
    if any(name != "LBFGS" or shard_axes(each) for each in sharded):
        raise UnsupportedError(
            f"{name}: torch does not compute its step on DTensors, which sharded parameters are; choose another "
            "optimizer, such as AdamW or SGD"
        )
