"""Parse text documents to values with positions, and edit them by position, so all other characters are preserved."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.paths import Path, Settings, has_path, value_at, with_entries

MAX_DEPTH = 64  # of nested values; a configuration has about ten levels, and Python's recursion is limited
TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"


class Edit(NamedTuple):
    """Replace the characters from ``start`` up to ``end`` by ``text``."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits applied.

    Raises:
        ValueError: Two edits overlap.
    """
    pieces: list[str] = []
    position = 0
    for edit in sorted(edits):
        if edit.start == edit.end <= position and edit.text.startswith("\n") and pieces[-1:] == [""]:
            # Lines behind the last line of a mapping, which is removed: in its place.
            pieces.append(edit.text[1:] + "\n" * (text[position - 1] == "\n"))
            continue
        if edit.start < position:
            raise ValueError(f"edits overlap at character {edit.start}")
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])


@dataclass
class Entry:
    """The span of a key and its value in the text. The key of an array item is its index; that of the whole file is "".

    Args:
        start: The position of the key's first character.
        end: The position after the value's last character.
        value: The position of the value's first character; for an alias, that of the anchored value.
        below: The entries in the value, if it is a mapping or an array; for a merge (``<<``), the entries that it adds.
        in_braces: Whether the value, if a mapping, is written in braces.
    """

    key: Any
    start: int
    end: int
    value: int
    below: list["Entry"]
    in_braces: bool = True

    @functools.cached_property
    def by_key(self) -> dict[Any, "Entry"]:
        """The entries in the value by key. Of duplicate keys, the last one, as in parsers."""
        return {each.key: each for each in self.below}

    @property
    def merged(self) -> dict[Any, "Entry"]:
        """The entries that a merge (``<<``) adds to the value, even if the value overrides them."""
        return self.by_key[MERGE].by_key if MERGE in self.by_key else {}


MERGE = "<<"


def line_edits(
    text: str, entries: Mapping[str, Entry], new: Mapping[str, Sequence[str]], added: Sequence[str]
) -> Iterator[Edit]:
    """Yield edits of a mapping whose entries are on separate lines.

    Args:
        entries: All entries of the mapping, by key.
        new: Key of an entry -> the lines that replace it. The comment after the entry is preserved.
        added: Lines to append.
    """
    *_, last = entries
    if new.get(last) == []:  # the new lines take its line and its comment
        new = {**new, last: added}
    elif added:
        behind = line_end(text, entries[last].end)
        yield Edit(behind, behind, "".join(f"\n{indent_at(text, entries[last].start)}{line}" for line in added))
    for key, lines in new.items():
        start, end = entries[key].start, entries[key].end
        line_start = text.rfind("\n", 0, start) + 1
        comment = comment_behind(text, end)
        if lines or text[line_start:start].strip():  # the line stays if it begins with a list item's dash
            yield Edit(start, end, f"\n{indent_at(text, start)}".join(lines))
        elif comment is not None:
            yield Edit(start, comment, "")
        else:
            yield Edit(line_start, text.find("\n", end) + 1 or len(text), "")


def indent_at(text: str, position: int) -> str:
    """Return the indentation of ``position`` in its line. Other characters before it are replaced by spaces."""
    before = text[text.rfind("\n", 0, position) + 1 : position]
    return before if not before.strip() else " " * len(before)


def line_end(text: str, position: int) -> int:
    """Return the position of the end of a position's line."""
    end = text.find("\n", position)
    return position + len(text[position : None if end < 0 else end].removesuffix("\r"))


def comment_behind(text: str, position: int) -> int | None:
    """Return the position of the comment that follows ``position`` in its line; None without one."""
    found = re.compile(r"[ \t]*(?=#)").match(text, position)
    return found and found.end()


def brace_edits(text: str, mapping: Entry, new: Mapping[str, str], added: str, comma: str) -> Iterator[Edit]:
    """Yield edits of a mapping in braces. Comments between entries are preserved.

    Args:
        new: Key of an entry -> the text that replaces it. "" removes the entry with the comma after it, or before it if
            it is the last.
        added: Entries to append.
        comma: The separator before ``added``.
    """
    entries = mapping.below
    first, last = text.index("{", mapping.value) + 1, str(entries[-1].key)
    if added and last in new:
        new = {**new, last: comma.join(filter(None, (new[last], added)))}
    elif added:
        yield Edit(entries[-1].end, entries[-1].end, f"{comma}{added}")
    staying = [number for number, each in enumerate(entries) if new.get(str(each.key), "stays")]
    if not staying:
        yield Edit(entries[-1].end, mapping.end - 1, _comments_of(text[entries[-1].end : mapping.end - 1]))
    for number, each in enumerate(entries):
        here = new.get(str(each.key))
        if here:
            yield Edit(each.start, each.end, here)
        elif here is not None and staying and number < staying[-1]:
            behind = entries[number + 1].start
            yield Edit(each.start, behind, _comments_of(text[each.end : behind]))
        elif here is not None:
            before = entries[number - 1].end if number else first
            yield Edit(before, each.end, _comments_of(text[before : each.start]))


def _comments_of(gap: str) -> str:
    """Return the comments in the text between two entries, without the comma."""
    return re.sub(r"\A((?:\s|#[^\n]*)*),", r"\1", gap) if "#" in gap else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """The entries that replace an entry.

    Args:
        heads: The names of the new entry and of mappings nested in it, outermost first, each with the entries that come
            first. The innermost mapping contains ``replacements`` and ``additions``.
        beside: Further entries after the new entry.
        inner: The path of the mapping in the old entry that has the keys of ``replacements``, or None.
        around: Replacements of other entries in the mapping that contains the entry.
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


def differences(expected: Any, found: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths at which two values differ.

    An interpolation in ``found`` is equal to any value, because no edit writes a new interpolation.
    """
    if isinstance(found, str) and "${" in found:
        return
    expected, found = (dict(enumerate(each)) if isinstance(each, list | tuple) else each for each in (expected, found))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in {**expected, **found}:
            if key in expected and key in found:
                yield from differences(expected[key], found[key], (*path, key))
            else:
                yield (*path, key)
    elif repr(expected) != repr(found):  # 1, 1.0 and true are equal, and mean different things; nan is not equal to nan
        yield path


def place_of(text: str, position: int) -> tuple[int, int]:
    """Return the line and the column of a position, both from 1."""
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)


# In error messages of json and tomllib.
_PLACED = re.compile(r"(.*)(?:: | \(at )(?:line (\d+),? column (\d+)|end of document).*")


def read_values(loads: Callable[[str], Any], text: str, name: str) -> Any:
    """Parse a text with the ``loads`` of json or tomllib.

    Raises:
        ConfigError: The text is invalid or nested too deep; the message has file, line and column.
    """
    try:
        values = loads(text)
        if _depth(values) > MAX_DEPTH + 1:
            raise RecursionError
    except RecursionError as error:
        raise ConfigError(f"{name}:1:1: {TOO_DEEP}") from error
    except ValueError as error:
        found = _PLACED.fullmatch(str(error))
        if found is None:  # an integer with too many digits
            raise ConfigError(f"{name}:1:1: {error}") from error
        line, column = found.group(2, 3) if found[2] else place_of(text, len(text))
        raise ConfigError(f"{name}:{line}:{column}: {found[1]}") from error
    return values


def _depth(values: Any) -> int:
    below = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return 1 + max(map(_depth, below), default=0)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PARAMETERS = "parameters"


def reference_root(values: Any) -> Path:
    """Return the path of the mapping to which interpolations are relative.

    This is the top of the file. In an MCLI run file it is ``parameters``, which MCLI mounts as a separate file.
    """
    is_run = isinstance(values, Mapping) and isinstance(values.get(_PARAMETERS), Mapping)
    return (_PARAMETERS,) if is_run and not {"command", "image", "compute"}.isdisjoint(values) else ()


def references_in(text: str, root: Path = ()) -> Iterator[Path]:
    """Yield the paths that interpolations in a text refer to."""
    for name in _REFERENCE.findall(text):
        yield (*root, *(int(part) if part.isdecimal() else part for part in name.split(".")))


def referenced_mapping(values: Any, written: Any) -> Mapping[str, Any] | None:
    """Return the mapping to which an interpolation refers, directly or through others; None if it refers to none."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(written, str) and _REFERENCE.fullmatch(written)):
            break
        (path,) = references_in(written, reference_root(values))
        written = value_at(values, path) if has_path(values, path) else None
    return written if isinstance(written, Mapping) else None


def with_references(values: Any, written: Any) -> Any:
    """Return the values with interpolations as in the file, except for relative ones, which depend on their
    position."""
    if isinstance(values, Mapping) and isinstance(written, Mapping):
        return {key: with_references(each, written.get(key)) for key, each in values.items()}
    return written if isinstance(written, str) and "${" in written and "${." not in written else values


class Document:
    """The text of a configuration file. Subclasses implement one format; the default methods edit entries in braces.

    Attributes:
        name: The name of the file, for messages.
        original: The unchanged text.
        text: The text to which positions refer, without byte order mark.
        values: The parsed values; a mapping unless there is a ``problem``.
        problem: Why the file cannot be a configuration, with file, line and column; otherwise "".
        root: The entry of the whole file.
        suffixes: The suffixes of the format in lower case; those of files may be in any case.
        takes_entries: Whether a section can be replaced by one of another system in the same text.
        has_aliases: Whether the text has aliases, so one value is used at several places.
    """

    values: Any
    problem: str
    root: Entry
    suffixes: tuple[str, ...]
    takes_entries = True
    has_aliases = False

    def __init__(self, text: str, name: str = "<text>") -> None:
        self.original, self.name = text, name
        self.text = text.removeprefix("\ufeff")

    @staticmethod
    def lines(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of a new file with these values. No target writes JSON."""
        raise NotImplementedError

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the original text with the edits applied. New lines get the most frequent line ending of the file.

        Raises:
            ValueError: Two edits overlap.
        """
        bare = self.original.removeprefix("\ufeff")
        ends = Counter(re.findall("\r\n|\n|\r", bare))
        newline = max(ends, key=lambda end: ends[end], default="\n")
        new = (edit._replace(text=re.sub("\r?\n", newline, edit.text)) for edit in edits)
        return self.original[: len(self.original) - len(bare)] + apply_edits(bare, new)

    def entry(self, path: Path) -> Entry:
        """Return the entry at ``path``, which a merge may have added. Raises KeyError if it does not exist."""
        entry = self.root
        for key in path:
            entry = entry.by_key[key] if key in entry.by_key else entry.merged[key]
        return entry

    def line_of(self, path: Path) -> int:
        """Return the line of the key at ``path``, from 1. Raises KeyError if it does not exist."""
        return place_of(self.text, self.entry(path).start)[0]

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        """Return a message about a duplicate key in the mapping at ``path``, or "".

        Args:
            key: The only key to check; None checks all.
        """
        seen: dict[str | int, int] = {}
        for each in self.entry(path).below:
            if each.key in seen and key in (None, each.key) and each.key != MERGE:
                (first, _), (line, column) = place_of(self.text, seen[each.key]), place_of(self.text, each.start)
                return f"{self.name}:{line}:{column}: {each.key} stands in line {first}, too"
            seen[each.key] = each.start
        return ""

    def is_written_at(self, path: Path) -> bool:
        """Return whether the value at ``path`` is written there, and not elsewhere as the source of an alias or a
        merge."""
        entries = [self.entry(path[:depth]) for depth in range(len(path) + 1)]
        return all(
            above.start <= each.start <= each.value <= each.end <= above.end for above, each in pairwise(entries)
        )

    def written_as(self, path: Path) -> str:
        """Return the alias or interpolation at ``path``, or "" if a mapping is written there."""
        value = value_at(self.values, path)
        if isinstance(value, str):
            return value
        if self.is_written_at(path):
            return ""
        return f"an alias of what begins in line {place_of(self.text, self.entry(path).value)[0]}"

    def stands_for(self, path: Path, others: Sequence[Path]) -> bool:
        """Return whether the value at ``path`` is an alias of, or an interpolation with, a value at one of the other
        paths."""
        value = value_at(self.values, path)
        if isinstance(value, str):
            return any(each in others for each in references_in(value, reference_root(self.values)))
        own = (each for each in others if each != path and self.is_written_at(each))
        return self.entry(path).value in [self.entry(each).value for each in own]

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        """Return edits that replace entries of the mapping at ``path``. All other bytes are preserved.

        A merge (``<<``) is expanded if one of its entries is replaced. If ``path`` is an alias or interpolation, the
        mapping is copied to ``path``, and its source does not change.

        Args:
            replacements: Key -> the entries that replace it; an empty sequence removes it. A comment after a removed
                entry is preserved on a separate line.
            additions: Entries to append.
            given: The values of the mapping with interpolations resolved; None if it has none.
        Raises:
            KeyError: ``path`` is not a mapping, or it lacks a key of ``replacements``.
        """
        if not replacements and not additions:
            return []
        written = value_at(self.values, path)
        values = written if given is None else given
        if missing := replacements.keys() - values.keys():
            raise KeyError(f"{'.'.join(map(str, path))} has no {', '.join(sorted(missing))}")
        if path and self.written_as(path):
            kept = with_references(values, referenced_mapping(self.values, written))
            new = [(str(path[-1]), with_entries(kept, (), replacements, additions))]
            is_own = path[-1] in self.entry(path[:-1]).by_key
            return self.edit_mapping(path[:-1], {new[0][0]: new} if is_own else {}, () if is_own else new)
        mapping = self.entry(path)
        if not mapping.below:
            start = self.text.index("{", mapping.value)
            return [Edit(start, mapping.end, self.in_braces(mapping, additions))]
        if replacements.keys() & mapping.merged.keys():  # also if it has the key itself: the merge would restore it
            inherited = [each for each in with_references(values, written).items() if each[0] not in mapping.by_key]
            own = {key: new for key, new in replacements.items() if key in mapping.by_key}
            replacements = {**own, MERGE: [new for old in inherited for new in replacements.get(old[0], [old])]}
        same = {
            self.inline(mapping, (key, values[key])): self.text[each.start : each.end]
            for key, each in mapping.by_key.items()
            if key in values
        }
        return list(self.edits_in(mapping, replacements, additions, same))

    def edits_in(
        self, mapping: Entry, replacements: Mapping[str, Settings], additions: Settings, same: Mapping[str, str]
    ) -> Iterator[Edit]:
        """Yield edits of the entries of a mapping.

        Args:
            same: ``inline`` text of an old entry -> its text in the file, so the bytes of unchanged entries are
                preserved.
        """
        comma = self.comma(mapping)

        def text(entries: Settings) -> str:
            new = (self.inline(mapping, each) for each in entries)
            return comma.join(same.get(each, each) for each in new)

        new = {key: text(into) for key, into in replacements.items()}
        return brace_edits(self.text, mapping, new, text(additions), comma)

    def inline(self, mapping: Entry, entry: tuple[str, Any]) -> str:
        """Return a new entry's text between the braces of a mapping."""
        return self.in_braces(mapping, [entry])[1:-1].strip()

    def in_braces(self, mapping: Entry, entries: Settings) -> str:
        """Return the text of entries in braces, in the layout of ``mapping``."""
        raise NotImplementedError

    def comma(self, mapping: Entry) -> str:
        """Return the separator of entries in the layout of a mapping in braces."""
        return ", "

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        """Return edits that replace the entry at ``path``. Comments are preserved in their order.

        Args:
            given: The values of the mapping that contains the entry.
        """
        return self.edit_mapping(path[:-1], {str(path[-1]): entries_of(new), **new.around}, given=given)


def nearest_line(document: Document, path: Path) -> int:
    """Return the line of ``path``, or of its nearest parent that is written in the file."""
    try:
        return document.line_of(path)
    except KeyError:
        return nearest_line(document, path[:-1]) if path else 1
