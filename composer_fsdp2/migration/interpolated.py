"""Find ``${...}`` in values. Resolution is a separate module, because dialects must not depend on OmegaConf."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.migration.paths import Path


def has_interpolation(value: Any) -> bool:
    """Return whether a value contains an interpolation, at any depth."""
    return any(True for _ in interpolations(value, ()))


def interpolations(value: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield each string with an interpolation in ``value``, at any depth, with its path.

    ``path`` is the path of ``value``.
    """
    return ((leaf, where) for leaf, where in leaves(value, path) if isinstance(leaf, str) and "${" in leaf)


def leaves(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Yield each nested value that is neither a mapping nor a list, with its path."""
    if not isinstance(value, Mapping | list):
        yield value, path
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(each, (*path, key))
