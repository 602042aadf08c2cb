"""The host never waits for the GPU within a step, so it launches kernels ahead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.gpus import Ranks, on_gpus, without_waiting
from support.models import ModelWithScalar, tokens
from support.training import adamw

from composer_fsdp2 import begin_microbatch, clip_grad_norm_, prepare_fully_shard
from composer_fsdp2._torch.local_tensors import local_tensor

NUM_STEPS, NUM_MICROBATCHES = 3, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "low precision": {"mixed_precision": "PURE"},
    "recomputed": {"activation_checkpointing": True},
    "accumulated": {"gradient_sync": "last", "reshard_after_backward": False},
}


def check_steps(device: str) -> None:
    def check(config: dict[str, Any]) -> None:
        model = ModelWithScalar()
        optimizer = adamw(model)
        prepare_fully_shard(model, optimizer, config, precision="amp_bf16", device=device)
        batches = [tokens(NUM_MICROBATCHES * dist.get_rank() + n).to(device) for n in range(NUM_MICROBATCHES)]

        def step() -> None:
            optimizer.zero_grad()
            for number, batch in enumerate(batches):
                begin_microbatch(model, is_last=number == NUM_MICROBATCHES - 1)
                model(batch).float().square().mean().backward()
            clip_grad_norm_(model, 1e-3)
            optimizer.step()

        step()  # one-time initialization: communicators, optimizer state
        before = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
        with without_waiting(device):
            for _ in range(NUM_STEPS):
                step()
        assert not all(map(torch.equal, before, map(local_tensor, model.parameters()))), "nothing was trained"

    for_each(check, {name: (config,) for name, config in CONFIGS.items()})


@on_gpus(1, 2, rehearsal=0)  # the CPU does not wait
def test_a_step_never_waits_for_the_gpu(ranks: Ranks):
    """If clipping read one number from the GPU, the optimizer would be launched only after the backward.

    With torch's AdamW; ``test_pipelined.py`` has Composer's.
    """
    ranks.run(check_steps)
