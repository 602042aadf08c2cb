"""Edits of a JSON text in its own layout; an unedited entry keeps its bytes.

The standard library reads the values and writes new entries. It reports no positions: tokens are scanned a second time
for an edit or a report. Called by ``migrate``; reads and writes no file.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from composer_fsdp2.migration.documents.edits import Document, Entry, read_values
from composer_fsdp2.migration.paths import Settings

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+')


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

    suffixes = (".json",)

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

    @functools.cached_property
    def root(self) -> Entry:  # type: ignore[override]
        tokens = _TOKEN.finditer(self.text)
        first = next(tokens)
        return _entry("", first.start(), first, tokens)

    def in_braces(self, mapping: Entry, entries: Settings) -> str:
        in_lines = "\n" in self._gap(mapping)
        text = json.dumps(
            dict(entries),
            ensure_ascii=self.text.isascii(),
            indent=self._indent if in_lines else None,
            separators=("," if in_lines else self._comma, self._colon),
        )
        line = self.text[self.text.rfind("\n", 0, mapping.value) + 1 : mapping.value]
        return text.replace("\n", f"\n{line[: len(line) - len(line.lstrip())]}")

    def comma(self, mapping: Entry) -> str:
        gap = self._gap(mapping)
        return f",{gap}" if "\n" in gap else self._comma

    def _gap(self, mapping: Entry) -> str:
        """Return the white space between a mapping's brace and its first entry."""
        if mapping.below:
            return self.text[mapping.value + 1 : mapping.below[0].start]
        return "" if self._indent is None else "\n"


def _entry(key: str | int, start: int, value: re.Match[str], tokens: Iterator[re.Match[str]]) -> Entry:
    """Return the entry whose value begins with a token, and takes further tokens up to its end."""
    entry = Entry(key, start, value.end(), value.start(), [])
    if value[0] not in ("{", "["):
        return entry
    for token in tokens:
        entry.end = token.end()
        if token[0] in ("}", "]"):
            break
        if token[0] != "," and value[0] == "[":
            entry.below.append(_entry(len(entry.below), token.start(), token, tokens))
        elif token[0] != ",":
            next(tokens)  # the colon
            entry.below.append(_entry(json.loads(token[0]), token.start(), next(tokens), tokens))
    return entry
