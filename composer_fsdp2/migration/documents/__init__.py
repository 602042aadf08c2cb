"""Configuration files as texts that can be edited; which file is in which format."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    NewEntry,
    differences,
    entries_of,
    nearest_line,
    referred,
    with_entries,
)
from composer_fsdp2.migration.documents.json import JsonDocument, json_lines
from composer_fsdp2.migration.documents.toml import TomlDocument, table_lines
from composer_fsdp2.migration.documents.yaml import block_lines, open_yaml

__all__ = [
    "SUFFIXES",
    "Document",
    "Edit",
    "Format",
    "NewEntry",
    "differences",
    "entries_of",
    "format_of",
    "nearest_line",
    "open_document",
    "referred",
    "suffix_for",
    "with_entries",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file.

    Args:
        suffixes: That its names end in, in any case.
        open: A document of a text and its name.
        takes_entries: ``Document.takes_entries``.
        lines: Of a new text with these values.
    """

    suffixes: tuple[str, ...]
    open: Callable[[str, str], Document]
    takes_entries: bool = True
    lines: Callable[[Mapping[str, Any]], Iterator[str]]


_YAML = Format(suffixes=(".yaml", ".yml"), open=open_yaml, lines=block_lines)
_TOML = Format(suffixes=(".toml",), open=TomlDocument, lines=table_lines, takes_entries=False)
_JSON = Format(suffixes=(".json",), open=JsonDocument, lines=json_lines)
SUFFIXES = (*_YAML.suffixes, *_TOML.suffixes, *_JSON.suffixes)


def format_of(name: str) -> Format:
    """TOML or JSON if a name ends so, else YAML."""
    return next((each for each in (_TOML, _JSON) if name.lower().endswith(each.suffixes)), _YAML)


def suffix_for(text: str) -> str:
    """The ending that a text without a name would have: of JSON or TOML if it is that, else of YAML."""
    for each in (_JSON, _TOML):
        with contextlib.suppress(ConfigError):
            if each.open(text, "").values:  # comments alone are any format
                return each.suffixes[0]
    return _YAML.suffixes[0]


def open_document(text: str, name: str = "<text>", suffix: str = "") -> Document:
    """A text in the format of its name, or of another ending than that has.

    Raises:
        ConfigError: it is not; names file, line and column.
    """
    return format_of(suffix or name).open(text, name)
