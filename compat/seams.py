"""Replace functions and methods of another package, everywhere they are bound, and put them back.

A seam is a decorated function in the file that tells its story::

    @seam("composer.utils.misc", "is_model_fsdp", why="scripts and callbacks ask it whether a model is sharded")
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
    """One function or method of another package that is replaced.

    Args:
        module: Where the function or class is defined.
        name: ``function``, or ``Class.method``.
        replacement: Called with the original and then with what that would have been called with.
        why: What goes wrong without it (read and measured on Composer 0.32.1).
        leaves: Packages whose modules keep the original under their own names.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    why: str
    leaves: tuple[str, ...] = ()

    def around(self, original: Any) -> Any:
        """What takes the original's place; for the raw descriptor of a class or static method, such a descriptor.

        For a class, what the replacement returns: it is called with the class, once.
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
    """The decorated function takes the place of ``names`` in ``module``; see ``Seam`` for what it is called with."""

    def note(replacement: F) -> F:
        _SEAMS.extend(Seam(module=module, name=name, replacement=replacement, why=why, leaves=leaves) for name in names)
        return replacement

    return note


def registered_seams() -> tuple[Seam, ...]:
    """The seams of the files that were imported by now."""
    return tuple(_SEAMS)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A seam that is in place."""

    seam: Seam
    original: Any
    new: Any


def replace(seams: Sequence[Seam]) -> list[Replacement]:
    """Put every seam's replacement wherever its original is bound now; nothing is changed if one is not found."""
    originals = [vars(_owner(each))[_attribute(each)] for each in seams]
    replacements = [
        Replacement(each, original, each.around(original)) for each, original in zip(seams, originals, strict=True)
    ]
    _rebind([(each.seam, each.original, each.new, each.seam.leaves) for each in replacements])
    return replacements


def restore(replacements: Sequence[Replacement]) -> None:
    """Undo ``replace``, also in modules that were imported in between."""
    _rebind([(each.seam, each.new, each.original, ()) for each in replacements])


def _owner(seam: Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    for name in seam.name.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner


def _attribute(seam: Seam) -> str:
    return seam.name.rpartition(".")[2]


def _rebind(changes: Sequence[tuple[Seam, Any, Any, tuple[str, ...]]]) -> None:
    """Set what each change's seam names, and every other binding of the old function or class, to the new one.

    Args:
        changes: The seam, the old, the new, and the packages whose modules are left alone.
    """
    functions: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for seam_, old, new, leaves in changes:
        owner = _owner(seam_)
        setattr(owner, _attribute(seam_), new)
        if isinstance(owner, ModuleType):
            functions[id(old)] = new, leaves
    # `from composer.distributed import prepare_fsdp_module` binds the function itself, under this name or another.
    # Thousands of modules, so they are gone through once for all changes.
    for module in list(sys.modules.values()):
        bindings = getattr(module, "__dict__", None)
        if isinstance(bindings, dict) and isinstance(module, ModuleType):
            for name in [name for name, value in list(bindings.items()) if id(value) in functions]:
                new, leaves = functions[id(bindings[name])]
                if module.__name__.partition(".")[0] not in leaves:
                    setattr(module, name, new)
