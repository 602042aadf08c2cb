"""Access values of a file by path, in any format, and change entries of mappings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]
Settings = Sequence[tuple[str, Any]]


def walk(values: Any, find: Callable[..., Path | None], path: Path = (), parent: Any = None) -> Iterator[Path]:
    """Yield the paths that ``find`` returns for the mappings of a file, outermost first.

    Args:
        find: Called with the path of a mapping, its values and those of its parent mapping (empty in a list). If it
            returns a path, the contents of the mapping are not searched.
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
    """Return the value at ``path``.

    Raises:
        KeyError, IndexError or TypeError: the values have no such path.
    """
    for key in path:
        values = values[key]
    return values


def has_path(values: Any, path: Iterable[str | int]) -> bool:
    """Return whether the values have such a path."""
    try:
        value_at(values, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def with_entries(values: Any, path: Path, replacements: Mapping[str, Settings], additions: Settings = ()) -> Any:
    """Return the values with entries of the mapping at ``path`` replaced, and ``additions`` appended to it."""
    if not path:
        new = [new for old in values.items() for new in replacements.get(str(old[0]), [old])]
        return dict([*new, *additions])
    key, *below = path
    here = values[key] if has_path(values, (key,)) else {}
    inner = with_entries(here if isinstance(here, Mapping | list) else {}, tuple(below), replacements, additions)
    if isinstance(values, list):
        return [inner if number == key else each for number, each in enumerate(values)]
    return {**values, key: inner}


def find_at(values: Any, path: Iterable[str | int]) -> Any:
    """Return the value at ``path``, or None if the values have no such path."""
    path = tuple(path)
    return value_at(values, path) if has_path(values, path) else None


def without_path(values: Any, path: Path) -> Any:
    """Return the values without the entry at ``path``; unchanged without one."""
    return with_entries(values, path[:-1], {str(path[-1]): []}) if has_path(values, path) else values


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return nested mappings for a dotted name: ``{"a": {"b": 1}}`` for ``a.b`` and 1."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; the second takes precedence."""
    both = {
        key: merged(first[key], value) if isinstance(first.get(key), Mapping) and isinstance(value, Mapping) else value
        for key, value in second.items()
    }
    return {**first, **both}
