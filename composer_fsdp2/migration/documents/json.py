"""Edits of a JSON text in its own layout; an unedited entry keeps its bytes.

The standard library reads the values and writes new entries. It reports no positions: objects are scanned a second
time for those that an edit or a report needs. Called by ``migrate``; reads and writes no file.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    Entry,
    brace_edits,
    place_of,
    read_values,
    refuse_missing,
    written_out,
)
from composer_fsdp2.migration.paths import Path, Settings, value_at

_SPACE = re.compile(r"[ \t\r\n,:]*")  # between keys and values
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Written(Entry):
    """An ``Entry`` whose value begins at ``value``."""

    value: int


class JsonDocument(Document):
    """A ``Document`` of JSON.

    New entries are ``json.dumps`` in the indentation, the separators and the line ends that the file begins with: in a
    file of one layout only edited lines change. Where layouts are mixed, a new entry may look unlike its neighbours.

    Args:
        text: The text of the whole file.
        name: The file's name in messages.
    Raises:
        ConfigError: The text is not JSON; the message has file, line and column.
    """

    takes_entries, has_aliases = True, False

    def __init__(self, text: str, name: str = "<text>") -> None:
        super().__init__(text, name)
        self.values: Any = read_values(json.loads, self.text, name)
        is_mapping = isinstance(self.values, dict)
        self.problem = "" if is_mapping else f"{name}:1:1: an object is expected at the top of the file"
        indent = re.search(r"[{\[]\s*\n([ \t]*)\S", self.text)
        colon = re.search(r'"([ \t]*:[ \t]*)\S', self.text)
        self._indent = indent[1] if indent else None
        self._colon = colon[1] if colon else ": "
        self._comma = ", " if self._colon.endswith(" ") else ","  # within a line
        start = _skip(self.text, 0)
        root = _Written("", start, len(self.text.rstrip()), start)
        self._written: dict[Path, list[_Written]] = {}
        self._places: dict[Path, _Written] = {(): root}  # of duplicate keys the last, as in json.loads

    def lines_of(self, path: Path) -> tuple[int, int]:
        entry = self._entry(path)
        return place_of(self.text, entry.start)[0], place_of(self.text, entry.end)[0]

    def positions_of_keys(self, path: Path) -> Iterable[tuple[str | int, int]]:
        return ((entry.key, entry.start) for entry in self._entries(path))

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
        if path and self.written_as(path):  # an interpolation: written out in its place
            here = written_out(self, path, given or {}, replacements, additions)
            return self.edit_mapping(path[:-1], {here[0]: [here]})
        whole, entries = self._entry(path), self._entries(path)
        refuse_missing(path, replacements, {each.key for each in entries})
        before = self.text[whole.value + 1 : entries[0].start if entries else whole.end]
        in_lines = "\n" in before if entries else self._indent is not None
        dump = functools.partial(self._dump, start=whole.value, in_lines=in_lines)
        if not entries:
            return [Edit(whole.value, whole.end, dump(additions))]
        new = {key: dump(each)[1:-1].strip() for key, each in replacements.items()}
        comma = f",{before}" if in_lines else self._comma
        around = Entry("", whole.value, whole.end)
        return list(brace_edits(self.text, around, entries, new, dump(additions)[1:-1].strip(), comma))

    def written_as(self, path: Path) -> str:
        value = value_at(self.values, path)
        return value if isinstance(value, str) else ""

    def _dump(self, entries: Settings, start: int, in_lines: bool) -> str:
        """Return the text of an object that begins in the line of ``start``."""
        text = json.dumps(
            dict(entries),
            ensure_ascii=self.text.isascii(),
            indent=self._indent if in_lines else None,
            separators=("," if in_lines else self._comma, self._colon),
        )
        line = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        return text.replace("\n", f"\n{line[: len(line) - len(line.lstrip())]}")

    # Positions

    def _entry(self, path: Path) -> _Written:
        if path not in self._places:
            self._entries(path[:-1])
        return self._places[path]

    def _entries(self, path: Path) -> list[_Written]:
        """Return the entries of an object or the items of an array; an empty list for other values."""
        if path not in self._written:
            self._written[path] = list(_entries_at(self.text, self._entry(path).value))
            self._places |= {(*path, entry.key): entry for entry in self._written[path]}
        return self._written[path]


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _entries_at(text: str, start: int) -> Iterator[_Written]:
    if text[start] not in "{[":
        return
    position, number = _skip(text, start + 1), 0
    while text[position] not in "}]":
        value, key = position, number
        if text[start] == "{":
            key, colon = _DECODER.raw_decode(text, position)
            value = _skip(text, colon)
        _, end = _DECODER.raw_decode(text, value)
        yield _Written(key, position, end, value)
        position, number = _skip(text, end), number + 1


def json_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an object."""
    yield from json.dumps(values, indent=2, ensure_ascii=False).split("\n")
