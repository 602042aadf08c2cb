"""Configuration files as texts that can be edited."""

from composer_fsdp2.migration.documents.edits import Document, Edit
from composer_fsdp2.migration.documents.toml import TomlDocument
from composer_fsdp2.migration.documents.yaml import YamlDocument

__all__ = ["Document", "Edit", "open_document"]


def open_document(text: str, name: str = "<text>") -> Document:
    """A TOML text, if its name ends so, else YAML.

    Raises:
        ConfigError: it is neither; names file, line and column.
    """
    return TomlDocument(text, name) if name.endswith(".toml") else YamlDocument(text, name)
