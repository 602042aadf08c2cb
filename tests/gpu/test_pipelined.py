"""Consecutive steps without synchronizing with the GPU, with the optimizer of LLM Foundry's runs."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.gpus import Ranks, on_gpus, without_waiting
from support.models import Model, tokens
from support.sharding import WAYS

from composer_fsdp2 import clip_grad_norm_

pytestmark = pytest.mark.composer

SIZES = {"cuda": {"num_blocks": 16, "width": 1024}, "cpu": {"num_blocks": 2, "width": 6}}
BATCH_SIZES = {"cuda": 256, "cpu": 4}
NUM_STEPS = {"cuda": 50, "cpu": 4}
TOLERANCE = 1e-3  # of the first loss, in fp32 with another order of sums; the last losses are almost 0
MAX_NORM = 0.5


class Trainee:
    """A model sharded one way, with its optimizer."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = Model(**SIZES[device])
        WAYS[name](self.model, device)
        self.optimizer = decoupled_adamw(self.model)
        self.is_fsdp1 = name == "FSDP1"

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss, which is still being computed."""
        loss = self.model(batch).square().mean()
        loss.backward()
        if self.is_fsdp1:
            self.model.decoder.clip_grad_norm_(MAX_NORM)
        else:
            clip_grad_norm_(self.model, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def decoupled_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """DecoupledAdamW with the seams, as in the Trainer; on FSDP1's plain parameters, Composer's own."""
    from composer.optim import DecoupledAdamW

    from composer_fsdp2.compat.optimizers import update_local_shards

    optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    update_local_shards(optimizer)
    return optimizer


def check_pipelined(device: str) -> None:
    seeds = range(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    batches = [tokens(seed, batch_size=BATCH_SIZES[device]).to(device) for seed in seeds]
    found = {}
    for name in ("FSDP1", "ours"):
        trainee = Trainee(name, device)
        # The first step creates the step counts on the device; the second copies them to the host, all at once.
        losses = [trainee.step(batches[number]) for number in range(2)]
        with without_waiting(device) if name == "ours" else contextlib.nullcontext():
            losses += [trainee.step(batches[number % 4]) for number in range(2, NUM_STEPS[device])]
        found[name] = [loss.item() for loss in losses]
        del trainee
    ours, theirs = found["ours"], found["FSDP1"]
    assert theirs[-1] < theirs[0], f"nothing is learnt: {theirs}"
    difference = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    assert difference <= TOLERANCE * theirs[0], f"{ours}, FSDP1 {theirs}"


@on_gpus(1, 2, packages=("mosaicml",))
def test_pipelined_steps_never_wait_and_learn_what_fsdp1_does(ranks: Ranks):
    """The next step waits for the asynchronous work of a step, and the host for neither. Composer's own DecoupledAdamW
    reads a count from the device for each parameter, so no step could be launched ahead."""
    ranks.run(check_pipelined)
