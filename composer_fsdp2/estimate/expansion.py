"""Extend the trace of a model with a few blocks to all blocks of the model."""

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from composer_fsdp2.estimate.blocks import BlockList
from composer_fsdp2.estimate.events import Hook, StepEvent
from composer_fsdp2.sharding.modules import is_at_or_under


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpan:
    """The range of events of one block's forward or backward.

    Args:
        begin: The index of the block's first event.
        end: The index after its last event. The event at this index is not a hook of a unit: it has the computation
            between the block and the next hook.
    """

    path: str
    begin: int
    end: int
    is_backward: bool


def expand(events: Sequence[StepEvent], spans: Sequence[BlockSpan], lists: Sequence[BlockList]) -> list[StepEvent]:
    """Return the events of all blocks. An omitted block gets the events of its traced representative.

    Live activations accumulate over blocks: each block allocates in forward, and frees in backward, as many bytes as
    its representative.

    Raises:
        NotInOrderError: a list with omitted blocks did not run from its first block to its last in forward, or in
            reverse in backward.
    """
    runs = {run.traced[0].begin: run for blocks in lists if blocks.is_short for run in _runs_of(blocks, spans)}
    after = {span.end for span in spans}
    found: list[StepEvent] = []
    shift, place = _Bytes(0, 0), 0
    while place < len(events):
        run = runs.get(place)
        if run is None:
            _put(found, _moved(events[place], shift), is_moment=place not in after)
            place += 1
        else:
            shift = _put_run(found, events, run, shift)
            place = run.traced[-1].end
    return found


class NotInOrderError(Exception):
    """Blocks did not run in the order of their list, ran more than once, or ran with other events between them."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Live bytes on the device and on the host."""

    live: int
    host: int

    @classmethod
    def at(cls, event: StepEvent) -> "_Bytes":
        return cls(event.live_bytes, event.host_live_bytes)

    def __add__(self, other: "_Bytes") -> "_Bytes":
        return _Bytes(self.live + other.live, self.host + other.host)

    def __sub__(self, other: "_Bytes") -> "_Bytes":
        return _Bytes(self.live - other.live, self.host - other.host)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one list."""

    blocks: BlockList
    names: Sequence[str]  # of all blocks, in execution order
    traced: Sequence[BlockSpan]


def _runs_of(blocks: BlockList, spans: Sequence[BlockSpan]) -> Iterator[_Run]:
    """Yield the forward of a list of blocks, and its backward, if it ran.

    Frozen blocks at the beginning have no backward.
    """
    paths = {blocks.block(name): name for name in blocks.present}
    traced = [span for span in spans if span.path in paths]
    for is_backward in (False, True):
        run = [span for span in traced if span.is_backward is is_backward]
        if not run:
            continue
        order = [paths[span.path] for span in run]
        inside = [name for name in blocks.names if blocks.representatives[name] in order]
        ran = [name for name in blocks.present if name in order]
        follows = all(second.begin == first.end + 1 for first, second in itertools.pairwise(run))
        if not follows or order != (ran[::-1] if is_backward else ran):
            raise NotInOrderError(blocks.path)
        yield _Run(blocks, inside[::-1] if is_backward else inside, run)


def _put_run(found: list[StepEvent], events: Sequence[StepEvent], run: _Run, shift: _Bytes) -> _Bytes:
    """Append the events of all blocks of a run. Return how many more bytes are live after the run than in the trace."""
    by_path = {span.path: span for span in run.traced}
    first, last = run.traced[0], run.traced[-1]
    live = _Bytes.at(events[first.begin]) + shift
    for name in run.names:
        path, span = run.blocks.block(name), by_path[run.blocks.block(run.blocks.representatives[name])]
        moved = live - _Bytes.at(events[span.begin])
        for event in _renamed(events[span.begin : span.end], span.path, path):
            _put(found, _moved(event, moved), is_moment=True)
        live = _Bytes.at(events[span.end]) + moved
        if name != run.names[-1]:
            between = first if span is last else span  # after the last traced block other modules run
            behind = _Bytes.at(events[between.end])
            _put(found, _moved(events[between.end], live - behind), is_moment=False)
            live += _Bytes.at(events[between.end + 1]) - behind
    return live - _Bytes.at(events[last.end])


def _put(found: list[StepEvent], event: StepEvent, *, is_moment: bool) -> None:
    """Append the event of a hook. Any other event is merged into the previous event."""
    if is_moment:
        found.append(event)
        return
    before = found[-1]
    largest = max(before, event, key=lambda each: each.peak_bytes)
    found[-1] = replace(
        before,
        peak_bytes=largest.peak_bytes,
        loss_bytes=largest.loss_bytes,
        host_bytes=max(before.host_bytes, event.host_bytes),
        flops=before.flops + event.flops,
        recomputed_flops=before.recomputed_flops + event.recomputed_flops,
        sent=before.sent + event.sent,
    )


def _moved(event: StepEvent, by: _Bytes) -> StepEvent:
    if by == _NOT_MOVED:
        return event
    return replace(
        event,
        live_bytes=event.live_bytes + by.live,
        peak_bytes=event.peak_bytes + by.live,
        host_live_bytes=event.host_live_bytes + by.host,
        host_bytes=event.host_bytes + by.host,
    )


_NOT_MOVED = _Bytes(0, 0)


def _renamed(events: Sequence[StepEvent], path: str, new_path: str) -> Iterator[StepEvent]:
    for event in events:
        unit, parameter = _below(event.unit, path, new_path), event.parameter
        yield replace(event, unit=unit, parameter=parameter and _below(parameter, path, new_path))


def _below(name: str, path: str, new_path: str) -> str:
    return new_path + name.removeprefix(path) if is_at_or_under(name, path) else name


def check_representatives(lists: Sequence[BlockList], unfinished: Set[str], not_sequential: Set[str]) -> None:
    """Check that the traces of representatives are valid for omitted blocks.

    Raises:
        NotInOrderError: a representative is in ``unfinished`` (its backward has no end), or its list in
            ``not_sequential``.
    """
    for each in lists:
        standing = {each.block(each.representatives[name]) for name in each.names if name not in each.present}
        if standing & unfinished or (standing and each.path in not_sequential):
            raise NotInOrderError(each.path)


def backward_begin(events: Sequence[StepEvent], path: str) -> int:
    """Return the index of the first event of a block's backward: PRE_BACKWARD of a unit with the same module
    precedes the block's."""
    place = len(events)
    while place and events[place - 1].hook is Hook.PRE_BACKWARD and is_at_or_under(events[place - 1].unit, path):
        place -= 1
    return place
