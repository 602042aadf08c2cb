"""An optimizer built before sharding stays the user's optimizer: same object, groups and options, new parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import full
from support.models import Chain, Model, layer, tie, tokens
from support.ranks import run_ranks
from support.training import FULL, adamw, assert_close, compare_training, sgd
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import PlanError, UnsupportedError, prepare_fully_shard
from composer_fsdp2.sharding.optimizer import check_optimizers, the_optimizer

Optimizer = torch.optim.Optimizer


def grouped(model: Model) -> Optimizer:
    """Two groups with options of their own, in an order that is not the model's."""
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
    """A model and its copy with optimizers that have taken a few steps, alike on every rank."""
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
    names = {parameter: name for name, parameter in model.named_parameters()}
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
    sharded = dict(model.named_parameters())
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


def check_all_continue() -> None:
    cases = {
        f"{make}, {'tied' if tied else 'untied'}, {num_steps_before} steps before": (make, tied, num_steps_before, {})
        for make in OPTIMIZERS
        for tied in (False, True)
        for num_steps_before in (0, 2)
    }
    for_each(check_continues, cases)


def test_training_goes_on_as_unsharded():
    """Groups, options, subsets and momentum survive sharding; FSDP1 dropped existing state without a word."""
    run_ranks(check_all_continue, 2)


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (4, {"data_parallel_replicate_degree": 2}),
        (4, {}),
        (2, {"cpu_offload": True}),
        (2, {"sharding_strategy": "NO_SHARD"}),
        (2, {"activation_checkpointing": True}),
    ],
)
def test_state_is_cut_as_the_parameters_are(world_size: int, config: dict[str, Any]):
    """Momentum follows its parameter onto 2-D meshes, to the CPU and behind checkpointing wrappers."""
    check = check_continues if not config.get("activation_checkpointing") else check_state_behind_wrappers
    run_ranks(check, world_size, "AdamW", True, 2, config)


def check_state_behind_wrappers(make: str, tied: bool, num_steps_before: int, config: dict[str, Any]) -> None:
    model, reference, ours, theirs = start(make, tied, num_steps_before)
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    compare_training(model, reference, ours, theirs, tokens, rtol=1e-9, atol=1e-12)


def check_scheduler() -> tuple[list[float], list[float]]:
    model = Model()
    optimizer = grouped(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    groups = list(optimizer.param_groups)
    prepare_fully_shard(model, optimizer, {}, device="cpu")
    rates = []
    for _ in range(2):
        model(tokens(0)).sum().backward()
        optimizer.step()
        scheduler.step()
        rates.append(groups[0]["lr"])
    return rates, [group["lr"] for group in optimizer.param_groups]


def test_a_scheduler_keeps_its_hold_on_the_groups():
    """Schedulers and callbacks hold group objects; the learning rate that they set is the one that is used."""
    for rates, now in run_ranks(check_scheduler, 2):
        assert rates == [0.05 / 2, 0.05 / 3]
        assert now == [0.05 / 3, 0.1 / 3]


def check_none_and_after() -> None:
    torch.set_default_dtype(torch.float64)

    def check(optimizers: Any) -> None:
        model = Model()
        reference = copy.deepcopy(model)
        prepare_fully_shard(model, optimizers, FULL, device="cpu")
        compare_training(model, reference, adamw(model), adamw(reference), tokens, rtol=1e-9, atol=1e-12)

    for_each(check, {f"{optimizers}": (optimizers,) for optimizers in (None, [], ())})


def test_an_optimizer_built_afterwards():
    """Scripts that build the optimizer after sharding pass None, or nothing in a list."""
    run_ranks(check_none_and_after, 2)


def check_frozen() -> None:
    torch.set_default_dtype(torch.float64)
    model = Model()
    model.decoder.embed.requires_grad_(False)
    reference = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    prepare_fully_shard(model, ours, FULL, device="cpu")
    assert not model.decoder.embed.weight.requires_grad
    compare_training(model, reference, ours, theirs, tokens)


def test_frozen_parameters():
    """Frozen layers stay frozen, in a group of the optimizer or not."""
    run_ranks(check_frozen, 2)


# --- what is refused


def test_parameters_of_another_model():
    """FSDP1's message; it tells how many parameters are foreign, and what the first of them looks like."""
    model, other = Model(), Model()
    mixed = torch.optim.SGD([{"params": model.parameters()}, {"params": other.decoder.head.parameters()}], lr=0.1)
    with pytest.raises(PlanError, match=r"The same model must be passed.*: 1 of the.*shape \(11, 6\), in group 1"):
        check_optimizers(model, mixed)
    check_optimizers(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_model_that_was_rebuilt_after_its_optimizer():
    """Surgery on the model after the optimizer was built leaves the optimizer with a dead parameter."""
    model = Chain(net=layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.net = layer()
    with pytest.raises(PlanError, match="after any change to its modules"):
        check_optimizers(model, optimizer)


def test_only_one_optimizer():
    """Composer's FSDP1 took one; a list of one is that one."""
    model = Model()
    optimizer = sgd(model)
    assert the_optimizer(optimizer) is the_optimizer([optimizer]) is the_optimizer((optimizer,)) is optimizer
    assert the_optimizer(None) is the_optimizer([]) is None
    with pytest.raises(UnsupportedError, match="Only one optimizer is supported; found 2"):
        the_optimizer([optimizer, sgd(model)])
    with pytest.raises(PlanError, match=r"holds a Linear; pass a torch\.optim\.Optimizer"):
        the_optimizer([layer()])


def test_tied_parameters_are_the_models_own():
    """A tied weight is one parameter of the optimizer, under whichever name it was taken."""
    model = Chain(a=layer(), b=layer())
    tie(model.a, model.b)
    check_optimizers(model, torch.optim.SGD(model.b.parameters(), lr=0.1))
