"""Models in which ranks diverge, over NCCL, where a rank that waits alone waits for the watchdog."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.comparing import full
from support.gpus import Ranks, on_gpus
from support.models import Model, tokens
from support.training import FULL

from composer_fsdp2 import RanksDivergedError, clip_grad_norm_, prepare_fully_shard

GUARD_S = 20


def check_guard(device: str) -> str:
    """Trains the same as without the guard; then one rank skips a block, and each rank returns its error."""
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
    """A run that would hang in NCCL ends with the position of each rank; a run that does not hang is unchanged bit for
    bit."""
    for text in ranks.run(check_guard, fresh=True):
        assert "rank 0 stands before the all-gather of decoder.blocks.1 in forward" in text
        assert "rank 1 stands before the all-gather of decoder.blocks.2 in forward" in text
