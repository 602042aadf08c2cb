"""Scaled losses with both sharded and replicated gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.models import Block, Chain, features, layer
from support.on_ranks import on_ranks
from support.training import FULL, adamw, assert_close
from torch import nn

from composer_fsdp2 import ShardedGradScaler, prepare_fully_shard


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded block, an unsharded module on each rank, a scalar, an excluded child, and an ignored module."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    own = {"alone": {"process_group": "self"}, "block": True}
    model = Chain(net=Chain(own, block=Block(), kept=layer(), alone=layer()), out=layer())
    model.net.alone.gain = nn.Parameter(torch.tensor(1.0))
    model.out._fsdp_wrap = False
    optimizer = adamw(model)
    prepare_fully_shard(model, optimizer, FULL | {"ignored_modules": [model.net.kept]}, device="cpu")
    return model, optimizer


@on_ranks(2)
def test_unscales_whole_and_sharded_gradients(folder: str) -> None:
    """fp16 runs with ignored modules, scalars or excluded children raise in torch's scalers. Unscaled gradients must
    equal those of the unscaled loss."""
    model, optimizer = sharded()
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=1)
    loss = model(features(dist.get_rank())).square().mean()
    loss.backward(retain_graph=True)
    expected = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    scaler.scale(model(features(dist.get_rank())).square().mean()).backward()
    scaler.unscale_(optimizer)
    for name, gradient in expected.items():
        assert_close(name, full(model.get_parameter(name).grad), gradient, rtol=1e-12, atol=1e-14)
    before = full(model.net.block.fc_in.weight).clone()
    scaler.step(optimizer)
    scaler.update()
    assert (full(model.net.block.fc_in.weight) != before).any() and scaler.get_scale() == 2048.0


def check_overflow(where: str, rank: int) -> None:
    model, optimizer = sharded()
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(features(dist.get_rank())).square().mean()).backward()
    if dist.get_rank() == rank:
        gradient = model.get_parameter(where).grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.view(-1)[0] = math.inf
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(full(p), before[name]) for name, p in model.named_parameters()), "a rank has stepped"
    assert scaler.get_scale() == 512.0


@on_ranks(2)
def test_an_overflow_anywhere_skips_the_step_everywhere(folder: str) -> None:
    """A rank that steps alone would diverge permanently."""
    names = ("net.block.fc_in.weight", "net.kept.weight", "net.alone.weight", "out.weight")
    for_each(check_overflow, {f"{name} of {rank}": (name, rank) for name in names for rank in (0, 1)})
