"""Convert a planned step to a Chrome trace, a JSON object for ui.perfetto.dev and chrome://tracing.

The format is the Trace Event Format: complete events (``X``) with start and duration in microseconds, counters (``C``),
and metadata (``M``) with the names of the tracks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from composer_fsdp2.estimate.bounds import COMPUTE, MODEL, Machine, Timed, timed_step
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.replay import assumed_trace
from composer_fsdp2.estimate.step import Kind

_TRACKS = (COMPUTE, "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", MODEL)
_PROCESS = 1
_MICROSECONDS = 1e6


def chrome_trace(step: PlannedStep) -> dict[str, Any]:
    """Return the trace of the schedule in ``timed_step``.

    If speeds are unknown, every event takes one microsecond, in order.
    """
    # Without a trace of the model, the estimate assumed these events.
    trace = assumed_trace(step.plan) if step.trace is None else step.trace
    timed = list(timed_step(step.estimate, trace, step.bounds.machine if step.bounds else Machine()))
    is_timed = any(each.seconds for each in timed)
    if not is_timed:
        timed = _one_after_the_other(timed)
    return {
        "traceEvents": [*_names(), *(_slice(each) for each in timed if each.seconds), *_counters(step, timed)],
        "displayTimeUnit": "ms",
        "otherData": {
            "source": step.source,
            "times": "the least that they can be at the given speeds" if is_timed else "none: the order only",
        },
    }


def _one_after_the_other(timed: list[Timed]) -> list[Timed]:
    return [
        replace(each, start_s=number / _MICROSECONDS, seconds=1 / _MICROSECONDS) for number, each in enumerate(timed)
    ]


def _names() -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": "a rank"}}
    for number, track in enumerate(_TRACKS):
        yield {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": track}}


def _slice(each: Timed) -> dict[str, Any]:
    args = {"flops": each.flops} if each.track == COMPUTE else {"bytes": each.num_bytes}
    return {
        "name": each.label or "the model",
        "cat": each.track,
        "ph": "X",
        "ts": each.start_s * _MICROSECONDS,
        "dur": each.seconds * _MICROSECONDS,
        "pid": _PROCESS,
        "tid": _TRACKS.index(each.track),
        "args": args,
    }


def _counters(step: PlannedStep, timed: list[Timed]) -> Iterator[dict[str, Any]]:
    """Memory by kind at each change, timestamped with the computation's start."""
    when = {each.sample: each.start_s for each in timed if each.track == COMPUTE}
    before, last_s = None, 0.0
    for place, sample in enumerate(step.estimate.timeline):
        last_s = when.get(place, last_s)
        if sample.bytes_by_kind != before:
            before = sample.bytes_by_kind
            args = {kind.value: sample.bytes_of(kind) for kind in Kind}
            yield {"name": "memory", "ph": "C", "ts": last_s * _MICROSECONDS, "pid": _PROCESS, "args": args}
