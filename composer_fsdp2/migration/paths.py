"""Paths into the values of a file, whatever its format, and entries of its mappings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]
Settings = Sequence[tuple[str, Any]]


def walk(values: Any, find: Callable[..., Path | None], path: Path = (), parent: Any = None) -> Iterator[Path]:
    """Every path that ``find`` gives for a mapping of a file, outermost first; not what lies in such a mapping.

    Args:
        find: From a mapping's path, its values and those of the mapping around it (empty in a list) to a path, or None.
    """
    if isinstance(values, list):
        for number, each in enumerate(values):
            yield from walk(each, find, (*path, number), {})
    elif isinstance(values, Mapping):
        found = find(path, values, parent or {})
        if found is not None:
            yield found
            return
        for key, value in values.items():
            yield from walk(value, find, (*path, key), values)


def value_at(values: Any, path: Iterable[str | int]) -> Any:
    """What is at ``path``. Raises KeyError, IndexError or TypeError: nothing is."""
    for key in path:
        values = values[key]
    return values


def has_path(values: Any, path: Iterable[str | int]) -> bool:
    """Whether anything is at ``path``."""
    try:
        value_at(values, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def without_path(values: Any, path: Path) -> Any:
    """The values without what is at ``path``; all of them where nothing is."""
    key, *below = path
    if isinstance(values, list):
        return [without_path(each, tuple(below)) if number == key else each for number, each in enumerate(values)]
    if not isinstance(values, Mapping):
        return values
    rest = {name: each for name, each in values.items() if name != key or below}
    return {name: without_path(each, tuple(below)) if name == key else each for name, each in rest.items()}


def nested(name: str, value: Any) -> dict[str, Any]:
    """``a.b`` and 1 give ``{"a": {"b": 1}}``."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, mappings in them merged; the second takes precedence."""
    both = {
        key: merged(first[key], value) if isinstance(first.get(key), Mapping) and isinstance(value, Mapping) else value
        for key, value in second.items()
    }
    return {**first, **both}
