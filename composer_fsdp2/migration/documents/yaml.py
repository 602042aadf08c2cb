"""Edit a YAML text. All other bytes are preserved.

A YAML library would write a new text with other quotes, line widths and blank lines. This module edits the text at the
positions of its nodes. Called by ``migrate``; does not access files.
"""

import bisect
import datetime
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    Entry,
    NewEntry,
    comment_behind,
    indent_at,
    line_edits,
    line_end,
    place_of,
)
from composer_fsdp2.migration.documents.yaml_text import YamlEntries
from composer_fsdp2.migration.paths import Path, Settings

_LINE_END = re.compile("\r(?!\n)|[\x85\u2028\u2029]")  # of YAML 1.1, other than the line feed
_COMMENT = re.compile(r"(?:(?<=\s)|^)#[^\r\n]*", re.MULTILINE)


class YamlDocument(Document):
    """A ``Document`` in YAML.

    Args:
        text: The text of the whole file.
        name: The file's name in messages.
    Attributes:
        values: The values of the document, a mapping unless there is a ``problem``; a list for several documents.
    Raises:
        ConfigError: The text is not YAML; the message has file, line and column.
    """

    suffixes = (".yaml", ".yml")

    def __init__(self, text: str, name: str = "<text>") -> None:
        super().__init__(text, name)
        lines, self.text = self.text, _LINE_END.sub("\n", self.text)
        try:
            found = YamlEntries(lines)
            documents = found.values()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{name}:1:1"
            raise ConfigError(f"{place}: {error.problem or error.context}") from error
        except yaml.reader.ReaderError as error:
            control = yaml.reader.Reader.NON_PRINTABLE.search(self.text)
            line, column = place_of(self.text, control.start() if control else 0)
            raise ConfigError(f"{name}:{line}:{column}: {error.reason}") from error
        self._scalars, self.has_aliases = found.scalars, found.has_aliases
        self.root = found.roots[0] if documents else Entry("", 0, 0, 0, [])
        self.values: Any = documents[0] if len(documents) == 1 else documents
        self.problem = ""
        if len(documents) > 1:
            line, _ = place_of(self.text, found.roots[1].start)
            self.problem = f"{name}:{line}:1: here is a second document, and every system reads files of one only"
        elif not isinstance(self.values, Mapping):
            self.problem = f"{name}:1:1: a mapping is expected at the top of the file"

    @staticmethod
    def lines(values: Mapping[str, Any], step: str = "  ") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping) and value:
                yield f"{_scalar_text(str(name))}:"
                yield from (f"{step}{line}" for line in YamlDocument.lines(value, step))
            else:
                yield f"{_scalar_text(str(name))}: {flow_text(value)}"

    def in_braces(self, mapping: Entry, entries: Settings) -> str:
        return flow_text(dict(entries))

    def edits_in(
        self, mapping: Entry, replacements: Mapping[str, Settings], additions: Settings, same: Mapping[str, str]
    ) -> Iterator[Edit]:
        if mapping.in_braces:
            yield from super().edits_in(mapping, replacements, additions, same)
            return
        entries = {str(key): each for key, each in mapping.by_key.items()}
        new = {}
        for key, into in replacements.items():
            start, end = entries[key].start, entries[key].end
            texts = [(each, same.get(self.inline(mapping, each))) for each in into]
            is_kept = self.text[start:end] in [text for _, text in texts]
            new[key] = [] if is_kept else self._lines_between(start, end, [], {})
            for each, text in texts:
                new[key] += self._new_lines([each]) if text is None else [text]
        added = self._new_lines(additions)
        if new.keys() == entries.keys() and not any(new.values()) and not added:
            added = ["{}"]
        yield from line_edits(self.text, entries, new, added)

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        mapping = self.entry(path[:-1])
        if mapping.in_braces or not all(self.is_written_at(each) for each in (path, new.inner) if each is not None):
            return super().replace_entry(path, new, given=given)
        entry = mapping.by_key[path[-1]]
        end = entry.end if comment_behind(self.text, entry.end) is None else line_end(self.text, entry.end)
        inner = [] if new.inner is None else self.entry(new.inner).below
        inner = [each for each in inner if entry.start <= each.start < entry.end]
        body = [*self._lines_between(entry.start, end, inner, new.replacements), *self._new_lines(new.additions)]
        for name, first in reversed(new.heads):
            body = [*self._new_lines(first), *body]
            has_entries = any(line and not line.startswith("#") for line in body)
            body = [f"{name}:" if has_entries else f"{name}: {{}}", *(f"{self._step}{line}" for line in body)]
        if anchor := re.compile(r"&\S+").match(self.text, entry.value):
            body[0] = body[0].replace(":", f": {anchor[0]}", 1)
        lines = [*body, *self._new_lines(new.beside)]
        edit = Edit(entry.start, end, f"\n{indent_at(self.text, entry.start)}".join(lines))
        return [edit, *self.edit_mapping(path[:-1], new.around)]

    def _lines_between(
        self, start: int, end: int, entries: Sequence[Entry], replacements: Mapping[str, Settings]
    ) -> list[str]:
        """Return the comments between two positions and the new lines of the entries there, in the order of the text.

        Replacements of entries that a merge adds are at the end.
        """
        found = {position: [comment] for position, comment in self._comments(start, end)}
        rest = dict(replacements)
        for each in entries:
            lines = self._new_lines(rest.pop(str(each.key), ()))
            comment = comment_behind(self.text, each.end)
            if comment in found and len(lines) == 1:
                lines = [f"{lines[0]}  {found.pop(comment)[0]}"]
            found[each.start] = lines
        lines = [line for position in sorted(found) for line in found[position]]
        return lines + [line for new in rest.values() for line in self._new_lines(new)]

    def _comments(self, start: int, end: int) -> Iterator[tuple[int, str]]:
        """Yield the position and the text of each comment between two positions."""
        for comment in _COMMENT.finditer(self.text, start, end):
            before = bisect.bisect_right(self._scalars, (comment.start(), len(self.text))) - 1
            if before < 0 or self._scalars[before][1] <= comment.start():
                yield comment.start(), comment[0].rstrip()

    def _new_lines(self, entries: Settings) -> list[str]:
        return list(self.lines(dict(entries), self._step))

    @functools.cached_property
    def _step(self) -> str:
        """The indentation of nested mappings in this file."""
        blocks = (each.below[0] for each in self.root.below if not each.in_braces)
        steps = (indent_at(self.text, first.start) for first in blocks if isinstance(first.key, str))  # in a mapping
        return next(filter(None, steps), "  ")


# ---------------------------------------------------------------------------------------------------------------------
# Values as text


def flow_text(value: object) -> str:
    """Format a value on one line, in a form with the same meaning in YAML 1.1 and 1.2."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow_text(key)}: {flow_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float | datetime.date):
        plain: str = yaml.safe_dump(value)  # 1e-06 would be read as a string
        return plain.partition("\n")[0]
    return _scalar_text(str(value))


_PLAIN = re.compile(r"[A-Za-z_./][\w./ -]*")
_WORDS = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|~|\.nan|\.inf")


def _scalar_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text) and text == text.strip():
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', width=2**31, allow_unicode=True)
    return quoted.removesuffix("\n")
