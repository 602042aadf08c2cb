"""Configuration files as editable documents, and the detection of their formats."""

import contextlib

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    NewEntry,
    differences,
    entries_of,
    nearest_line,
    referenced_mapping,
)
from composer_fsdp2.migration.documents.json import JsonDocument
from composer_fsdp2.migration.documents.toml import TomlDocument
from composer_fsdp2.migration.documents.yaml import YamlDocument

__all__ = [
    "SUFFIXES",
    "Document",
    "Edit",
    "NewEntry",
    "differences",
    "entries_of",
    "format_of",
    "nearest_line",
    "open_document",
    "referenced_mapping",
    "suffix_for",
]

_FORMATS: tuple[type[Document], ...] = (JsonDocument, TomlDocument, YamlDocument)
SUFFIXES = (*YamlDocument.suffixes, *TomlDocument.suffixes, *JsonDocument.suffixes)


def format_of(name: str) -> type[Document]:
    """Return the document class for a file name: TOML or JSON by its suffix, otherwise YAML."""
    return next((each for each in _FORMATS if name.lower().endswith(each.suffixes)), YamlDocument)


def suffix_for(text: str) -> str:
    """Return the suffix for a text without a file name: that of JSON or TOML if it can be parsed as such, else of
    YAML."""
    for each in (JsonDocument, TomlDocument):
        with contextlib.suppress(ConfigError):
            if each(text, "").values:  # a text of comments alone parses in more than one format
                return each.suffixes[0]
    return YamlDocument.suffixes[0]


def open_document(text: str, name: str = "<text>", suffix: str = "") -> Document:
    """Parse a text in the format of ``suffix``, or of the suffix of ``name``. JSON in a YAML file is parsed as JSON.

    Raises:
        ConfigError: The text is not in this format; the message has file, line and column.
    """
    if name.lower().endswith(".py"):
        launcher = "composer -n" if "composer" in text else "torchrun --nproc-per-node"
        raise ConfigError(
            f"{name}:1:1: this is Python, and configurations are YAML, TOML or JSON; the script trains unchanged: "
            f"{launcher} 8 -m composer_fsdp2 run {name}"
        )
    document = format_of(suffix or name)(text, name)
    if isinstance(document, YamlDocument) and text.lstrip("\ufeff \t\r\n").startswith("{"):
        with contextlib.suppress(ConfigError):
            in_json = JsonDocument(text, name)
            in_json.values = document.values  # as PyYAML reads them: 1e-5 is a string
            return in_json
    return document
