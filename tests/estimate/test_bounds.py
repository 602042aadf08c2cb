"""Bounds of a step, compared with a schedule by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_fsdp2.estimate.bounds import GPUS, Machine, step_bounds, timed_step
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace, StepEvent
from composer_fsdp2.estimate.step import CollectiveCall, Kind, Link, MemorySample, Phase, StepEstimate

pytestmark = pytest.mark.any_torch

# Unit a computes 100 operations forward, b 50, and b's backward 80, 20 of them recomputation.
EVENTS = (
    StepEvent(hook=Hook.PRE_FORWARD, unit="a", flops=100),
    StepEvent(hook=Hook.PRE_FORWARD, unit="b", flops=50),
    StepEvent(hook=Hook.PRE_BACKWARD, unit="b", flops=80, recomputed_flops=20),
    StepEvent(hook=Hook.POST_BACKWARD, unit="b"),
)
TRACE = MicrobatchTrace(events=EVENTS)


def call(op: str, unit: str, sample: int, *, ranks: int = 2, on_node: int = 2) -> CollectiveCall:
    return CollectiveCall(
        op=op,
        phase=Phase.FORWARD,
        unit=unit,
        num_bytes=100,
        ranks=ranks,
        ranks_on_node=on_node,
        link=Link.INTRA if ranks == on_node else Link.INTER,
        sample=sample,
    )


def estimate(*calls: CollectiveCall) -> StepEstimate:
    samples = (
        MemorySample(
            phase=Phase.FORWARD, microbatch=0, event=place, unit=event.unit, label="", bytes_by_kind=(0,) * len(Kind)
        )
        for place, event in enumerate(EVENTS)
    )
    return StepEstimate(
        parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, timeline=tuple(samples), calls=tuple(calls)
    )


STEP = estimate(call("all_gather", "a", 0), call("all_gather", "b", 1), call("reduce_scatter", "b", 3))
MACHINE = Machine(flops=10, intra_bytes_per_s=5)  # 50 bytes of a buffer are sent: 10 s for each collective


def test_a_step_waits_for_what_it_needs():
    """a is gathered until 10 and computes until 20, when b is gathered, which computes until 33; then b is reduced."""
    timed = [(each.track, each.label, each.start_s, each.end_s) for each in timed_step(STEP, TRACE, MACHINE)]
    assert [each for each in timed if each[0] != "compute"] == [
        ("all_gather", "a", 0, 10),
        ("all_gather", "b", 10, 20),
        ("reduce_scatter", "b", 33, 43),
    ]
    assert [(start, end) for track, _, start, end in timed if track == "compute"] == [
        (10, 20),
        (20, 25),
        (25, 33),
        (33, 33),
    ]
    bounds = step_bounds(STEP, TRACE, MACHINE)
    assert (bounds.compute_s, bounds.intra_s, bounds.inter_s) == (23, 30, 0)
    assert (bounds.lower_s, bounds.serial_s, bounds.exposed_s) == (43, 53, 20)
    assert bounds.flops == 230 and bounds.mfu_at_most == pytest.approx(210 / 430)


def test_fp8_computes_at_its_own_peak():
    """A bound with bfloat16's peak would be wrong: fp8 may take half of it."""
    h100 = GPUS["h100"]
    assert h100.computing_in("amp_fp8").flops == 1978.9e12  # NVIDIA's H100 white paper, dense fp8 of the SXM5
    assert h100.computing_in("amp_bf16") == h100
    # A user's own number, and a device without fp8, are unchanged.
    assert Machine(flops=10).computing_in("amp_fp8").flops == 10
    assert GPUS["a100"].computing_in("amp_fp8") == GPUS["a100"]


def test_what_is_not_given_bounds_nothing():
    """No bound depends on a speed that the user did not specify."""
    without_flops = step_bounds(STEP, TRACE, Machine(intra_bytes_per_s=5))
    assert (without_flops.lower_s, without_flops.exposed_s, without_flops.mfu_at_most) == (30, None, None)
    without_links = step_bounds(STEP, TRACE, Machine(flops=10))
    assert (without_links.lower_s, without_links.intra_s, without_links.exposed_s) == (23, 0, 0)
    without_trace = step_bounds(STEP, None, MACHINE)
    assert (without_trace.compute_s, without_trace.mfu_at_most) == (0, None)
    assert not Machine().has_any_speed and without_trace.unknown


def test_a_node_shares_its_network():
    """Of eight ranks on two nodes, four share the transfer of the bytes on the other node: half of 100 bytes, 12 each,
    at 2 bytes a second. Besides, 42 of the 87 bytes of a ring are on the own node."""
    step = estimate(call("all_gather", "a", 0, ranks=8, on_node=4))
    bounds = step_bounds(step, None, Machine(intra_bytes_per_s=1000, inter_bytes_per_s=2))
    assert bounds.inter_s == 6
    assert bounds.intra_s == pytest.approx(87 * 3 // 7 / 1000)


def test_microbatches_are_counted():
    """Two microbatches recompute twice."""
    twice = replace(STEP, timeline=(*STEP.timeline, *(replace(each, microbatch=1) for each in STEP.timeline)))
    bounds = step_bounds(twice, TRACE, MACHINE)
    assert (bounds.flops, bounds.model_flops) == (460, 420)


def test_the_table_says_where_its_numbers_come_from():
    for name, machine in GPUS.items():
        assert machine.flops and machine.intra_bytes_per_s, name
        assert len(machine.sources) == 1 + bool(machine.inter_bytes_per_s), name  # the GPU's, and its node's network
