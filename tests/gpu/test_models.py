"""Models in which ranks do not do alike, over NCCL, where a rank that waits alone waits for the watchdog."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import Model, ModelWithScalar, tokens
from support.training import FULL, adamw, train_alike

from composer_fsdp2 import RanksDivergedError, clip_grad_norm_, prepare_fully_shard

GUARD_S = 20


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
