"""Replace functions and methods of another package at all their bindings, and restore them.

A seam is the replacement of one function, declared by a decorator::

    @seam("composer.utils.misc", "is_model_fsdp", why="scripts and callbacks check whether a model is sharded")
    def is_model_fsdp(original: Callable[[nn.Module], bool], model: nn.Module) -> bool:
        return is_sharded(model) or original(model)
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A function or method of another package, and its replacement.

    Args:
        module: The module that defines the function or class.
        name: ``function``, or ``Class.method``.
        replacement: Called with the original function, followed by the call's arguments.
        why: What fails without the replacement (in Composer 0.32.1).
        leaves: Packages whose modules still use the original.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    why: str
    leaves: tuple[str, ...] = ()

    def around(self, original: Any) -> Any:
        """Return the object that replaces the original: a function, or a classmethod or staticmethod as the original.

        For a class, ``replacement`` is called once with the class, and its return value replaces the class.
        """
        if isinstance(original, type):
            return self.replacement(original)
        if isinstance(original, classmethod | staticmethod):
            return type(original)(self.around(original.__func__))

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.replacement(original, *args, **kwargs)

        return replaced


_SEAMS: list[Seam] = []


def seam(module: str, *names: str, why: str, leaves: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Make the decorated function replace ``names`` in ``module`` once ``install`` is called; see ``Seam`` for the
    arguments."""

    def note(replacement: F) -> F:
        _SEAMS.extend(Seam(module=module, name=name, replacement=replacement, why=why, leaves=leaves) for name in names)
        return replacement

    return note


def registered_seams() -> tuple[Seam, ...]:
    """The seams of all files imported so far."""
    return tuple(_SEAMS)


@dataclass(frozen=True, slots=True)
class Replacement:
    """An installed seam."""

    seam: Seam
    original: Any
    new: Any


def replace(seams: Sequence[Seam]) -> list[Replacement]:
    """Install all seams, at all current bindings of their originals.

    If an original is not found, nothing is changed.
    """
    originals = [vars(_owner(each))[_attribute(each)] for each in seams]
    replacements = [
        Replacement(each, original, each.around(original)) for each, original in zip(seams, originals, strict=True)
    ]
    _rebind([(each.seam, each.original, each.new, each.seam.leaves) for each in replacements])
    return replacements


def restore(replacements: Sequence[Replacement]) -> None:
    """Undo ``replace``, also in modules imported since."""
    _rebind([(each.seam, each.new, each.original, ()) for each in replacements])


def _owner(seam: Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    for name in seam.name.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner


def _attribute(seam: Seam) -> str:
    return seam.name.rpartition(".")[2]


def _rebind(changes: Sequence[tuple[Seam, Any, Any, tuple[str, ...]]]) -> None:
    """Replace each old function or class by the new one, at its definition and in all modules that imported it.

    Args:
        changes: Tuples of seam, old function, new function, and packages whose modules are not changed.
    """
    functions: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for seam_, old, new, leaves in changes:
        owner = _owner(seam_)
        setattr(owner, _attribute(seam_), new)
        if isinstance(owner, ModuleType):
            functions[id(old)] = new, leaves
    # `from composer.distributed import prepare_fsdp_module` binds the function, possibly under another name. A single
    # pass over sys.modules, which has thousands of entries, applies all changes.
    for module in list(sys.modules.values()):
        bindings = getattr(module, "__dict__", None)
        if isinstance(bindings, dict) and isinstance(module, ModuleType):
            for name in [name for name, value in list(bindings.items()) if id(value) in functions]:
                new, leaves = functions[id(bindings[name])]
                if module.__name__.partition(".")[0] not in leaves:
                    setattr(module, name, new)
