"""Metrics of sharded parameters are those of the full ones, with few collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full
from support.models import Chain, layer
from support.ranks import run_ranks
from support.training import FULL
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.training.reductions import reduce_to_floats

METRICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": torch.linalg.vector_norm,
    "1-norm": lambda p: torch.linalg.vector_norm(p, 1),
    "3-norm": lambda p: torch.linalg.vector_norm(p, 3),
    "squared norm": lambda p: torch.linalg.vector_norm(p) ** 2,
    "sum": torch.Tensor.sum,
}
# torch raises for these on a rank with an empty shard, and takes means of the shards' means: for even shards only.
OF_EVEN_SHARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inf-norm": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "max": torch.Tensor.max,
    "min": torch.Tensor.min,
    "mean": torch.Tensor.mean,
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(a=nn.Linear(6, 8), b=nn.Linear(6, 5), thin=nn.Linear(6, 1), rest=layer())


def check_settle(config: dict[str, Any]) -> None:
    model = build()
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    values, expected = {}, {}
    for path, parameter in model.named_parameters():
        world_size = dist.get_world_size()
        is_even = parameter.shape[0] % world_size == 0
        for name, metric in (METRICS | OF_EVEN_SHARDS if is_even else METRICS).items():
            values[path, name] = metric(parameter.detach())
            expected[path, name] = metric(full(parameter.detach())).item()
    values["plain", ""] = torch.tensor(0.25)
    expected["plain", ""] = 0.25
    settled = reduce_to_floats(values)
    assert list(settled) == list(values)
    for key, value in expected.items():
        assert settled[key] == pytest.approx(value, rel=1e-6), key


CONFIGS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"sharding_strategy": "NO_SHARD"}, {"cpu_offload": True}],
    4: [{"data_parallel_replicate_degree": 2}],
}


@pytest.mark.parametrize("world_size", CONFIGS)
def test_metrics_of_sharded_parameters(world_size: int):
    """The metric is the full parameter's: not this rank's shard's, nor counted once for each replica."""
    run_ranks(for_each, world_size, check_settle, {f"{config}": (config,) for config in CONFIGS[world_size]})


def check_few_collectives() -> None:
    """Thousands of metrics take one all-reduce instead of one each."""
    model = build()
    prepare_fully_shard(model, None, FULL, device="cpu")
    values = {path: torch.linalg.vector_norm(p.detach()) for path, p in model.named_parameters()}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        reduce_to_floats(values)
    assert all_reduce.call_count == 1


def check_large() -> None:
    """An exploding gradient is logged with its value; only the sum of squares was infinite."""
    model = Chain(net=nn.Linear(4, 4, bias=False))
    prepare_fully_shard(model, None, FULL, device="cpu")
    with torch.no_grad():
        model.net.weight.to_local().fill_(0.0)
        model.net.weight.to_local()[0, 0] = 1.5e19
    norm = torch.linalg.vector_norm(model.net.weight.detach())
    assert norm.full_tensor().isinf()
    assert reduce_to_floats({"norm": norm})["norm"] == pytest.approx(2**0.5 * 1.5e19)


def test_one_collective_and_squares_that_fit_no_fp32():
    """Logging is fast, and finite norms are logged as finite."""
    run_ranks(all_of, 2, check_few_collectives, check_large)
