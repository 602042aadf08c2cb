"""Replace a function or a method of another package, everywhere it is bound, and put it back."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["Replacement", "Seam", "put_back", "replace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One place where we come in.

    Args:
        module: Where the function or class is defined.
        name: ``function``, or ``Class.method``.
        make: Called with the original (the raw descriptor for a method), returns what takes its place.
        why: What goes wrong without it.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    why: str


@dataclass(frozen=True, slots=True)
class Replacement:
    """A seam that is in place."""

    seam: Seam
    original: Any
    new: Any


def replace(seam: Seam) -> Replacement:
    """Put the seam's replacement wherever the original is bound now."""
    owner = _owner(seam)
    attribute = seam.name.rpartition(".")[2]
    original = vars(owner)[attribute]
    replacement = Replacement(seam, original, seam.make(original))
    _rebind(owner, attribute, replacement.original, replacement.new)
    return replacement


def put_back(replacement: Replacement) -> None:
    """Undo ``replace``, also in modules that were imported in between."""
    attribute = replacement.seam.name.rpartition(".")[2]
    _rebind(_owner(replacement.seam), attribute, replacement.new, replacement.original)


def _owner(seam: Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    for name in seam.name.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner


def _rebind(owner: Any, attribute: str, old: Any, new: Any) -> None:
    setattr(owner, attribute, new)
    if not isinstance(owner, ModuleType):
        return
    # `from composer.distributed import prepare_fsdp_module` binds the function itself, under this name or another.
    for module in list(sys.modules.values()):
        bindings = getattr(module, "__dict__", None)
        if isinstance(bindings, dict) and isinstance(module, ModuleType):
            for name in [name for name, value in list(bindings.items()) if value is old]:
                setattr(module, name, new)
