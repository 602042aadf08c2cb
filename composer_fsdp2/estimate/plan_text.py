"""What ``plan`` says of a run, as text that fits a screen."""

import textwrap
from collections.abc import Iterator, Sequence

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.text import human_bytes, printable
from composer_fsdp2.estimate.bounds import Bounds
from composer_fsdp2.estimate.planned_step import PlannedStep, unit_kinds
from composer_fsdp2.estimate.step import Kind, MemorySample

WIDTH = 96
_BAR = 24
_SHOWN_KINDS = 6
_SHOWN_FINDINGS = 4


def plan_text(step: PlannedStep) -> str:
    """The whole answer: the run, its memory, units, collectives, bounds and findings, and the verdict last."""
    parts = (_run, _memory, _units, _collectives, _bounds, _findings, _verdict)
    return "\n".join(printable(line) for part in parts for line in part(step))


def human_count(number: float) -> str:
    """405853388800 as ``405.9 B``."""
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:.0f}"


def human_seconds(seconds: float) -> str:
    for size, word in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {word}"
    return "0 s" if not seconds else f"{seconds * 1e9:.3g} ns"


def where(sample: MemorySample) -> str:
    """A moment in words."""
    number = f", microbatch {sample.microbatch + 1}" if sample.microbatch >= 0 else ""
    return f"{sample.phase.value}{number}: {sample.label or 'the model'}"


def _run(step: PlannedStep) -> Iterator[str]:
    ranks = f"{step.world_size} {'ranks' if step.world_size > 1 else 'rank'}, {step.gpus_per_node} a node"
    yield f"{step.source}: {human_count(step.num_parameters)} parameters in {len(step.plan.units)} units on {ranks}"
    yield f"  {step.plan.mesh}; {step.precision}; {step.optimizer}"
    rows = f"{step.microbatch_size} × {step.sequence_length} tokens"
    number = step.num_microbatches
    yield f"  on each rank {number} {'microbatches' if number > 1 else 'microbatch'} of {rows} a step"


def _memory(step: PlannedStep) -> Iterator[str]:
    peak = step.estimate.peak
    yield f"memory of a rank, where it is largest: {human_bytes(peak.total_bytes)}"
    yield f"  in {where(peak)}"
    for kind in Kind:
        if size := peak.bytes_of(kind):
            share = size / peak.total_bytes
            yield f"  {kind.value:<23} {human_bytes(size):>11}  {share:>4.0%}  {'█' * round(share * _BAR)}".rstrip()
    if step.trace is None:
        yield "  activations             not counted"
    if step.estimate.host_bytes:
        yield f"  and in the host's memory, for each rank: {human_bytes(step.estimate.host_bytes)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        first, *others = row
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        indent = "" if row is header else "  "
        yield f"{indent}{first:<{widths[0] + (2 if row is header else 0)}}  {'  '.join(cells)}".rstrip()


def _short(name: str, length: int = 34) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _units(step: PlannedStep) -> Iterator[str]:
    kinds = unit_kinds(step.units_and_bytes())
    rows = [
        (
            _short(kind.name),
            f"{kind.units}",
            human_count(kind.parameters),
            human_bytes(kind.gathered_bytes),
            human_bytes(kind.sent.intra),
            human_bytes(kind.sent.inter),
        )
        for kind in sorted(kinds, key=lambda kind: -kind.units * kind.parameters)
    ]
    yield from _table(
        ("units of a kind", "number", "parameters", "gathered", "sent in nodes", "between"), rows[:_SHOWN_KINDS]
    )
    if len(rows) > _SHOWN_KINDS:
        yield f"  and {len(rows) - _SHOWN_KINDS} more kinds; --json has them all"


def collective_rows(step: PlannedStep) -> list[tuple[str, ...]]:
    """Of a step's collectives that are alike: what, ranks, link, calls, and bytes of buffers, sent, and to nodes."""
    return [
        (
            f"{each.phase.value}: {each.op}",
            f"{each.ranks}",
            each.link.value,
            f"{each.calls}",
            human_bytes(each.num_bytes),
            human_bytes(each.ring_bytes),
            human_bytes(each.node_bytes),
        )
        for each in step.traffic
    ]


def _collectives(step: PlannedStep) -> Iterator[str]:
    yield from _table(
        ("collectives of a step", "ranks", "link", "calls", "buffers", "sent", "to nodes"), collective_rows(step)
    )


def _bounds(step: PlannedStep) -> Iterator[str]:
    if step.bounds is not None:
        yield from _lines_of(step.bounds)


def _lines_of(bounds: Bounds) -> Iterator[str]:
    parts = (("computing", bounds.compute_s), ("in nodes", bounds.intra_s), ("between nodes", bounds.inter_s))
    said = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in parts if seconds)
    yield f"a step takes at least {human_seconds(bounds.lower_s)}: {said or 'nothing is known to take time'}"
    more = []
    if bounds.exposed_s is not None:
        more.append(f"communication that no overlap hides: at least {human_seconds(bounds.exposed_s)}")
    if bounds.mfu_at_most is not None:
        more.append(f"MFU at most {bounds.mfu_at_most:.1%}")
    if more:
        yield f"  {'; '.join(more)}"
    yield f"  one after the other, at the same speeds: {human_seconds(bounds.serial_s)}"
    if bounds.machine.sources:
        yield from _wrapped("; ".join(bounds.machine.sources))
    yield from _wrapped("Not known: contention, stragglers, kernels, data loading, NCCL's choices (--json says more).")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _change(before: int, after: int) -> str:
    return f"{(after - before) / before:+.1%}" if before else ""


def _findings(step: PlannedStep) -> Iterator[str]:
    """What blocks comes first; what is exact or not needed is left to ``--json``."""
    said = [*step.blocking, *(each for each in step.findings if each.asks and not each.outcome.blocks and each.reason)]
    told = [each for each in said if each.outcome not in (Outcome.EXACT, Outcome.UNNEEDED)]
    for finding in told[:_SHOWN_FINDINGS]:
        yield from textwrap.wrap(str(finding), WIDTH, initial_indent="finding: ", subsequent_indent="    ", max_lines=2)
    if len(told) > _SHOWN_FINDINGS:
        yield f"and {len(told) - _SHOWN_FINDINGS} more findings; --json has them all"
    for note in step.estimate.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="note: ", subsequent_indent="    ")


def _verdict(step: PlannedStep) -> Iterator[str]:
    memory, peak = step.memory, step.estimate.peak_bytes
    if step.blocking:
        yield f"verdict: {len(step.blocking)} findings need a decision before it can run"
    if memory is None:
        yield "verdict: no memory was given to compare with; --memory 80GiB does"
        return
    left = memory.usable_bytes - peak
    reserve = (
        f"{human_bytes(memory.given_bytes)} less a reserve of {memory.reserve} is {human_bytes(memory.usable_bytes)}"
    )
    how = f"fits, with {human_bytes(left)} to spare" if left >= 0 else f"does not fit, by {human_bytes(-left)}"
    yield f"verdict: {how}: {reserve}"
