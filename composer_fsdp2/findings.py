"""What became of one setting (``Finding``), and the table of them that a user reads."""

import enum
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ASKS_FOR_NOTHING", "OFF", "Finding", "Outcome", "format_findings"]

# Reasons of findings for values that are the same under every FSDP.
OFF = "off, as by default"
ASKS_FOR_NOTHING = "this value asks for nothing"


class Outcome(enum.Enum):
    """How an FSDP1 setting lives on under FSDP2."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNNEEDED = "unneeded"
    UNSUPPORTED = "unsupported"
    NEEDS_DECISION = "needs decision"

    @property
    def blocks(self) -> bool:
        """Whether a strict translation gives no configuration because of it."""
        return self in (Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one setting: its value, where it went, why, and what the user can do about it."""

    key: str
    value: object
    outcome: Outcome
    target: str
    reason: str
    hint: str = ""
    where: str = ""

    def to_json(self) -> dict[str, object]:
        value = self.value
        return {
            "key": self.key,
            "value": value if isinstance(value, bool | int | float | str | None) else repr(value),
            "outcome": self.outcome.value,
            "target": self.target,
            "reason": self.reason,
            "hint": self.hint,
            "where": self.where,
        }

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        where = f"   ({self.where})" if self.where else ""
        is_what = "needs a decision" if self.outcome is Outcome.NEEDS_DECISION else f"is {self.outcome.value}"
        return f"{self.key}: {self.value!r} {is_what}: {self.reason}{hint}{where}"


def format_findings(findings: Iterable[Finding], width: int = 110) -> str:
    """The findings as text: one line each (key, value, outcome, target), and the reason below it."""
    rows = [(f"{finding.key}: {_short(finding.value)}", finding) for finding in findings]
    if not rows:
        return "  (nothing was set: FSDP1's defaults hold)"
    first = max(len(said) for said, _ in rows)
    second = max(len(finding.outcome.value) for _, finding in rows)
    lines = []
    for said, finding in rows:
        lines.append(f"  {said:<{first}}  {finding.outcome.value:<{second}}  {finding.target or '-'}")
        note = finding.reason + (f" ({finding.hint})" if finding.hint else "")
        lines.extend(textwrap.wrap(note, width, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
