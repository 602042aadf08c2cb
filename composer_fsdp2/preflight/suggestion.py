"""What ``plan --suggest`` says of a run: proposals for its file, the cheapest first, and their text."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer_fsdp2.config.text import human_bytes, printable
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.settings import Numbers
from composer_fsdp2.estimate.suggest import Cost
from composer_fsdp2.migration.patched_file import KeyChange

_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Value):
    """One proposal, as it was planned anew from the changed file.

    Args:
        changes: Of the file's keys.
        cost: Of a step, the dearest first.
        peak_bytes: What a rank's device holds when it holds the most.
        fixed_bytes: Of these, activations, output layer and loss: no number of ranks makes them smaller.
        numbers: What becomes of the run's numbers.
        reasons: By the setting that changes, why they are not the same to the last bit.
        notes: What else has to be seen to.
        diff: Of the file.
    """

    changes: tuple[KeyChange, ...]
    cost: Cost
    peak_bytes: int
    fixed_bytes: int
    numbers: Numbers
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid(Value):
    """What is not proposed, because the file cannot say it or something else decides it."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedEdits(Value):
    """What ``--suggest`` says of a run.

    Args:
        memory_bytes: What an estimate may take of a device.
        fits: Whether the run as it is does.
        cost: Of the run as it is, and ``peak_bytes`` what it takes.
        proposals: At most three, the cheapest first.
        nearest: Where nothing fits, what takes the least.
        num_tried: Of choices.
    """

    memory_bytes: int
    fits: bool
    cost: Cost
    peak_bytes: int
    proposals: tuple[Suggestion, ...]
    nearest: Suggestion | None
    num_tried: int
    unsaid: tuple[Unsaid, ...]

    def explain(self) -> str:
        """As text."""
        return "\n".join(map(printable, _explained(self)))


def _explained(found: SuggestedEdits) -> Iterator[str]:
    yield f"suggestions for {human_bytes(found.memory_bytes)} a rank, the cheapest of {found.num_tried:,} choices"
    over = found.peak_bytes - found.memory_bytes
    whether = f"{human_bytes(over)} too much" if over > 0 else "which fits"
    yield from _wrapped(f"as it is: {human_bytes(found.peak_bytes)} at its peak, {whether}; {_cost_text(found.cost)}")
    told = found.proposals
    if found.fits and not told:
        yield "  nothing that this file can say is cheaper"
    for number, each in enumerate(told, 1):
        yield from _proposal_lines(f"{number}.", each)
    if not found.fits and not told:
        yield from _nearest_lines(found)
        told = tuple(filter(None, (found.nearest,)))
    if reasons := {name: why for each in told for name, why in each.reasons.items()}:
        yield "  why numbers are rounded otherwise"
        for name, why in reasons.items():
            yield from _wrapped(f"{name}: {why}", indent=4)
    if found.unsaid:
        yield "  not proposed"
        for left_out in found.unsaid:
            yield from _wrapped(f"{left_out.what}: {left_out.reason}", indent=4)


def _nearest_lines(found: SuggestedEdits) -> Iterator[str]:
    if found.nearest is None:
        yield "  nothing fits, and nothing that this file can say takes less"
        return
    yield f"  nothing fits; the nearest misses by {human_bytes(found.nearest.peak_bytes - found.memory_bytes)}"
    yield from _proposal_lines("-", found.nearest)
    yield from _wrapped(
        f"{human_bytes(found.nearest.fixed_bytes)} of it are activations, the output layer and the loss, which more "
        "ranks do not make smaller: shorter rows do, or a loss that is computed in pieces",
        indent=4,
    )


def _proposal_lines(mark: str, each: Suggestion) -> Iterator[str]:
    because = f" ({', '.join(each.reasons)})" if each.reasons else ""
    said = f"{mark} {human_bytes(each.peak_bytes)} at its peak; {_cost_text(each.cost)}; "
    yield from _wrapped(f"{said}the numbers are {each.numbers.value}{because}", further=3)
    for note in each.notes:
        yield from _wrapped(f"but: {note}", indent=5)
    yield from (f"     {line}" for line in each.diff.splitlines())


def _wrapped(text: str, *, indent: int = 2, further: int = 2) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + further))


def _cost_text(cost: Cost) -> str:
    parts = (
        (cost.inter_node_bytes, f"{human_bytes(cost.inter_node_bytes)} to other nodes"),
        (cost.recomputed_flops, f"{cost.recomputed_flops:.2e} operations a second time"),
        (cost.calls, f"{cost.calls:,} collectives"),
        (cost.offloaded_bytes, f"{human_bytes(cost.offloaded_bytes)} in the host's memory"),
    )
    said = ", ".join(text for amount, text in parts if amount)
    return f"{said} a step" if said else "no cost"
