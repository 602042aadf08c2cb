"""Text documents with parsed values and positions, and edits by position that preserve all other characters."""

import abc
import bisect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.paths import Path, Settings, value_at

MAX_DEPTH = 64  # of nested values; a configuration has about ten levels, and Python's recursion is limited
TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replace the characters from ``start`` up to ``end`` by ``text``."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits applied.

    Raises:
        ValueError: Two edits overlap.
    """
    pieces, position = [], 0
    for edit in sorted(edits):
        if edit.start < position:
            raise ValueError(f"edits overlap at character {edit.start}")
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])


@dataclass(frozen=True, slots=True)
class Entry:
    """The span of a key and its value, from the key's first character to the value's last; an array item's key is its
    index.
    """

    key: Any
    start: int
    end: int


def line_edits(
    text: str, entries: Mapping[str, Entry], new: Mapping[str, Sequence[str]], added: Sequence[str]
) -> Iterator[Edit]:
    """Yield edits of a mapping whose entries are on separate lines.

    Args:
        entries: All entries of the mapping, by key.
        new: The lines that replace an entry, by its key; the comment behind the entry stays.
        added: New lines at the end.
    """
    *_, last = entries.values()
    if new.get(last.key) == []:  # the new lines take its line and its comment
        new = {**new, last.key: added}
    elif added:
        behind = line_end(text, last.end)
        yield Edit(behind, behind, "".join(f"\n{indent_at(text, last.start)}{line}" for line in added))
    for key, lines in new.items():
        start, end = entries[key].start, entries[key].end
        line_start = text.rfind("\n", 0, start) + 1
        if lines or text[line_start:start].strip():  # the line stays if it begins with a list item's dash
            yield Edit(start, end, f"\n{indent_at(text, start)}".join(lines))
        elif comment := comment_behind(text, end):
            yield Edit(start, line_end(text, end) - len(comment), "")
        else:
            yield Edit(line_start, min(line_end(text, end) + 1, len(text)), "")


def indent_at(text: str, position: int) -> str:
    """Return the indentation before a position in its line; other characters there are replaced by spaces."""
    before = text[text.rfind("\n", 0, position) + 1 : position]
    return before if not before.strip() else " " * len(before)


def line_end(text: str, position: int) -> int:
    """Return the position of the end of a position's line."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def comment_behind(text: str, position: int) -> str:
    """Return the comment behind a position in its line, or ""."""
    found = re.compile(r"[ \t]*(#[^\n]*)").match(text, position)
    return found[1] if found else ""


def brace_edits(
    text: str, around: Entry, entries: Sequence[Entry], new: Mapping[str, str], added: str, comma: str
) -> Iterator[Edit]:
    """Yield edits of a mapping in braces; comments between its entries stay.

    Args:
        around: The span from brace to brace.
        new: The text that replaces an entry, by its key; "" removes the entry with the comma behind it, or before it
            if no remaining entry follows.
        added: New entries at the end.
        comma: The separator before ``added``.
    """
    last = entries[-1].key
    if added and last in new:
        new, added = {**new, last: comma.join(filter(None, (new[last], added)))}, ""
    staying = [number for number, each in enumerate(entries) if new.get(each.key, "stays")]
    if not staying:
        ends = (around.start + 1, *(each.end for each in entries))
        starts = (*(each.start for each in entries), around.end - 1)
        comments = (_comments_of(text[end:start]) for end, start in zip(ends, starts, strict=True))
        yield Edit(around.start, around.end, f"{{{''.join(comments)}}}")
        return
    for number, each in enumerate(entries):
        here = new.get(each.key)
        if here:
            yield Edit(each.start, each.end, here)
        elif here is not None and number < staying[-1]:
            behind = entries[number + 1].start
            yield Edit(each.start, behind, _comments_of(text[each.end : behind]))
        elif here is not None:
            before = entries[number - 1].end
            yield Edit(before, each.end, _comments_of(text[before : each.start]))
    if added:
        yield Edit(entries[-1].end, entries[-1].end, f"{comma}{added}")


def _comments_of(gap: str) -> str:
    """Return the comments in the text between two entries, without the comma."""
    return re.sub(r"\A((?:\s|#[^\n]*)*),", r"\1", gap) if "#" in gap else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """The replacement of an entry.

    Args:
        heads: The names of the new entry and of the mappings nested in it, outermost first, each with its first
            entries. The innermost mapping contains ``replacements`` and ``additions``.
        beside: Further entries after the new one.
        inner: The path of the mapping within the old entry whose entries ``replacements`` replaces, or None.
        around: Replacements in the mapping that contains the entry.
    """

    heads: Sequence[tuple[str, Settings]]
    beside: Settings
    inner: Path | None
    replacements: Mapping[str, Settings]
    additions: Settings
    around: Mapping[str, Settings]


def entries_of(new: NewEntry) -> Settings:
    """Return the new entry and the entries beside it, as values."""
    settings = (*(each for into in new.replacements.values() for each in into), *new.additions)
    entries: dict[str, Any] = dict(settings)
    for name, first in reversed(new.heads):
        entries = {name: {**dict(first), **entries}}
    return [*entries.items(), *new.beside]


def with_entries(values: Any, path: Path, replacements: Mapping[str, Settings], additions: Settings = ()) -> Any:
    """Return the values that a file is expected to have after ``Document.edit_mapping``."""
    if not path:
        new = [new for old in values.items() for new in replacements.get(str(old[0]), [old])] if values else []
        return dict([*new, *additions])
    key, *below = path
    if isinstance(values, list):
        return [
            with_entries(each, tuple(below), replacements, additions) if number == key else each
            for number, each in enumerate(values)
        ]
    here = values.get(key)
    inner = with_entries(here if isinstance(here, Mapping | list) else {}, tuple(below), replacements, additions)
    return {**values, key: inner}


def differences(meant: Any, found: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths at which two values differ.

    An interpolation in ``found`` equals any value, since no edit writes a new interpolation.
    """
    if isinstance(meant, Mapping) and isinstance(found, Mapping):
        for key in {**meant, **found}:
            if key not in meant or key not in found:
                yield (*path, key)
            else:
                yield from differences(meant[key], found[key], (*path, key))
    elif isinstance(meant, list | tuple) and isinstance(found, list) and len(meant) == len(found):
        for number, pair in enumerate(zip(meant, found, strict=True)):
            yield from differences(*pair, (*path, number))
    elif isinstance(found, str):
        if "${" not in found and found != meant:
            yield path
    elif repr(meant) != repr(found):  # 1, 1.0 and true are equal, and mean different things; nan is not equal to nan
        yield path


def place_of(text: str, position: int) -> tuple[int, int]:
    """Return the line and the column of a position, both from 1."""
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


_PLACED = re.compile(r"(.*)(?:: | \(at )line (\d+),? column (\d+).*")  # in error messages of json and tomllib
_AT_END = " (at end of document)"


def read_values(loads: Callable[[str], Any], text: str, name: str) -> Any:
    """Parse a text with the ``loads`` of json or tomllib.

    Raises:
        ConfigError: The text is invalid or nested too deep; the message has file, line and column.
    """
    try:
        values = loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}:1:1: {TOO_DEEP}") from error
    except ValueError as error:
        problem, line, column = str(error), 1, 1  # an integer with too many digits
        if found := _PLACED.fullmatch(problem):
            problem, line, column = found[1], int(found[2]), int(found[3])
        elif problem.endswith(_AT_END):
            problem, (line, column) = problem.removesuffix(_AT_END), place_of(text, len(text))
        raise ConfigError(f"{name}:{line}:{column}: {problem}") from error
    if _is_too_deep(values):
        raise ConfigError(f"{name}:1:1: {TOO_DEEP}")
    return values


def _is_too_deep(values: Any) -> bool:
    """Return whether values are nested more than ``MAX_DEPTH`` deep; not recursive, as they may exceed its limit."""
    level = [values]
    for _ in range(MAX_DEPTH + 1):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PARAMETERS = "parameters"


def reference_root(values: Any) -> Path:
    """Return the path of the mapping that interpolations start from: an MCLI run file's ``parameters``, which MCLI
    mounts as a file of their own, or the top of the file.
    """
    is_run = isinstance(values, Mapping) and isinstance(values.get(_PARAMETERS), Mapping)
    return (_PARAMETERS,) if is_run and not {"command", "image", "compute"}.isdisjoint(values) else ()


def references_in(text: str, root: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the paths that interpolations in a text refer to, each with the interpolation's line."""
    for found in _REFERENCE.finditer(text):
        line, _ = place_of(text, found.start())
        yield (*root, *(int(part) if part.isdecimal() else part for part in found[1].split("."))), line


def referred(values: Any, written: Any) -> Mapping[str, Any] | None:
    """Return the mapping that an interpolation refers to, directly or through others; None if it refers to none."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(written, str) and _REFERENCE.fullmatch(written)):
            break
        ((path, _),) = references_in(written, reference_root(values))
        try:
            written = value_at(values, path)
        except (KeyError, IndexError, TypeError):
            return None
    return written if isinstance(written, Mapping) else None


def with_references(values: Any, written: Any) -> Any:
    """Return the values with their interpolations as written, except relative ones, which depend on their position."""
    if isinstance(values, Mapping) and isinstance(written, Mapping):
        return {key: with_references(each, written.get(key)) for key, each in values.items()}
    return written if isinstance(written, str) and "${" in written and "${." not in written else values


def written_out(
    document: "Document",
    path: Path,
    given: Mapping[str, Any],
    replacements: Mapping[str, Settings],
    additions: Settings,
) -> tuple[str, Any]:
    """Return the entry at ``path`` with its alias or interpolation replaced by the edited mapping."""
    kept = with_references(given, referred(document.values, value_at(document.values, path)))
    return str(path[-1]), with_entries(kept, (), replacements, additions)


def refuse_missing(path: Path, replacements: Mapping[str, Settings], present: Collection[str | int]) -> None:
    """Raise KeyError if the mapping at ``path`` lacks a key of ``replacements``."""
    if missing := replacements.keys() - present:
        raise KeyError(f"{'.'.join(map(str, path))} has no {', '.join(sorted(missing))}")


class Document(abc.ABC):
    """A configuration file of any format; the default methods assume neither duplicate keys nor aliases.

    Attributes:
        name: The file's name in messages.
        original: The unchanged text.
        text: The text that positions refer to: without byte order mark, with a line feed for each line end.
        values: The parsed values; a mapping unless there is a ``problem``.
        problem: Why no system reads the file as its configuration, with file, line and column; otherwise "".
        takes_entries: Whether a section of one system can be replaced by another system's, within the text.
        has_aliases: Whether a value may be in more than one place.
    """

    values: Any
    problem: str
    takes_entries: bool
    has_aliases: bool

    def __init__(self, text: str, name: str) -> None:
        self.original, self.name = text, name
        bare = text.removeprefix("\ufeff")
        self.text = bare.replace("\r\n", "\n")
        self._first = len(text) - len(bare)
        self._returns = [found.start() - number for number, found in enumerate(re.finditer("\r\n", bare))]

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the original text with edits of ``text`` applied; new lines get its most frequent line end.

        Raises:
            ValueError: Two edits overlap.
        """
        ends = Counter(re.findall("\r\n|\n|\r", self.original))
        newline = max(ends, key=lambda end: ends[end], default="\n")
        return apply_edits(
            self.original,
            (
                Edit(self._original(edit.start), self._original(edit.end), edit.text.replace("\n", newline))
                for edit in edits
            ),
        )

    def _original(self, position: int) -> int:
        return self._first + position + bisect.bisect_left(self._returns, position)

    @abc.abstractmethod
    def lines_of(self, path: Path) -> tuple[int, int]:
        """Return the first and the last line of the entry at ``path``, from 1. Raises KeyError if it does not exist."""

    def line_of(self, path: Path) -> int:
        """Return the line of the key at ``path``, the first of ``lines_of``."""
        return self.lines_of(path)[0]

    def holds_line(self, path: Path, line: int) -> bool:
        """Return whether a line is part of the entry at ``path``."""
        try:
            first, last = self.lines_of(path)
        except KeyError:  # the entry comes from an interpolation
            return False
        return first <= line <= last

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        """Return a message about a duplicate key in the mapping at ``path``, or "".

        Args:
            key: The only key to check; None checks all.
        """
        seen: dict[str | int, int] = {}
        for name, position in self.positions_of_keys(path):
            if name in seen and key in (None, name):
                (first, _), (line, column) = place_of(self.text, seen[name]), place_of(self.text, position)
                return f"{self.name}:{line}:{column}: {name} stands in line {first}, too"
            seen[name] = position
        return ""

    def positions_of_keys(self, path: Path) -> Iterable[tuple[str | int, int]]:
        """Return the keys of the mapping at ``path`` with positions in ``text``; may be empty if all are unique."""
        return ()

    @abc.abstractmethod
    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        """Return edits that replace entries of the mapping at ``path``; all other entries keep their bytes.

        Args:
            replacements: The entries that replace a key; an empty sequence removes it. A comment behind a removed
                entry stays, on a separate line.
            additions: New entries at the end.
            given: The mapping's values with interpolations resolved; None if these equal the text's.
        Raises:
            KeyError: ``path`` is not a mapping, or it lacks a key of ``replacements``.
        """

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        """Return edits that replace the entry at ``path``; comments stay, in their order.

        Args:
            given: The values of the mapping that contains the entry.
        """
        return self.edit_mapping(path[:-1], {str(path[-1]): entries_of(new), **new.around}, given=given)

    def stands_for(self, path: Path, others: Sequence[Path]) -> Path | None:
        """Return the path in ``others`` that the value at ``path`` is an alias or interpolation of; otherwise None."""
        found = references_in(self.written_as(path), reference_root(self.values))
        return next((each for each, _ in found if each in others), None)

    def written_as(self, path: Path) -> str:
        """Return the alias or interpolation that is written at ``path`` instead of a mapping; "" for a mapping."""
        return ""

    def references(self) -> Iterator[tuple[Path, int]]:
        """Yield the paths that interpolations refer to, each with the line of the interpolation."""
        return references_in(self.text, reference_root(self.values))


def nearest_line(document: Document, path: Path) -> int:
    """Return the line of ``path``, or of its nearest parent that is written in the file."""
    for depth in range(len(path), -1, -1):
        try:
            return document.line_of(path[:depth])
        except (KeyError, IndexError):
            continue
    return 1
