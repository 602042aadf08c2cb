"""Ignored modules: left alone by sharding, and taken along by clipping and the optimizer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from support.comparing import full
from support.models import Block, Chain, features, layer
from support.ranks import run_ranks
from support.training import adamw, assert_close
from torch import nn

from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard


def partly_ignored() -> nn.Module:
    torch.manual_seed(0)
    return Chain(net=Chain({"inner": True}, kept=Block(), inner=layer(), rest=layer()))


def check_ignored(microbatches: int) -> tuple[float, bool]:
    torch.set_default_dtype(torch.float64)
    model = partly_ignored()
    reference = copy.deepcopy(model)
    kept = {name: (tensor, tensor.data_ptr()) for name, tensor in model.net.kept.state_dict(keep_vars=True).items()}
    optimizer = adamw(model)
    config = {"ignored_modules": [model.net.kept], "sync_module_states": True, "mixed_precision": {}}
    if dist.get_rank() == 1:
        model.net.kept.scale.data.fill_(0.75)  # its own, and not rank 0's
        reference.net.kept.scale.data.fill_(0.75)
    prepare_fully_shard(model, optimizer, config, device="cpu")
    for name, (tensor, address) in kept.items():
        now = model.net.kept.state_dict(keep_vars=True)[name]
        assert now is tensor and now.data_ptr() == address, f"{name} was touched"
    for microbatch in range(microbatches):
        model(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    # What each rank would have had alone.
    for microbatch in range(microbatches):
        reference(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.clone()
        if "kept" not in name:
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
        assert_close(name, full(model.get_parameter(name).grad), expected, rtol=1e-12, atol=1e-14)
    squares = torch.zeros(2)  # of what is sharded, and of what is not
    for name, parameter in model.named_parameters():
        squares[int("kept" in name)] += full(parameter.grad).square().sum()
    dist.all_reduce(squares)
    expected_norm = math.sqrt(squares.sum().item() / dist.get_world_size())
    (norm,) = clip_grad_norm_(model, 0.01).values()
    assert math.isclose(norm.item(), expected_norm, rel_tol=1e-12)
    before = model.net.kept.fc_in.weight.detach().clone()
    optimizer.step()
    return norm.item(), bool((model.net.kept.fc_in.weight != before).all())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_ignored_modules(microbatches: int):
    """They keep their tensors and their own gradients; clipping and the optimizer take them along, and all ranks scale
    alike."""
    (first, is_trained), second = run_ranks(check_ignored, 2, microbatches)
    assert (first, is_trained) == second and is_trained
