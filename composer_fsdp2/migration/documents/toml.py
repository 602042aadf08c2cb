"""Edits of a TOML text that preserve every other byte.

tomllib reads the values, and reports no positions. It is also used to find them: a key or a value is complete where a
text that ends there is valid TOML. Called by ``migrate``; reads and writes no file.
"""

import contextlib
import datetime
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
    refuse_missing,
)
from composer_fsdp2.migration.paths import Path, Settings, has_path


class TomlDocument(Document):
    """A ``Document`` of TOML, which has no aliases; tomllib refuses duplicate keys.

    Args:
        text: The text of the whole file.
        name: The file's name in messages.
    Raises:
        ConfigError: The text is not TOML; the message has file, line and column.
    """

    takes_entries = has_aliases = False
    problem = ""

    def __init__(self, text: str, name: str = "<text>") -> None:
        super().__init__(text, name)
        if text != self.text and self._first:
            raise ConfigError(
                f"{name}:1:1: the file begins with a byte order mark, which TOML does not take; save it without"
            )
        self.values: dict[str, Any] = read_values(tomllib.loads, self.text, name)

    def lines_of(self, path: Path) -> tuple[int, int]:
        """``Document.lines_of``; of a table with its header; of the entry around an array item or a value in braces."""
        if not has_path(self.values, path):
            raise KeyError(path)
        below = [each for key, each in self._places.items() if key[: len(path)] == path]
        if not path or not below:
            return self.lines_of(path[:-1]) if path else (1, self.text.count("\n") + 1)
        first = self._places.get(path, below[0])
        return place_of(self.text, first.start)[0], place_of(self.text, below[-1].end)[0]

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        """``Document.edit_mapping``; a table that the file lacks is appended to it.

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
        refuse_missing(path, replacements, own.keys())
        new = {key: self._lines_beside(own[key], each) for key, each in replacements.items()}
        if own or path in self._places:
            beside = own or {"": self._places[path]}
            *_, last = beside.values()
            return list(line_edits(self.text, beside, new, self._lines_beside(last, additions)))
        added = "".join(f"{line}\n" for line in _lines(additions))
        if not path:
            return [Edit(0, 0, added)]
        gap = "" if not self.text else "\n" if self.text.endswith("\n") else "\n\n"
        header = ".".join(_key_text(str(part)) for part in path)
        return [Edit(len(self.text), len(self.text), f"{gap}[{header}]\n{added}")]

    def _lines_beside(self, entry: Entry, new: Settings) -> list[str]:
        """Return the lines of new entries, with the dotted prefix of the entry beside them."""
        if self.text[entry.start] == "[":
            return _lines(new)
        return _lines(new, _LAST_PART.sub("", _key_at(self.text, entry.start)))

    @functools.cached_property
    def _places(self) -> dict[Path, Entry]:
        """Entries and headers, in the order of the text, without those in braces."""
        found: dict[Path, Entry] = {}
        table: Path = ()
        lengths: dict[Path, int] = {}  # of arrays of tables
        end = 0
        while key := _START.match(self.text, end):
            start, is_header = key.end(), self.text[key.end()] == "["
            end = start + len(_complete(self.text, start, r"\s*(?:#|\n|\Z)"))
            names = _names(self.text[start:end] if is_header else f"{_key_at(self.text, start)}= 0")
            if is_header:
                table = ()
                for number, name in enumerate(names, 1):
                    table = (*table, name)
                    if number == len(names) and self.text.startswith("[[", start):
                        lengths[table] = lengths.get(table, -1) + 1
                    if table in lengths:
                        table = (*table, lengths[table])
            path = table if is_header else (*table, *names)
            found[path] = Entry(path[-1], start, end)
        return found


# ---------------------------------------------------------------------------------------------------------------------
# Positions in valid TOML

_START = re.compile(r"(?:\s|#[^\n]*+)*+(?=\S)")  # behind white space and comments
_LAST_PART = re.compile(r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')\s*\Z""")


def _complete(text: str, start: int, end: str, rest: str = "") -> str:
    """Return the shortest text from ``start`` up to a match of ``end`` that is TOML if ``rest`` is appended."""
    for found in re.compile(end).finditer(text, start):
        piece = text[start : found.start()]
        if "\n" in piece and not piece.endswith(("]", "}", '"""', "'''")):
            continue  # otherwise each line of a long list would be tried
        with contextlib.suppress(tomllib.TOMLDecodeError):
            tomllib.loads(piece + rest)
            return piece
    raise AssertionError(f"no TOML at character {start}")


def _key_at(text: str, start: int) -> str:
    return _complete(text, start, "=", "= 0")


def _names(text: str) -> Path:
    """Return the path of keys in nested tables of one key each."""
    names: Path = ()
    values: Any = tomllib.loads(text)
    while isinstance(values, dict) and values:
        ((name, values),) = values.items()
        names = (*names, name)
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Values as text


def _lines(entries: Settings, prefix: str = "") -> list[str]:
    return [f"{prefix}{_key_text(name)} = {toml_text(value)}" for name, value in entries]


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_text(key)


def table_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of tables with their entries, with an empty line between tables."""
    for number, (table, entries) in enumerate(values.items()):
        yield from [*([""] if number else []), f"[{table}]", *_lines(list(entries.items()))]


def toml_text(value: object) -> str:
    """Return a value on one line.

    Raises:
        ValueError: The value is None, or of a type that TOML lacks.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        entries = ", ".join(_lines(list(value.items())))
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float):  # also nan and inf
        return repr(value)
    if isinstance(value, bool | int | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ValueError(f"TOML has no word for {value!r}")
