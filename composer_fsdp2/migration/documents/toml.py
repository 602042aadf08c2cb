"""Edits of a TOML text that leave every other byte as it is.

tomllib reads the values, and refuses what is not TOML; it keeps no places, so a scanner finds where each key and value
stands. The scanner may rely on the text being right. Called by ``migrate``; reads and writes no file.
"""

import datetime
import json
import re
import tomllib
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
    is_too_deep,
    refuse_missing,
)
from composer_fsdp2.migration.paths import Path, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A key with its value in the text.

    Args:
        prefix: What stands before the last part of a dotted key.
        is_inline: Whether it stands inside of ``{}``.
    """

    start: int
    end: int
    prefix: str
    is_inline: bool


class TomlDocument(Document):
    """A ``Document`` of TOML, in which nothing stands for something else; tomllib refuses a key that stands twice.

    Args:
        text: Of the whole file.
        name: What messages call it.
    Raises:
        ConfigError: it is not TOML; names file, line and column.
    """

    takes_entries = has_aliases = False
    problem = ""

    def __init__(self, text: str, name: str = "<text>") -> None:
        self.text = self.original = text
        self.name = name
        try:
            self.values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(_message(error, text, name)) from error
        except ValueError as error:  # an integer of too many digits
            raise ConfigError(f"{name}:1:1: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{name}:1:1: {TOO_DEEP}") from error
        if is_too_deep(self.values):
            raise ConfigError(f"{name}:1:1: {TOO_DEEP}")
        scanner = _Scanner(text)
        scanner.scan()
        self.entries, self.headers = scanner.entries, scanner.headers

    def edited(self, edits: Iterable[Edit]) -> str:
        return apply_edits(self.text, edits)

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        return _edit_table(self, path, replacements, additions)

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        raise NotImplementedError("another system's section is a file of its own beside TOML")

    def line_of(self, path: Path) -> int:
        """The line of the key or table at ``path``, from 1; of its first entry, where a table has no header.

        Raises:
            KeyError: there is none.
        """
        if not path:
            return 1
        if path in self.entries:
            start = self.entries[path].start
        elif path in self.headers:
            start, _ = self.headers[path]
        elif isinstance(path[-1], int):  # an item of an array, whose places are not kept
            return self.line_of(path[:-1])
        else:
            below = [entry.start for key, entry in self.entries.items() if key[: len(path)] == path]
            below += [place for key, (place, _) in self.headers.items() if key[: len(path)] == path]
            if not below:
                raise KeyError(path)
            start = min(below)
        return self.text.count("\n", 0, start) + 1


def _message(error: tomllib.TOMLDecodeError, text: str, name: str) -> str:
    if text.startswith("\ufeff"):
        return f"{name}:1:1: the file begins with a byte order mark, which TOML does not take; save it without"
    problem, _, place = str(error).rpartition(" (at ")
    numbers = re.fullmatch(r"line (\d+), column (\d+)\)", place)
    if numbers:
        return f"{name}:{numbers[1]}:{numbers[2]}: {problem}"
    lines = text.split("\n")
    return f"{name}:{len(lines)}:{len(lines[-1]) + 1}: {problem or error}"


# ---------------------------------------------------------------------------------------------------------------------
# Places

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|("(?:\\.|[^"\\])*"|'[^']*'))[ \t]*""")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"' + r"|'[^']*'")
_MULTILINE = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}(?!")' + r"|'''.*?'{3,5}(?!')", re.DOTALL)
_BARE = re.compile(r"[^,\]}#\r\n]*")


class _Scanner:
    """Walks a text that tomllib took."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.entries: dict[Path, _Written] = {}
        self.headers: dict[Path, tuple[int, int]] = {}  # from the bracket to the end
        self._lengths: dict[Path, int] = {}  # of arrays of tables

    def scan(self) -> None:
        table: Path = ()
        position = self._skip(0)
        while position < len(self.text):
            if self.text[position] == "[":
                table, position = self._header(position)
            else:
                position = self._entry(position, table, is_inline=False)
            position = self._skip(position)

    def _skip(self, position: int) -> int:
        found = _SPACE.match(self.text, position)
        assert found is not None
        return found.end()

    def _header(self, start: int) -> tuple[Path, int]:
        is_array = self.text.startswith("[[", start)
        parts, end = self._dotted(start + 1 + is_array)
        end += 1 + is_array
        path: Path = ()
        for number, part in enumerate(parts):
            path = (*path, part)
            if is_array and number == len(parts) - 1:
                self._lengths[path] = self._lengths.get(path, 0) + 1
            if path in self._lengths:
                path = (*path, self._lengths[path] - 1)
        self.headers[path] = (start, end)
        return path, end

    def _dotted(self, position: int) -> tuple[list[str], int]:
        parts = []
        while True:
            found = _KEY.match(self.text, position)
            assert found is not None
            parts.append(found[1] if found[1] is not None else tomllib.loads(f"key = {found[2]}")["key"])
            position = found.end()
            if self.text[position] != ".":
                return parts, position
            position += 1

    def _entry(self, start: int, table: Path, *, is_inline: bool) -> int:
        parts, equals = self._dotted(start)
        path = (*table, *parts)
        written = self.text[start:equals].rstrip()
        last = re.search(r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')$""", written)
        assert last is not None
        end = self._value(self._skip(equals + 1), path)
        self.entries[path] = _Written(start=start, end=end, prefix=written[: last.start()], is_inline=is_inline)
        return end

    def _value(self, start: int, path: Path) -> int:
        """The position behind a value's last character."""
        opening = self.text[start]
        if opening in "[{":
            return self._collection(start, path)
        if opening in "\"'":
            found = (_MULTILINE if self.text.startswith(opening * 3, start) else _STRING).match(self.text, start)
            assert found is not None
            return found.end()
        found = _BARE.match(self.text, start)
        assert found is not None
        return start + len(found[0].rstrip())

    def _collection(self, start: int, path: Path) -> int:
        is_table = self.text[start] == "{"
        position, number = self._skip(start + 1), 0
        while self.text[position] not in "]}":
            if is_table:
                position = self._entry(position, path, is_inline=True)
            else:
                position = self._value(position, (*path, number))
            position, number = self._skip(position), number + 1
            if self.text[position] == ",":
                position = self._skip(position + 1)
        return position + 1


# ---------------------------------------------------------------------------------------------------------------------
# Editing


def _edit_table(
    document: "TomlDocument",
    path: Path,
    replacements: Mapping[str, Sequence[tuple[str, object]]],
    additions: Sequence[tuple[str, object]] = (),
) -> list[Edit]:
    """``Document.edit_mapping``; a table that the file lacks comes at the file's end.

    Raises:
        ConfigError: the table is written in braces; names file, line and column.
    """
    own = {str(key[-1]): entry for key, entry in document.entries.items() if key[:-1] == path}
    refuse_missing(path, replacements, own.keys())
    _refuse_braces(document, path, own)
    newline = "\r\n" if "\r\n" in document.text else "\n"
    texts = {key: [_line(own[key].prefix, *each) for each in new] for key, new in replacements.items()}
    edits = []
    if additions:
        last = max(own, key=lambda key: own[key].start) if own else ""
        prefix = own[last].prefix if own else ""
        added = [_line(prefix, *each) for each in additions]
        if last in texts and not texts[last]:  # its line goes
            texts[last] += added
        elif own or path in document.headers or not path:
            edits.append(_insertion(document, path, own.get(last), added, newline))
        else:
            edits.append(_new_table(document, path, added, newline))
    return [*edits, *(_replacement(document.text, own[key], lines, newline) for key, lines in texts.items())]


def _refuse_braces(document: "TomlDocument", path: Path, own: Mapping[str, _Written]) -> None:
    inline = [entry for entry in own.values() if entry.is_inline]
    if path in document.entries:  # the table is a value: name = {}
        inline.append(document.entries[path])
    if inline:
        start = min(entry.start for entry in inline)
        line = document.text.count("\n", 0, start) + 1
        column = start - document.text.rfind("\n", 0, start)
        name = ".".join(map(str, path))
        raise ConfigError(
            f"{document.name}:{line}:{column}: {name} stands in braces, which cannot be edited; write it as [{name}]"
        )


def _line(prefix: str, key: str, value: object) -> str:
    return f"{prefix}{_key_text(key)} = {toml_text(value)}"


def _replacement(text: str, entry: _Written, lines: Sequence[str], newline: str) -> Edit:
    if lines:
        return Edit(entry.start, entry.end, f"{newline}{_indent(text, entry.start)}".join(lines))
    line_end = _line_end(text, entry.end)
    comment = text[entry.end : line_end].lstrip()
    if comment.strip():
        return Edit(entry.start, line_end - len(comment), "")
    return Edit(text.rfind("\n", 0, entry.start) + 1, min(text.find("\n", line_end) + 1 or len(text), len(text)), "")


def _insertion(document: "TomlDocument", path: Path, last: _Written | None, added: Sequence[str], newline: str) -> Edit:
    """The position behind the last entry, or the header, or at the file's beginning."""
    text = document.text
    if last is not None:
        position, indent = _line_end(text, last.end), _indent(text, last.start)
    elif path:
        start, end = document.headers[path]
        position, indent = _line_end(text, end), _indent(text, start)
    else:
        return Edit(0, 0, "".join(f"{line}{newline}" for line in added))
    return Edit(position, position, "".join(f"{newline}{indent}{line}" for line in added))


def _new_table(document: "TomlDocument", path: Path, added: Sequence[str], newline: str) -> Edit:
    text = document.text
    gap = "" if not text else newline if text.endswith("\n") else newline * 2
    header = ".".join(_key_text(str(part)) for part in path)
    return Edit(len(text), len(text), f"{gap}[{header}]{newline}" + "".join(f"{line}{newline}" for line in added))


def _line_end(text: str, position: int) -> int:
    """The end of the line at ``position``."""
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    return end - 1 if end > position and text[end - 1] == "\r" else end


def _indent(text: str, position: int) -> str:
    return text[text.rfind("\n", 0, position) + 1 : position]


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def table_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of tables with their entries, an empty one between two tables."""
    for number, (table, entries) in enumerate(values.items()):
        yield from ([""] if number else [])
        yield f"[{table}]"
        yield from (f"{name} = {toml_text(value)}" for name, value in entries.items())


def toml_text(value: object) -> str:
    """A value on one line.

    Raises:
        ValueError: it is None, or of a type that TOML has not.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key_text(str(key))} = {toml_text(each)}" for key, each in value.items())
        return "{ " + pairs + " }" if pairs else "{}"
    raise ValueError(f"TOML has no word for {value!r}")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
