"""Where ``${...}`` stands in values; apart from what resolves it, so that dialects need neither OmegaConf nor files."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.migration.paths import Path


def has_interpolation(value: Any) -> bool:
    """Whether an interpolation stands in a value or, nested, below it."""
    return any(True for _ in interpolations(value, ()))


def interpolations(value: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """Each text with one, in a value or below it, and where it is; ``path`` is the value's own."""
    return ((leaf, where) for leaf, where in leaves(value, path) if isinstance(leaf, str) and "${" in leaf)


def leaves(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Each value that is neither a mapping nor a list, and where it is."""
    if not isinstance(value, Mapping | list):
        yield value, path
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(each, (*path, key))
