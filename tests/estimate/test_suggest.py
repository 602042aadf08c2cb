"""The ladder of plans: which settings are tried, in which order, and which are proposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import Accumulation, ActivationCheckpointing, GradientSync, ShardingConfig
from composer_fsdp2.estimate.bounds import GPUS
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace
from composer_fsdp2.estimate.replay import assumed_trace, estimate_step
from composer_fsdp2.estimate.seconds import step_seconds
from composer_fsdp2.estimate.settings import Activations, Settings, blocks_of, present_settings
from composer_fsdp2.estimate.step import Kind, MemorySample, Phase
from composer_fsdp2.estimate.suggest import MAX_TRIED, Candidate, Ladder, Suggestions, ladder_of, suggest_settings
from composer_fsdp2.sharding.plan import ParameterSpec, ShardingPlan, ShardUnit

pytestmark = pytest.mark.any_torch


def plan_of(
    num_layers: int = 3, width: int = 8, world_size: int = 8, *, offload: bool = False, **config: Any
) -> ShardingPlan:
    """The plan of a language model: equal blocks, and a root with embeddings and output."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Settings to try

NONE, FOURTH, SECOND, ALL = Activations(), *(Activations(every=each, recompute=True) for each in (4, 2, 1))
NOW = Settings(reshard_after_forward=True, activations=ALL, microbatch_size=2, replicas=1, cpu_offload=False)


def ladder(plan: ShardingPlan, *, rows: int = 8, size: int = 2, gpus_per_node: int = 8) -> Ladder:
    return ladder_of(plan, present_settings(plan, size), rows=rows, gpus_per_node=gpus_per_node)


def shardings(ladder: Ladder) -> list[tuple[bool | int, int]]:
    return [(each.reshard_after_forward, each.replicas) for each in ladder.shardings]


def test_on_one_node_nothing_is_replicated():
    """Parameters are resharded after forward, or not. Smaller shard groups and replicas only help on networks slower
    than NVLink."""
    assert shardings(ladder(plan_of())) == [(True, 1), (False, 1)]
    assert ladder(plan_of(num_layers=3)).activations == (NONE, SECOND, ALL)
    assert ladder(plan_of(num_layers=4)).activations == (NONE, FOURTH, SECOND, ALL)
    assert ladder(plan_of(num_layers=1)).activations == (NONE,)  # one block is no row of blocks


def test_on_several_nodes_a_node_may_keep_parameters_or_be_a_replica():
    """24 ranks on 3 nodes: never groups of 6, some of which span two nodes and send ten times as much as the others."""
    assert shardings(ladder(plan_of(world_size=24))) == [(True, 1), (8, 1), (False, 1), (True, 3)]
    hybrid = plan_of(mesh=MeshSpec.of_degrees(8, 3, device_type="cuda"), reshard_after_forward=False)
    assert shardings(ladder(hybrid)) == [(False, 3), (True, 3), (True, 1)]
    halves = MeshSpec.of_degrees(16, tensor=2, device_type="cuda")  # a node has four of its shards
    assert shardings(ladder(plan_of(mesh=halves))) == [(True, 1), (4, 1), (False, 1)]
    split = replace(plan_of(world_size=16), units=plan_of(world_size=8).units)
    assert shardings(ladder(split)) == [(True, 1), (8, 1), (False, 1)]  # its units have different meshes


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [(8, 2, (1, 2, 4, 8)), (32, 8, (1, 4, 8, 16, 32)), (1, 1, (1,)), (8, 8, (1, 4, 8)), (7, 3, (1, 3, 7))],
)
def test_rows_divide_the_batch(rows: int, size: int, expected: tuple[int, ...]):
    assert ladder(plan_of(), rows=rows, size=size).sizes == expected


def test_who_offloads_may_not_need_to():
    """An optimizer on the host is the slowest setting; a run that offloads may fit without it."""
    found = ladder(plan_of(offload=True))
    assert [each.cpu_offload for each in found.shardings] == [True, False, False]


def test_what_a_plan_recomputes_is_recognized():
    """Otherwise a proposal would be refused as a different plan, or the present run would be tried a second time."""
    config = {"activation_checkpointing": ActivationCheckpointing(checkpoint=True)}
    plan = plan_of(num_layers=4, reshard_after_forward=1, **config)
    rows = blocks_of(plan)[0]

    def has(*names: str) -> Activations:
        return present_settings(replace(plan, checkpointed=names), 1).activations

    assert (has(), has(*rows), has(*rows[1::2]), has(rows[3])) == (NONE, ALL, SECOND, FOURTH)
    assert has(rows[0]).every == -1
    assert present_settings(plan, 1).reshard_after_forward is False  # a group of one rank never reshards


def test_a_row_s_first_block_may_have_more_parameters():
    """T5's first blocks have the position embeddings of all; otherwise "recompute every block" would leave these
    out."""
    plan = plan_of(num_layers=3)
    extra = ParameterSpec(names=("model.layers.0.bias",), shape=(8,), dtype="float32")
    first = replace(plan.units[0], parameters=(*plan.units[0].parameters, extra))
    inner = replace(plan.units[1], modules=("model.layers.1.experts.0",))
    plan = replace(plan, units=(inner, first, *plan.units[1:]))
    assert blocks_of(plan) == (tuple(f"model.layers.{number}" for number in range(3)),)


# ---------------------------------------------------------------------------------------------------------------------
# Settings and their order

LADDER = Ladder(
    shardings=(NOW, replace(NOW, reshard_after_forward=False)), activations=(NONE, SECOND, ALL), sizes=(1, 2, 4)
)
KEPT = {NONE: 10, SECOND: 6, ALL: 2}


def candidate(settings: Settings, peak_bytes: float, seconds: float, host_bytes: int = 0) -> Candidate:
    by_kind = (round(peak_bytes), *(0,) * (len(Kind) - 1))
    peak = MemorySample(phase=Phase.FORWARD, microbatch=0, event=0, unit="", label="", bytes_by_kind=by_kind)
    return Candidate(settings=settings, seconds=seconds, peak=peak, host_bytes=host_bytes)


def rated(settings: Settings, sends: float = 1) -> Candidate:
    """State takes 10, and 20 more without resharding; recomputing all blocks takes a third longer; each microbatch
    communicates."""
    kept = KEPT.get(replace(settings.activations, offload=False), 2) * settings.microbatch_size
    state = 10 if settings.reshard_after_forward else 30
    state = 4 if settings.cpu_offload else state
    kept = 1 if settings.activations.offload else kept
    sent = (3 if settings.reshard_after_forward else 2) * sends / settings.microbatch_size
    seconds = 300 * (1 + {NONE: 0, SECOND: 1 / 6}.get(settings.activations, 1 / 3)) + sent
    seconds += 500 * settings.cpu_offload + 100 * settings.activations.offload
    return candidate(settings, state + kept, seconds)


def suggested(
    memory_bytes: int, rate: Callable[[Settings], Candidate | None] = rated
) -> tuple[Suggestions, list[Settings]]:
    asked: list[Settings] = []

    def noted(settings: Settings) -> Candidate | None:
        asked.append(settings)
        return rate(settings)

    return suggest_settings(rate(NOW) or rated(NOW), LADDER, memory_bytes, noted), asked


def short(settings: Settings) -> tuple[str, str, int]:
    recomputed = {NONE: "none", SECOND: "second", ALL: "all"}[settings.activations]
    return "reshard" if settings.reshard_after_forward else "keep", recomputed, settings.microbatch_size


def test_the_ladder_goes_from_one_rung_to_the_next():
    """Each setting alone, in an expert's order; then for each choice of recomputed blocks the largest microbatch that
    fits. With 24, one row fits without recomputation, two with half of it, four with all; without resharding, none."""
    first = [
        ("keep", "all", 2),
        ("reshard", "none", 2),
        ("reshard", "second", 2),
        ("reshard", "all", 1),
        ("reshard", "none", 1),
    ]
    # On a slow network, 600 s, 500 s and 475 s: larger microbatches outweigh recomputation.
    found, asked = suggested(24, lambda settings: rated(settings, sends=100))
    then = [("reshard", "second", 4), ("reshard", "all", 4), ("keep", "all", 1)]
    assert [short(each) for each in asked] == [*first, *then]
    assert found.num_tried == 9  # including the run as it is
    assert [(short(each.settings), each.peak_bytes) for each in found.proposals] == [(("reshard", "all", 4), 18)]
    # On a fast network larger microbatches gain nothing, and recomputing half the blocks takes more memory.
    found, asked = suggested(24)
    assert [short(each) for each in asked] == [*first, ("keep", "all", 1)]
    assert [(short(each.settings), each.peak_bytes) for each in found.proposals] == [(("reshard", "none", 1), 20)]


def test_nothing_is_offered_where_nothing_is_gained():
    """Nobody applies a diff that saves one millisecond."""

    def as_fast(settings: Settings) -> Candidate:
        return replace(rated(settings), seconds=(1 if settings == NOW else 0.995) * rated(NOW).seconds)

    assert suggested(10**6, as_fast)[0].proposals == ()
    assert suggested(10**6, as_fast)[0].nearest is None
    fits = suggested(10**6)[0]
    assert fits.proposals and all(each.seconds < 0.99 * rated(NOW).seconds for each in fits.proposals)


def test_of_plans_that_are_as_fast_what_changes_least_is_proposed():
    """Here, no resharding saves less than 1 % of a step and takes 20 more memory, which is not worth a change."""
    best = suggested(10**6)[0].proposals[0].settings
    assert best == replace(NOW, activations=NONE)
    peaks = [each.peak_bytes for each in suggested(10**6)[0].proposals]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks) > 1  # slower, with a smaller peak


def test_offloading_comes_last():
    """Otherwise an optimizer on the host would be the first suggestion for a run that fits with less."""
    assert not any(each.cpu_offload or each.activations.offload for each in suggested(14)[1])
    found, asked = suggested(8)
    least = replace(NOW, microbatch_size=1)
    offloaded = replace(ALL, offload=True)
    assert asked[-3:] == [
        replace(least, activations=offloaded),
        replace(least, cpu_offload=True),
        replace(least, activations=offloaded, cpu_offload=True),
    ]
    assert [each.settings for each in found.proposals] == [asked[-2], asked[-1]]
    nothing = suggested(1)[0]
    assert nothing.nearest is not None
    assert nothing.proposals == () and nothing.nearest.settings == asked[-1]


def test_what_cannot_be_had_is_left_out():
    """For files without a key for the microbatch size, or models that cannot recompute, the other settings are
    suggested."""
    found, asked = suggested(24, lambda settings: rated(settings) if settings.microbatch_size == 2 else None)
    assert [short(each.settings) for each in found.proposals] == [("reshard", "second", 2)]
    assert [each.microbatch_size for each in asked].count(1) == 1
    alone = suggested(11, lambda settings: None)[0]
    assert alone.nearest is not None and alone.nearest.settings == NOW


@given(data=st.data())
@examples(40)
def test_at_most_24_plans_are_tried(data: st.DataObject):
    """A ladder that grows with the batch size or the number of ranks would take minutes."""
    draw = data.draw
    world_size = draw(st.sampled_from((8, 16, 64, 1024)))
    replicas = draw(st.sampled_from((1, 2, 8)))
    plan = plan_of(
        num_layers=draw(st.integers(1, 12)),
        mesh=MeshSpec.of_degrees(world_size // replicas, replicas if replicas > 1 else None, device_type="cuda"),
        reshard_after_forward=draw(st.booleans()),
    )
    now = present_settings(plan, draw(st.integers(1, 16)))
    peaks: dict[Settings, int] = {}

    def rate(settings: Settings) -> Candidate | None:
        assert settings not in peaks, "nothing is planned twice"
        peaks[settings] = draw(st.integers(0, 9))
        return None if peaks[settings] == 9 else candidate(settings, peaks[settings], draw(st.floats(1, 9)))

    memory_bytes = draw(st.integers(0, 9))
    found = suggest_settings(candidate(now, 5, 5), ladder_of(plan, now, rows=16, gpus_per_node=8), memory_bytes, rate)
    assert found.num_tried == len(peaks) + 1 <= MAX_TRIED == 24
    assert all(each.peak_bytes <= memory_bytes for each in found.proposals)
    if memory_bytes >= 5:
        assert all(each.seconds < 5 for each in found.proposals)
    if found.nearest is not None:  # there was room for all settings that offload
        assert sum(each.cpu_offload or each.activations.offload for each in peaks) == 3
    assert (found.nearest is None) == (memory_bytes >= min([5, *(each for each in peaks.values() if each < 9)]))


# ---------------------------------------------------------------------------------------------------------------------
# Microbatches


@given(data=st.data())
@examples(20)
def test_three_microbatches_tell_of_any_number(data: st.DataObject):
    """[Note: microbatches alike] Otherwise a candidate would be proposed that does not fit, or is slower than
    predicted."""
    draw = data.draw
    plan = plan_of(
        num_layers=draw(st.integers(1, 4)),
        mesh=draw(st.sampled_from((MeshSpec.of_degrees(8), MeshSpec.of_degrees(2, 4), MeshSpec.of_degrees(4, 2)))),
        reshard_after_forward=draw(st.sampled_from((True, False))),
        offload=draw(st.booleans()),
        accumulation=Accumulation(
            gradient_sync=draw(st.sampled_from(GradientSync)), reshard_after_backward=draw(st.booleans())
        ),
    )
    events, live = [], 0
    for event in assumed_trace(plan).events:
        live += {Hook.POST_FORWARD: 1, Hook.POST_BACKWARD: -1}.get(event.hook, 0) * draw(st.just(4000))
        events.append(replace(event, live_bytes=max(live, 0), peak_bytes=max(live, 0) + 500, flops=10**12))
    trace = MicrobatchTrace(events=tuple(events), host_bytes=draw(st.sampled_from((0, 10**6))))
    number = draw(st.integers(4, 9))
    few, all_of_them = (
        estimate_step(plan, trace, world_size=8, num_microbatches=each, gpus_per_node=4) for each in (3, number)
    )
    assert few.peak == replace(all_of_them.peak, microbatch=few.peak.microbatch)
    assert few.host_bytes == all_of_them.host_bytes
    machine = replace(GPUS["h100"], inter_bytes_per_s=draw(st.sampled_from((1.0, 1e12))))
    took = [step_seconds(plan, each, trace, machine, number) for each in (few, all_of_them)]
    assert took[0] == pytest.approx(took[1])
