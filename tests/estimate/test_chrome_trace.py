"""A step as a Chrome trace: in the Trace Event Format, with everything that Perfetto needs to draw it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from estimate.test_html import planned

from composer_fsdp2 import estimate_step
from composer_fsdp2.estimate.bounds import GPUS, Machine, step_bounds
from composer_fsdp2.estimate.chrome_trace import chrome_trace
from composer_fsdp2.estimate.planned_step import PlannedStep
from composer_fsdp2.estimate.replay import assumed_trace
from composer_fsdp2.estimate.step import Kind

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which the engine's environment has not")

# The event types in use: complete events, counters and metadata, in microseconds.
NUMBER = {"type": "number", "minimum": 0}
EVENT = {
    "oneOf": [
        {
            "properties": {"ph": {"const": "X"}, "ts": NUMBER, "dur": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
        },
        {
            "properties": {
                "ph": {"const": "C"},
                "ts": NUMBER,
                "args": {"type": "object", "minProperties": 1, "additionalProperties": NUMBER},
            },
            "required": ["name", "ph", "ts", "pid", "args"],
        },
        {
            "properties": {
                "ph": {"const": "M"},
                "name": {"enum": ["process_name", "thread_name"]},
                "args": {"required": ["name"]},
            },
            "required": ["name", "ph", "pid", "tid", "args"],
        },
    ]
}
SCHEMA = {
    "type": "object",
    "properties": {
        "traceEvents": {"type": "array", "minItems": 1, "items": EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
    },
    "required": ["traceEvents"],
}


def planned_at(machine: Machine | None, *, is_traced: bool) -> PlannedStep:
    step = planned(num_blocks=3, sharding_strategy="HYBRID_SHARD")
    trace = assumed_trace(step.plan)
    if is_traced:
        trace = replace(trace, events=tuple(replace(each, flops=10**9, live_bytes=64) for each in trace.events))
    estimate = estimate_step(step.plan, trace, world_size=16, num_microbatches=2, gpus_per_node=8)
    bounds = step_bounds(estimate, trace, machine) if machine else None
    return replace(step, estimate=estimate, trace=trace if is_traced else None, bounds=bounds)


def test_a_trace_opens_and_shows_all_of_the_step():
    """Perfetto draws nothing of a file with one wrong event, and a constant counter is no timeline; also for a plan
    without activations or without speeds."""
    for machine in (None, GPUS["h100"], Machine(inter_bytes_per_s=1e9), Machine(flops=1e12)):
        for is_traced in (True, False):
            step = planned_at(machine, is_traced=is_traced)
            trace = json.loads(json.dumps(chrome_trace(step), allow_nan=False))
            jsonschema.validate(trace, SCHEMA)
            events = trace["traceEvents"]
            counters = [event for event in events if event["ph"] == "C"]
            assert max(sum(event["args"].values()) for event in counters) == step.estimate.peak_bytes
            assert {kind.value for kind in Kind} == counters[0]["args"].keys()
            times = [event["ts"] for event in counters]
            assert times == sorted(times), (machine, is_traced)
            if machine is None or (machine.has_any_speed and (is_traced or machine.flops is None)):
                assert len(set(times)) > 10, (machine, is_traced)
            slices = [event for event in events if event["ph"] == "X"]
            named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            assert {event["cat"] for event in slices} <= set(named.values())
            assert all(named[event["tid"]] == event["cat"] for event in slices)
            if machine is None:
                calls = [event for event in slices if event["cat"] != "compute"]
                of_calls = sorted(call.num_bytes for call in step.estimate.calls)
                assert sorted(event["args"]["bytes"] for event in calls) == of_calls
            for track in named:  # consecutive on each track, because overlapping slices hide each other
                ends = [(event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == track]
                assert all(one[1] <= other[0] + 1e-6 for one, other in itertools.pairwise(ends)), track
