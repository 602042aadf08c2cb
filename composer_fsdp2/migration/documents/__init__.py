"""Configuration files as editable documents, and the detection of their formats."""

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
    """A file format.

    Args:
        suffixes: The suffixes of its files, in lower case; files may have them in any case.
        open: Opens a document from a text and a name.
        takes_entries: ``Document.takes_entries``.
        lines: Yields the lines of a new text with the values of a mapping.
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
    """Return TOML or JSON for a name with such a suffix, otherwise YAML."""
    return next((each for each in (_TOML, _JSON) if name.lower().endswith(each.suffixes)), _YAML)


def suffix_for(text: str) -> str:
    """Return the suffix of a text without a name: that of JSON or TOML if it parses as such, otherwise YAML's."""
    for each in (_JSON, _TOML):
        with contextlib.suppress(ConfigError):
            if each.open(text, "").values:  # a text of comments alone parses in more than one format
                return each.suffixes[0]
    return _YAML.suffixes[0]


def open_document(text: str, name: str = "<text>", suffix: str = "") -> Document:
    """Open a text in the format of ``suffix``, or of its name's suffix.

    Raises:
        ConfigError: The text is not in this format; the message has file, line and column.
    """
    return format_of(suffix or name).open(text, name)
