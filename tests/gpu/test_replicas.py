"""HSDP on four GPUs, with and without CPU offloading."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.gpus import Ranks, on_gpus
from support.models import Model, tokens
from support.training import HSDP_2X2, adamw, train_alike
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch.local_tensors import local_tensor

OFFLOADED = HSDP_2X2 | {"cpu_offload": True}
# Large enough on a GPU that a copy to the host is still running when the backward returns: 8 MiB a matrix.
SIZES = {"cuda": {"num_blocks": 8, "width": 1024}, "cpu": {"num_blocks": 2, "width": 6}}
NUM_BACKWARDS = {"cuda": 1000, "cpu": 5}


def check_training(device: str) -> None:
    def check(config: dict[str, Any]) -> None:
        train_alike(Model, config, tokens, device=device, optimizer=adamw, num_steps=4, rtol=1e-9, atol=1e-12)

    deferred = {"gradient_sync": "defer_replica"}
    for_each(check, {"HSDP": (HSDP_2X2,), "offloaded": (OFFLOADED,), "deferred": (HSDP_2X2 | deferred,)})


@on_gpus(4, rehearsal=0)  # tests/sharding/ has the CPU version
def test_replicas_train_as_unsharded(ranks: Ranks):
    """Two nodes with a replica each train as one process, over NCCL's two communicators."""
    ranks.run(check_training)


def check_backwards(device: str) -> None:
    def check(precision: str, mixed_precision: str) -> None:
        torch.manual_seed(0)
        models = [Model(**SIZES[device])]
        models.append(copy.deepcopy(models[0]))
        for model, config in zip(models, (HSDP_2X2, OFFLOADED), strict=True):
            prepare_fully_shard(model, None, config | {"mixed_precision": mixed_precision}, precision, device)
        assert {parameter.device.type for parameter in models[1].parameters()} == {"cpu"}
        for number in range(NUM_BACKWARDS[device]):
            batch = tokens(number * dist.get_world_size() + dist.get_rank()).to(device)
            # The offloaded one runs and is read first, without time for its copies to end.
            offloaded, resident = (gradients_of(model, batch) for model in reversed(models))
            for name, gradient in offloaded.items():
                assert torch.equal(gradient, resident[name]), f"backward {number}, {name} is of another backward"

    for_each(check, {"fp32": ("fp32", "FULL"), "bf16": ("amp_bf16", "PURE"), "sums in fp32": ("amp_bf16", "DEFAULT")})


def gradients_of(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """This rank's gradient shards on the CPU, of this backward alone, because earlier ones are freed first."""
    model.zero_grad()
    model(batch).float().square().mean().backward()
    return {name: local_tensor(parameter.grad).cpu().clone() for name, parameter in model.named_parameters()}


@pytest.mark.timeout(3600)
@on_gpus(4, slow=True, slow_rehearsal=True)
def test_offloaded_gradients_are_those_of_their_backward(ranks: Ranks):
    """Bit for bit, 1,000 times: torch 2.7 lets the optimizer read gradients during their copy to the host
    (pytorch#160291).

    A torch that frees the memory of a reduction before its copy to the host ends has the same effect: pytorch#180665,
    seen there in 30 to 60 % of the backwards of two layers. 2.7, 2.13 and 2.15 do not free it early, and others are
    refused.
    """
    ranks.run(check_backwards, timeout_s=3000)
