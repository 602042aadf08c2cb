"""Replace functions and methods of another package, everywhere they are bound, and put them back."""

import importlib
import sys
from collections.abc import Callable, Sequence
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


def replace(seams: Sequence[Seam]) -> list[Replacement]:
    """Put every seam's replacement wherever its original is bound now; nothing is changed if one cannot be made."""
    replacements = []
    for seam in seams:
        original = vars(_owner(seam))[_attribute(seam)]
        replacements.append(Replacement(seam, original, seam.make(original)))
    _rebind([(each.seam, each.original, each.new) for each in replacements])
    return replacements


def put_back(replacements: Sequence[Replacement]) -> None:
    """Undo ``replace``, also in modules that were imported in between."""
    _rebind([(each.seam, each.new, each.original) for each in replacements])


def _owner(seam: Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    for name in seam.name.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner


def _attribute(seam: Seam) -> str:
    return seam.name.rpartition(".")[2]


def _rebind(changes: Sequence[tuple[Seam, Any, Any]]) -> None:
    """For each change: what the seam names, and every other binding of the old function, is the new one."""
    functions: dict[int, Any] = {}
    for seam, old, new in changes:
        owner = _owner(seam)
        setattr(owner, _attribute(seam), new)
        if isinstance(owner, ModuleType):
            functions[id(old)] = new
    # `from composer.distributed import prepare_fsdp_module` binds the function itself, under this name or another.
    # Thousands of modules, so they are gone through once for all changes.
    for module in list(sys.modules.values()):
        bindings = getattr(module, "__dict__", None)
        if isinstance(bindings, dict) and isinstance(module, ModuleType):
            for name in [name for name, value in list(bindings.items()) if id(value) in functions]:
                setattr(module, name, functions[id(bindings[name])])
