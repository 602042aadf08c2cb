"""Edit a TOML text. All other bytes are preserved.

tomllib parses the values. It does not report positions, so edits and reports scan the tokens again. Called by
``migrate``; does not access files.
"""

import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    Entry,
    line_edits,
    place_of,
    read_values,
)
from composer_fsdp2.migration.paths import Path, Settings, has_path


class TomlDocument(Document):
    """A ``Document`` in TOML. TOML has no aliases, and tomllib rejects duplicate keys.

    Args:
        text: The text of the whole file.
        name: The file's name in messages.
    Raises:
        ConfigError: The text is not TOML; the message has file, line and column.
    """

    suffixes = (".toml",)
    takes_entries = False
    problem = ""

    def __init__(self, text: str, name: str = "<text>") -> None:
        super().__init__(text, name)
        if text != self.text:
            raise ConfigError(
                f"{name}:1:1: the file begins with a byte order mark, which TOML does not take; save it without"
            )
        self.root = Entry("", 0, len(self.text), 0, [])
        self.values: dict[str, Any] = read_values(tomllib.loads, self.text, name)

    def entry(self, path: Path) -> Entry:
        """As ``Document.entry``.

        For a table without a header, its first entry; for an item of an array or braces, the enclosing entry.
        """
        if not has_path(self.values, path):
            raise KeyError(path)
        if not path:
            return self.root
        near = (each for key, each in self._places.items() if key[: len(path)] == path)
        return self._places.get(path) or next(near, None) or self.entry(path[:-1])

    def is_written_at(self, path: Path) -> bool:
        return True  # TOML has no aliases

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        """As ``Document.edit_mapping``. A table that does not exist is appended to the file.

        Raises:
            ConfigError: The table is written in braces; the message has file, line and column.
        """
        entries = {path: each for path, each in self._places.items() if self.text[each.start] != "["}
        for depth in range(len(path)):
            if braces := entries.get(path[: depth + 1]):
                line, column = place_of(self.text, braces.start)
                name, place = ".".join(map(str, path)), f"{self.name}:{line}:{column}"
                raise ConfigError(f"{place}: {name} stands in braces, which cannot be edited; write it as [{name}]")
        own = {str(key[-1]): each for key, each in entries.items() if key[:-1] == path}
        new = {key: self._prefixed_lines(own[key], each) for key, each in replacements.items()}
        if own or path in self._places:
            beside = own or {"": self._places[path]}
            *_, last = beside.values()
            return list(line_edits(self.text, beside, new, self._prefixed_lines(last, additions)))
        added = "".join(f"{line}\n" for line in _lines(additions))
        if not path:
            return [Edit(0, 0, added)]
        gap = "" if not self.text else "\n" if self.text.endswith("\n") else "\n\n"
        header = ".".join(_key_text(str(part)) for part in path)
        return [Edit(len(self.text), len(self.text), f"{gap}[{header}]\n{added}")]

    def _prefixed_lines(self, entry: Entry, new: Settings) -> list[str]:
        """Return the lines of new entries, with the dotted prefix of the entry that they replace."""
        key = _KEY.match(self.text, entry.start)
        return _lines(new, key[1] if key else "")

    @functools.cached_property
    def _places(self) -> dict[Path, Entry]:
        """Entries and table headers by path, in the order of the text, without entries in braces.

        Tables of an array of tables are not distinguished, because no system has a section in one.
        """
        found: dict[Path, Entry] = {}
        table: Path = ()
        for start, end in _statements(self.text):
            path = _names(self.text, start)
            if self.text[start] == "[":
                table = path
            else:
                path = (*table, *path)
            found.setdefault(path, Entry(path[-1], start, end, start, []))
        return found

    @staticmethod
    def lines(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of a new file: tables with their entries, and empty lines between tables."""
        for number, (table, entries) in enumerate(values.items()):
            yield from [*([""] if number else []), f"[{table}]", *_lines(list(entries.items()))]


# ---------------------------------------------------------------------------------------------------------------------
# Positions in valid TOML

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_KEY = re.compile(rf"((?:{_PART}\s*\.\s*)*){_PART}")  # its prefix is a group
_TEXTS = r"""\"{3}(?:\\.|[^\\])*?"{3}(?!")|'{3}.*?'{3}(?!')|"(?:\\.|[^"\\])*"|'[^']*'"""
_TOKEN = re.compile(rf"{_TEXTS}|#[^\n]*|\n|[\[\]{{}}]|[^\s\"'#\[\]{{}}]+", re.DOTALL)


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of all table headers and entries, without the comments after them."""
    start, end, depth = -1, -1, 0
    for token in _TOKEN.finditer(f"{text}\n"):
        if token[0] == "\n" and not depth and start >= 0:
            yield start, end
            start = -1
        elif token[0] != "\n" and token[0][0] != "#":
            start, end = token.start() if start < 0 else start, token.end()
            depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))


def _names(text: str, start: int) -> Path:
    """Return the parts of the first key from ``start``."""
    key = _KEY.search(text, start)
    assert key is not None
    parts = re.findall(_PART, key[0])
    return tuple(tomllib.loads(f"text = {part}")["text"] if part[0] in "\"'" else part for part in parts)


# ---------------------------------------------------------------------------------------------------------------------
# Values as text


def _lines(entries: Settings, prefix: str = "") -> list[str]:
    return [f"{prefix}{_key_text(name)} = {toml_text(value)}" for name, value in entries]


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_text(key)


def toml_text(value: object) -> str:
    """Format a value as TOML on one line.

    Raises:
        ValueError: The value is None, or of a type that TOML does not have.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        entries = ", ".join(_lines(list(value.items())))
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, float):  # also nan and inf
        return repr(value)
    if isinstance(value, bool | int | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ValueError(f"TOML has no word for {value!r}")
