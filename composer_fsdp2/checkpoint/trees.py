"""Nested values of dicts, lists and tuples: where their leaves are, and the same value with other leaves."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

EntryPath: TypeAlias = tuple[str | int, ...]


def dotted(path: EntryPath) -> str:
    """``('state', 'model', 'wte.weight')`` as ``state.model.wte.weight``, the key that DCP gives it."""
    return ".".join(map(str, path))


# A container's parts with their keys or numbers; None for what is a leaf.
Parts: TypeAlias = Iterable[tuple[str | int, Any]] | None


def parts_of(value: Any) -> Parts:
    """Those of a dict, list or tuple."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else None


def leaves(
    value: Any, path: EntryPath = (), parts: Callable[[Any], Parts] = parts_of
) -> Iterator[tuple[EntryPath, Any]]:
    """Everything in a nested value that has no parts, in order, with its path."""
    inside = parts(value)
    if inside is None:
        yield path, value
        return
    for key, part in inside:
        yield from leaves(part, (*path, key), parts)


def mapped(
    value: Any, leaf: Callable[[Any, EntryPath], Any], path: EntryPath = (), *, keeps_class: bool = False
) -> Any:
    """A nested value with ``leaf(part, path)`` for each leaf; containers are new, named tuples are leaves.

    Args:
        keeps_class: Of an OrderedDict, and what else is a dict; without it, all become plain ones.
    """
    if isinstance(value, dict):
        parts = {key: mapped(part, leaf, (*path, key), keeps_class=keeps_class) for key, part in value.items()}
        if not keeps_class or type(value) is dict:
            return parts
        same = copy.copy(value)
        same.update(parts)
        return same
    if type(value) in (list, tuple):
        return type(value)(
            mapped(part, leaf, (*path, number), keeps_class=keeps_class) for number, part in enumerate(value)
        )
    return leaf(value, path)


def as_tree(found: Mapping[EntryPath, Any]) -> Any:
    """Nested dicts and lists from paths: a number is a position in a list, text a key (``optimizers.*.state`` aside).

    A leaf that is a dict itself, beside others below the same path, takes them in.
    """
    if set(found) == {()}:
        return found[()]
    by_first: dict[str | int, dict[EntryPath, Any]] = {}
    for path, value in found.items():
        if path:
            by_first.setdefault(path[0], {})[path[1:]] = value
    inner = {key: as_tree(below) for key, below in by_first.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    own = found.get(())
    return {**own, **inner} if isinstance(own, dict) else inner
