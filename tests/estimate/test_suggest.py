"""The search for the cheapest settings that fit: it finds what trying out everything finds."""

from __future__ import annotations

import operator
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import (
    Accumulation,
    GradientSync,
    MixedPrecision,
    ShardingConfig,
)
from composer_fsdp2.estimate.events import MicrobatchTrace, Moment
from composer_fsdp2.estimate.replay import assumed_trace
from composer_fsdp2.estimate.settings import Activations, Settings, Space, blocks_of, chosen_blocks, plan_with
from composer_fsdp2.estimate.suggest import MAX_PROPOSALS, Cost, Subject, cost_of, suggest_settings
from composer_fsdp2.sharding.plan import ParameterSpec, ShardingPlan, ShardUnit

pytestmark = pytest.mark.any_torch


def plan_of(
    num_layers: int = 3, width: int = 8, world_size: int = 8, *, offload: bool = False, **config: Any
) -> ShardingPlan:
    """A language model's: equal blocks, and a root with embeddings and output."""
    mesh = config.pop("mesh", MeshSpec.of_degrees(world_size, device_type="cuda"))
    given = ShardingConfig(mesh=mesh, cpu_offload=offload, **config)

    def unit(name: str, **shapes: tuple[int, ...]) -> ShardUnit:
        is_root = name == "model"
        return ShardUnit(
            modules=(name,),
            parameters=tuple(
                ParameterSpec(names=(f"{name}.{key}",), shape=shape, dtype="float32") for key, shape in shapes.items()
            ),
            mesh=mesh,
            is_root=is_root,
            reshard_after_forward=False if is_root else given.reshard_after_forward,
            mixed_precision=given.mixed_precision,
            cpu_offload=offload,
            reason="",
        )

    blocks = [
        unit(f"model.layers.{number}", up=(4 * width, width), down=(width, 4 * width), norm=(width,))
        for number in range(num_layers)
    ]
    root = unit("model", embedding=(5 * width + 1, width), head=(5 * width + 1, width))
    return ShardingPlan(
        config=given, units=(*blocks, root), tie_groups=(), ignored=(), left_out=(), checkpointed=(), notes=()
    )


def traces_of(plan: ShardingPlan, kept: int = 4000, recomputed: int = 200, loss: int = 9000):
    """Activations that grow with each block's forward and shrink with its backward, and are the largest at the loss."""

    def trace(activations: Activations, rows: int) -> MicrobatchTrace:
        chosen = chosen_blocks(plan, activations)
        events, live, host = [], 0, 0
        for event in assumed_trace(plan_with(plan, replace(present(plan), activations=activations))).events:
            here = kept
            if event.unit in chosen:
                here = recomputed if activations.recompute else kept
                host += here * activations.offload * rows * (event.moment is Moment.POST_FORWARD)
                here = 0 if activations.offload else here
            flops = 0
            if event.moment is Moment.POST_FORWARD and event.unit != "model":
                live += here * rows
            if event.moment is Moment.POST_BACKWARD:
                live -= here * rows
            if event.moment is Moment.PRE_BACKWARD and event.unit in chosen and activations.recompute:
                flops = 1000 * rows
            at_loss = loss * rows if event.moment is Moment.POST_FORWARD and event.unit == "model" else 0
            events.append(
                replace(
                    event,
                    live_bytes=live,
                    peak_bytes=live + max(at_loss, kept * rows // 2),
                    loss_bytes=at_loss,
                    recomputed_flops=flops,
                )
            )
        return MicrobatchTrace(events=tuple(events), host_bytes=host)

    return trace


def present(plan: ShardingPlan) -> Settings:
    return Subject(
        plan=plan, traces=lambda *_: MicrobatchTrace(events=()), rows=1, microbatch_size=1, world_size=8
    ).present


def order_of(cost: Cost) -> tuple[int, ...]:
    return cost.inter_node_bytes, cost.recomputed_flops, cost.calls, cost.offloaded_bytes


def by_brute_force(
    subject: Subject, memory_bytes: int, host_bytes: int, space: Space
) -> tuple[list[Settings], Settings | None]:
    """Each combination as a plan of its own, estimated whole; what no other one beats, the cheapest first."""
    now, tried = subject.present, {}
    for point in (*space.points(subject.plan), now):
        trace = subject.traces(point.activations, point.microbatch_size)
        estimate = subject.estimate(point)
        cost = order_of(cost_of(estimate, trace, subject.rows // point.microbatch_size))
        if cost[-1] > host_bytes and point != now:
            continue
        tried[point] = (cost, len(point.changed_from(now)), estimate.peak_bytes)
    fitting = [point for point, (*_, peak) in tried.items() if peak <= memory_bytes]
    if not fitting:
        return [], min(tried, key=lambda point: (tried[point][2], *tried[point][:2]))
    nearest_of: dict[tuple[int, ...], Settings] = {}  # by cost, what changes least
    for point in sorted(fitting, key=lambda point: tried[point][1]):
        nearest_of.setdefault(tried[point][0], point)

    def is_beaten(cost: tuple[int, ...]) -> bool:
        return any(cost != other and all(map(operator.le, other, cost)) for other in nearest_of)

    dearest = tried[now][0] if now in fitting else (sys.maxsize,)
    best = sorted(cost for cost in nearest_of if cost < dearest and not is_beaten(cost))
    return [nearest_of[cost] for cost in best[:MAX_PROPOSALS]], None


ACTIVATIONS = (
    Activations(),
    Activations(every=1, recompute=True),
    Activations(every=2, recompute=True),
    Activations(every=1, recompute=True, offload=True),
    Activations(every=2, offload=True),
)


@given(data=st.data())
@examples(5)
def test_finds_what_brute_force_finds(data: st.DataObject):
    """A run would be told of dearer settings than it needs, or that nothing fits where something does."""
    draw = data.draw
    world_size = draw(st.sampled_from((4, 8, 12)), "ranks")
    plan = plan_of(
        num_layers=draw(st.integers(1, 4)),
        world_size=world_size,
        reshard_after_forward=draw(st.sampled_from((True, False, 2))),
        mixed_precision=draw(
            st.sampled_from((MixedPrecision(), MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")))
        ),
        accumulation=Accumulation(
            gradient_sync=draw(st.sampled_from(GradientSync)), reshard_after_backward=draw(st.booleans())
        ),
    )
    rows = draw(st.sampled_from((1, 2, 4, 6)), "rows of a batch")
    sizes = tuple(size for size in range(1, rows + 1) if rows % size == 0)
    subject = Subject(
        plan=plan,
        traces=traces_of(plan, kept=draw(st.integers(0, 9000)), loss=draw(st.integers(0, 9000))),
        rows=rows,
        microbatch_size=draw(st.sampled_from(sizes)),
        world_size=world_size,
        gpus_per_node=draw(st.sampled_from((2, 4))),
    )
    space = Space(
        microbatch_sizes=sizes,
        replicas=tuple(each for each in (1, 2, 4) if world_size % each == 0 and each < world_size),
        reshards=(True, False, 2),
        activations=ACTIVATIONS if blocks_of(plan) else ACTIVATIONS[:1],
        cpu_offloads=(False, True),
    )
    memory_bytes = draw(st.integers(3_000, 80_000), "memory")
    host_bytes = draw(st.sampled_from((0, 20_000, 10**9)), "memory of the host")
    found = suggest_settings(subject, memory_bytes, space, host_bytes=host_bytes)
    proposals, nearest = by_brute_force(subject, memory_bytes, host_bytes, space)
    assert [each.settings for each in found.proposals] == proposals
    assert (found.nearest.settings if found.nearest else None) == nearest
    assert found.num_points == len({*space.points(plan), subject.present})
    for each in (*found.proposals, *filter(None, (found.present, found.nearest))):
        estimate, size = subject.estimate(each.settings), each.settings.microbatch_size
        assert each.peak_bytes == estimate.peak_bytes
        trace = subject.traces(each.settings.activations, size)
        assert order_of(each.cost) == order_of(cost_of(estimate, trace, subject.rows // size))


def test_a_row_s_first_block_may_have_more_parameters():
    """T5's first blocks hold the positions of all: every block recomputed would be all but these."""
    plan = plan_of(num_layers=3)
    extra = ParameterSpec(names=("model.layers.0.bias",), shape=(8,), dtype="float32")
    first = replace(plan.units[0], parameters=(*plan.units[0].parameters, extra))
    inner = replace(plan.units[1], modules=("model.layers.1.experts.0",))
    plan = replace(plan, units=(inner, first, *plan.units[1:]))
    row = tuple(f"model.layers.{number}" for number in range(3))
    assert blocks_of(plan) == (row,)
    assert chosen_blocks(plan, Activations(every=1, recompute=True)) == row
    assert chosen_blocks(plan, Activations(every=2, recompute=True)) == row[1::2]


def test_groups_that_straddle_nodes_are_not_proposed():
    """Of 24 ranks on 3 nodes in groups of 6, those that lie on two nodes send ten times what rank 0 does."""
    subject = Subject(
        plan=plan_of(world_size=24),
        traces=traces_of(plan_of(world_size=24)),
        rows=1,
        microbatch_size=1,
        world_size=24,
        gpus_per_node=8,
    )
    assert [24 // replicas for replicas in subject.space().replicas] == [24, 8, 4, 2]


def test_what_the_run_takes_may_be_known_better():
    """A search that thinks that a run fits, where its plan says that it does not, would look for cheaper settings."""
    plan = plan_of()
    subject = Subject(plan=plan, traces=traces_of(plan), rows=2, microbatch_size=2, world_size=8)
    peak = subject.estimate(subject.present).peak
    larger = replace(peak, bytes_by_kind=(*peak.bytes_by_kind[:-1], peak.bytes_by_kind[-1] + 1))
    found = suggest_settings(subject, peak.total_bytes, present_peak=larger)
    assert suggest_settings(subject, peak.total_bytes).fits and not found.fits
    assert found.present.peak_bytes == peak.total_bytes + 1
