"""Look up a key or a value in the tables of all dialects: its meaning under FSDP1, and its outcome under FSDP2."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.text import nearest_names, text_width
from composer_fsdp2.config.value import plain
from composer_fsdp2.migration.class_arguments import FSDPClass
from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.dialects import DIALECTS

# Version of the object that ``explain --json`` prints; a new version means that programs which read it must change.
VERSION = 1
# What can be asked for: the keys of every dialect, and the arguments of FSDP1's class.
EXPLAINED: dict[str, Dialect] = {**DIALECTS, FSDPClass.name: FSDPClass()}
SCHEMA = Path(__file__).with_name("explain.schema.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutcome:
    """The outcome of one value of a key.

    Args:
        readers: The readers with this outcome; empty if the dialect has only one reader.
    """

    value: Any
    finding: Finding
    readers: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        finding = self.finding.to_json()
        names = ("outcome", "target", "reason", "hint")
        return {"value": plain(self.value), "readers": list(self.readers), **{name: finding[name] for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A row that matches a query, with the outcome of each value if the outcome depends on the value.

    Args:
        queried_value: The value that was looked up; empty if a key was looked up.
    """

    dialect: Dialect
    row: Row
    value_outcomes: tuple[ValueOutcome, ...] = ()
    queried_value: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        return self.dialect.places(self.row)

    @property
    def read_by(self) -> tuple[str, ...]:
        return self.dialect.read_by(self.row)

    def default_text(self, quote: str = "") -> str:
        """Return the default as text. If readers have different defaults, each with its readers."""
        texts = {
            reader: f"{quote}{value_text(value)}{quote}" for reader, value in self.dialect.defaults(self.row).items()
        }
        readers = {text: [reader for reader, its_text in texts.items() if its_text == text] for text in texts.values()}
        if len(readers) < 2:
            return "".join(readers)
        return ", ".join(f"{text} ({'; '.join(names)})" for text, names in readers.items())

    def to_json(self) -> dict[str, object]:
        dialect, row = self.dialect, self.row
        return {
            "dialect": dialect.name,
            "key": row.name,
            "asked_as": "value" if self.queried_value else "key",
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
            "values": [outcome.to_json() for outcome in self.value_outcomes],
        }

    def __str__(self) -> str:
        first, *others = self.places
        row, dialect = self.row, self.dialect
        instead = [("instead", f"{equivalent} ({reader})") for reader, equivalent in dialect.instead(row).items()]
        values = [("value", self._outcome_text(each)) for each in self.value_outcomes]
        common = [("read by", "; ".join(self.read_by)), ("with", row.only_with), ("meant", row.meaning)]
        of_key = [
            ("or", ", ".join(others)),
            ("parts", ", ".join(row.nested)),
            ("default", self.default_text()),
            ("takes", row.takes.text),
            *common,
            ("FSDP2", f"{row.outcome.value}: {row.target}" if row.target else row.outcome.value),
            ("", row.reason + (f" ({row.hint})" if row.hint else "")),
            *instead,
            ("", row.elsewhere),
            *values,
        ]
        # For a value, the text about the key's other values is left out.
        lines = [f"{dialect.name}: {first}" + (f" = {self.queried_value}" if self.queried_value else "")]
        for name, text in [*common, *values, *instead] if self.queried_value else of_key:
            lines += textwrap.wrap(text, text_width(110), initial_indent=f"  {name:<9}", subsequent_indent=" " * 11)
        return "\n".join(lines)

    def _outcome_text(self, outcome: ValueOutcome) -> str:
        found = outcome.finding
        under = "" if outcome.readers == self.read_by else f" [{'; '.join(outcome.readers)}]"
        target = f"{found.outcome.value}, {found.target}" if found.target else found.outcome.value
        hint = f" ({found.hint})" if found.hint else ""
        return f"{value_text(outcome.value)}{under}: {target}: {found.reason}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one query.

    Args:
        implicit: Dialect -> findings for implicit behavior that no key configures.
        near: Dialect -> similar keys and values, if the query matches nothing.
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


def value_text(value: Any) -> str:
    """Return a value in YAML notation; an empty list is ``none``."""
    value = plain(value)
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{key}: {value_text(each)}" for key, each in value.items()) + "}"
    return _TEXTS.get(repr(value), str(value))


_TEXTS = {"None": "null", "True": "true", "False": "false", "[]": "none", "'[]'": "none", "''": "''"}

# ---------------------------------------------------------------------------------------------------------------------
# Queries


def explain(query: str, *, dialect: str | None = None) -> list[Explanation]:
    """Look up a key or a value in each dialect.

    Rows whose key matches come first, then rows that accept the text as a value. A key may have a path or prefix, or be
    spelled as a command-line option.

    Args:
        query: ``KEY``, ``VALUE``, or ``KEY=VALUE`` for the outcome of one value.
        dialect: The only dialect to search; None searches all.
    Returns:
        The matching rows; empty if no dialect has a match (see ``nearest``).
    """
    written, name, value = _key_and_value(query)
    depths = [(system, row, _num_shared_parts(system, row, name)) for system, row in _rows(dialect)]
    least = 2 if any(depth > 1 for *_, depth in depths) else 1  # a path beats a last name, which may be ambiguous
    found = [(system, row) for system, row, depth in depths if depth >= least]
    if value is not None:
        values = ((system, row, _read(value, row, name.rpartition(".")[2])) for system, row in found)
        return [
            Explanation(dialect=system, row=row, value_outcomes=_value_outcomes(system, row, [each]))
            for system, row, each in values
        ]
    of_keys = (
        Explanation(dialect=system, row=row, value_outcomes=_distinct_outcomes(system, row)) for system, row in found
    )
    return [*of_keys, *_rows_taking(written, dialect)]


def _rows_taking(query: str, dialect: str | None) -> Iterator[Explanation]:
    """Yield the rows that accept the text as a value, with its outcome.

    A number is not looked up, because many rows accept it.
    """
    for system, row in _rows(dialect) if any(map(str.isalpha, query)) else ():
        if values := _matching_values(system, row, query):
            shown = next((value for value in values if isinstance(value, str)), query)
            yield Explanation(
                dialect=system, row=row, value_outcomes=_value_outcomes(system, row, values), queried_value=shown
            )


def _matching_values(dialect: Dialect, row: Row, query: str) -> list[Any]:
    """Return the text as values of the row or of its nested keys, in the letter case that the row accepts."""
    texts = ((value, value.values() if isinstance(value, Mapping) else (value,)) for value in dialect.values(row))
    own = [
        value for value, each in texts if any(isinstance(text, str) and text.lower() == query.lower() for text in each)
    ]
    if not own and any(isinstance(choice, bool) for choice in row.takes.choices):
        return []  # "on" and "off" do not identify a Boolean key
    if _accepts_specifically(dialect, row, query):
        return [query]
    return own[:1] or [{part: query} for part in row.nested if _accepts_specifically(dialect, row, query, part)]


def _accepts_specifically(dialect: Dialect, row: Row, text: str, part: str = "") -> bool:
    """Return whether the row, or its nested key ``part``, accepts this text because it is a known value, not any
    string."""
    query, *others = ({part: each} if part else each for each in (text, *_UNKNOWN_TEXTS))
    return any(
        row.takes.fits(query, reader) and not any(row.takes.fits(other, reader) for other in others)
        for reader in dialect.readers or (None,)
    )


_UNKNOWN_TEXTS = ("no-word-of-any-system", "NoWordOfAnySystem")  # the second looks like a class name


def all_keys(dialect: str | None = None) -> list[Explanation]:
    """Return an explanation of every row, in all dialects or in one."""
    return [
        Explanation(dialect=system, row=row, value_outcomes=_distinct_outcomes(system, row))
        for system, row in _rows(dialect)
    ]


def nearest(query: str, *, dialect: str | None = None) -> dict[str, list[str]]:
    """Return the keys, and values as KEY=VALUE, that resemble the query, by dialect."""
    written, name, value = _key_and_value(query)
    near: dict[str, list[str]] = {}
    for system in _dialects(dialect):
        keys, texts = _keys(system), {} if value is not None else _text_values(system)
        spelled = dict.fromkeys((name, name.rpartition(".")[2]))
        matches = dict.fromkeys(keys[match] for each in spelled for match in nearest_names(each, keys, 3))
        # Values are many: with the default likeness, one of them would often match before the intended key.
        similar_values = [texts[match] for match in nearest_names(written, texts, 3, likeness=0.75)]
        near[system.name] = [*list(matches)[:3], *similar_values]
    return {name: names for name, names in near.items() if names}


def names_with_prefix(incomplete: str) -> list[str]:
    """Return the keys (without path) and values of all dialects that start with a text, for shell completion."""
    known = (name for system in EXPLAINED.values() for name in (*_keys(system), *_text_values(system)))
    return sorted({name for name in known if name.startswith(incomplete) and "." not in name})


def _keys(dialect: Dialect) -> dict[str, str]:
    """Map each name of a key, with and without its path, to the usual path of the key."""
    places = ((place, dialect.places(row)[0]) for row in dialect.rows for place in _all_paths(dialect, row))
    return {name: usual for place, usual in places for name in (place, place.rpartition(".")[2])}


def _text_values(dialect: Dialect) -> dict[str, str]:
    """Map each string value to ``KEY=VALUE`` with the first key that accepts it."""
    texts: dict[str, str] = {}
    for row in dialect.rows:
        new = (value for value in dialect.values(row) if isinstance(value, str) and value and value not in texts)
        texts |= {each: f"{dialect.places(row)[0]}={each}" for each in new}
    return texts


def implicit_settings(dialect: str | None = None) -> dict[str, list[Finding]]:
    """Return findings for implicit behavior that no key configures, by dialect. Defaults of keys are not included."""
    found = {
        system.name: {
            finding.key: finding
            for section in system.silent
            for finding in system.read(section).findings
            if finding.origin is Origin.IMPLICIT and all(row.name != finding.key for row in system.rows)
        }
        for system in _dialects(dialect)
    }
    return {name: list(findings.values()) for name, findings in found.items() if findings}


def _read(text: str, row: Row, name: str) -> Any:
    """Parse a value as YAML, as in a file; return the text itself if it is not valid YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    return {name: value} if name in row.nested else value


def _dialects(name: str | None) -> Iterator[Dialect]:
    yield from (dialect for dialect in EXPLAINED.values() if name in (None, dialect.name))


def _rows(dialect: str | None) -> Iterator[tuple[Dialect, Row]]:
    yield from ((system, row) for system in _dialects(dialect) for row in system.rows)


def _key_and_value(query: str) -> tuple[str, str, str | None]:
    """Split ``KEY=VALUE``, or ``KEY: VALUE`` copied from a file, and strip quotes and punctuation.

    Returns:
        The key as written; the key as a dotted name in lower case, also of options (``--fsdp-size``) and environment
            variables; the value, or None.
    """
    written, *values = re.split(r"\s*=\s*|:\s+", query.strip(), maxsplit=1)
    written = written.strip().strip("\"'`:,")
    name = written.lstrip("-").replace("-", "_").lower().removeprefix("$.")
    return written, ".".join(filter(None, name.split("."))), next(iter(values), None)


def _all_paths(dialect: Dialect, row: Row) -> list[str]:
    """Return every path of the row and of its nested keys."""
    return [name for place in dialect.places(row) for name in (place, *(f"{place}.{part}" for part in row.nested))]


def _num_shared_parts(dialect: Dialect, row: Row, query: str) -> int:
    """Return how many trailing parts a query shares with a path of the row, if one ends with the other; else 0."""
    names = (f".{name.lower()}" for name in _all_paths(dialect, row))
    matches = (name for name in names if name.endswith(f".{query}") or f".{query}".endswith(name))
    return max((min(name.count("."), query.count(".") + 1) for name in matches), default=0)


def _distinct_outcomes(dialect: Dialect, row: Row) -> tuple[ValueOutcome, ...]:
    """Return the outcomes of the row's values if they differ from the row's; for Boolean values, only if ``outcome``
    differs."""
    value_outcomes = _value_outcomes(dialect, row, dialect.values(row))
    length = 1 if all(isinstance(outcome.value, bool) for outcome in value_outcomes) else 4
    return (
        value_outcomes
        if any(_outcome_fields(outcome.finding)[:length] != _outcome_fields(row)[:length] for outcome in value_outcomes)
        else ()
    )


def _outcome_fields(item: Finding | Row) -> tuple[object, ...]:
    return (item.outcome, item.target, item.reason, item.hint)


def _value_outcomes(dialect: Dialect, row: Row, values: Iterable[Any]) -> tuple[ValueOutcome, ...]:
    """Return one outcome for each value, or several if readers of the dialect have different outcomes."""
    value_outcomes: dict[object, ValueOutcome] = {}
    for number, value in enumerate(values):
        for reader, finding in _reader_findings(dialect, row, value):
            same = value_outcomes.get(
                (number, _outcome_fields(finding)), ValueOutcome(value=value, finding=finding, readers=())
            )
            readers = (*same.readers, reader) if reader else ()
            value_outcomes[number, _outcome_fields(finding)] = replace(same, readers=readers)
    return tuple(value_outcomes.values())


def _reader_findings(dialect: Dialect, row: Row, value: Any) -> Iterator[tuple[str, Finding]]:
    """Yield each reader and the finding of a value, from reading the smallest file with this value."""
    for reader, file in dialect.files(row, value).items():
        parts = dialect.place(row, file).split(".")
        ends = [".".join(parts[number:]) for number in range(len(parts))]  # a report may omit leading parts
        for found in dialect.read(dialect.with_key(row, value, file)).findings:
            # For a wrong value, Composer's reader names the section, and others name each key of a mapping value.
            is_own = any(f"{found.key}.".startswith(f"{end}.") for end in (*ends, *map(str, file.path[-1:])))
            if is_own and found.origin is Origin.KEY:
                yield reader, found
