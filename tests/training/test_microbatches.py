"""gradient_sync and reshard_after_backward: communication of each microbatch, and equal gradients of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.models import Chain
from support.ranks import run_ranks
from support.training import assert_close
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ConfigError, Outcome, begin_microbatch, prepare_fully_shard, translate
from composer_fsdp2.estimate._torch.counting import Collectives

NUM_MICROBATCHES = 3
WIDTH = 6


class Body(nn.Module):
    """Three units below a root without parameters. It may skip a layer, as layer drop, experts and multi-task heads
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.skip: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = torch.tanh(layer(x))
        return x

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return module in self.layers


def build(*, scalar: bool = False) -> Any:
    """With a scalar, which is replicated, in the first layer if ``scalar``."""
    torch.manual_seed(0)
    model = Chain(body=Body())
    if scalar:
        first = model.body.layers[0]
        first.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
        first.register_forward_hook(lambda module, args, output: output * module.scale)
    return model.double()


def batch(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(NUM_MICROBATCHES)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


SKIPS = (None, 2, 1)  # the layer that each microbatch skips, if any does


def run_batch(model: Any, rank: int, *, skips: bool, share: float | None = None) -> None:
    """One rank's batch; with ``share``, its part of an unsharded model's gradients."""
    for number, x in enumerate(batch(rank)):
        model.body.skip = SKIPS[number] if skips else None
        if share is None:
            begin_microbatch(model, is_last=number == NUM_MICROBATCHES - 1)
        (loss_of(model, x) * (share or 1) / NUM_MICROBATCHES).backward()


KEPT = {"reshard_after_backward": False}
SGO = {"sharding_strategy": "SHARD_GRAD_OP"}
HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
LAST, DEFERRED = {"gradient_sync": "last"}, {"gradient_sync": "defer_replica"}


@dataclass(kw_only=True)
class Case:
    """A configuration, and the all-gathers, reduce-scatters and all-reduces of a batch of three microbatches over three
    units: two all-gathers a unit and microbatch (forward, backward) and one reduction, unless deferred."""

    config: dict[str, Any]
    counts: tuple[int, int, int] | None = None
    scalar: bool = False
    skips: bool = False


# By the number of ranks.
CASES: dict[int, dict[str, Case]] = {
    2: {
        "every": Case(config={}, counts=(18, 9, 0)),
        "last": Case(config=LAST, counts=(18, 3, 0)),
        "last, parameters kept": Case(config=LAST | KEPT, counts=(12, 3, 0)),
        "last, parameters kept, also after forward": Case(config=LAST | KEPT | SGO, counts=(3, 3, 0)),
        "every, parameters kept, also after forward": Case(config=KEPT | SGO, counts=(3, 9, 0)),
        "no replicas to defer": Case(config=DEFERRED, counts=(18, 9, 0)),
        "last, skipping": Case(config=LAST, skips=True),
    },
    4: {
        "every": Case(config=HSDP, counts=(18, 9, 9)),
        "defer_replica": Case(config=HSDP | DEFERRED, counts=(18, 9, 3)),
        "last, parameters kept": Case(config=HSDP | LAST | KEPT, counts=(12, 3, 3)),
        "defer_replica, parameters kept": Case(config=HSDP | DEFERRED | KEPT, counts=(12, 9, 3)),
        "every, skipping, with a scalar": Case(config=HSDP, skips=True, scalar=True),
        "last, skipping, with a scalar": Case(config=HSDP | LAST | KEPT, skips=True, scalar=True),
        "defer_replica, skipping, with a scalar": Case(config=HSDP | DEFERRED, skips=True, scalar=True),
    },
}


KINDS = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")


def check(case: Case) -> None:
    unsharded, model = build(scalar=case.scalar), build(scalar=case.scalar)
    world_size = dist.get_world_size()
    for rank in range(world_size):
        run_batch(unsharded, rank, skips=case.skips, share=1 / world_size)
    prepare_fully_shard(model, None, {"mixed_precision": "FULL", **case.config}, precision="fp32")
    for _ in range(2):  # the second batch starts like the first one, without anything left over
        model.zero_grad()
        with Collectives() as sent:
            run_batch(model, dist.get_rank(), skips=case.skips)
        counts = {name: found["calls"] for name, found in sent.counts.items()}
        assert counts.keys() <= set(KINDS), counts
        assert case.counts is None or tuple(counts.get(kind, 0) for kind in KINDS) == case.counts, counts
        for (path, parameter), other in zip(model.named_parameters(), unsharded.parameters(), strict=True):
            assert isinstance(parameter, DTensor) or not parameter.dim(), f"{path} stayed gathered"
            assert_close(path, full(parameter.grad), other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.any_torch), 4])
def test_collectives_and_gradients(world_size: int):
    """The modes differ only in communication, such as one all-reduce a batch over slow links between replicas. A
    deferred reduction also runs if the last microbatch skips the unit, instead of in the next batch. A scalar's
    gradient, which our code averages, is averaged in the same microbatches."""
    run_ranks(for_each, world_size, check, {name: (case,) for name, case in CASES[world_size].items()})


@pytest.mark.parametrize("value", ["never", "Every", 1, None, True])
def test_other_modes_are_refused(value: Any):
    """A misspelt mode would train as another one, with other memory and communication."""
    with pytest.raises(ConfigError, match=r"gradient_sync.*every|gradient_sync.*string"):
        translate({"gradient_sync": value})


def test_report():
    """The report shows the memory cost, or that nothing is deferred."""
    deferred = translate({"gradient_sync": "defer_replica"}, world_size=2)
    [finding] = deferred.findings
    assert finding.outcome is Outcome.UNNEEDED and "replicas" in finding.reason
    [finding] = translate({"gradient_sync": "last"}, world_size=2).findings
    assert finding.outcome is Outcome.EXACT and "memory" in finding.reason
