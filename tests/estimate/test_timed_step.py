"""The schedule of a step beside the streams and events of real ``fully_shard``.

``torch.cpu`` has streams and events so that code can be written for any device. Here each of them is a clock: a
collective moves the clock of the stream that issues it, a unit's computation that of the current stream, and a wait
takes the later of two. The order, the streams and the waits are those of ``fully_shard`` itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from estimate.test_replay import HSDP, Case, record, tokens, world_of
from support.on_ranks import on_ranks
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from composer_fsdp2 import apply_plan, begin_microbatch, estimate_step
from composer_fsdp2.estimate.bounds import COMPUTE, Machine, timed_step
from composer_fsdp2.estimate.events import Hook

Starts = list[tuple[str, float]]
OPERATORS = {  # as ``fully_shard`` calls them in torch 2.7, and in 2.13
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}


class Event:
    def __init__(self, *unused: Any, **options: Any) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        self.time = (stream or torch.cpu.current_stream()).time
        return self

    def synchronize(self) -> None:
        pass


class Stream:
    def __init__(self, *unused: Any, **options: Any) -> None:
        self.time = 0.0

    def wait_event(self, event: Event) -> None:
        self.time = max(self.time, event.time)

    wait_stream = wait_event

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)


@contextlib.contextmanager
def clocks(bytes_per_s: float) -> Iterator[Starts]:
    """Collects (operator, start) of each collective of the block; a unit of n parameters computes n seconds forward and
    2n backward."""
    starts: Starts = []

    def timed(op: str, communicate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            buffers = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            ranks, stream = dist.get_world_size(kwargs.get("group")), torch.cpu.current_stream()
            starts.append((op, stream.time))
            stream.time += max(each.nbytes for each in buffers) * (ranks - 1) / ranks / bytes_per_s
            return communicate(*args, **kwargs)

        return run

    def computing(seconds: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_recomputed = group._training_state is TrainingState.PRE_BACKWARD
            result = hook(group, *args, **kwargs)
            torch.cpu.current_stream().time += 0 if is_recomputed else seconds * len(group.fsdp_params)
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "Stream", Stream)
        patch.setattr(torch.cpu, "Event", Event)
        main = Stream()
        patch.setattr(torch.cpu, "_default_cpu_stream", main)
        patch.setattr(torch.cpu, "_current_stream", main)
        for name, op in OPERATORS.items():
            if hasattr(dist, name):
                patch.setattr(dist, name, timed(op, getattr(dist, name)))
        patch.setattr(FSDPParamGroup, "pre_forward", computing(1, FSDPParamGroup.pre_forward))
        patch.setattr(FSDPParamGroup, "pre_backward", computing(2, FSDPParamGroup.pre_backward))
        yield starts


def both(case: Case, bytes_per_s: float) -> tuple[Starts, Starts]:
    """The starts of collectives in one step, of real ``fully_shard`` and of the schedule. Called on all ranks."""
    model = case.model()
    model(tokens())
    plan = case.plan(model)
    trace = record(model, plan)
    numbers = {unit.name: len(unit.parameters) for unit in plan.units}
    seconds = {Hook.PRE_FORWARD: 1, Hook.PRE_BACKWARD: 2}
    events = (replace(each, flops=seconds.get(each.hook, 0) * numbers.get(each.unit, 0)) for each in trace.events)
    trace = replace(trace, events=tuple(events))
    estimate = estimate_step(plan, trace, world_size=case.ranks, num_microbatches=case.microbatches)
    machine = Machine(flops=1, intra_bytes_per_s=bytes_per_s)
    timed = timed_step(estimate, trace, machine)
    ours = [(each.track, each.start_s) for each in timed if each.track != COMPUTE]
    with clocks(bytes_per_s) as theirs:
        apply_plan(model, plan)
        theirs.clear()
        begin_s = torch.cpu.current_stream().time  # apply_plan communicates, too
        for number in range(case.microbatches):
            begin_microbatch(model, is_last=number == case.microbatches - 1)
            model(tokens()).square().sum().backward()
    return [(op, start_s - begin_s) for op, start_s in theirs], ours


CASES = {
    "full": Case(microbatches=2),
    "grad op": Case(config={"sharding_strategy": "SHARD_GRAD_OP"}, microbatches=2),
    "int": Case(config={"reshard_after_forward": 2}, microbatches=2),
    "hsdp": Case(config=HSDP, microbatches=2),
    "none": Case(config={"sharding_strategy": "NO_SHARD"}, microbatches=2),
    "scalar, hsdp": Case(scalar=True, config=HSDP),
    "last": Case(config={"gradient_sync": "last"}, microbatches=3),
    "prefetch": Case(config={"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 2}),
    "no prefetch": Case(config={"backward_prefetch": "NONE"}),
    "recomputed": Case(config={"activation_checkpointing": True}),
}
SPEEDS = {"fast links": 1e6, "about as fast": 300.0, "slow links": 20.0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")  # torch 2.7
def test_no_collective_starts_before_fully_shard_could(name: str):
    """A trace with earlier all-gathers shows overlap that no run has."""
    for speed, bytes_per_s in SPEEDS.items():
        with world_of(CASES[name].ranks):
            theirs, ours = both(CASES[name], bytes_per_s)
        assert [op for op, _ in ours] == [op for op, _ in theirs], speed
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert our[1] == pytest.approx(their[1], rel=1e-3, abs=1e-6), (speed, place, our, their)


@on_ranks(2)
def test_ranks_that_communicate_have_the_same_order():
    """The fake group above sends nothing; over gloo, each collective starts at the same time."""
    theirs, ours = both(Case(ranks=2, microbatches=2), 300.0)
    assert [op for op, _ in ours] == [op for op, _ in theirs]
    assert all(our == pytest.approx(their, rel=1e-3) for (_, our), (_, their) in zip(ours, theirs, strict=True))
