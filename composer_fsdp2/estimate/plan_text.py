"""Render a planned step as text that fits a screen."""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.text import human_bytes, printable, text_width
from composer_fsdp2.estimate.links import sent_by_unit
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.step import Kind, Link, MemorySample
from composer_fsdp2.sharding.plan import ShardUnit

_SHOWN_KINDS = 6
_SHOWN_FINDINGS = 4
_SHORTEST = 12  # name of a row


@dataclass(frozen=True, slots=True)
class Table:
    """A table for text and HTML; the first column is left-aligned, the others right-aligned."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plan_text(step: PlannedStep) -> str:
    """Return the text of a planned step: run, memory, units, collectives, bounds, findings, and whether it fits."""
    parts = (_run, _memory, _units, _collectives, _bounds, _findings, _verdict)
    return joined(line for part in parts for line in part(step))


def joined(lines: Iterable[str]) -> str:
    """Join lines to a printable text. On a terminal, lines that are wider than the terminal are wrapped."""
    width = text_width(sys.maxsize)
    return "\n".join(
        each
        for line in map(printable, lines)
        for each in ([line] if len(line) <= width else textwrap.wrap(line, width, subsequent_indent=" " * 4))
    )


def human_count(number: float) -> str:
    """Format 405853388800 as ``405.9 B``."""
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
    """Describe the phase, microbatch and event of a sample."""
    number = f", microbatch {sample.microbatch + 1}" if sample.microbatch >= 0 else ""
    return f"{sample.phase.value}{number}: {sample.label or 'the model'}"


def _run(step: PlannedStep) -> Iterator[str]:
    ranks = f"{step.world_size} {'ranks' if step.world_size > 1 else 'rank'}, {step.gpus_per_node} a node"
    yield f"{step.source}: {human_count(step.num_parameters)} parameters in {len(step.plan.units)} units on {ranks}"
    yield f"  {step.plan.mesh}; {step.precision}; {step.optimizer}"
    rows = f"{step.microbatch_size} × {step.sequence_length} tokens"
    number = step.num_microbatches
    yield f"  on each rank {number} {'microbatches' if number > 1 else 'microbatch'} of {rows} a step"


def memory_table(step: PlannedStep) -> Table:
    """Return the memory at the peak by kind, in the order of ``Kind``. Kinds that are always zero are omitted."""
    peak = step.estimate.peak
    rows = [
        (kind.value, human_bytes(size := peak.bytes_of(kind)), f"{size / peak.total_bytes:.0%}", human_bytes(most))
        for kind in Kind
        if (most := step.most_of(kind))
    ]
    return Table(("by kind", "at the peak", "share", "at most"), tuple(rows))


def _memory(step: PlannedStep) -> Iterator[str]:
    peak = step.estimate.peak
    yield f"memory of a rank, at its peak: {human_bytes(peak.total_bytes)}"
    yield f"  in {where(peak)}"
    yield from table_lines(memory_table(step))
    if step.trace is None:
        yield "  activations are not counted"
    if step.estimate.host_bytes:
        yield f"  and in the host's memory, for each rank: {human_bytes(step.estimate.host_bytes)}"


def table_lines(table: Table) -> Iterator[str]:
    """Yield a table as aligned lines.

    Rows are indented below the header, and long names cut to the terminal's width.
    """
    widths = [max(len(row[column]) for row in (table.header, *table.rows)) for column in range(len(table.header))]
    excess = sum(widths) + 2 * len(widths) - text_width(sys.maxsize)
    widths[0] -= max(0, min(excess, widths[0] - _SHORTEST))
    for row in (table.header, *table.rows):
        first, *others = row
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        indent = "" if row is table.header else "  "
        yield f"{indent}{shortened(first, widths[0]):<{widths[0] + 2 - len(indent)}}  {'  '.join(cells)}".rstrip()


def units_table(step: PlannedStep) -> Table:
    """Return a table of the units, largest first. Units that differ only in their layer index have one row.

    Units without parameters of their own, such as some roots, share one row: their hooks run, but do not communicate.
    """
    alike: dict[tuple[str, int, str], list[ShardUnit]] = {}
    for unit in step.plan.units:
        name = ".".join("*" if part.isdecimal() else part for part in unit.name.split("."))
        kind = (name, unit.numel, str(unit.reshard_after_forward)) if unit.numel else ("without parameters", 0, "")
        alike.setdefault(kind, []).append(unit)
    sent = sent_by_unit(step.estimate.calls)
    rows = [
        (
            name or "(the model)",
            f"{len(units)}",
            human_count(numel),
            human_bytes(units[0].unsharded_bytes),
            *(human_bytes(sum(sent[unit.name, link] for unit in units)) for link in (Link.INTRA, Link.INTER)),
        )
        for (name, numel, _), units in sorted(alike.items(), key=lambda each: -len(each[1]) * each[0][1])
    ]
    return Table(("units of a kind", "number", "parameters", "gathered", "sent in nodes", "between"), tuple(rows))


def _units(step: PlannedStep) -> Iterator[str]:
    table = units_table(step)
    shown = [(shortened(name), *others) for name, *others in table.rows[:_SHOWN_KINDS]]
    yield from table_lines(Table(table.header, tuple(shown)))
    if len(table.rows) > len(shown):
        units = sum(int(number) for _, number, *_ in table.rows[_SHOWN_KINDS:])
        yield f"  and {len(table.rows) - len(shown)} more kinds ({units} units); --json has them all"


def shortened(name: str, length: int = 34) -> str:
    """Return the name, or the end of a name that is longer than ``length``: paths of modules differ at their ends."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def collectives_table(step: PlannedStep) -> Table:
    """Return a table of one rank's collectives in a step. Sent bytes assume a ring algorithm."""
    rows = [
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
    return Table(("collectives of a step", "ranks", "link", "calls", "buffers", "sent", "to nodes"), tuple(rows))


def _collectives(step: PlannedStep) -> Iterator[str]:
    yield from table_lines(collectives_table(step))


def bounds_table(step: PlannedStep) -> Table:
    """Return a table of lower bounds of a step's time; empty if the machine's speeds are unknown."""
    bounds = step.bounds
    if bounds is None:
        return Table((), ())
    machine = bounds.machine
    of_speeds = (
        (machine.flops, "computing", bounds.compute_s),
        (machine.intra_bytes_per_s, "sending in nodes, the least bytes", bounds.intra_s),
        (machine.inter_bytes_per_s, "sending between nodes, the least bytes", bounds.inter_s),
    )
    rows = [(name, human_seconds(seconds)) for speed, name, seconds in of_speeds if speed]
    rows.append(("all without overlap", human_seconds(bounds.serial_s)))
    if bounds.exposed_s is not None:
        rows.append(("exposed communication", f"at least {human_seconds(bounds.exposed_s)}"))
    if bounds.mfu_at_most is not None:
        rows.append(("MFU", f"at most {bounds.mfu_at_most:.1%}"))
    if step.tokens_per_s is not None:
        rows.append(("tokens a second, all ranks", f"at most {human_count(step.tokens_per_s)}"))
        rows.append(("GPU hours for 1 B tokens", f"at least {step.gpu_hours_per_billion_tokens:.3g}"))
    return Table(("a step", f"at least {human_seconds(bounds.lower_s)}"), tuple(rows))


def _bounds(step: PlannedStep) -> Iterator[str]:
    if step.bounds is not None:
        yield from table_lines(bounds_table(step))
        if step.bounds.machine.sources:
            yield from wrapped("; ".join(step.bounds.machine.sources))
        yield from wrapped(
            "Not known: contention, stragglers, kernels, data loading, NCCL's choices (--json says more)."
        )


def wrapped(text: str, *, begin: str = "  ", indent: int = 4, max_lines: int | None = None) -> list[str]:
    """Wrap a text to lines of the terminal's width. The first line starts with ``begin``, the others are indented."""
    return textwrap.wrap(
        text, text_width(96), initial_indent=begin, subsequent_indent=" " * indent, max_lines=max_lines
    )


def shown_findings(step: PlannedStep) -> list[Finding]:
    """Blocking findings first; exact and unneeded ones are in ``--json`` only."""
    quiet = (Outcome.EXACT, Outcome.UNNEEDED)
    others = [each for each in step.findings if each.asks and each.reason and not each.outcome.blocks]
    return [*step.blocking, *(each for each in others if each.outcome not in quiet)]


def _findings(step: PlannedStep) -> Iterator[str]:
    found = shown_findings(step)
    for finding in found[:_SHOWN_FINDINGS]:
        yield from wrapped(str(finding), begin="finding: ", max_lines=4 if finding.outcome.blocks else 2)
    if (more := len(found) - _SHOWN_FINDINGS) > 0:
        yield f"and {more} more finding{'s' * (more > 1)}; --json has them all, with their lines in the file"
    for note in step.estimate.notes:
        yield from wrapped(note, begin="note: ")


def _verdict(step: PlannedStep) -> Iterator[str]:
    memory, peak = step.memory, step.estimate.peak_bytes
    if step.blocking:
        number = len(step.blocking)
        yield f"verdict: {number} {'finding needs' if number == 1 else 'findings need'} a decision"
    if memory is None:
        yield "verdict: no memory was given to compare with; --memory 80GiB does"
        return
    reserve = (
        f"{human_bytes(memory.given_bytes)} less a reserve of {memory.reserve} is {human_bytes(memory.usable_bytes)}"
    )
    left = memory.usable_bytes - peak
    how = f"fits, with {human_bytes(left)} to spare" if left >= 0 else f"does not fit, by {human_bytes(-left)}"
    yield f"verdict: {how}: {reserve}"
