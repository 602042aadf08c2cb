"""gradient_sync and reshard_after_backward: what each microbatch communicates, and that gradients stay the batch's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.ranks import run_ranks
from support.training import assert_close
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import ConfigError, Outcome, begin_microbatch, prepare_fully_shard, translate

NUM_MICROBATCHES = 4
WIDTH = 6


class Body(nn.Module):
    """Four units below a root that has no parameters of its own; each has a scalar, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return module in self.layers


class Model(nn.Module):
    def __init__(self, *, scalar: bool = False) -> None:
        super().__init__()
        self.body = Body()
        if scalar:
            self.body.layers[0].register_parameter("scale", nn.Parameter(torch.tensor(0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def batch(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(NUM_MICROBATCHES)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def run_batch(model: nn.Module, microbatches: list[torch.Tensor]) -> None:
    for number, x in enumerate(microbatches):
        begin_microbatch(model, is_last=number == len(microbatches) - 1)
        (loss_of(model, x) / len(microbatches)).backward()


KEPT = {"reshard_after_backward": False}
SGO = {"sharding_strategy": "SHARD_GRAD_OP"}
HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
# All-gathers, reduce-scatters and all-reduces of a batch of four microbatches over four units: two gathers a unit and
# microbatch (forward, backward) and one reduction, unless something is put off.
ONE_AXIS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "every": ({}, (32, 16, 0)),
    "last": ({"gradient_sync": "last"}, (32, 4, 0)),
    "last, parameters kept": ({"gradient_sync": "last"} | KEPT, (20, 4, 0)),
    "last, parameters kept, also after forward": ({"gradient_sync": "last"} | KEPT | SGO, (4, 4, 0)),
    "every, parameters kept, also after forward": (KEPT | SGO, (4, 16, 0)),
    "no replicas to defer": ({"gradient_sync": "defer_replica"}, (32, 16, 0)),
}
TWO_AXES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "every": (HSDP, (32, 16, 16)),
    "defer_replica": (HSDP | {"gradient_sync": "defer_replica"}, (32, 16, 4)),
    "last": (HSDP | {"gradient_sync": "last"}, (32, 4, 4)),
    "last, parameters kept": (HSDP | {"gradient_sync": "last"} | KEPT, (20, 4, 4)),
    "defer_replica, parameters kept": (HSDP | {"gradient_sync": "defer_replica"} | KEPT, (20, 16, 4)),
}


class Counting(TorchDispatchMode):
    """All-gathers, reduce-scatters and all-reduces in a block."""

    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> tuple[int, ...]:
        assert set(self.names) <= set(self.kinds), self.names
        return tuple(self.names.count(kind) for kind in self.kinds)


def check_counts(cases: dict[str, tuple[dict[str, Any], tuple[int, int, int]]]) -> None:
    torch.manual_seed(0)
    unsharded = Model().double()
    for rank in range(dist.get_world_size()):
        for x in batch(rank):
            (loss_of(unsharded, x) / NUM_MICROBATCHES / dist.get_world_size()).backward()

    def check(config: dict[str, Any], expected: tuple[int, ...]) -> None:
        model = copy.deepcopy(unsharded)
        model.zero_grad()
        prepare_fully_shard(model, None, {"mixed_precision": "FULL", **config}, precision="fp32")
        for _ in range(2):  # the second batch begins as the first one did
            model.zero_grad()
            with Counting() as counting:
                run_batch(model, batch(dist.get_rank()))
            assert counting.counts == expected, counting.counts
            for (path, parameter), other in zip(model.named_parameters(), unsharded.parameters(), strict=True):
                assert isinstance(parameter, DTensor), f"{path} stayed gathered after the last microbatch"
                assert_close(path, full(parameter.grad), other.grad, rtol=1e-12, atol=1e-14)

    for_each(check, cases)


def test_collectives_and_gradients():
    """The modes differ in what they send, and in nothing else."""
    run_ranks(check_counts, 2, ONE_AXIS)


def test_collectives_and_gradients_of_replicas():
    """Between replicas links are slow: their all-reduce once a batch."""
    run_ranks(check_counts, 4, TWO_AXES)


def check_whole_parameters() -> None:
    torch.manual_seed(0)
    unsharded = Model(scalar=True).double()
    unsharded.body.layers[0].register_forward_hook(lambda module, args, output: output * module.scale)
    for rank in range(dist.get_world_size()):
        for x in batch(rank):
            (loss_of(unsharded, x) / NUM_MICROBATCHES / dist.get_world_size()).backward()

    def check(mode: str, kept: bool) -> None:
        model = copy.deepcopy(unsharded)
        model.zero_grad()
        config = {**HSDP, "gradient_sync": mode, "reshard_after_backward": kept, "mixed_precision": "FULL"}
        prepare_fully_shard(model, None, config, precision="fp32")
        run_batch(model, batch(dist.get_rank()))
        for (path, parameter), other in zip(model.named_parameters(), unsharded.parameters(), strict=True):
            assert_close(path, full(parameter.grad), other.grad, rtol=1e-12, atol=1e-14)

    for_each(check, {f"{case}": case for case in itertools.product(("every", "last", "defer_replica"), (True, False))})


def test_parameters_that_stay_whole():
    """A scalar's gradient is averaged by us, not by fully_shard: put off in the same microbatches, and right."""
    run_ranks(check_whole_parameters, 4)


class Skipping(Body):
    """Leaves one layer out, as layer drop, experts and heads of several tasks do."""

    skip: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = torch.tanh(layer(x))
        return x


def check_skipped(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    unsharded = Model().double()
    unsharded.body.__class__ = Skipping
    world_size, skips = dist.get_world_size(), (None, 1, 2, 1)
    for rank in range(world_size):
        for x, unsharded.body.skip in zip(batch(rank), skips, strict=True):
            (loss_of(unsharded, x) / NUM_MICROBATCHES / world_size).backward()

    def check(mode: str) -> None:
        model = copy.deepcopy(unsharded)
        prepare_fully_shard(model, None, config | {"gradient_sync": mode, "mixed_precision": "FULL"}, precision="fp32")
        for _ in range(2):  # nothing of a batch is left for the next
            model.zero_grad()
            for number, (x, skip) in enumerate(zip(batch(dist.get_rank()), skips, strict=True)):
                model.body.skip = skip
                begin_microbatch(model, is_last=number == NUM_MICROBATCHES - 1)
                (loss_of(model, x) / NUM_MICROBATCHES).backward()
            for (path, parameter), other in zip(model.named_parameters(), unsharded.parameters(), strict=True):
                assert_close(path, full(parameter.grad), other.grad, rtol=1e-12, atol=1e-14)

    for_each(check, {mode: (mode,) for mode in ("every", "last", "defer_replica")})


def test_units_that_the_last_microbatch_does_not_run():
    """What was put off until then is communicated all the same, instead of in the next batch."""
    run_ranks(check_skipped, 4, HSDP)
    run_ranks(check_skipped, 2, {})


@pytest.mark.parametrize("value", ["never", "Every", 1, None, True])
def test_other_modes_are_refused(value: Any):
    """A misspelt mode would train as another one, with other memory and other traffic."""
    with pytest.raises(ConfigError, match=r"gradient_sync.*every|gradient_sync.*string"):
        translate({"gradient_sync": value})


def test_report():
    """What it costs, or that there is nothing to put off."""
    deferred = translate({"gradient_sync": "defer_replica"}, world_size=2)
    [finding] = deferred.findings
    assert finding.outcome is Outcome.UNNEEDED and "replicas" in finding.reason
    [finding] = translate({"gradient_sync": "last"}, world_size=2).findings
    assert finding.outcome is Outcome.EXACT and "memory" in finding.reason
