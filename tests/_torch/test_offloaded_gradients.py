"""Synchronization of offloaded gradients before the optimizer, with fake GPU streams and events on the CPU.

No GPU copies asynchronously here. The streams of the model's collectives are replaced by streams that record their
events. Its gradients are "pinned", and torch therefore takes the code path of a GPU. The collectives are gloo's own.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of
from support.models import Chain, features, layer
from support.on_ranks import on_ranks
from support.training import HSDP_2X2
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from composer_fsdp2 import UnsupportedError, apply_plan, plan_sharding, prepare_fully_shard, translate
from composer_fsdp2._torch.api import require_known_torch
from composer_fsdp2._torch.groups import groups_of, state_of
from composer_fsdp2.sharding.sharded import units


@dataclass(eq=False)
class Event:
    """An event on a stream, numbered across all streams."""

    stream: str
    number: int
    log: Log

    def synchronize(self) -> None:
        self.log.synchronized.append(self)

    def wait(self, *args: Any) -> None:
        pass


@dataclass
class Log:
    recorded: list[Event] = field(default_factory=list)
    synchronized: list[Event] = field(default_factory=list)


class Stream(torch.cpu.Stream):  # type: ignore[misc]
    """The CPU's stream, with events."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def record_event(self, event: Any = None) -> Event:
        self.log.recorded.append(Event(self.name, len(self.log.recorded), self.log))
        return self.log.recorded[-1]

    def wait_event(self, event: Any) -> None:
        pass


def as_on_a_gpu(model: nn.Module, log: Log) -> None:
    """Called after a first forward, which makes the streams to replace."""
    for group in (group for unit in units(model).values() for group in groups_of(state_of(unit))):
        group.comm_ctx.reduce_scatter_stream = Stream("reduce-scatter", log)
        group.comm_ctx.all_reduce_stream = Stream("all-reduce", log)
        for parameter in group.fsdp_params:
            parameter.pin_memory = True


def trained_once(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Chain(a=layer(), b=layer())
    prepare_fully_shard(model, None, {"cpu_offload": True, **config}, "fp32", "cpu")
    model(features(0)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return model


def check_events() -> None:
    """torch 2.7 waited on the other stream, and the optimizer read gradients before their copy was complete."""
    model, log = trained_once(HSDP_2X2), Log()
    as_on_a_gpu(model, log)
    model(features(1)).sum().backward()
    assert len(log.synchronized) == len(list(model.parameters()))
    assert all(event.stream == "all-reduce" for event in log.synchronized), log.synchronized
    # The copies are between the all-reduce's event and the event that the next unit waits for.
    of_stream = [event for event in log.recorded if event.stream == "all-reduce"]
    assert {event.number for event in log.synchronized} <= {event.number for event in of_stream[1:]}


def check_kept() -> None:
    """Each unit frees one buffer after its backward has finished, and not before: if the reductions' stream reuses its
    memory while it is being copied, the copy contains the next unit's gradient.

    torch 2.7.0 and 2.13.0 do not have this bug, pytorch#180665: a unit keeps the gradients reduced over replicas until
    its backward has finished. By then the default stream, which the next backward's reductions wait for, has waited for
    the copies. A torch that frees them earlier fails here.
    """
    model = trained_once(HSDP_2X2)
    as_on_a_gpu(model, Log())
    reduced: list[weakref.ref[torch.Tensor]] = []
    finished: list[Any] = []
    all_reduce, finalize, to = dist.all_reduce, FSDPParamGroup.finalize_backward, torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(weakref.ref(tensor))
        return all_reduce(tensor, *args, **kwargs)

    def copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """On the CPU, the copy to the host would be the same buffer."""
        return to(tensor, *args, **kwargs).clone() if kwargs.get("non_blocking") else to(tensor, *args, **kwargs)

    def num_there() -> int:
        return sum(buffer() is not None for buffer in reduced)

    def finish(group: Any) -> None:
        num_kept = len(reduced) - len(finished)
        deadline = time.monotonic() + 10
        while num_there() > num_kept and time.monotonic() < deadline:  # gloo's thread frees it some time after the wait
            time.sleep(0.001)
        assert num_there() == num_kept, (num_there(), len(reduced), len(finished))
        finalize(group)
        finished.append(group)

    with (
        mock.patch.object(dist, "all_reduce", noted),
        mock.patch.object(FSDPParamGroup, "finalize_backward", finish),
        mock.patch.object(torch.Tensor, "to", copied),
    ):
        model(features(1)).sum().backward()
    assert (len(reduced), len(finished)) == (2, 2)


class LetsGo(FSDPParamGroup):
    def __init__(self) -> None:
        """A future torch that does not keep the buffer."""


def check_refused() -> None:
    """A torch that frees the buffer early is refused with replicas only, before anything changes."""
    require_known_torch()  # once in a process, with the real class
    with mock.patch.object(FSDPParamGroup, "__init__", LetsGo.__init__):
        for config in (HSDP_2X2, {}):
            model = Chain(a=layer(), b=layer())
            before = dict(model.named_parameters())
            plan = plan_sharding(model, translate({"cpu_offload": True, **config}, device="cuda", world_size=4).config)
            with pytest.raises(UnsupportedError if config else Exception) as error:  # CUDA is missing here
                apply_plan(model, plan)
            text = str(error.value)
            if config:
                assert "cpu_offload with replicas" in text and "pytorch#180665" in text, text
                assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
            else:
                assert "cpu_offload" not in text, text


@on_ranks(4)
def test_gradients_over_replicas(folder: str) -> None:
    """Copies are waited for on their own stream, and no buffer is freed during its copy. Otherwise a run silently
    trains on wrong gradients."""
    all_of(check_events, check_kept, check_refused)


@on_ranks(2)
def test_a_hook_reads_a_gradient_that_is_there(folder: str) -> None:
    """An optimizer that runs in backward would step with the previous batch's gradients (pytorch#180666)."""
    model, log = trained_once({}), Log()
    as_on_a_gpu(model, log)
    hooked, *others = model.parameters()
    calls = []
    handle = hooked.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad))
    model(features(1)).sum().backward()
    handle.remove()
    assert len(calls) == 1
    assert len(log.synchronized) == len(others), "its copy was waited for before the hook, not at the end"
    for parameter in model.parameters():
        parameter.grad = None
    log.synchronized.clear()
    model(features(2)).sum().backward()
    assert len(log.synchronized) == len(others) + 1, "without a hook the copy overlaps again"
