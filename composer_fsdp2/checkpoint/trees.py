"""Nested dicts, lists and tuples: the paths of their leaves, and copies with other leaves."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

EntryPath: TypeAlias = tuple[str | int, ...]


def dotted(path: EntryPath) -> str:
    """Join a path as DCP does: ``('state', 'model', 'wte.weight')`` as ``state.model.wte.weight``."""
    return ".".join(map(str, path))


# The children of a container with their keys or indices; None for a leaf.
Parts: TypeAlias = Iterable[tuple[str | int, Any]] | None


def parts_of(value: Any) -> Parts:
    """Those of a dict, list or tuple."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else None


def value_at(value: Any, path: Iterable[str | int]) -> Any:
    """The value at a path of dict keys; None if not found."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def leaves(
    value: Any, path: EntryPath = (), parts: Callable[[Any], Parts] = parts_of
) -> Iterator[tuple[EntryPath, Any]]:
    """Iterate over the leaves of a nested value in order, with their paths."""
    inside = parts(value)
    if inside is None:
        yield path, value
        return
    for key, part in inside:
        yield from leaves(part, (*path, key), parts)


def mapped(value: Any, leaf: Callable[[Any, EntryPath], Any], path: EntryPath = ()) -> Any:
    """Copy a nested value with ``leaf(part, path)`` in place of each leaf. Containers have the same classes.

    Named tuples are leaves.
    """
    if isinstance(value, dict):
        return _with_class_of(value, {key: mapped(part, leaf, (*path, key)) for key, part in value.items()})
    if type(value) in (list, tuple):
        return type(value)(mapped(part, leaf, (*path, number)) for number, part in enumerate(value))
    return leaf(value, path)


def _with_class_of(like: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Convert ``parts`` to an OrderedDict, a Counter or a defaultdict with the same factory, if ``like`` is one."""
    if type(like) is dict or not isinstance(like, dict):
        return parts
    same = copy.copy(like)
    same.clear()  # a Counter's update adds
    same.update(parts)
    return same


# [Note: flattened state] torch.distributed.checkpoint stores each leaf under its path as text. It leaves out empty
# dicts, the classes of dicts, and whether a key was an int (torch/distributed/checkpoint/_traverse.py, 2.7). Its own
# load fills the live state dict, which has them. ``fitted`` does that; without a live state ``as_tree`` infers what
# can be inferred.


def fitted(found: Any, live: Any) -> Any:
    """Convert a result of ``as_tree`` to the containers of the live value that it replaces.

    Keys, classes of dicts and empty containers are those of ``live``; see [Note: flattened state]. Every leaf is the
    file's. Entries of ``live`` without a counterpart in ``found`` are dropped, unless they have no leaves.
    """
    if isinstance(live, list) and isinstance(found, dict):
        if found == {}:  # as_tree's placeholder for an index without leaves
            found = [{} for part in live if isinstance(part, Mapping | list)] or found
        elif all(isinstance(key, int) and 0 <= key < len(live) for key in found):
            found = [found.get(number, {}) for number in range(max(found) + 1)]
    if isinstance(live, Mapping) and isinstance(found, dict):
        own_keys = {str(key): key for key in live}
        parts = {}
        for key, part in found.items():
            own = own_keys.get(str(key), key)
            parts[own] = fitted(part, live.get(own))
        parts |= {key: copy.deepcopy(part) for key, part in live.items() if key not in parts and is_leafless(part)}
        return _with_class_of(live, parts)
    if isinstance(live, list) and isinstance(found, list):
        rest = live[len(found) :]
        return [
            *(fitted(part, own) for part, own in itertools.zip_longest(found, live[: len(found)])),
            *(copy.deepcopy(rest) if is_leafless(rest) else ()),
        ]
    return found


def is_leafless(value: Any) -> bool:
    """Whether a value has no leaves: an empty dict, or a list of empty dicts. An empty list is a leaf."""
    if isinstance(value, list):
        return bool(value) and all(map(is_leafless, value))
    return isinstance(value, Mapping) and all(map(is_leafless, value.values()))


# Hugging Face's JSON files and the machine's description, in which all keys are text.
_TEXT_KEYS: tuple[EntryPath, ...] = (("state", "integrations"), ("state", "metadata"))
# MultiStepLR's, also within SequentialLR and ChainedScheduler, which call a Counter's methods.
_SCHEDULERS: EntryPath = ("state", "schedulers")
_COUNTERS = ("milestones",)
_MAX_EMPTY = 1024  # in one list, because a hostile index could take unlimited memory; beyond it, a dict by index


def as_tree(found: Mapping[EntryPath, Any], path: EntryPath = ()) -> Any:
    """Build nested dicts and lists from paths: a number in a path is an index of a list, text a key of a dict.

    If a leaf is a dict and there are other paths below its own, their values are added to it. See [Note: flattened
    state]: an index without an entry was an empty dict, and a key that is the text of an int was an int.

    Args:
        path: The path of the value in the state dict. Below some paths all keys are text.
    """
    if set(found) == {()}:
        return found[()]
    by_first: dict[str | int, dict[EntryPath, Any]] = {}
    for below, value in found.items():
        if below:
            by_first.setdefault(below[0], {})[below[1:]] = value
    inner: dict[Any, Any] = {key: as_tree(below, (*path, key)) for key, below in by_first.items()}
    if inner and all(isinstance(key, int) for key in inner):
        is_plausible = min(inner) >= 0 and max(inner) < len(inner) + _MAX_EMPTY
        return [inner.get(number, {}) for number in range(max(inner) + 1)] if is_plausible else inner
    if path[:2] not in _TEXT_KEYS:
        inner = {int(key) if _is_integer(key) else key: part for key, part in inner.items()}
    if path[:2] == _SCHEDULERS and path[-1] in _COUNTERS:
        return Counter(inner)
    own = found.get(())
    return {**own, **inner} if isinstance(own, dict) else inner


def integer_keys(paths: Iterable[EntryPath]) -> Iterator[EntryPath]:
    """The dicts whose keys ``as_tree`` converts to ints, from entries' paths; excludes optimizers and weights."""
    for path in paths:
        if path[1:2] == ("optimizers",) or path[:2] in _TEXT_KEYS:
            continue
        first = 3 if path[1:2] == ("model",) else 2
        yield from (path[:end] for end in range(first, len(path)) if _is_integer(path[end]))


def _is_integer(key: str | int) -> bool:
    """Whether a key is an int in Python's notation."""
    return isinstance(key, str) and len(key) <= 20 and key.lstrip("-").isdecimal() and key == str(int(key))
