"""A text with its values and places, and edits by positions, which leave every other character as it is."""

import abc
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def is_too_deep(values: Any) -> bool:
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


_REFERENCE = re.compile(r"\$\{([\w.]+)\}|\n")


def references_in(text: str) -> Iterator[tuple[Path, int]]:
    """The paths that interpolations in a text refer to, each with its line."""
    line = 1
    for found in _REFERENCE.finditer(text):
        if found[1] is None:
            line += 1
        else:
            yield tuple(int(part) if part.isdecimal() else part for part in found[1].split(".")), line


_ONE_REFERENCE = re.compile(r"\$\{[\w.]+\}")


def referred(values: Any, written: Any) -> Mapping[str, Any] | None:
    """The mapping that stands in a file where an interpolation refers to, by way of others; None if there is none."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(written, str) and _ONE_REFERENCE.fullmatch(written)):
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
        values: What it holds: a mapping, if there is no ``problem``.
        problem: Why no system reads it as its configuration, with file, line and column; "" if one may.
        takes_entries: Whether a section of one system can be replaced by another system's, within the text.
        has_aliases: Whether a value may stand in more than one place.
    """

    name: str
    original: str
    values: Any
    problem: str
    takes_entries: bool
    has_aliases: bool

    @abc.abstractmethod
    def edited(self, edits: Iterable[Edit]) -> str:
        """The original text with all edits made."""

    @abc.abstractmethod
    def line_of(self, path: Path) -> int:
        """The line of the key at ``path``, from 1. Raises KeyError: there is none."""

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        """A message about a key that stands twice in the mapping at ``path``; "" if none does.

        Args:
            key: The only one that is asked about; None asks about all.
        """
        return ""

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

    @abc.abstractmethod
    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        """Put another entry in the place of the one at ``path``; comments stay, in their order.

        Args:
            given: The values of the mapping that the entry lies in.
        """

    def stands_for(self, path: Path, others: Sequence[Path]) -> Path | None:
        """The other path that the value at ``path`` is only an alias of, or an interpolation; None if it is none."""
        return None

    def written_as(self, path: Path) -> str:
        """What stands at ``path`` in the place of a mapping: an alias, an interpolation; "" if the mapping does."""
        return ""

    def references(self) -> Iterator[tuple[Path, int]]:
        """The paths that interpolations refer to, each with the line of the interpolation."""
        return iter(())

    def holds_line(self, path: Path, line: int) -> bool:
        """Whether a line is part of what stands at ``path``."""
        return False
