"""Add FSDP1's attributes and methods to modules sharded by ``fully_shard``, for scripts written for FSDP1."""

import contextlib
import dis
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import ActivationWrapper
from composer_fsdp2.errors import CallError, UnsupportedError
from composer_fsdp2.fsdp1.state_dicts import STATIC_METHODS, returns_full_values
from composer_fsdp2.sharding.sharded import sharded_roots
from composer_fsdp2.training.clipping import clip_grad_norm_
from composer_fsdp2.training.full_params import summon_full_params

log = logging.getLogger(__name__)

_MISSING = object()

# By class: names that some module of the class defines itself, such as a child named `module`.
_NAMES_IN_USE: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()
_ROOTS: WeakSet[nn.Module] = WeakSet()


def add_fsdp1_attributes(model: nn.Module) -> None:
    """Add FSDP1's attributes and methods (``_TABLE``) to the units of ``model``.

    The first use of each attribute logs its replacement. Attributes that the user's class or module defines are not
    replaced.

    [Note: attribute access] ``unit.module`` returns the unit itself, so a loop that unwraps while a module has
    ``module`` would not terminate (transformers' ``unwrap_model``, accelerate's with ``recursive=True``, and many
    scripts). All of them check with ``hasattr`` or ``getattr`` first. ``unit.module`` and ``unit._fsdp_wrapped_module``
    therefore work, but ``hasattr`` and ``getattr`` do not find these names.

    The attributes are added to the class that ``fully_shard`` creates, not to the modules. They are therefore not
    children, not in state dicts, and not copied with a module. Called by ``prepare_fully_shard`` on all ranks; does not
    communicate.
    """
    _ROOTS.update(root for _, root in sharded_roots(model))
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        cls = type(unit)
        _refuse_saving_shards(cls)
        in_use = _NAMES_IN_USE.setdefault(cls, set())
        for name, attribute in _ATTRIBUTES.items():
            is_ours = vars(cls).get(name) is attribute
            if (not is_ours and inspect.getattr_static(cls, name, _MISSING) is not _MISSING) or _has(unit, name):
                in_use.add(name)
                if is_ours:  # torch.compile would trace it in the forward of this unit
                    delattr(cls, name)
            elif name not in in_use:
                setattr(cls, name, attribute)


def _has(module: nn.Module, name: str) -> bool:
    return any(name in names for names in (vars(module), module._modules, module._parameters, module._buffers))


@functools.cache
def log_replacement(name: str, instead: str) -> None:
    """Log the replacement of an FSDP1 name, once per process."""
    log.warning("%s is FSDP1's: %s", name, instead)


class _FSDP1Attribute:
    """A descriptor for one attribute of FSDP1.

    If the module defines the name itself, the module's value is returned.
    """

    def __init__(self, name: str, value: Callable[[nn.Module], Any], instead: str, only_attribute_access: bool) -> None:
        self.name, self.value, self.instead, self.only_attribute_access = name, value, instead, only_attribute_access

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        try:
            # A child, parameter or buffer, or an attribute forwarded by the user's class or a checkpointing wrapper.
            return module.__getattr__(self.name)
        except AttributeError:
            if self.only_attribute_access:
                if not _is_attribute_access(sys._getframe(1)):
                    raise
                _refuse_endless(sys._getframe(1), self.name)
        log_replacement(f"module.{self.name}", self.instead)
        return self.value(module)


def _is_attribute_access(caller: FrameType) -> bool:
    """Whether the caller executes ``x.name``, and not ``hasattr(x, "name")`` or ``getattr``; see [Note: attribute
    access].
    """
    return dis.opname[caller.f_code.co_code[caller.f_lasti]] in ("LOAD_ATTR", "LOAD_METHOD")


# The last place that read a name, as (frame, instruction), the number of consecutive reads, and the time of the first.
_last_read: tuple[tuple[int, int], int, float] = ((0, 0), 0, 0.0)
_ENDLESS_READS, _ENDLESS_S = 100_000, 10.0


def _refuse_endless(caller: FrameType, name: str) -> None:
    """Raise CallError in an infinite loop ``while isinstance(m, FullyShardedDataParallel): m = m.module``."""
    global _last_read
    place = (id(caller), caller.f_lasti)
    before, count, since = _last_read
    _last_read = (place, count + 1, since) if place == before else (place, 1, time.monotonic())
    if _last_read[1] % _ENDLESS_READS == 0 and time.monotonic() - _last_read[2] < _ENDLESS_S:
        raise CallError(
            f"a loop reads {name} of a module repeatedly: fully_shard does not wrap modules, so the module is its own "
            f"{name}; replace `while` by `if`, or remove the loop"
        )


def _wrapped(unit: nn.Module) -> nn.Module:
    """Return the value of ``unit.module``: the unit itself, without an activation checkpointing wrapper, as in
    FSDP1."""
    inside: nn.Module = unit._checkpoint_wrapped_module if isinstance(unit, ActivationWrapper) else unit
    return inside


def _summon(unit: nn.Module) -> Callable[..., AbstractContextManager[None]]:
    # A static method in FSDP1: `unit.summon_full_params(unit)`. Without an argument, it applies to the unit.
    def summon(module: nn.Module | None = None, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return summon_full_params(unit if module is None else module, *args, **kwargs)

    return summon


def _is_root(unit: nn.Module) -> bool:
    return unit in _ROOTS


def _clip(unit: nn.Module) -> Callable[..., torch.Tensor]:
    def clip(max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        _require_root(unit, "clip_grad_norm_")
        return clip_grad_norm_(unit, max_norm, norm_type)[""]

    return clip


def _no_sync(unit: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        root = cast(FSDPModule, _require_root(unit, "no_sync"))
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    return no_sync


def _require_root(unit: nn.Module, name: str) -> nn.Module:
    if not _is_root(unit):
        raise CallError(
            f"{name} of a {type(unit).__name__} inside another unit (FSDP1 refused it too); call the root's"
        )
    return unit


def _refuse_saving_shards(cls: type) -> None:
    """Make ``save_pretrained`` of a sharded class raise for DTensors: Hugging Face would save only this rank's
    shards."""
    original: Any = getattr(cls, "save_pretrained", None)
    if not callable(original) or hasattr(original, "refuses_shards"):
        return

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict") or next((each for each in args if isinstance(each, dict)), None)
        values = self.parameters() if given is None else given.values()
        if any(isinstance(each, DTensor) for each in values) and not (given is None and returns_full_values(self)):
            raise CallError(
                f"save_pretrained of a {type(self).__name__} whose parameters are sharded: write `with "
                "composer_fsdp2.summon_full_params(model, writeback=False):` around it, entered on all ranks, or pass "
                "state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)), called on all ranks"
            )
        return original(self, *args, **kwargs)

    save_pretrained.refuses_shards = True  # type: ignore[attr-defined]
    cls.save_pretrained = save_pretrained  # type: ignore[attr-defined]


def _refuse_comm_hook(unit: nn.Module) -> Callable[..., None]:
    def register(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "register_comm_hook: fully_shard reduces gradients itself; write reduce_dtype in mixed_precision for "
            "gradients in low precision, and a hook of the optimizer's step for what changes them after the reduction"
        )

    return register


_IS_THE_MODULE = "fully_shard does not wrap modules, so this is the module itself"
# Name -> the value for a unit, its replacement, and whether it requires attribute syntax ([Note: attribute access]).
_TABLE: dict[str, tuple[Callable[[nn.Module], Any], str, bool]] = {
    "module": (_wrapped, _IS_THE_MODULE, True),
    "_fsdp_wrapped_module": (
        lambda unit: unit,
        f"{_IS_THE_MODULE}; names of parameters have no such part",
        True,
    ),
    "summon_full_params": (_summon, "write `with composer_fsdp2.summon_full_params(module):`", False),
    "clip_grad_norm_": (_clip, "write `composer_fsdp2.clip_grad_norm_(model, max_norm)`", False),
    "no_sync": (
        _no_sync,
        "write `root.set_requires_gradient_sync(False)`, and True before the last microbatch, or call "
        "composer_fsdp2.begin_microbatch with `gradient_sync` in the configuration",
        False,
    ),
    "check_is_root": (
        lambda unit: functools.partial(_is_root, unit),
        "the direct children of the model that prepare_fully_shard got are the roots",
        False,
    ),
    "register_comm_hook": (_refuse_comm_hook, "fully_shard has no such hooks", False),
    **{
        name: (functools.partial(lambda function, unit: function, function), instead, False)
        for name, (function, instead) in STATIC_METHODS.items()
    },
}
_ATTRIBUTES = {name: _FSDP1Attribute(name, *rest) for name, rest in _TABLE.items()}
