"""The estimate of a step's seconds, compared with sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import MixedPrecision, ShardingConfig
from composer_fsdp2.estimate.bounds import GPUS, Machine, with_assumed_speeds
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace, StepEvent
from composer_fsdp2.estimate.seconds import HOST_PASSES, LINK_SHARE, step_seconds
from composer_fsdp2.estimate.step import CollectiveCall, Kind, Link, MemorySample, Phase, StepEstimate
from composer_fsdp2.sharding.plan import ParameterSpec, ShardingPlan, ShardUnit

pytestmark = pytest.mark.any_torch

# 100 operations forward; 300 backward, 100 of them recomputation. At half of 20 a second these are 10 and 30 s.
TRACE = MicrobatchTrace(
    events=(
        StepEvent(hook=Hook.PRE_FORWARD, unit="a", flops=100),
        StepEvent(hook=Hook.PRE_BACKWARD, unit="a", flops=300, recomputed_flops=100),
        StepEvent(hook=Hook.POST_BACKWARD, unit="a"),
    )
)
MACHINE = Machine(
    flops=20,
    achieved=0.5,
    intra_bytes_per_s=5 / LINK_SHARE,
    inter_bytes_per_s=2 / LINK_SHARE,
    pcie_bytes_per_s=4 / LINK_SHARE,
    host_bytes_per_s=10,
)


def plan_of(*, offload: bool = False) -> ShardingPlan:
    """One unit of 60 elements in fp32, gathered in bf16."""
    mesh = MeshSpec.of_degrees(2, device_type="cuda")
    config = ShardingConfig(mesh=mesh, cpu_offload=offload)
    unit = ShardUnit(
        modules=("a",),
        parameters=(ParameterSpec(names=("a.weight",), shape=(60,), dtype="float32"),),
        mesh=mesh,
        is_root=True,
        reshard_after_forward=True,
        mixed_precision=MixedPrecision(param_dtype="bfloat16"),
        cpu_offload=offload,
        reason="",
    )
    return ShardingPlan(config=config, units=(unit,), tie_groups=(), ignored=(), left_out=(), checkpointed=(), notes=())


def estimate_of(num_microbatches: int = 1, *, num_bytes: int = 120, link: Link = Link.INTRA) -> StepEstimate:
    """All-gathers in forward and in backward, and a reduce-scatter, in each microbatch; half of a buffer is the other
    rank's."""
    samples, calls = [], []
    for number in range(num_microbatches):
        for place, (op, phase) in enumerate(
            (("all_gather", Phase.FORWARD), ("all_gather", Phase.BACKWARD), ("reduce_scatter", Phase.BACKWARD))
        ):
            calls.append(
                CollectiveCall(
                    op=op,
                    phase=phase,
                    unit="a",
                    num_bytes=num_bytes,
                    ranks=2,
                    ranks_on_node=2 if link is Link.INTRA else 1,
                    link=link,
                    sample=len(samples),
                )
            )
            samples.append(
                MemorySample(
                    phase=phase, microbatch=number, event=place, unit="a", label="", bytes_by_kind=(0,) * len(Kind)
                )
            )
    end = MemorySample(
        phase=Phase.OPTIMIZER, microbatch=-1, event=-1, unit="", label="", bytes_by_kind=(0,) * len(Kind)
    )
    return StepEstimate(
        parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, timeline=(*samples, end), calls=tuple(calls)
    )


def seconds(estimate: StepEstimate, *, number: int = 1, trace: MicrobatchTrace = TRACE, offload: bool = False) -> float:
    return step_seconds(plan_of(offload=offload), estimate, trace, MACHINE, number)


def test_what_overlaps_with_computation_is_not_counted():
    """60 of 120 bytes pass NVLink in 12 s, 2 more than forward computes; backward's 24 s overlap with 30."""
    assert seconds(estimate_of()) == pytest.approx(12 + 30)
    assert seconds(estimate_of(num_bytes=20)) == pytest.approx(10 + 30)  # all overlapped
    # Between two nodes the same 60 bytes take 30 s, and twice as many 60.
    assert seconds(estimate_of(link=Link.INTER)) == pytest.approx(30 + 60)


def test_what_is_recomputed_is_computed():
    """A ladder that did not count recomputation would recompute everything."""
    once = tuple(replace(each, flops=each.flops - each.recomputed_flops) for each in TRACE.events)
    assert seconds(estimate_of(num_bytes=20), trace=replace(TRACE, events=once)) == pytest.approx(10 + 20)


def test_the_second_of_three_microbatches_stands_for_those_between():
    assert seconds(estimate_of(3), number=3) == pytest.approx(3 * 42)
    assert seconds(estimate_of(3), number=10) == pytest.approx(420)
    assert seconds(estimate_of(10), number=10) == pytest.approx(420)


def test_offloading_takes_time():
    """240 bytes of parameters in fp32, half of them on each of two ranks: 120 bytes at 4 a second for each gather and
    each gradient, overlapped with computation. Saved activations pass PCIe twice, and everything waits for them."""
    cheap = estimate_of(num_bytes=20)
    assert seconds(cheap, offload=True) == pytest.approx(30 + 60)
    assert seconds(replace(cheap, host_bytes=480), offload=True) == pytest.approx(90 + HOST_PASSES * 48)
    trace = replace(TRACE, host_bytes=40)
    # The same 40 bytes are part of the step's host memory, and not the optimizer's.
    assert seconds(replace(cheap, host_bytes=40), trace=trace) == pytest.approx(40 + 2 * 10)
    assert seconds(replace(estimate_of(3, num_bytes=20), host_bytes=40), trace=trace, number=5) == pytest.approx(5 * 60)


def test_speeds_are_assumed_from_the_memory():
    """Without a GPU's name, the order uses assumed speeds, and the sources name their GPU."""
    sizes = {40 * 2**30: "a100", 80 * 2**30: "h100", 81 * 2**30: "h200", 10**15: "h200"}
    for memory, name in sizes.items():
        found = with_assumed_speeds(None, memory)
        assert replace(found, sources=(), fp8_flops=None) == replace(GPUS[name], sources=(), fp8_flops=None)
        assert "assumed" in found.sources[-1]
    own = with_assumed_speeds(Machine(inter_bytes_per_s=1e9), 2**30)
    assert (own.inter_bytes_per_s, own.flops) == (1e9, GPUS["a100"].flops) and "assumed" in own.sources[-1]
    assert with_assumed_speeds(GPUS["h200"], 2**30) == GPUS["h200"]  # nothing is assumed or added
