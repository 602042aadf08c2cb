"""Traces that need not be taken: of more rows, and of blocks some of which are recomputed or offloaded, from two each.

At every event a microbatch takes what does not depend on its rows, and what each row adds. And what a block keeps does
not depend on what is done with other blocks, but for the activation that passes from one to the next: where neighbours
are treated differently, the sum is off by at most one of these.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from composer_fsdp2.estimate.events import MicrobatchTrace, Moment, StepEvent


def with_rows(one: MicrobatchTrace, two: MicrobatchTrace, rows: int) -> MicrobatchTrace:
    """The trace of ``rows`` rows, from those of one and of two.

    A peak between two events is the largest of several sums, each of which grows by its own amount with a row, so that
    it can be above the line through the first two: what is to be relied on is traced with its own rows.
    """
    if rows == 1:
        return one
    events = tuple(
        replace(
            first,
            live_bytes=_on_line(first.live_bytes, second.live_bytes, rows),
            peak_bytes=_on_line(first.peak_bytes, second.peak_bytes, rows),
            loss_bytes=_on_line(first.loss_bytes, second.loss_bytes, rows),
            flops=_on_line(first.flops, second.flops, rows),
            recomputed_flops=_on_line(first.recomputed_flops, second.recomputed_flops, rows),
            sent=tuple(
                (op, _on_line(num_bytes, more, rows), ranks)
                for (op, num_bytes, ranks), (_, more, _) in zip(first.sent, second.sent, strict=True)
            ),
        )
        for first, second in zip(one.events, two.events, strict=True)
    )
    return replace(one, events=events, host_bytes=_on_line(one.host_bytes, two.host_bytes, rows))


def _on_line(one: int, two: int, rows: int) -> int:
    return one + (rows - 1) * (two - one)


def with_blocks(
    plain: MicrobatchTrace, treated: MicrobatchTrace, blocks: Collection[str], chosen: Collection[str]
) -> MicrobatchTrace:
    """The trace of a model of which some blocks are treated as in ``treated`` all are, and the others as in ``plain``.

    Args:
        blocks: The names of the units of all blocks.
        chosen: Of those that are treated.
    """
    events: list[StepEvent] = []
    live: int | None = None  # where the next part begins
    parts = zip(_parts(plain.events, blocks), _parts(treated.events, blocks), strict=True)
    for of_plain, of_treated in parts:
        part, after = of_treated if of_treated[0][0].unit in chosen else of_plain
        shift = 0 if live is None else live - part[0].live_bytes
        events += (
            replace(each, live_bytes=each.live_bytes + shift, peak_bytes=each.peak_bytes + shift) for each in part
        )
        live = None if after is None else after.live_bytes + shift
    share = len({*chosen}) / max(len(blocks), 1)
    host_bytes = plain.host_bytes + round((treated.host_bytes - plain.host_bytes) * share)
    return replace(plain, events=tuple(events), host_bytes=host_bytes, notes=(*plain.notes, *treated.notes))


def _parts(
    events: Sequence[StepEvent], blocks: Collection[str]
) -> Iterator[tuple[Sequence[StepEvent], StepEvent | None]]:
    """From where a block's forward or backward begins to where the next one's does, and the event there."""
    begins = {0, *(number for number, event in enumerate(events) if _begins(event, blocks))}
    for begin, end in pairwise((*sorted(begins), len(events))):
        yield events[begin:end], events[end] if end < len(events) else None


def _begins(event: StepEvent, blocks: Collection[str]) -> bool:
    return event.unit in blocks and event.moment in (Moment.PRE_FORWARD, Moment.PRE_BACKWARD)
