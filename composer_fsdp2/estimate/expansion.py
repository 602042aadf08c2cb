"""From the events of a model with a few blocks to those of the model with all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from composer_fsdp2.estimate.blocks import BlockList
from composer_fsdp2.estimate.events import Moment, StepEvent
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


def expand(events: Sequence[StepEvent], stretches: Sequence[Stretch], lists: Sequence[BlockList]) -> list[StepEvent]:
    """The events of all blocks: those of a block that was left out are those of the one that stands for it.

    What lives on from one block to the next is added up: each block adds in its forward, and gives back in its
    backward, what the one that stands for it did.
    """
    by_begin = {stretch.begin: number for number, stretch in enumerate(stretches)}
    after = {stretch.end for stretch in stretches}
    found: list[StepEvent] = []
    shift, place = 0, 0
    while place < len(events):
        number = by_begin.get(place)
        run = None if number is None else _run_of(stretches[number:], lists)
        if run is None:
            _put(found, _moved(events[place], shift), is_moment=place not in after)
            place += 1
        else:
            shift = _put_run(found, events, run, shift)
            place = run.traced[-1].end
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one list, one after the other."""

    blocks: BlockList
    names: Sequence[str]  # of all blocks, in the order in which they run
    traced: Sequence[Stretch]


def _run_of(stretches: Sequence[Stretch], lists: Sequence[BlockList]) -> _Run | None:
    """The run that the first of the stretches begins, if its list's blocks run in order or the other way round."""
    blocks = next((each for each in lists if stretches[0].path in map(each.block, each.present)), None)
    if blocks is None:
        return None
    paths = [blocks.block(name) for name in blocks.present]
    traced = stretches[: len(paths)]
    order = [each.path for each in traced]
    if order == paths:
        return _Run(blocks, blocks.names, traced)
    return _Run(blocks, blocks.names[::-1], traced) if order == paths[::-1] else None


def _put_run(found: list[StepEvent], events: Sequence[StepEvent], run: _Run, shift: int) -> int:
    """Append the events of a run; returns by how much more is alive behind it than where it was traced."""
    by_path = {stretch.path: stretch for stretch in run.traced}
    first, last = run.traced[0], run.traced[-1]
    live = events[first.begin].live_bytes + shift
    for name in run.names:
        path, stretch = run.blocks.block(name), by_path[run.blocks.block(run.blocks.kept[name])]
        moved = live - events[stretch.begin].live_bytes
        for event in _renamed(events[stretch.begin : stretch.end], stretch.path, path):
            _put(found, _moved(event, moved), is_moment=True)
        live = events[stretch.end].live_bytes + moved
        if name != run.names[-1]:
            between = first if stretch is last else stretch  # behind the last one that was traced comes another thing
            _put(found, _moved(events[between.end], live - events[between.end].live_bytes), is_moment=False)
            live += events[between.end + 1].live_bytes - events[between.end].live_bytes
    return live - events[last.end].live_bytes


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
        flops=before.flops + event.flops,
        recomputed_flops=before.recomputed_flops + event.recomputed_flops,
    )


def _moved(event: StepEvent, shift: int) -> StepEvent:
    if not shift:
        return event
    return replace(event, live_bytes=event.live_bytes + shift, peak_bytes=event.peak_bytes + shift)


def _renamed(events: Sequence[StepEvent], path: str, new_path: str) -> Iterator[StepEvent]:
    for event in events:
        unit, parameter = _below(event.unit, path, new_path), event.parameter
        yield replace(event, unit=unit, parameter=parameter and _below(parameter, path, new_path))


def _below(name: str, path: str, new_path: str) -> str:
    return new_path + name.removeprefix(path) if is_at_or_under(name, path) else name


def stretches_of(events: Sequence[StepEvent], markers: Sequence[tuple[Moment, str, int]]) -> list[Stretch]:
    """Where each block's forward and backward lies.

    Args:
        markers: At which moment of which block's how many events had been told of. Where a block ends, the next event
            is the one of what comes after it.
    """
    found: list[Stretch] = []
    begun: dict[str, int] = {}
    for moment, path, place in markers:
        match moment:
            case Moment.PRE_FORWARD:
                begun[path] = place
            case Moment.PRE_BACKWARD:
                begun[path] = _with_unit(events, path, place)
            case _:
                found.append(Stretch(path=path, begin=begun.pop(path), end=place))
    return found


def _with_unit(events: Sequence[StepEvent], path: str, place: int) -> int:
    """Where a block's backward begins: a unit of the same module is told of it first."""
    while place and events[place - 1].moment is Moment.PRE_BACKWARD and is_at_or_under(events[place - 1].unit, path):
        place -= 1
    return place
