"""Configuration files as texts that can be edited; which file is in which format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.migration.documents.edits import Document, Edit, NewEntry
from composer_fsdp2.migration.documents.toml import TomlDocument, table_lines
from composer_fsdp2.migration.documents.yaml import YamlDocument, block_lines

__all__ = ["SUFFIXES", "Document", "Edit", "Format", "NewEntry", "format_of", "open_document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of file.

    Args:
        suffixes: That its names end in.
        open: A document of a text and its name.
        lines: Of a new text with these values.
    """

    suffixes: tuple[str, ...]
    open: Callable[[str, str], Document]
    lines: Callable[[Mapping[str, Any]], Iterator[str]]


_YAML = Format(suffixes=(".yaml", ".yml"), open=YamlDocument, lines=block_lines)
_TOML = Format(suffixes=(".toml",), open=TomlDocument, lines=table_lines)
SUFFIXES = (*_YAML.suffixes, *_TOML.suffixes)


def format_of(name: str) -> Format:
    """TOML if a name ends so, else YAML."""
    return _TOML if name.endswith(_TOML.suffixes) else _YAML


def open_document(text: str, name: str = "<text>") -> Document:
    """A text in the format of its name.

    Raises:
        ConfigError: it is not; names file, line and column.
    """
    return format_of(name).open(text, name)
