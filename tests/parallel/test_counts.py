"""Communication of a step under CP, TP and EP, compared with hand-written code or a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import language, reader
from support.comparing import full
from support.experts import MoELanguage
from support.memory import HostMemory
from support.on_ranks import on_ranks
from support.training import FULL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2.estimate._torch.counting import Collectives

Counts = dict[str, dict[str, int]]
NUM_LAYERS = 1
CLIPPING = {"allreduce_": {"calls": 1, "bytes": 8}}  # the square of the norm


def counted(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], then: Callable[[nn.Module], Any] = lambda model: None
) -> Counts:
    """The collectives of a second step, because the first finds the roots."""
    for _ in range(2):
        model.zero_grad()
        with Collectives() as sent:
            loss(model).backward()
            then(model)
    return sent.counts


def clipped(model: nn.Module) -> None:
    clip_grad_norm_(model, 1.0)


@on_ranks(2)
def test_a_divided_sequence_takes_half_the_memory_and_one_exchange_each_way(folder: str) -> None:
    """Otherwise every rank would keep whole rows, and long ones would not fit."""
    tokens, labels = reader.batch(192, 32)  # large enough that memory freed late by a gloo thread does not matter
    counts, peaks = [], []
    for degree in (1, 2):
        model = reader.build(width=64, num_layers=NUM_LAYERS)
        prepare_fully_shard(model, None, FULL | {"context_parallel_degree": degree}, device="cpu")

        def loss(model: nn.Module) -> torch.Tensor:
            return model.model(tokens, labels)

        counts.append(counted(model, loss))
        with HostMemory() as host:
            loss(model).backward()
        peaks.append(host.peak_bytes)
    whole, divided = counts
    exchanged, items = divided.pop("alltoall_base_"), divided.pop("allreduce_")
    assert divided == whole, (divided, whole)
    # In each layer, queries, keys and values together and the output, in both directions; once, the number of labels.
    assert exchanged["calls"] == 4 * NUM_LAYERS and items == {"calls": 1, "bytes": 16}, (exchanged, items)
    assert peaks[1] < 0.6 * peaks[0], peaks


@on_ranks(4)
def test_split_layers_send_what_they_send_by_hand(folder: str) -> None:
    """A step with TP and FSDP needs no additional collective, and clipping adds one number."""
    torch.set_default_dtype(torch.float64)
    repair_cpu_collectives()  # gloo lacks averaging in torch 2.7
    ours, by_hand = (language.Language(num_layers=NUM_LAYERS) for _ in range(2))
    by_hand.load_state_dict(ours.state_dict())
    split = {"tensor_parallel_degree": 2, "layer_plan": language.layer_plan(ends=False)}
    prepare_fully_shard(ours, None, FULL, device="cpu", tensor_parallel=split)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(by_hand, mesh["tensor"], language.layer_plan(ends=False))
    for layer in by_hand.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(by_hand.model, mesh=mesh["shard"], reshard_after_forward=False)

    def loss(model: nn.Module) -> torch.Tensor:
        return language.loss_of(model, language.batch(0, 2))

    counts = counted(ours, loss)
    assert counts == counted(by_hand, loss)
    assert counts["all_reduce"]["calls"] >= 3 * NUM_LAYERS and "_allgather_base_" in counts, counts
    for one, other in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), full(other.grad), rtol=0, atol=1e-12)
    assert counted(ours, loss, clipped) == counts | CLIPPING


@on_ranks(4)  # on two, FSDP has one rank: torch 2.13 gathers nothing then
def test_split_experts_send_their_rows_and_nothing_else(folder: str) -> None:
    """An additional exchange would occur in every layer."""
    model = MoELanguage(num_layers=NUM_LAYERS)
    prepare_fully_shard(model, None, FULL | {"expert_parallel_degree": 2}, device="cpu")

    def loss(model: nn.Module) -> torch.Tensor:
        return language.loss_of(model, language.batch(dist.get_rank(), 2))

    counts = counted(model, loss)
    # Layers and model are all-gathered once, those that reshard after forward twice. Each rank gathers its own experts
    # by an all-to-all. The remaining all-to-alls send the numbers of rows, rows in both directions, and rows in
    # backward.
    calls = {name: each["calls"] for name, each in counts.items()}
    assert calls == {
        "_allgather_base_": 2 * NUM_LAYERS + 1,
        "alltoall_base_": (3 + 5) * NUM_LAYERS,
        "_reduce_scatter_base_": NUM_LAYERS + 1,
    }, calls
    with_clipping = counted(model, loss, clipped)
    assert {name: each for name, each in with_clipping.items() if name not in counts} == CLIPPING
    assert {name: each["calls"] for name, each in with_clipping.items() if name in counts} == calls
