"""Rows of a dialect's table of keys, and what they have in common: which values a key takes, and its usual finding."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer_fsdp2.compat.dialects.base import Part, Run
from composer_fsdp2.findings import ASKS_FOR_NOTHING, Finding, Outcome

__all__ = [
    "ANY",
    "BOOL",
    "POSITIVE_INT",
    "TEXT",
    "Gap",
    "Row",
    "Takes",
    "deciding",
    "default_hint",
    "finding_of",
    "gaps",
    "one_of",
    "unknown_key",
]


@dataclass(frozen=True, slots=True)
class Takes:
    """Which values a key takes, in words and as a test; all of them, if they are few."""

    text: str
    fits: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


ANY = Takes("any value", lambda value: True)
BOOL = Takes("true or false", lambda value: isinstance(value, bool), choices=(True, False))
POSITIVE_INT = Takes("a whole number from 1 on", _is_positive_int)
TEXT = Takes("a string", lambda value: isinstance(value, str))


def one_of(*values: Any) -> Takes:
    """Exactly these values; True is not 1."""
    text = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return Takes(
        text, lambda value: any(value == each and type(value) is type(each) for each in values), choices=values
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a system: what it means there, and its usual fate. A value can have another fate; the finding says so.

    Args:
        name: With dots, from where the system reads it.
        default: What the system takes if the file does not say it.
        outcome: Of a value that asks for something.
        neutral: Values that ask for nothing; they are unneeded.
        only_with: The key without which the system does not read this one.
        aliases: Names that the key had in earlier versions.
    """

    name: str
    default: Any
    meaning: str
    outcome: Outcome
    target: str
    reason: str
    hint: str = ""
    takes: Takes = field(default=ANY)
    neutral: tuple[Any, ...] = ()
    only_with: str = ""
    part: Part = Part.EXTRA
    aliases: tuple[str, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        return any(value == each and type(value) is type(each) for each in self.neutral)


def finding_of(row: Row, key: str, value: Any, *, is_read: bool = True) -> Finding:
    """The usual fate of ``row`` with this value.

    Args:
        key: As the report names it.
        is_read: Whether the key in ``row.only_with`` is on.
    """
    if not row.takes.fits(value):
        return Finding(
            key=key,
            value=value,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason=f"this key takes {row.takes.text}",
            hint=default_hint(row),
        )
    if row.only_with and not is_read:
        reason = f"it is read together with {row.only_with} only, which is off"
        return Finding(key=key, value=value, outcome=Outcome.UNNEEDED, target="", reason=reason)
    if row.is_neutral(value):
        reason = ASKS_FOR_NOTHING
        return Finding(key=key, value=value, outcome=Outcome.UNNEEDED, target="", reason=reason)
    return Finding(key=key, value=value, outcome=row.outcome, target=row.target, reason=row.reason, hint=row.hint)


def default_hint(row: Row) -> str:
    return "remove it" if row.default is None else f"its default is {row.default!r}"


def unknown_key(key: str, value: Any, known: Iterable[str], reason: str) -> Finding:
    """A key that the system does not know, with the one that was likely meant."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return Finding(key=key, value=value, outcome=Outcome.UNSUPPORTED, target="", reason=reason, hint=hint)


def deciding(parts: Mapping[str, Part], findings: Iterable[Finding]) -> dict[str, Part]:
    """Of keys with their parts those for which a target's words can stand: not what asks for nothing."""
    idle = {finding.key for finding in findings if finding.outcome is Outcome.UNNEEDED}
    return {key: part for key, part in parts.items() if part is not Part.EXTRA and key not in idle}


def as_it_is(findings: Iterable[Finding], system: str, unknown: str) -> Iterator[Finding]:
    """Findings for a section that stays in its system's own words, all of which hold as before.

    Args:
        unknown: The reason that keys have which the system does not know.
    """
    for finding in findings:
        if finding.key.startswith("("):  # how others do what no key says
            continue
        if finding.outcome in (Outcome.APPROXIMATE, Outcome.UNSUPPORTED) and finding.reason != unknown:
            reason = f"{system}'s FSDP2 reads it, as before"
            yield replace(finding, outcome=Outcome.EXACT, target="as it is", reason=reason, hint="")
        else:
            yield finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A part of a run that a target cannot say, or does in its own way.

    Args:
        said: The value that asks for it; None if the run does not. It goes for ``{value}`` in reason and hint.
    """

    key: str
    said: Callable[[Run], Any]
    outcome: Outcome
    reason: str
    target: str = ""
    hint: str = ""


def gaps(table: Iterable[Gap], run: Run) -> list[Finding]:
    """A finding for each gap that the run falls into."""
    found = []
    for gap in table:
        value = gap.said(run)
        if value is not None:
            found.append(
                Finding(
                    key=gap.key,
                    value=value,
                    outcome=gap.outcome,
                    target=gap.target,
                    reason=gap.reason.replace("{value}", str(value)),
                    hint=gap.hint.replace("{value}", str(value)),
                )
            )
    return found
