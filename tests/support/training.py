"""Train a sharded model and the unsharded one, and compare outputs, gradients and parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.comparing import full, own_name
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.training import control

Inputs = Callable[[int], torch.Tensor]  # from a seed

# FSDP1's default casts to the precision, and fp32 is the highest that Composer offers.
FULL = {"mixed_precision": "FULL"}
# On four ranks.
HSDP_2X2 = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
# A decorator. Ranks that time out wait for other ranks' reports; on one machine these arrive soon.
reports_soon = mock.patch.object(control, "_REPORT_TIMEOUT_S", 1.0)


def assert_close(what: str, actual: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names without activation checkpointing."""
    return {own_name(name): parameter for name, parameter in model.named_parameters()}


def assert_gradients(model: nn.Module, reference: nn.Module, *, atol: float = 1e-12) -> None:
    """Compare with the reference's gradients on the whole batch, zero where it has none. Called on all ranks."""
    ours = named_parameters(model)
    for name, parameter in reference.named_parameters():
        found, expected = (
            torch.zeros_like(parameter) if p.grad is None else full(p.grad) for p in (ours[name], parameter)
        )
        error = (found - expected).abs().max().item()
        assert error <= atol, (name, error)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train_alike(
    build: Callable[[], nn.Module],
    config: dict[str, Any],
    inputs: Inputs,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    num_steps: int = 2,
    rtol: float = 1e-12,
    atol: float = 1e-14,
) -> nn.Module:
    """Shard the model of ``build``, train it with different batches on each rank, and compare with the mean over all
    batches.

    Called on all ranks, with a ``build`` that returns equal values on each. Nothing is cast unless ``config`` sets it.
    Returns the sharded model.
    """
    torch.set_default_dtype(dtype)
    model = build()
    reference = copy.deepcopy(model).to(device)
    ours, theirs = optimizer(model), optimizer(reference)
    prepare_fully_shard(model, ours, FULL | config, device=device)
    compare_training(
        model, reference, ours, theirs, lambda seed: inputs(seed).to(device), num_steps=num_steps, rtol=rtol, atol=atol
    )
    return model


def compare_training(
    model: nn.Module,
    reference: nn.Module,
    ours: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer,
    inputs: Inputs,
    *,
    num_steps: int = 2,
    rtol: float = 1e-12,
    atol: float = 1e-14,
) -> None:
    def compare(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert_close(f"step {step}, {what}", actual.to(expected.device), expected, rtol=rtol, atol=atol)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(num_steps):
        output = model(inputs(step * world_size + rank))
        output.square().mean().backward()
        for peer in range(world_size):
            expected = reference(inputs(step * world_size + peer))
            (expected.square().mean() / world_size).backward()
            if peer == rank:
                compare("output", output, expected)
        compare_tensors(model, reference, compare, "gradient", lambda p: p.grad)
        ours.step()
        theirs.step()
        compare_tensors(model, reference, compare, "parameter", lambda p: p)
        ours.zero_grad()
        theirs.zero_grad()


def compare_tensors(
    model: nn.Module,
    reference: nn.Module,
    compare: Callable[[str, torch.Tensor, torch.Tensor], None],
    what: str,
    of: Callable[[nn.Parameter], torch.Tensor | None],
) -> None:
    sharded, whole = named_parameters(model), named_parameters(reference)
    assert sharded.keys() == whole.keys(), f"names differ: {sharded.keys() ^ whole.keys()}"
    for name, expected in whole.items():
        ours, theirs = of(sharded[name]), of(expected)
        assert (ours is None) == (theirs is None), f"{what} of {name}: {ours} and {theirs}"
        if ours is not None and theirs is not None:
            compare(f"{what} of {name}", full(ours), theirs.detach())
