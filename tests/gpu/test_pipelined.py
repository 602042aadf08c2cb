"""Steps that follow each other without a look at the GPU, with the optimizer that LLM Foundry's runs have."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.gpus import Ranks, Recorder, on_gpus, without_waiting
from support.models import Model, tokens
from support.sharding import WAYS

from composer_fsdp2 import clip_grad_norm_

pytestmark = pytest.mark.composer

SIZES = {"cuda": {"num_blocks": 16, "width": 1024}, "cpu": {"num_blocks": 2, "width": 6}}
BATCH_SIZES = {"cuda": 256, "cpu": 4}
NUM_STEPS = {"cuda": 50, "cpu": 4}
TOLERANCE = 1e-3  # of the first loss, in fp32 whose sums are taken in another order; the last ones are almost 0
MAX_NORM = 0.5


class Trainee:
    """A model that is sharded one way, with its optimizer."""

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


def check_pipelined(device: str) -> dict[str, tuple[list[float], float]]:
    """By who sharded: the losses, read when all steps are done, and the seconds of a step, on this rank."""
    seeds = range(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    batches = [tokens(seed, batch_size=BATCH_SIZES[device]).to(device) for seed in seeds]
    found = {}
    for name in ("FSDP1", "ours"):
        trainee = Trainee(name, device)
        first = trainee.step(batches[0])  # makes what is made once
        synchronize(device)
        start = time.perf_counter()
        losses = [first, *(trainee.step(batches[number % 4]) for number in range(1, NUM_STEPS[device]))]
        synchronize(device)
        seconds = (time.perf_counter() - start) / (NUM_STEPS[device] - 1)
        found[name] = [loss.item() for loss in losses], seconds
        del trainee
    return found


def decoupled_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """As the Trainer has it under the shim; over FSDP1's plain parameters as Composer has it."""
    from composer.optim import DecoupledAdamW

    from composer_fsdp2.compat.optimizers import update_own_parts

    optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    update_own_parts(optimizer)
    return optimizer


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@on_gpus(1, 2, packages=("mosaicml",))
def test_pipelined_steps_learn_what_fsdp1_does(ranks: Ranks, record_property: Recorder):
    """What one step leaves under way on some stream, the next one waits for; the times are recorded, not judged."""
    for number, found in enumerate(ranks.run(check_pipelined)):
        (ours, our_s), (theirs, their_s) = found["ours"], found["FSDP1"]
        assert theirs[-1] < theirs[0], f"nothing is learnt: {theirs}"
        difference = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        assert difference <= TOLERANCE * theirs[0], f"{ours}, FSDP1 {theirs}"
        if number == 0:
            cells = {"ours": f"{1e3 * our_s:.1f} ms", "FSDP1": f"{1e3 * their_s:.1f} ms"}
            ranks.record(record_property, "a pipelined step", cells | {"ours to FSDP1": f"{our_s / their_s:.3f}"})


def check_waiting(device: str) -> None:
    trainee, batch = Trainee("ours", device), tokens(dist.get_rank(), batch_size=4).to(device)
    # The first step makes the step counts, on the device; the second brings them to the host, all at once.
    for _ in range(2):
        trainee.step(batch)
    with without_waiting(device):
        losses = [trainee.step(batch) for _ in range(3)]
    assert losses[-1] < losses[0], f"nothing is learnt: {losses}"


@on_gpus(1, 2, packages=("mosaicml",))
def test_a_step_with_decoupled_adamw_never_waits_for_the_gpu(ranks: Ranks):
    """Composer's own reads a count from the device for each parameter, so that no step could begin ahead."""
    ranks.run(check_waiting)
