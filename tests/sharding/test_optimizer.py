"""An optimizer built before sharding remains the user's: same object, groups and options, with new parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import full
from support.models import Model, layer, tokens
from support.ranks import run_ranks
from support.training import FULL, adamw, assert_close, compare_training, named_parameters, sgd
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, UnsupportedError, prepare_fully_shard
from composer_fsdp2.sharding.optimizer import check_optimizers, the_optimizer

Optimizer = torch.optim.Optimizer


def grouped(model: Model) -> Optimizer:
    """Two groups with their own options, in an order that differs from the model's."""
    blocks, rest = [], []
    for name, parameter in model.named_parameters():
        (blocks if "blocks" in name else rest).append(parameter)
    groups = [
        {"params": rest[::-1], "lr": 0.05, "weight_decay": 0.1, "name": "rest"},
        {"params": blocks, "momentum": 0.5},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def subset(model: Model) -> Optimizer:
    return torch.optim.SGD(model.decoder.blocks.parameters(), lr=0.1, momentum=0.9)


def adagrad(model: Model) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "one group": sgd,
    "two groups": grouped,
    "subset": subset,
    "AdamW": adamw,
    "state from the start": adagrad,
}


def start(make: str, tied: bool, num_steps_before: int) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    """A model and its copy, with optimizers that have taken a few steps, equal on every rank."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Model(tied=tied)
    ours = OPTIMIZERS[make](model)
    for step in range(num_steps_before):
        model(tokens(100 + step)).square().mean().backward()
        ours.step()
        ours.zero_grad()
    reference, theirs = copy.deepcopy((model, ours))
    return model, reference, ours, theirs


def describe(optimizer: Optimizer, model: nn.Module) -> list[Any]:
    """By the names without activation checkpointing."""
    names = {parameter: name for name, parameter in named_parameters(model).items()}
    return [
        ({key: value for key, value in group.items() if key != "params"}, [names[p] for p in group["params"]])
        for group in optimizer.param_groups
    ]


def check_continues(make: str, tied: bool, num_steps_before: int, config: dict[str, Any]) -> None:
    model, reference, ours, theirs = start(make, tied, num_steps_before)
    identity = id(ours.param_groups), [id(group) for group in ours.param_groups], describe(ours, model)
    prepare_fully_shard(model, [ours], FULL | config, device="cpu")
    assert (id(ours.param_groups), [id(group) for group in ours.param_groups], describe(ours, model)) == identity
    assert all(isinstance(p, DTensor) for group in ours.param_groups for p in group["params"])
    assert set(ours.state) <= set(model.parameters()), "state of parameters that are gone"
    compare_training(model, reference, ours, theirs, tokens, rtol=1e-9, atol=1e-12)
    compare_state(ours, theirs, model, reference)


def compare_state(ours: Optimizer, theirs: Optimizer, model: nn.Module, reference: nn.Module) -> None:
    sharded = named_parameters(model)
    for name, parameter in reference.named_parameters():
        assert set(ours.state[sharded[name]]) == set(theirs.state[parameter]), name
        for key, expected in theirs.state[parameter].items():
            actual = ours.state[sharded[name]][key]
            if not isinstance(expected, torch.Tensor):
                assert actual == expected
                continue
            if expected.dim():
                assert isinstance(actual, DTensor) and actual.to_local().shape == sharded[name].to_local().shape
            assert_close(f"{name}.{key}", full(actual), expected, rtol=1e-9, atol=1e-12)


# By the number of ranks: the optimizer, whether the model is tied, the number of earlier steps, and the configuration.
CASES: dict[int, dict[str, tuple[str, bool, int, dict[str, Any]]]] = {
    2: {
        **{f"{make}, new": (make, True, 0, {}) for make in ("two groups", "state from the start")},
        **{f"{make}, with state": (make, i % 2 == 1, 2, {}) for i, make in enumerate(OPTIMIZERS) if make != "AdamW"},
        "cpu_offload": ("AdamW", True, 2, {"cpu_offload": True}),
        "NO_SHARD": ("AdamW", True, 2, {"sharding_strategy": "NO_SHARD"}),
        "recomputed": ("AdamW", True, 2, {"activation_checkpointing": True}),
    },
    4: {"replicas": ("AdamW", True, 2, {"data_parallel_replicate_degree": 2})},
}


@pytest.mark.parametrize("world_size", CASES)
def test_training_goes_on_as_unsharded(world_size: int):
    """Groups, options, subsets and momentum survive sharding, on 2-D meshes, with CPU offload and with checkpointing
    wrappers; FSDP1 silently dropped existing state."""
    run_ranks(for_each, world_size, check_continues, CASES[world_size])


# --- refused optimizers


def test_parameters_of_another_model():
    """FSDP1's error, with the number of foreign parameters and the first one's shape. Replacing modules after building
    the optimizer leaves such a parameter, too."""
    model, other = Model(), Model()
    mixed = torch.optim.SGD([{"params": model.parameters()}, {"params": other.decoder.head.parameters()}], lr=0.1)
    with pytest.raises(PlanError, match=r"The same model must be passed.*: 1 of the.*shape \(11, 6\), in group 1"):
        check_optimizers(model, mixed)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    check_optimizers(other, optimizer)
    other.decoder.head = layer()
    with pytest.raises(PlanError, match="after any change to its modules"):
        check_optimizers(other, optimizer)


def test_only_one_optimizer():
    """Composer's FSDP1 accepted one optimizer; a list of one is accepted, too."""
    model = Model()
    optimizer = sgd(model)
    assert the_optimizer(optimizer) is the_optimizer([optimizer]) is the_optimizer((optimizer,)) is optimizer
    assert the_optimizer(None) is the_optimizer([]) is None
    with pytest.raises(UnsupportedError, match="Only one optimizer is supported; found 2"):
        the_optimizer([optimizer, sgd(model)])
    with pytest.raises(PlanError, match=r"holds a Linear; pass a torch\.optim\.Optimizer"):
        the_optimizer([layer()])
