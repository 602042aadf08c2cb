"""Where ``${...}`` stands in values; apart from what resolves it, so that dialects need neither OmegaConf nor files."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.migration.paths import Path


def has_interpolation(value: Any) -> bool:
    """Whether an interpolation stands in a value or, nested, below it."""
    return any(True for _ in interpolations(value, ()))


def interpolations(value: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """Each text with one, in a value or below it, and where it is; ``path`` is the value's own."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from interpolations(each, (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from interpolations(each, (*path, number))
    elif isinstance(value, str) and "${" in value:
        yield value, path
