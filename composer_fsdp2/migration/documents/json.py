"""Edits of a JSON text that leave every other byte as it is.

The standard library reads the values; it keeps no places, so that objects are walked here once more, where an edit or a
report asks for one. Called by ``migrate``; reads and writes no file.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    TOO_DEEP,
    Document,
    Edit,
    NewEntry,
    apply_edits,
    entries_of,
    is_too_deep,
    references_in,
    referred,
    refuse_missing,
    with_references,
)
from composer_fsdp2.migration.paths import Path, Settings

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A key with its value in the text, or an item of an array.

    Args:
        value: Where the value begins.
    """

    key: str | int
    start: int
    value: int
    end: int


class JsonDocument(Document):
    """A ``Document`` of JSON.

    Args:
        text: Of the whole file.
        name: What messages call it.
    Raises:
        ConfigError: it is not JSON; names file, line and column.
    """

    takes_entries, has_aliases = True, False

    def __init__(self, text: str, name: str = "<text>") -> None:
        self.original, self.name = text, name
        self.text = text.removeprefix("\ufeff")
        try:
            self.values: Any = json.loads(self.text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}:{error.colno}: {error.msg}") from error
        except ValueError as error:  # an integer of too many digits
            raise ConfigError(f"{name}:1:1: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{name}:1:1: {TOO_DEEP}") from error
        if is_too_deep(self.values):
            raise ConfigError(f"{name}:1:1: {TOO_DEEP}")
        is_mapping = isinstance(self.values, dict)
        self.problem = "" if is_mapping else f"{name}:1:1: an object is expected at the top of the file"
        self._style = _Style.of(self.text)
        self._written: dict[Path, list[_Written]] = {}
        self._places: dict[Path, _Written] = {}  # of two with one key the last, as json.loads has it

    def edited(self, edits: Iterable[Edit]) -> str:
        return self.original[: len(self.original) - len(self.text)] + apply_edits(self.text, edits)

    def line_of(self, path: Path) -> int:
        if not path:
            return 1
        return self.text.count("\n", 0, self._entry(path).start) + 1

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        lines: dict[str | int, int] = {}
        for entry in self._entries(path):
            if key not in (None, entry.key):
                continue
            line = self.text.count("\n", 0, entry.start) + 1
            if entry.key in lines:
                column = entry.start - self.text.rfind("\n", 0, entry.start)
                return f"{self.name}:{line}:{column}: {entry.key} stands in line {lines[entry.key]}, too"
            lines[entry.key] = line
        return ""

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        if not replacements and not additions:
            return []
        if path and self.written_as(path):  # an interpolation: its entries are written out in its place
            values = with_references(dict(given or {}), referred(self.values, self.written_as(path)))
            new = {key: each for old in values.items() for key, each in replacements.get(old[0], [old])}
            return self.edit_mapping(path[:-1], {str(path[-1]): [(str(path[-1]), new | dict(additions))]})
        entries = self._entries(path)
        refuse_missing(path, replacements, {each.key for each in entries})
        return list(_object_edits(self.text, self._style, self._start(path), entries, replacements, additions))

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        return self.edit_mapping(path[:-1], {str(path[-1]): entries_of(new), **new.around}, given=given)

    def written_as(self, path: Path) -> str:
        start = self._start(path)
        return str(_DECODER.raw_decode(self.text, start)[0]) if self.text[start] == '"' else ""

    def stands_for(self, path: Path, others: Sequence[Path]) -> Path | None:
        return next((each for each, _ in references_in(self.written_as(path)) if each in others), None)

    def references(self) -> Iterator[tuple[Path, int]]:
        return references_in(self.text)

    def holds_line(self, path: Path, line: int) -> bool:
        entry = self._entry(path)
        return self.line_of(path) <= line <= self.text.count("\n", 0, entry.end) + 1

    # Places

    def _start(self, path: Path) -> int:
        """The position of the value at ``path``."""
        return self._entry(path).value if path else _skip(self.text, 0)

    def _entry(self, path: Path) -> _Written:
        self._entries(path[:-1])
        return self._places[path]

    def _entries(self, path: Path) -> list[_Written]:
        if path not in self._written:
            self._written[path] = list(_entries_at(self.text, self._start(path)))
            self._places |= {(*path, entry.key): entry for entry in self._written[path]}
        return self._written[path]


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _entries_at(text: str, start: int) -> Iterator[_Written]:
    """The entries of the object, or the items of the array, that begins at ``start``; none of anything else."""
    if text[start] not in "{[":
        return
    position, number = _skip(text, start + 1), 0
    while text[position] not in "}]":
        value, key = position, number
        if text[start] == "{":
            key, colon = _DECODER.raw_decode(text, position)
            value = _skip(text, _skip(text, colon) + 1)
        _, end = _DECODER.raw_decode(text, value)
        yield _Written(key=key, start=position, value=value, end=end)
        position, number = _skip(text, end), number + 1
        if text[position] == ",":
            position = _skip(text, position + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Editing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """How a file is laid out, which new entries follow.

    Args:
        indent: Of one level; None if the file is one line.
    """

    indent: str | None
    colon: str
    newline: str
    is_ascii: bool

    @classmethod
    def of(cls, text: str) -> "_Style":
        indent = re.search(r"[{\[][ \t]*\r?\n([ \t]+)\S", text)
        colon = re.search(r'"(\s*:\s*)[^\s]', text)
        return cls(
            indent=indent[1] if indent else None,
            colon=colon[1] if colon else ": ",
            newline="\r\n" if "\r\n" in text else "\n",
            is_ascii=text.isascii(),
        )

    @property
    def comma(self) -> str:
        """Between two entries of one line."""
        return ", " if self.colon.endswith(" ") else ","

    def text_of(self, value: Any, column: str, *, in_lines: bool) -> str:
        """A value behind ``column``; a list stays on its line."""
        if not isinstance(value, Mapping) or not value:
            return json.dumps(value, ensure_ascii=self.is_ascii, separators=(self.comma, self.colon))
        inner = column + (self.indent or "")
        each = [self.entry_of(key, item, inner, in_lines=in_lines) for key, item in value.items()]
        if not in_lines or self.indent is None:
            return "{" + self.comma.join(each) + "}"
        around = f"{self.newline}{inner}"
        return "{" + around + f",{around}".join(each) + f"{self.newline}{column}" + "}"

    def entry_of(self, key: str, value: Any, column: str, *, in_lines: bool) -> str:
        name = json.dumps(key, ensure_ascii=self.is_ascii)
        return f"{name}{self.colon}{self.text_of(value, column, in_lines=in_lines)}"


def _object_edits(
    text: str,
    style: _Style,
    opening: int,
    entries: Sequence[_Written],
    replacements: Mapping[str, Settings],
    additions: Settings,
) -> Iterator[Edit]:
    """Entries that go take the comma behind them along, the last ones the comma before them."""
    first = entries[0].start if entries else _skip(text, opening + 1)
    before = text[opening + 1 : first]
    in_lines = "\n" in before
    column = before.rpartition("\n")[2] if in_lines else ""
    separator = f",{before}" if in_lines else style.comma
    entry = functools.partial(style.entry_of, column=column, in_lines=in_lines)
    new = {key: separator.join(entry(*each) for each in into) for key, into in replacements.items()}
    added = separator.join(entry(*each) for each in additions)
    if not entries and style.indent is not None:  # {} in a file of lines
        value = style.text_of(dict(additions), _column(text, opening), in_lines=True)
        yield Edit(opening, first + 1, value)
        return
    staying = [number for number, each in enumerate(entries) if new.get(str(each.key), "stays")]
    if not staying:
        yield Edit(first, entries[-1].end if entries else first, added)
        return
    last = staying[-1]
    for number, each in enumerate(entries[: last + 1]):
        here = new.get(str(each.key))
        if here:
            yield Edit(each.start, each.end, here)
        elif here is not None:
            yield Edit(each.start, entries[number + 1].start, "")
    if added or entries[last + 1 :]:
        yield Edit(entries[last].end, entries[-1].end, f"{separator}{added}" if added else "")


def _column(text: str, position: int) -> str:
    """The white space at the beginning of a position's line."""
    found = re.compile(r"[ \t]*").match(text, text.rfind("\n", 0, position) + 1)
    assert found is not None
    return found[0]


def json_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of an object."""
    yield from json.dumps(values, indent=2, ensure_ascii=False).split("\n")
