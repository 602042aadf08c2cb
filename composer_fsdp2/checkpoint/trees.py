"""Nested values of dicts, lists and tuples: where their leaves are, and the same value with other leaves."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

EntryPath: TypeAlias = tuple[str | int, ...]


def dotted(path: EntryPath) -> str:
    """``('state', 'model', 'wte.weight')`` as ``state.model.wte.weight``, DCP's key for it."""
    return ".".join(map(str, path))


# A container's parts with their keys or numbers; None for a leaf.
Parts: TypeAlias = Iterable[tuple[str | int, Any]] | None


def parts_of(value: Any) -> Parts:
    """Those of a dict, list or tuple."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else None


def value_at(value: Any, path: Iterable[str | int]) -> Any:
    """The value at a path of keys of dicts; None without one."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


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


def mapped(value: Any, leaf: Callable[[Any, EntryPath], Any], path: EntryPath = ()) -> Any:
    """A nested value with ``leaf(part, path)`` for each leaf, in new containers of the same classes.

    Named tuples are leaves.
    """
    if isinstance(value, dict):
        return _of_class_of(value, {key: mapped(part, leaf, (*path, key)) for key, part in value.items()})
    if type(value) in (list, tuple):
        return type(value)(mapped(part, leaf, (*path, number)) for number, part in enumerate(value))
    return leaf(value, path)


def _of_class_of(like: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """``parts`` as an OrderedDict, a Counter or a defaultdict with its factory, as ``like`` is one."""
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
    """A value of ``as_tree`` in the containers of the live value whose entries it replaces.

    Keys, classes of dicts and empty containers are those of ``live``; see [Note: flattened state]. Every leaf is the
    file's: entries of ``live`` without a place in ``found`` are left out, unless they have no leaves.
    """
    if isinstance(live, list) and isinstance(found, dict):
        if found == {}:  # as_tree's placeholder for a position without leaves
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
        return _of_class_of(live, parts)
    if isinstance(live, list) and isinstance(found, list):
        rest = live[len(found) :]
        return [
            *(fitted(part, own) for part, own in itertools.zip_longest(found, live[: len(found)])),
            *(copy.deepcopy(rest) if is_leafless(rest) else ()),
        ]
    return found


def is_leafless(value: Any) -> bool:
    """Whether flattening leaves nothing of it: an empty dict, or a list of them. An empty list is a leaf."""
    if isinstance(value, list):
        return bool(value) and all(map(is_leafless, value))
    return isinstance(value, Mapping) and all(map(is_leafless, value.values()))


# Texts of Hugging Face's JSON files and of the machine; their keys are text in any case.
_TEXT_KEYS: tuple[EntryPath, ...] = (("state", "integrations"), ("state", "metadata"))
# MultiStepLR's, also within SequentialLR and ChainedScheduler, which call a Counter's methods.
_SCHEDULERS: EntryPath = ("state", "schedulers")
_COUNTERS = ("milestones",)
_MAX_EMPTY = 1024  # in one list: a hostile position would take unlimited memory; beyond, a dict by position


def as_tree(found: Mapping[EntryPath, Any], path: EntryPath = ()) -> Any:
    """Nested dicts and lists from paths: a number is a position in a list, text a key (``optimizers.*.state`` aside).

    A leaf that is a dict itself, beside others below the same path, takes them in. See [Note: flattened state]: a
    position without an entry was an empty dict, and a key that is a number was an int.

    Args:
        path: The value's own, in the state dict.
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
    """The dicts whose keys ``as_tree`` takes for ints, by entries' paths; neither optimizers' nor weights' names."""
    for path in paths:
        if path[1:2] == ("optimizers",) or path[:2] in _TEXT_KEYS:
            continue
        first = 3 if path[1:2] == ("model",) else 2
        yield from (path[:end] for end in range(first, len(path)) if _is_integer(path[end]))


def _is_integer(key: str | int) -> bool:
    """Whether a key is the text of an int, as Python writes one."""
    return isinstance(key, str) and len(key) <= 20 and key.lstrip("-").isdecimal() and key == str(int(key))
