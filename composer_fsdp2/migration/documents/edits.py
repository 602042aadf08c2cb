"""A text with its values and places, and edits by positions, which leave every other character as it is."""

import abc
import bisect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.paths import Path, Settings, value_at

MAX_DEPTH = 64  # of values in values; a configuration has ten, and all of Python's recursion has its end somewhere
TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Put ``text`` in the place of the characters from ``start`` up to ``end``."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made.

    Raises:
        ValueError: two of them overlap.
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
    """A key with its value, from the key's first character to the value's last; an item of an array with its number."""

    key: Any
    start: int
    end: int


def line_edits(
    text: str, entries: Mapping[str, Entry], new: Mapping[str, Sequence[str]], added: Sequence[str]
) -> Iterator[Edit]:
    """Edits of entries that stand on lines of their own.

    Args:
        entries: All of the mapping, by key.
        new: By key, the lines that come in an entry's place; the comment behind it stays.
        added: New lines at the end.
    """
    *_, last = entries.values()
    if new.get(last.key) == []:  # its line, with the comment behind it, is that of the new ones
        new = {**new, last.key: added}
    elif added:
        behind = line_end(text, last.end)
        yield Edit(behind, behind, "".join(f"\n{indent_at(text, last.start)}{line}" for line in added))
    for key, lines in new.items():
        start, end = entries[key].start, entries[key].end
        line_start = text.rfind("\n", 0, start) + 1
        if lines or text[line_start:start].strip():  # behind the dash of a list's item the line stays
            yield Edit(start, end, f"\n{indent_at(text, start)}".join(lines))
        elif comment := comment_behind(text, end):
            yield Edit(start, line_end(text, end) - len(comment), "")
        else:
            yield Edit(line_start, min(line_end(text, end) + 1, len(text)), "")


def indent_at(text: str, position: int) -> str:
    """The white space before a position in its line, as wide as whatever else stands there."""
    before = text[text.rfind("\n", 0, position) + 1 : position]
    return before if not before.strip() else " " * len(before)


def line_end(text: str, position: int) -> int:
    """The end of a position's line."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def comment_behind(text: str, position: int) -> str:
    """The comment that stands behind a position in its line; "" if there is none."""
    found = re.compile(r"[ \t]*(#[^\n]*)").match(text, position)
    return found[1] if found else ""


def brace_edits(
    text: str, around: Entry, entries: Sequence[Entry], new: Mapping[str, str], added: str, comma: str
) -> Iterator[Edit]:
    """Edits of entries between braces; comments between two of them stay.

    Args:
        around: From brace to brace.
        new: By key, what comes in an entry's place; an entry without goes with the comma behind it, the last ones with
            the one before them.
        added: New entries at the end.
        comma: Before these.
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
    """What stays of the text between two entries, the comma not."""
    return re.sub(r"\A((?:\s|#[^\n]*)*),", r"\1", gap) if "#" in gap else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """What comes in the place of an entry.

    Args:
        heads: The names of the new entry and of the mappings in it, outermost first, each with the entries that it
            begins with. The innermost takes ``replacements`` and ``additions``.
        beside: Further entries after it.
        inner: The mapping within the old entry that ``replacements`` are about; None if there is none.
        around: Replacements in the mapping that the entry lies in.
    """

    heads: Sequence[tuple[str, Settings]]
    beside: Settings
    inner: Path | None
    replacements: Mapping[str, Settings]
    additions: Settings
    around: Mapping[str, Settings]


def entries_of(new: NewEntry) -> Settings:
    """The new entry with those beside it, as values."""
    settings = (*(each for into in new.replacements.values() for each in into), *new.additions)
    entries: dict[str, Any] = dict(settings)
    for name, first in reversed(new.heads):
        entries = {name: {**dict(first), **entries}}
    return [*entries.items(), *new.beside]


def with_entries(values: Any, path: Path, replacements: Mapping[str, Settings], additions: Settings = ()) -> Any:
    """What ``Document.edit_mapping`` is to make of the values."""
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
    """The paths at which two values differ. An interpolation may stand for anything: none is ever written anew."""
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
    """The line and the column of a position, from 1."""
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


_PLACED = re.compile(r"(.*)(?:: | \(at )line (\d+),? column (\d+).*")  # as json and tomllib put it
_AT_END = " (at end of document)"


def read_values(loads: Callable[[str], Any], text: str, name: str) -> Any:
    """The values of a text, by the ``loads`` of json or tomllib.

    Raises:
        ConfigError: it refuses the text; names file, line and column.
    """
    try:
        values = loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}:1:1: {TOO_DEEP}") from error
    except ValueError as error:
        problem, line, column = str(error), 1, 1  # an integer of too many digits
        if found := _PLACED.fullmatch(problem):
            problem, line, column = found[1], int(found[2]), int(found[3])
        elif problem.endswith(_AT_END):
            problem, (line, column) = problem.removesuffix(_AT_END), place_of(text, len(text))
        raise ConfigError(f"{name}:{line}:{column}: {problem}") from error
    if _is_too_deep(values):
        raise ConfigError(f"{name}:1:1: {TOO_DEEP}")
    return values


def _is_too_deep(values: Any) -> bool:
    """Whether values are nested more than ``MAX_DEPTH`` deep; without recursion, which they may be too deep for."""
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


def references_in(text: str) -> Iterator[tuple[Path, int]]:
    """The paths that interpolations in a text refer to, each with its line."""
    for found in _REFERENCE.finditer(text):
        line, _ = place_of(text, found.start())
        yield tuple(int(part) if part.isdecimal() else part for part in found[1].split(".")), line


def referred(values: Any, written: Any) -> Mapping[str, Any] | None:
    """The mapping that stands in a file where an interpolation refers to, by way of others; None if there is none."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(written, str) and _REFERENCE.fullmatch(written)):
            break
        ((path, _),) = references_in(written)
        try:
            written = value_at(values, path)
        except (KeyError, IndexError, TypeError):
            return None
    return written if isinstance(written, Mapping) else None


def with_references(values: Any, written: Any) -> Any:
    """The values as they are written, with their interpolations, as far as these mean the same in another place."""
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
    """The entry with all that an alias or an interpolation at ``path`` stands for, edited."""
    kept = with_references(given, referred(document.values, value_at(document.values, path)))
    return str(path[-1]), with_entries(kept, (), replacements, additions)


def refuse_missing(path: Path, replacements: Mapping[str, Settings], present: Collection[str | int]) -> None:
    """Raise KeyError if the mapping at ``path`` lacks a key that is to be replaced."""
    if missing := replacements.keys() - present:
        raise KeyError(f"{'.'.join(map(str, path))} has no {', '.join(sorted(missing))}")


class Document(abc.ABC):
    """A configuration file, whatever its format; by itself one in which no key stands twice, and nothing for something
    else.

    Attributes:
        name: What messages call it.
        original: The text as given.
        text: That in which places are: without byte order mark, with a line feed for each line end.
        values: What it holds: a mapping, if there is no ``problem``.
        problem: Why no system reads it as its configuration, with file, line and column; "" if one may.
        takes_entries: Whether a section of one system can be replaced by another system's, within the text.
        has_aliases: Whether a value may stand in more than one place.
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
        """The original text with edits of ``text``, in the line ends that most of its lines have.

        Raises:
            ValueError: two of them overlap.
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
        """The first and the last line of the entry at ``path``, from 1. Raises KeyError: there is none."""

    def line_of(self, path: Path) -> int:
        """The first of ``lines_of``: that of its key."""
        return self.lines_of(path)[0]

    def holds_line(self, path: Path, line: int) -> bool:
        """Whether a line is part of the entry at ``path``."""
        try:
            first, last = self.lines_of(path)
        except KeyError:  # it was itself an interpolation's
            return False
        return first <= line <= last

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        """A message about a key that stands twice in the mapping at ``path``; "" if none does.

        Args:
            key: The only one that is asked about; None asks about all.
        """
        seen: dict[str | int, int] = {}
        for name, position in self.positions_of_keys(path):
            if name in seen and key in (None, name):
                (first, _), (line, column) = place_of(self.text, seen[name]), place_of(self.text, position)
                return f"{self.name}:{line}:{column}: {name} stands in line {first}, too"
            seen[name] = position
        return ""

    def positions_of_keys(self, path: Path) -> Iterable[tuple[str | int, int]]:
        """The keys of the mapping at ``path``, each with its place in ``text``, if any of them may stand twice."""
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
        """Edits that put other entries in the place of some of a mapping's; all others keep their bytes.

        Args:
            replacements: By key, the entries that come in its place; none remove it. A comment behind a removed entry
                stays, on a line of its own.
            additions: New entries at the end.
            given: What the mapping holds, with interpolations resolved; None if that is what the text says.
        Raises:
            KeyError: there is no mapping at ``path``, or it lacks a key of ``replacements``.
        """

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        """Put another entry in the place of the one at ``path``; comments stay, in their order.

        Args:
            given: The values of the mapping that the entry lies in.
        """
        return self.edit_mapping(path[:-1], {str(path[-1]): entries_of(new), **new.around}, given=given)

    def stands_for(self, path: Path, others: Sequence[Path]) -> Path | None:
        """The other path that the value at ``path`` is only an alias of, or an interpolation; None if it is none."""
        return next((each for each, _ in references_in(self.written_as(path)) if each in others), None)

    def written_as(self, path: Path) -> str:
        """What stands at ``path`` in the place of a mapping: an alias, an interpolation; "" if the mapping does."""
        return ""

    def references(self) -> Iterator[tuple[Path, int]]:
        """The paths that interpolations refer to, each with the line of the interpolation."""
        return references_in(self.text)


def nearest_line(document: Document, path: Path) -> int:
    """The line of ``path``, or of the nearest above it that is written in the file."""
    for depth in range(len(path), -1, -1):
        try:
            return document.line_of(path[:depth])
        except (KeyError, IndexError):
            continue
    return 1
