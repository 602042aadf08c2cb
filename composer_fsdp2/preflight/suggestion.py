"""The result of ``plan --suggest``: proposed edits of a file, fastest first, and their text form."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer_fsdp2.config.text import human_bytes, printable
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.plan_text import human_seconds, wrapped
from composer_fsdp2.migration.patched_file import KeyChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Value):
    """One proposed edit, with the estimate of the edited file.

    Args:
        changes: The keys that the edit changes.
        seconds: Approximate duration of a step.
        peak_bytes: Peak device memory of a rank.
        host_bytes: Host memory of a rank.
        reasons: Changed setting -> why it changes rounding; empty if the run's results are bitwise the same.
        notes: Further steps that the user must take.
        diff: The edit as a unified diff.
    """

    changes: tuple[KeyChange, ...]
    seconds: float
    peak_bytes: int
    host_bytes: int
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotProposed(Value):
    """Settings that are not proposed. Either the file has no keys for them, or ``reason`` says what prevents it."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedEdits(Value):
    """The proposed edits for a run.

    Args:
        memory_bytes: The limit for the estimated peak memory.
        seconds, peak_bytes: Step time and peak memory of the unmodified run.
        speeds: The assumed speeds and their sources.
        proposals: At most three, fastest first.
        nearest: If no edit fits, the edit with the lowest peak; None if no edit lowers it.
        helps: If no edit fits, other changes that would lower the peak.
        num_tried: The number of settings planned.
        unsaid: Settings that are not proposed.
    """

    memory_bytes: int
    seconds: float
    peak_bytes: int
    speeds: tuple[str, ...]
    proposals: tuple[Suggestion, ...]
    nearest: Suggestion | None
    helps: tuple[str, ...]
    num_tried: int
    unsaid: tuple[NotProposed, ...]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes

    def explain(self) -> str:
        """Render as text."""
        return "\n".join(map(printable, _explained(self)))


def _explained(found: SuggestedEdits) -> Iterator[str]:
    yield f"suggestions for {human_bytes(found.memory_bytes)} a rank, the fastest of {found.num_tried} plans"
    yield from wrapped(f"as it is: {_seconds(found.seconds)}, {_size(found.peak_bytes, found.memory_bytes)}")
    if found.fits and not found.proposals:
        yield "  no setting available in this file makes it faster"
    for number, each in enumerate(found.proposals, 1):
        gain = f", {1 - each.seconds / found.seconds:.0%} less" if each.seconds < found.seconds else ""
        yield from _proposal_lines(f"{number}. {_seconds(each.seconds)}{gain}", each, found.memory_bytes)
    if not (found.fits or found.proposals):
        yield f"  nothing fits{'' if found.nearest else ', and no setting available in this file uses less memory'}"
    if found.nearest:
        yield from _proposal_lines(f"nearest: {_seconds(found.nearest.seconds)}", found.nearest, found.memory_bytes)
    for way in found.helps:
        yield from wrapped(f"what would help: {way}")
    shown = (*found.proposals, *filter(None, (found.nearest,)))
    if reasons := {name: why for each in shown for name, why in each.reasons.items()}:
        yield "  why numbers are rounded otherwise"
        for name, why in reasons.items():
            yield from wrapped(f"{name}: {why}", begin="    ", indent=6)
    if found.unsaid:
        yield "  not proposed"
        for left_out in found.unsaid:
            yield from wrapped(f"{left_out.what}: {left_out.reason}", begin="    ", indent=6)
    yield from wrapped(f"seconds rank these plans and predict no run; speeds: {'; '.join(found.speeds)}")


def _seconds(seconds: float) -> str:
    return f"about {human_seconds(seconds)} a step"


def _size(peak_bytes: int, memory_bytes: int) -> str:
    over = peak_bytes - memory_bytes
    return f"{human_bytes(peak_bytes)} at its peak, {f'{human_bytes(over)} too much' if over > 0 else 'which fits'}"


def _proposal_lines(begin: str, each: Suggestion, memory_bytes: int) -> Iterator[str]:
    host = f", {human_bytes(each.host_bytes)} in the host's memory" if each.host_bytes else ""
    rounded = f"the same up to rounding ({', '.join(each.reasons)})" if each.reasons else "the same"
    size = _size(each.peak_bytes, memory_bytes)
    yield from wrapped(f"{begin}, {size}{host}; the numbers are {rounded}", indent=5)
    for note in each.notes:
        yield from wrapped(f"but: {note}", begin=" " * 5, indent=7)
    yield from (f"     {line}" for line in each.diff.splitlines())
