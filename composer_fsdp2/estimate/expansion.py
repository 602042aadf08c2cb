"""From the events of a model with a few blocks to those of the model with all of them."""

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from composer_fsdp2.estimate.blocks import BlockList
from composer_fsdp2.estimate.events import Hook, StepEvent
from composer_fsdp2.sharding.modules import is_at_or_under


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The events of one block's forward or backward, and what the model computes after it.

    Args:
        begin: Of the block's events, in all of them.
        end: Where they end. The event there is no moment of a unit's: it has what the model computes after the block,
            up to its next moment.
    """

    path: str
    begin: int
    end: int
    is_backward: bool


def expand(events: Sequence[StepEvent], stretches: Sequence[Stretch], lists: Sequence[BlockList]) -> list[StepEvent]:
    """The events of all blocks: those of a block that was left out are those of the one that stands for it.

    What lives on from one block to the next is added up: each block adds in its forward, and gives back in its
    backward, what the one that stands for it did.

    Raises:
        NotInOrderError: a list that is not complete did not run from its first block to its last, or back.
    """
    runs = {run.traced[0].begin: run for blocks in lists if blocks.is_short for run in _runs_of(blocks, stretches)}
    after = {stretch.end for stretch in stretches}
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
    """Blocks ran in another order than that of their list, more than once, or with something between them."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """On the device and on the host."""

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
    """Blocks of one list, one directly after the other."""

    blocks: BlockList
    names: Sequence[str]  # of all blocks, in the order in which they run
    traced: Sequence[Stretch]


def _runs_of(blocks: BlockList, stretches: Sequence[Stretch]) -> Iterator[_Run]:
    """At most one forward, and one backward of all blocks or of the last ones, the others being frozen."""
    paths = {blocks.block(name): name for name in blocks.present}
    traced = [stretch for stretch in stretches if stretch.path in paths]
    for is_backward in (False, True):
        run = [stretch for stretch in traced if stretch.is_backward is is_backward]
        if not run:
            continue
        order = [paths[stretch.path] for stretch in run]
        inside = [name for name in blocks.names if blocks.kept[name] in order]
        ran = [name for name in blocks.present if name in order]
        follows = all(second.begin == first.end + 1 for first, second in itertools.pairwise(run))
        if not follows or order != (ran[::-1] if is_backward else ran):
            raise NotInOrderError(blocks.path)
        yield _Run(blocks, inside[::-1] if is_backward else inside, run)


def _put_run(found: list[StepEvent], events: Sequence[StepEvent], run: _Run, shift: _Bytes) -> _Bytes:
    """Append the events of a run; returns by how much more is alive behind it than where it was traced."""
    by_path = {stretch.path: stretch for stretch in run.traced}
    first, last = run.traced[0], run.traced[-1]
    live = _Bytes.at(events[first.begin]) + shift
    for name in run.names:
        path, stretch = run.blocks.block(name), by_path[run.blocks.block(run.blocks.kept[name])]
        moved = live - _Bytes.at(events[stretch.begin])
        for event in _renamed(events[stretch.begin : stretch.end], stretch.path, path):
            _put(found, _moved(event, moved), is_moment=True)
        live = _Bytes.at(events[stretch.end]) + moved
        if name != run.names[-1]:
            between = first if stretch is last else stretch  # behind the last one that was traced comes another thing
            behind = _Bytes.at(events[between.end])
            _put(found, _moved(events[between.end], live - behind), is_moment=False)
            live += _Bytes.at(events[between.end + 1]) - behind
    return live - _Bytes.at(events[last.end])


def _put(found: list[StepEvent], event: StepEvent, *, is_moment: bool) -> None:
    """Append a moment; or have the one before go on."""
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


def stretches_of(events: Sequence[StepEvent], markers: Sequence[tuple[Hook, str, int]]) -> list[Stretch]:
    """Where each block's forward and backward lies.

    Args:
        markers: At which moment of which block's how many events had been told of. Where a block ends, the next event
            is the one of what comes after it.
    """
    found: list[Stretch] = []
    begun: dict[str, int] = {}
    for hook, path, place in markers:
        match hook:
            case Hook.PRE_FORWARD:
                begun[path] = place
            case Hook.PRE_BACKWARD:
                begun[path] = _with_unit(events, path, place)
            case _ if path in begun:
                is_backward = hook is Hook.POST_BACKWARD
                found.append(Stretch(path=path, begin=begun.pop(path), end=place, is_backward=is_backward))
    return found


def check_order(
    stretches: Sequence[Stretch],
    markers: Sequence[tuple[Hook, str, int]],
    lists: Sequence[BlockList],
    not_chained: Set[str] = frozenset(),
) -> None:
    """Raise where blocks that were left out cannot be told from those that stand for them.

    Raises:
        NotInOrderError: one of these began a backward whose end nothing showed, or is in a list in ``not_chained``.
    """
    begun = {path for hook, path, _ in markers if hook is Hook.PRE_BACKWARD}
    ended = {stretch.path for stretch in stretches if stretch.is_backward}
    for each in lists:
        standing = {each.block(each.kept[name]) for name in each.names if name not in each.present}
        if standing & begun - ended or (standing and each.path in not_chained):
            raise NotInOrderError(each.path)


def _with_unit(events: Sequence[StepEvent], path: str, place: int) -> int:
    """Where a block's backward begins: a unit of the same module is told of it first."""
    while place and events[place - 1].hook is Hook.PRE_BACKWARD and is_at_or_under(events[place - 1].unit, path):
        place -= 1
    return place
