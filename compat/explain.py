"""What a key did under FSDP1, and is under FSDP2, in every dialect that knows it: from the dialects' tables."""

import difflib
import enum
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from composer_fsdp2.compat.dialects import DIALECTS
from composer_fsdp2.compat.dialects.key_rows import TABLES, KeyRow
from composer_fsdp2.findings import Finding

__all__ = ["Explanation", "Fate", "all_keys", "default_text", "explain", "nearest", "unsaid", "value_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one value of a key.

    Args:
        readers: In whose files; empty if the dialect has one reader only.
    """

    value: Any
    finding: Finding
    readers: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        told = self.finding.to_json()
        return {
            "value": _plain(self.value),
            "readers": list(self.readers),
            **{name: told[name] for name in ("outcome", "target", "reason", "hint")},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A row of a dialect's table, and the fates of those values that decide one."""

    row: KeyRow
    fates: tuple[Fate, ...] = ()

    def to_json(self) -> dict[str, object]:
        row = self.row
        return {
            "dialect": row.dialect,
            "key": row.name,
            "places": list(row.places),
            "aliases": list(row.aliases),
            "parts": list(row.parts),
            "read_by": list(row.read_by),
            "instead": dict(row.instead),
            "elsewhere": row.elsewhere,
            "default": {reader: _plain(value) for reader, value in row.defaults.items()},
            "takes": row.takes,
            "meaning": row.meaning,
            "only_with": row.only_with,
            "outcome": row.outcome.value,
            "target": row.target,
            "reason": row.reason,
            "hint": row.hint,
            "values": [fate.to_json() for fate in self.fates],
        }

    def __str__(self) -> str:
        row = self.row
        fate = f"{row.outcome.value}: {row.target}" if row.target else row.outcome.value
        lines = [f"{row.dialect}: {row.places[0]}"]
        lines += _field("or", ", ".join(row.places[1:]))
        lines += _field("parts", ", ".join(row.parts))
        lines += _field("default", default_text(row))
        lines += _field("takes", row.takes)
        lines += _field("read by", "; ".join(row.read_by))
        lines += _field("with", row.only_with)
        lines += _field("meant", row.meaning)
        lines += _field("FSDP2", fate)
        lines += _field("", row.reason + (f" ({row.hint})" if row.hint else ""))
        for reader, way in row.instead.items():
            lines += _field("instead", f"{way} ({reader})")
        lines += _field("", row.elsewhere)
        for each in self.fates:
            lines += _field("value", _fate_text(each, row))
        return "\n".join(lines)


_WIDTH = 110
_INDENT = " " * 11


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9}", subsequent_indent=_INDENT)


def _fate_text(fate: Fate, row: KeyRow) -> str:
    found = fate.finding
    under = "" if fate.readers == row.read_by else f" [{'; '.join(fate.readers)}]"
    target = f"{found.outcome.value}, {found.target}" if found.target else found.outcome.value
    hint = f" ({found.hint})" if found.hint else ""
    return f"{value_text(fate.value)}{under}: {target}: {found.reason}{hint}"


def value_text(value: Any) -> str:
    """As YAML says it."""
    value = _plain(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return {"[]": "none", "": "''"}.get(str(value), str(value))


def _plain(value: Any) -> Any:
    """For JSON."""
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def default_text(row: KeyRow, quote: str = "") -> str:
    """The default, or the defaults with their readers where these differ."""
    readers: dict[str, list[str]] = {}
    for reader, value in row.defaults.items():
        readers.setdefault(f"{quote}{value_text(value)}{quote}", []).append(reader)
    if len(readers) < 2:
        return "".join(readers)
    return ", ".join(f"{value} ({'; '.join(names)})" for value, names in readers.items())


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def explain(key: str, *, dialect: str | None = None) -> list[Explanation]:
    """What each dialect makes of a key, named as a user has it: with its path in the file, with a prefix, as an option.

    Args:
        key: ``KEY``, or ``KEY=VALUE`` for the fate of one value. Empty result: no dialect knows it (``nearest``).
        dialect: Of this one only.
    """
    name, has_value, value = key.strip().partition("=")
    parts = _parts(name)
    rows = [(row, _depth(row, parts)) for row in _rows(dialect)]
    # A whole path beats a last name that is the same elsewhere.
    deepest_counts = any(depth > 1 for _, depth in rows) and len(parts) > 1
    found = [row for row, depth in rows if depth > (1 if deepest_counts else 0)]
    if has_value:
        return [Explanation(row=row, fates=_fates(row, [_read(value, row, parts[-1])])) for row in found]
    return [Explanation(row=row, fates=_telling(row)) for row in found]


def all_keys(dialect: str | None = None) -> list[Explanation]:
    """Every row of every table, or of one dialect's."""
    return [Explanation(row=row, fates=_telling(row)) for row in _rows(dialect)]


def nearest(key: str, *, dialect: str | None = None) -> dict[str, list[str]]:
    """By dialect, the known keys that were likely meant."""
    parts = _parts(key.partition("=")[0])
    near = {}
    for name, table in TABLES.items():
        if dialect not in (None, name):
            continue
        known: dict[str, str] = {}
        for row in table.rows:
            for place in _named(row):
                known |= dict.fromkeys((place, place.rpartition(".")[2]), row.places[0])
        matches = [
            *difflib.get_close_matches(".".join(parts), known, n=3, cutoff=0.6),
            *difflib.get_close_matches(parts[-1] if parts else "", known, n=3, cutoff=0.6),
        ]
        if matches:
            near[name] = list(dict.fromkeys(known[match] for match in matches))[:3]
    return near


def unsaid(dialect: str | None = None) -> dict[str, list[Finding]]:
    """By dialect, what a run does that no key says. A key that holds by default is no such thing: its row says it."""
    found = {}
    for name, table in TABLES.items():
        if dialect not in (None, name):
            continue
        keys = {row.name for row in table.rows}
        told = {
            finding.key: finding
            for section in table.silent
            for finding in DIALECTS[name].read(section).findings
            if finding.key.startswith("(unsaid) ") and finding.key.removeprefix("(unsaid) ") not in keys
        }
        if told:
            found[name] = list(told.values())
    return found


def _read(text: str, row: KeyRow, name: str) -> Any:
    """As a file's value is read; a string, where it is no YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    return {name: value} if name in row.parts else value


def _rows(dialect: str | None) -> Iterator[KeyRow]:
    for name, table in TABLES.items():
        if dialect in (None, name):
            yield from table.rows


def _parts(name: str) -> list[str]:
    """Options (``--fsdp-size``), keys with their colon and environment variables are keys as well."""
    plain = name.strip().strip("\"'`:").lstrip("-").replace("-", "_").lower()
    return [part for part in plain.removeprefix("$.").split(".") if part]


def _named(row: KeyRow) -> Iterator[str]:
    """Every path that leads to the row."""
    for place in row.places:
        yield place
        yield from (f"{place}.{part}" for part in row.parts)


def _depth(row: KeyRow, parts: list[str]) -> int:
    """How many parts of the name and of a place of the row are the same, if one is the other's end; else 0."""
    depths = [0]
    for place in _named(row):
        own = place.lower().split(".")
        length = min(len(own), len(parts))
        if length and own[-length:] == parts[-length:]:
            depths.append(length)
    return max(depths)


def _telling(row: KeyRow) -> tuple[Fate, ...]:
    """The fates of the row's values, if it is the value that decides; true and false only if the outcomes differ."""
    fates = _fates(row, row.values)
    if all(isinstance(fate.value, bool) for fate in fates):
        return fates if {fate.finding.outcome for fate in fates} - {row.outcome} else ()
    told = {(fate.finding.outcome, fate.finding.target, fate.finding.reason, fate.finding.hint) for fate in fates}
    return fates if told - {(row.outcome, row.target, row.reason, row.hint)} else ()


def _fates(row: KeyRow, values: Iterable[Any]) -> tuple[Fate, ...]:
    """One for each value, or several where the readers of a dialect differ."""
    fates: list[Fate] = []
    for value in values:
        told: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
        for reader, finding in _asked(row, value):
            looks = (finding.outcome.value, finding.target, finding.reason, finding.hint)
            told.setdefault(looks, (finding, []))[1].append(reader)
        fates += [
            Fate(value=value, finding=finding, readers=tuple(filter(None, readers)))
            for finding, readers in told.values()
        ]
    return tuple(fates)


def _asked(row: KeyRow, value: Any) -> Iterator[tuple[str, Finding]]:
    for asked in TABLES[row.dialect].asked(row, value):
        findings = DIALECTS[row.dialect].read(asked.section).findings
        # Composer's reader names the section where a value is wrong, others each key of a value that is a mapping.
        keys = (asked.key, *map(str, asked.section.path[-1:]))
        for finding in findings:
            if finding.key in keys or finding.key.startswith(f"{asked.key}."):
                yield asked.reader, finding
