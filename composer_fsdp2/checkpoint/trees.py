"""Nested values of dicts, lists and tuples: where their leaves are, and the same value with other leaves."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

EntryPath: TypeAlias = tuple[str | int, ...]


def dotted(path: EntryPath) -> str:
    """``('state', 'model', 'wte.weight')`` as ``state.model.wte.weight``, the key that DCP gives it."""
    return ".".join(map(str, path))


def leaves(value: Any, path: EntryPath = ()) -> Iterator[tuple[EntryPath, Any]]:
    """Everything in a nested value that is not a dict, list or tuple, in order, with its path."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, (*path, number))
    else:
        yield path, value


def mapped(value: Any, leaf: Callable[[Any, EntryPath], Any], path: EntryPath = ()) -> Any:
    """The same nested value with ``leaf(part, path)`` for each leaf; containers are new, named tuples are leaves."""
    if isinstance(value, dict):
        return {key: mapped(part, leaf, (*path, key)) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(part, leaf, (*path, number)) for number, part in enumerate(value))
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
