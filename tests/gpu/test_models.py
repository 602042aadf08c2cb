"""Models in which ranks do not do alike, over NCCL, where a rank that waits alone waits for the watchdog."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import WIDTH, Block, Model, ModelWithScalar, features, tokens
from support.training import FULL, adamw, assert_close, named_parameters, train_alike
from torch import nn

from composer_fsdp2 import RanksDivergedError, clip_grad_norm_, prepare_fully_shard

GUARD_S = 20
NUM_EXPERTS = 4


# --- the guard


def check_guard(device: str) -> str:
    """Trains as without the guard; then one rank skips a block, and all raise what is returned."""
    gradients = []
    for config in ({}, {"collective_guard": GUARD_S}):
        torch.manual_seed(0)
        model = Model(num_blocks=3)
        prepare_fully_shard(model, None, FULL | config, device=device)
        model(tokens(dist.get_rank()).to(device)).square().mean().backward()
        clip_grad_norm_(model, 1.0)
        gradients.append([full(parameter.grad) for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), "the guard changed a gradient"
    if dist.get_rank() == dist.get_world_size() - 1:
        del model.decoder.blocks[1]
    try:
        model(tokens(0).to(device))
    except RanksDivergedError as error:
        return str(error)
    raise AssertionError("nothing raised")


@on_gpus(2)
def test_the_guard_says_where_ranks_part(ranks: Ranks):
    """A run that would hang in NCCL says which rank stands where; one that does not is let through, to the bit."""
    for text in ranks.run(check_guard, fresh=True):
        assert "rank 0 stands before the all-gather of decoder.blocks.1 in forward" in text
        assert "rank 1 stands before the all-gather of decoder.blocks.2 in forward" in text


# --- parameters that every rank holds unsharded


def check_replicated(device: str) -> None:
    def check(config: dict[str, Any]) -> None:
        model = train_alike(ModelWithScalar, config, tokens, device=device, optimizer=adamw, rtol=1e-9, atol=1e-12)
        own = full(model.decoder.gain)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own.to(device))
        assert all(torch.equal(own, other) for other in gathered), f"ranks hold {gathered}"

    for_each(check, {"FULL_SHARD": ({},), "deferred": ({"gradient_sync": "last"},)})


@on_gpus(2)
def test_replicated_parameters_stay_alike(ranks: Ranks):
    """What is too small to be cut learns from all ranks' batches, and does not drift apart between them."""
    ranks.run(check_replicated)


# --- experts that a rank's batch does not reach


class Experts(nn.Module):
    """A mixture in which a batch reaches one expert, and ranks not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(NUM_EXPERTS))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](self.router(x))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return False  # one unit: its ranks gather and reduce alike, whichever expert runs


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def check_experts(device: str) -> None:
    torch.set_default_dtype(torch.float64)
    model = Mixture()
    reference = copy.deepcopy(model).to(device)
    prepare_fully_shard(model, None, FULL, device=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in range(NUM_EXPERTS):
        for each in (model, reference):
            each.zero_grad()
        chosen = [(batch + other) % NUM_EXPERTS for other in range(world_size)]
        model.body.chosen = chosen[rank]
        model(features(rank).to(device)).square().mean().backward()
        for other in range(world_size):
            reference.body.chosen = chosen[other]
            (reference(features(other).to(device)).square().mean() / world_size).backward()
        for name, expected in reference.named_parameters():
            found = named_parameters(model)[name].grad
            # An expert that no rank reached: zeros, as in FSDP1's flat gradient.
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            assert_close(f"batch {batch}, {name}", full(found), wanted, rtol=1e-9, atol=1e-12)


@on_gpus(2)
def test_experts_that_a_rank_does_not_reach(ranks: Ranks):
    """An expert learns from the ranks that reached it; sums are not put together of different experts' gradients."""
    ranks.run(check_experts)
