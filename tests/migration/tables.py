"""What a run is expressed in, as values: settings, tables of TOML, and their way into a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.migration.dialect import Expression
from composer_fsdp2.migration.documents.toml import TomlDocument

Path = tuple[str | int, ...]


def settings_of(expression: Expression) -> dict[str, Any]:
    return {setting.key: setting.value for setting in expression.settings}


def tables_of(expression: Expression) -> dict[Path, dict[str, Any]]:
    tables: dict[Path, dict[str, Any]] = {}
    for setting in expression.settings:
        table, _, name = setting.key.rpartition(".")
        tables.setdefault(tuple(table.split(".")), {})[name] = setting.value
    return tables


def with_tables(text: str, tables: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with these values: changed in place, added at a table's end, removed if None."""
    document = TomlDocument(text, "run.toml")
    edits = []
    for path, values in tables.items():
        present = _at(document.values, path) or {}
        changed = {
            key: value
            for key, value in values.items()
            if type(present.get(key)) is not type(value) or present.get(key) != value
        }
        replacements = {
            key: [] if value is None else [(key, value)] for key, value in changed.items() if key in present
        }
        additions = [(key, value) for key, value in changed.items() if key not in present and value is not None]
        if replacements or additions:
            edits += document.edit_mapping(path, replacements, additions)
    return document.edited(edits)


def _at(values: Any, path: Path) -> Any:
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
