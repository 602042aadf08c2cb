"""Find ``${...}`` in values; separate from its resolution, because dialects must need neither OmegaConf nor files."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.migration.paths import Path


def has_interpolation(value: Any) -> bool:
    """Return whether a value contains an interpolation, at any depth."""
    return any(True for _ in interpolations(value, ()))


def interpolations(value: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield each text with an interpolation in a value, at any depth, and its path; ``path`` is that of the value."""
    return ((leaf, where) for leaf, where in leaves(value, path) if isinstance(leaf, str) and "${" in leaf)


def leaves(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Yield each nested value that is neither a mapping nor a list, and its path."""
    if not isinstance(value, Mapping | list):
        yield value, path
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(each, (*path, key))
