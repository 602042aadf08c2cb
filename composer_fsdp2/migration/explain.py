"""What a key or a value did under FSDP1, and is under FSDP2, in every dialect: from the dialects' tables."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.text import nearest_names
from composer_fsdp2.config.value import plain
from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.dialects import DIALECTS

# Of the object that ``explain --json`` prints; another one means that a program has to be changed.
VERSION = 1
SCHEMA = Path(__file__).with_name("explain.schema.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one value of a key.

    Args:
        readers: In whose files; empty if the dialect has one reader only.
    """

    value: Any
    finding: Finding
    readers: tuple[str, ...]

    @property
    def looks(self) -> tuple[object, ...]:
        found = self.finding
        return (found.outcome, found.target, found.reason, found.hint)

    def to_json(self) -> dict[str, object]:
        told = self.finding.to_json()
        names = ("outcome", "target", "reason", "hint")
        return {"value": plain(self.value), "readers": list(self.readers), **{name: told[name] for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A row of a dialect's table, and the fates of those values that decide one.

    Args:
        word: The value that was asked for, where no key was.
    """

    dialect: Dialect
    row: Row
    fates: tuple[Fate, ...] = ()
    word: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        return self.dialect.places(self.row)

    @property
    def read_by(self) -> tuple[str, ...]:
        return self.dialect.read_by(self.row)

    def default_text(self, quote: str = "") -> str:
        """The default, or the defaults with their readers where these differ."""
        readers: dict[str, list[str]] = {}
        for reader, value in self.dialect.defaults(self.row).items():
            readers.setdefault(f"{quote}{value_text(value)}{quote}", []).append(reader)
        if len(readers) < 2:
            return "".join(readers)
        return ", ".join(f"{value} ({'; '.join(names)})" for value, names in readers.items())

    def to_json(self) -> dict[str, object]:
        dialect, row = self.dialect, self.row
        return {
            "dialect": dialect.name,
            "key": row.name,
            "asked_as": "value" if self.word else "key",
            "places": list(self.places),
            "aliases": list(dialect.aliases(row)),
            "parts": list(row.nested),
            "read_by": list(self.read_by),
            "instead": dict(dialect.instead(row)),
            "elsewhere": row.elsewhere,
            "default": plain(dialect.defaults(row)),
            "takes": row.takes.text,
            "meaning": row.meaning,
            "only_with": row.only_with,
            "outcome": row.outcome.value,
            "target": row.target,
            "reason": row.reason,
            "hint": row.hint,
            "values": [fate.to_json() for fate in self.fates],
        }

    def __str__(self) -> str:
        first, *_ = self.places
        lines = [f"{self.dialect.name}: {first}" + (f" = {self.word}" if self.word else "")]
        for name, text in self._of_word() if self.word else self._of_key():
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9}", subsequent_indent=_INDENT)
        return "\n".join(lines)

    def _of_key(self) -> Iterator[tuple[str, str]]:
        row, (_, *others) = self.row, self.places
        yield "or", ", ".join(others)
        yield "parts", ", ".join(row.nested)
        yield "default", self.default_text()
        yield "takes", row.takes.text
        yield "read by", "; ".join(self.read_by)
        yield "with", row.only_with
        yield "meant", row.meaning
        yield "FSDP2", f"{row.outcome.value}: {row.target}" if row.target else row.outcome.value
        yield "", row.reason + (f" ({row.hint})" if row.hint else "")
        yield from (("instead", f"{way} ({reader})") for reader, way in self.dialect.instead(row).items())
        yield "", row.elsewhere
        yield from (("value", self._fate_text(each)) for each in self.fates)

    def _of_word(self) -> Iterator[tuple[str, str]]:
        """What the key says of its other values would only stand in the way."""
        yield "read by", "; ".join(self.read_by)
        yield "with", self.row.only_with
        yield "meant", self.row.meaning
        yield from (("value", self._fate_text(each)) for each in self.fates)
        yield from (("instead", f"{way} ({reader})") for reader, way in self.dialect.instead(self.row).items())

    def _fate_text(self, fate: Fate) -> str:
        found = fate.finding
        under = "" if fate.readers == self.read_by else f" [{'; '.join(fate.readers)}]"
        target = f"{found.outcome.value}, {found.target}" if found.target else found.outcome.value
        hint = f" ({found.hint})" if found.hint else ""
        return f"{value_text(fate.value)}{under}: {target}: {found.reason}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that is said to one question.

    Args:
        implicit: What no key asks for, by dialect.
        near: What was likely meant, by dialect, where nothing is known.
    """

    keys: Sequence[Explanation] = ()
    implicit: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    error: str = ""
    near: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "error": self.error,
            "near": {name: list(names) for name, names in self.near.items()},
            "keys": [each.to_json() for each in self.keys],
            "implicit": {name: [finding.to_json() for finding in found] for name, found in self.implicit.items()},
        }


_WIDTH = 110
_INDENT = " " * 11


def value_text(value: Any) -> str:
    """As YAML says it."""
    value = plain(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{key}: {value_text(each)}" for key, each in value.items()) + "}"
    return {"[]": "none", "": "''"}.get(str(value), str(value))


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def explain(asked: str, *, dialect: str | None = None) -> list[Explanation]:
    """What each dialect makes of a key, named as a user has it (with its path in the file, with a prefix, as an
    option), and of a word that is a value of keys: those that are named so first, then those that take it.

    Args:
        asked: ``KEY``, ``VALUE``, or ``KEY=VALUE`` for the fate of one value. Empty result: no dialect knows it
            (``nearest``).
        dialect: Of this one only.
    """
    name, value = _key_and_value(asked)
    parts = _parts(name)
    rows = [(dialect_of, row, _depth(dialect_of, row, parts)) for dialect_of, row in _rows(dialect)]
    # An entire path beats a last name that is the same elsewhere.
    deepest_counts = any(depth > 1 for *_, depth in rows) and len(parts) > 1
    found = [(of, row) for of, row, depth in rows if depth > (1 if deepest_counts else 0)]
    if value is not None:
        return [
            Explanation(dialect=of, row=row, fates=_fates(of, row, [_read(value, row, parts[-1])])) for of, row in found
        ]
    return [
        *(Explanation(dialect=of, row=row, fates=_telling(of, row)) for of, row in found),
        *_taking(_plain(name), dialect),
    ]


def _taking(word: str, dialect: str | None) -> Iterator[Explanation]:
    """The rows that take a word as their value, with what becomes of it there; a number says nothing by itself."""
    for of, row in _rows(dialect) if any(map(str.isalpha, word)) else ():
        values = _values_of(of, row, word)
        if values:
            shown = next((value for value in values if isinstance(value, str)), word)
            yield Explanation(dialect=of, row=row, fates=_fates(of, row, values), word=shown)


def _values_of(dialect: Dialect, row: Row, word: str) -> list[Any]:
    """The word as values of the row, in a case that its system takes: the row's own, or one for each part of it."""
    own = [value for value in dialect.values(row) if word.lower() in map(str.lower, _texts_in(value))]
    if not own and any(isinstance(choice, bool) for choice in row.takes.choices):
        return []  # of a switch, "on" and "off" say nothing
    if _is_word_of(dialect, row, word):
        return [word]
    return own[:1] or [{part: word} for part in row.nested if _is_word_of(dialect, row, word, part)]


def _texts_in(value: Any) -> list[str]:
    each = value.values() if isinstance(value, Mapping) else (value,)
    return [text for text in each if isinstance(text, str)]


def _is_word_of(dialect: Dialect, row: Row, word: str, part: str = "") -> bool:
    """Whether it is one of the words that the row, or a part of it, takes, not just text where any is taken."""
    asked, *others = ({part: each} if part else each for each in (word, *_NO_WORDS))
    return any(
        row.takes.fits(asked, reader) and not any(row.takes.fits(other, reader) for other in others)
        for reader in dialect.readers or (None,)
    )


_NO_WORDS = ("no-word-of-any-system", "NoWordOfAnySystem")  # the second could be a class


def all_keys(dialect: str | None = None) -> list[Explanation]:
    """Every row of every table, or of one dialect's."""
    return [Explanation(dialect=of, row=row, fates=_telling(of, row)) for of, row in _rows(dialect)]


def nearest(asked: str, *, dialect: str | None = None) -> dict[str, list[str]]:
    """The known keys, and values as KEY=VALUE, that were likely meant, by dialect."""
    name, value = _key_and_value(asked)
    parts = _parts(name)
    near: dict[str, list[str]] = {}
    for of in _dialects(dialect):
        keys, words = _known(of, with_values=value is None)
        matches = [
            *(keys[match] for match in nearest_names(".".join(parts), keys, 3)),
            *(keys[match] for match in nearest_names(parts[-1] if parts else "", keys, 3)),
        ]
        # Of words there are many, so that a key is like one of them sooner than like the key that was meant.
        of_words = [words[match] for match in nearest_names(_plain(name), words, 3, likeness=0.75)]
        if matches or of_words:
            near[of.name] = [*list(dict.fromkeys(matches))[:3], *of_words]
    return near


def beginning_with(incomplete: str) -> list[str]:
    """The keys and the words of all dialects that begin so, as a shell completes them; keys by their last name."""
    known = (name for of in DIALECTS.values() for names in _known(of, with_values=True) for name in names)
    return sorted({name for name in known if name.startswith(incomplete) and "." not in name})


def _known(dialect: Dialect, *, with_values: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Every name of a key, and every word that is a value, each with how it is asked for."""
    keys: dict[str, str] = {}
    words: dict[str, str] = {}
    for row in dialect.rows:
        usual, *_ = dialect.places(row)
        for place in _named(dialect, row):
            keys |= dict.fromkeys((place, place.rpartition(".")[2]), usual)
        for value in dialect.values(row) if with_values else ():
            if isinstance(value, str) and value:
                words.setdefault(value, f"{usual}={value}")
    return keys, words


def implicit_settings(dialect: str | None = None) -> dict[str, list[Finding]]:
    """What a run does that no key asks for, by dialect; what a key's default asks for is told by its row."""
    found = {}
    for of in _dialects(dialect):
        keys = {row.name for row in of.rows}
        told = {
            finding.key: finding
            for section in of.silent
            for finding in of.read(section).findings
            if finding.origin is Origin.IMPLICIT and finding.key not in keys
        }
        if told:
            found[of.name] = list(told.values())
    return found


def _read(text: str, row: Row, name: str) -> Any:
    """As a file's value is read; a string, where it is not YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    return {name: value} if name in row.nested else value


def _dialects(name: str | None) -> Iterator[Dialect]:
    yield from (dialect for dialect in DIALECTS.values() if name in (None, dialect.name))


def _rows(dialect: str | None) -> Iterator[tuple[Dialect, Row]]:
    yield from ((of, row) for of in _dialects(dialect) for row in of.rows)


def _key_and_value(asked: str) -> tuple[str, str | None]:
    """``KEY=VALUE``, or a line as it stands in a file, ``KEY: VALUE``."""
    name, *values = re.split(r"\s*=\s*|:\s+", asked.strip(), maxsplit=1)
    return name, values[0] if values else None


def _plain(name: str) -> str:
    return name.strip().strip("\"'`:,")


def _parts(name: str) -> list[str]:
    """Options (``--fsdp-size``), keys with their colon and environment variables are keys as well."""
    plain_name = _plain(name).lstrip("-").replace("-", "_").lower()
    return [part for part in plain_name.removeprefix("$.").split(".") if part]


def _named(dialect: Dialect, row: Row) -> Iterator[str]:
    """Every path that leads to the row."""
    for place in dialect.places(row):
        yield place
        yield from (f"{place}.{part}" for part in row.nested)


def _depth(dialect: Dialect, row: Row, parts: list[str]) -> int:
    """How many parts of the name and of a place of the row are the same, if one is the other's end; else 0."""
    depths = [0]
    for place in _named(dialect, row):
        own = place.lower().split(".")
        length = min(len(own), len(parts))
        if length and own[-length:] == parts[-length:]:
            depths.append(length)
    return max(depths)


def _telling(dialect: Dialect, row: Row) -> tuple[Fate, ...]:
    """The fates of the row's values, if it is the value that decides; true and false only if the outcomes differ."""
    fates = _fates(dialect, row, dialect.values(row))
    if all(isinstance(fate.value, bool) for fate in fates):
        return fates if {fate.finding.outcome for fate in fates} - {row.outcome} else ()
    return fates if {fate.looks for fate in fates} - {(row.outcome, row.target, row.reason, row.hint)} else ()


def _fates(dialect: Dialect, row: Row, values: Iterable[Any]) -> tuple[Fate, ...]:
    """One for each value, or several where the readers of a dialect differ."""
    fates: list[Fate] = []
    for value in values:
        alike: dict[tuple[object, ...], Fate] = {}
        for fate in _asked(dialect, row, value):
            same = alike.get(fate.looks)
            alike[fate.looks] = fate if same is None else replace(same, readers=same.readers + fate.readers)
        fates += alike.values()
    return tuple(fates)


def _asked(dialect: Dialect, row: Row, value: Any) -> Iterator[Fate]:
    for question in dialect.questions(row, value):
        # Composer's reader names the section where a value is wrong, others each key of a value that is a mapping.
        keys = (question.key, *map(str, question.section.path[-1:]))
        readers = (question.reader,) if question.reader else ()
        for finding in dialect.read(question.section).findings:
            is_own = finding.key in keys or finding.key.startswith(f"{question.key}.")
            if is_own and finding.origin is Origin.KEY:
                yield Fate(value=value, finding=finding, readers=readers)
