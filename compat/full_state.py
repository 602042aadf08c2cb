"""Let scripts and callbacks use FSDP1's class, its state dict types and its optimizer state dicts on FSDP2."""

import contextlib
import copyreg
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2.fsdp.installing import active_fsdp_class
from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel
from composer_fsdp2.fsdp1.attributes import log_replacement
from composer_fsdp2.fsdp1.state_dicts import STATIC_METHODS
from composer_fsdp2.sharding.placements import shard_axes
from composer_fsdp2.sharding.sharded import is_sharded

from .seams import seam

# Packages that unwrap FSDP1 modules or call FSDP1's functions for them; for these, a unit is not an instance of FSDP1.
_FSDP1_ONLY_PACKAGES = ("torch", "composer", "composer_fsdp2", "accelerate", "transformers", "peft")


def _is_script(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__")).partition(".")[0] not in _FSDP1_ONLY_PACKAGES


class _UnitsAreInstances(type):
    """Metaclass of FSDP1's class as scripts see it: ``isinstance`` is true for modules that this package sharded."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is not _script_class():
            return type.__instancecheck__(cls, instance)
        is_unit = isinstance(instance, FSDPModule) and _is_script(sys._getframe(1))
        return is_unit or isinstance(instance, (FSDP1Wrapper, FullyShardedDataParallel))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is not _script_class():
            return type.__subclasscheck__(cls, subclass)
        is_unit = issubclass(subclass, FSDPModule) and _is_script(sys._getframe(1))
        return is_unit or issubclass(subclass, (FSDP1Wrapper, FullyShardedDataParallel))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Under ``install_fsdp`` create composer_fsdp2's class; otherwise FSDP1's, which torch's functions accept."""
        return active_fsdp_class()(*args, **kwargs) if cls is _script_class() else super().__call__(*args, **kwargs)


@functools.cache
def _script_class() -> type:
    names = {name: getattr(FSDP1Wrapper, name) for name in ("__module__", "__qualname__", "__doc__")}
    return _UnitsAreInstances(FSDP1Wrapper.__name__, (FSDP1Wrapper,), names)


def _by_name(cls: type) -> Any:
    """Return what pickle stores for a class: the public name of FSDP1's class, or the name of a script's subclass."""
    if cls is _script_class():
        return pkgutil.resolve_name, ("torch.distributed.fsdp:FullyShardedDataParallel",)
    return cls.__qualname__


copyreg.pickle(_UnitsAreInstances, _by_name)


@seam(
    "torch.distributed.fsdp",
    "FullyShardedDataParallel",
    why="isinstance(module, FullyShardedDataParallel) was false in scripts, which then left out clipping or saving",
    leaves=("torch", "composer", "composer_fsdp2"),
)
def class_for_scripts(original: type) -> type:
    """Replaces FSDP1's class under its public name, and in scripts that imported it before ``install``."""
    return _script_class()


@seam(
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    *(f"FullyShardedDataParallel.{name}" for name in STATIC_METHODS),
    why="scripts and LLM Foundry's MonolithicCheckpointSaver call them, and FSDP1's raise KeyError or AttributeError",
)
def static_method(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces a static method of FSDP1's class.

    Models with FSDP1 modules, and unsharded ones, still use the original.
    """
    name = original.__name__
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    model: nn.Module = given["model"] if "model" in given else given["module"]
    is_of_fsdp1 = any(isinstance(each, FSDP1Wrapper) for each in model.modules())
    # torch's checkpoint functions use FSDP1's code path if they find its modules.
    is_inside = name == "fsdp_modules" and not _is_script(sys._getframe(2))
    if is_of_fsdp1 or is_inside or not is_sharded(model):
        return original(*args, **kwargs)
    ours, instead = STATIC_METHODS[name]
    if not any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        log_replacement(f"FullyShardedDataParallel.{name}", instead)
    return ours(*args, **kwargs)


@seam(
    "torch.serialization",
    "save",
    why="torch.save(model.state_dict()) silently wrote rank 0's shards, where FSDP1's was full",
)
def save(original: Callable[..., Any], obj: object, *args: Any, **kwargs: Any) -> None:
    """Replaces ``torch.save``: warns once about shards in a dict."""
    values = obj.values() if isinstance(obj, dict) else ()
    inner = (each for value in values for each in (value.values() if isinstance(value, dict) else (value,)))
    if any(isinstance(each, DTensor) and shard_axes(each) for each in inner):
        log_replacement("torch.save(model.state_dict())", f"it saves this rank's shards alone; {_SAVE_FULL}")
    original(obj, *args, **kwargs)


_SAVE_FULL = STATIC_METHODS["state_dict_type"][1]


# Whether a state dict contains algorithms' shards unchanged. A context variable, because ``State.state_dict`` has no
# argument for it.
keeps_shards = ContextVar("keeps_shards", default=False)


@contextlib.contextmanager
def keeping_shards(keeps: bool) -> Iterator[None]:
    """In the block, state dicts contain the shards of algorithms, to write a full checkpoint shard by shard.

    Outside of it, state dicts contain full tensors.
    """
    token = keeps_shards.set(keeps)
    try:
        yield
    finally:
        keeps_shards.reset(token)
