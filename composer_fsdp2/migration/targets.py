"""What a configuration can be migrated to, and a file that holds a section of it only."""

from collections.abc import Iterable, Iterator
from typing import Any

from composer_fsdp2.migration.dialect import Dialect, Expression, Setting
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.documents.toml import toml_text
from composer_fsdp2.migration.documents.yaml import block_text

# By the word that ``--to`` takes.
TARGETS: dict[str, Dialect] = {dialect.target: dialect for dialect in DIALECTS.values()}


def file_text(target: Dialect, expression: Expression, source: str) -> str:
    """A file that holds this section only.

    Args:
        source: The name of the file that asked for it.
    """
    head = f"# What {source} asks for, in the words of {target.target}; written by composer-fsdp2 migrate.\n"
    if target.suffix == ".toml":
        return head + "\n".join(_toml(expression)) + "\n"
    values: dict[str, Any] = _mapping(expression.settings)
    for name, first in reversed(target.heads):
        values = {name: {**dict(first), **values}}
    return head + "\n".join(block_text(_mapping(expression.beside) | values)) + "\n"


def _mapping(settings: Iterable[Setting]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in settings}


def _toml(expression: Expression) -> Iterator[str]:
    tables: dict[str, list[str]] = {}
    for setting in expression.settings:
        table, _, name = setting.key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {toml_text(setting.value)}")
    for number, (table, lines) in enumerate(tables.items()):
        yield from ([""] if number else [])
        yield f"[{table}]"
        yield from lines
