"""Expert parallelism beside one process: every loss, norm and parameter of several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full_parameters
from support.experts import NUM_EXPERTS, MoELanguage, Weights
from support.language import batch, loss_of
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, adamw, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer_fsdp2 import (
    ComposerFSDP2Error,
    begin_microbatch,
    clip_grad_adaptive_,
    clip_grad_norm_,
    prepare_fully_shard,
    summon_full_params,
)

ATOL = 1e-12

Optimizer = torch.optim.Optimizer


def build(**sizes: int) -> MoELanguage:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return MoELanguage(**sizes)


def split_as_foundry(model: nn.Module, degree: int) -> None:
    """What LLM Foundry does for MegaBlocks (llmfoundry/models/layers/ffn.py, set_ffn_device_mesh), on a mesh of its
    own."""
    shape = (dist.get_world_size() // degree, degree)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("weight_parallel", "expert_parallel"))
    for layer in model.model.layers:
        weights = layer.moe.experts.mlp
        for name, weight in list(weights.named_parameters()):
            part = distribute_tensor(weight.detach(), mesh["expert_parallel"], [Shard(0)])
            weights.register_parameter(name, nn.Parameter(part))
        layer.moe.experts._fsdp_kwargs_dict = {"device_mesh": mesh["weight_parallel"]}


def freeze_some(model: nn.Module) -> None:
    """The first layer's inputs have no gradients, and its experts are not trained."""
    model.model.embedding.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


def check_training(
    degree: int,
    config: dict[str, Any],
    *,
    sizes: dict[str, int] | None = None,
    make: Callable[[nn.Module], Optimizer] = sgd,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    by_script: bool = False,
    steps_before: int = 0,
    num_microbatches: int = 1,
    num_steps: int = 4,
) -> None:
    model = build(**(sizes or {}))
    prepare(model)
    reference = copy.deepcopy(model)
    theirs = make(reference)
    if by_script:
        split_as_foundry(model, degree)
    else:
        config = config | {"expert_parallel_degree": degree}
    ours = make(model)
    for step in range(steps_before):
        for each, optimizer in ((model, ours), (reference, theirs)):
            loss_of(each, batch(100 + step, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(num_steps):
        tokens = batch(step, 2 * num_microbatches * world_size)
        expected = loss_of(reference, tokens)
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        loss = torch.zeros(())
        for number, microbatch in enumerate(tokens.chunk(world_size)[rank].chunk(num_microbatches)):
            begin_microbatch(model, is_last=number == num_microbatches - 1)
            part = loss_of(model, microbatch) / num_microbatches
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world_size, expected.detach(), rtol=0, atol=ATOL)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5)["model"], expected_norm, rtol=0, atol=ATOL)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    found = full_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=ATOL, msg=lambda text, n=name: n + text)


def check_all_trainings() -> None:
    recomputed = {"activation_checkpointing": True}
    cases: dict[str, dict[str, Any]] = {
        "two ranks": {"degree": 2, "config": {}},
        "all ranks": {"degree": 4, "config": {}},
        "recomputed": {"degree": 2, "config": recomputed, "num_steps": 2},
        "recomputed, not reentrant": {
            "degree": 4,
            "config": recomputed | {"activation_checkpointing_reentrant": False},
            "num_steps": 2,
        },
        "frozen": {"degree": 2, "config": {}, "prepare": freeze_some, "num_steps": 2},
        "kept gathered": {"degree": 2, "config": {"sharding_strategy": "SHARD_GRAD_OP"}, "num_steps": 2},
        "offloaded": {"degree": 2, "config": {"cpu_offload": True}, "num_steps": 2},
        "microbatches, reduced in the last": {
            "degree": 2,
            "config": {"gradient_sync": "last"},
            "num_microbatches": 2,
            "num_steps": 2,
        },
        "state from before": {"degree": 2, "config": {}, "make": adamw, "steps_before": 2, "num_steps": 2},
        "many experts without tokens": {"degree": 4, "config": {}, "sizes": {"num_experts": 64}, "num_steps": 2},
        "split by the script": {"degree": 2, "config": {}, "by_script": True, "num_steps": 2},
        "split by the script, all ranks": {"degree": 4, "config": {}, "by_script": True, "num_steps": 2},
    }
    for_each(lambda options: check_training(**options), {name: (options,) for name, options in cases.items()})


def test_training_is_that_of_one_process():
    """Whoever splits experts trains the model of one process, with another batch on every rank: no gradient is that of
    some ranks' tokens alone, or too large by the number of ranks."""
    run_ranks(check_all_trainings, 4)
