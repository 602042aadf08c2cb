"""The outcome of one setting (``Finding``), and a table of findings as text."""

import enum
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from composer_fsdp2.config.text import text_width
from composer_fsdp2.config.value import Value


class Outcome(enum.Enum):
    """How FSDP2 carries out an FSDP1 setting.

    Example:
        >>> [finding] = translate({"use_orig_params": True}, device="cpu").findings
        >>> finding.outcome is Outcome.UNNEEDED
        True
    """

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNNEEDED = "unneeded"
    UNSUPPORTED = "unsupported"
    NEEDS_DECISION = "needs decision"

    @property
    def blocks(self) -> bool:
        """Whether a configuration with this outcome cannot be used."""
        return self in (Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION)


class Origin(enum.Enum):
    """The source of a finding: a key, the syntax of a file, an implicit default of the system, or a feature that the
    target lacks.
    """

    KEY = "key"
    WRITING = "writing"
    IMPLICIT = "implicit"
    LACKING = "lacking in the target"


def _plain_value(value: object) -> object:
    """JSON has no infinity and no NaN."""
    is_plain = isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Value):
    """The outcome of one setting: its value, its target under FSDP2, the reason, and the next step for the user.

    Args:
        key: The key as spelled in the file. For an implicit setting or a missing feature, its name.
        asks: Whether the value has an effect in its system; False for a feature that is off.
        known: Whether the system knows the key.
        where: File and line.

    Example:
        >>> [finding] = translate({"sharding_strategy": "FULL_SHARD"}, device="cpu").findings
        >>> finding.key, finding.outcome.name
        ('sharding_strategy', 'EXACT')
    """

    key: str
    value: object = field(metadata={"json": _plain_value})
    outcome: Outcome
    target: str = ""
    reason: str
    hint: str = ""
    where: str = ""
    origin: Origin = Origin.KEY
    asks: bool = True
    known: bool = True

    @property
    def name(self) -> str:
        """The key, in parentheses if the file does not contain it."""
        if self.origin is Origin.KEY:
            return self.key
        return f"(implicit) {self.key}" if self.origin is Origin.IMPLICIT else f"({self.key})"

    def sentence(self, values: str) -> str:
        """Return the finding as one sentence (name, ``values``, outcome, reason, hint) without file and line."""
        hint = f"; {self.hint}" if self.hint else ""
        is_what = "needs a decision" if self.outcome is Outcome.NEEDS_DECISION else f"is {self.outcome.value}"
        return f"{self.name}: {values} {is_what}: {self.reason}{hint}"

    def __str__(self) -> str:
        return self.sentence(repr(self.value)) + (f"   ({self.where})" if self.where else "")


# Findings that need action come first.
_URGENCY = (Outcome.NEEDS_DECISION, Outcome.UNSUPPORTED, Outcome.APPROXIMATE, Outcome.UNNEEDED, Outcome.EXACT)


def format_findings(findings: Iterable[Finding], *, hidden: Container[Outcome] = ()) -> str:
    """Return a table with one line per finding (key, value, outcome, target) and the reason below it, most urgent
    first.

    Args:
        hidden: Outcomes whose findings are only counted, in one line.
    """
    ordered = sorted(findings, key=lambda finding: _URGENCY.index(finding.outcome))
    if not ordered:
        return "  (nothing was set: FSDP1's defaults apply)"
    rows = [(f"{each.name}: {_short(each.value)}", each) for each in ordered if each.outcome not in hidden]
    first = max((len(given) for given, _ in rows), default=0)
    second = max((len(finding.outcome.value) for _, finding in rows), default=0)
    lines: list[str] = []
    width, longest = text_width(110), text_width(sys.maxsize)
    for given, finding in rows:
        row = f"  {given:<{first}}  {finding.outcome.value:<{second}}  {finding.target or '-'}"
        lines.extend([row] if len(row) <= longest else _wrapped(row, longest))
        note = finding.reason + (f" ({finding.hint})" if finding.hint else "")
        lines.extend(textwrap.wrap(note, width, initial_indent="      ", subsequent_indent="      "))
    counts = Counter(finding.outcome for finding in ordered if finding.outcome in hidden)
    counted = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in _URGENCY if counts[outcome])
    return "\n".join([*lines, *([f"  {counted} (--all lists them)"] if counted else [])])


def _wrapped(row: str, width: int) -> list[str]:
    """The lines of a row; ``needs decision`` stays on one line."""
    joined = row.replace("needs decision", "needs\xa0decision")
    lines = textwrap.wrap(joined, width, subsequent_indent=" " * 6)
    return [line.replace("needs\xa0decision", "needs decision") for line in lines]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
