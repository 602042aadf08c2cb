"""Edit a JSON text in its own layout. The bytes of other entries are preserved.

The standard library parses values and writes new entries. It does not report positions, so edits and reports scan the
tokens again. Called by ``migrate``; does not access files.
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
    """A ``Document`` in JSON.

    New entries are written by ``json.dumps`` with the indentation, separators and line endings of the first lines of
    the file. In a file with mixed layouts, a new entry may differ from adjacent ones.

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
        """Return the whitespace between the opening brace of a mapping and its first entry."""
        if mapping.below:
            return self.text[mapping.value + 1 : mapping.below[0].start]
        return "" if self._indent is None else "\n"


def _entry(key: str | int, start: int, value: re.Match[str], tokens: Iterator[re.Match[str]]) -> Entry:
    """Return the entry whose value starts with a token, consuming tokens up to the value's end."""
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
