"""collective_guard: if ranks diverge, all ranks raise and name the place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full
from support.models import Model, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import reports_soon
from support.translations import config_of
from torch import nn

from composer_fsdp2 import (
    ConfigError,
    RanksDivergedError,
    clip_grad_norm_,
    plan_sharding,
    prepare_fully_shard,
    summon_full_params,
    translate,
)
from composer_fsdp2.training.node import Node

LIMIT_S = 1
TIME_LIMIT_S = 120  # longer is a hang


def model_for(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Model(num_blocks=3)
    prepare_fully_shard(model, None, {"collective_guard": 60, **config}, precision="fp32")
    return model


def is_stray() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def skips_a_block(model: nn.Module) -> None:
    if is_stray():
        model.decoder.blocks[1].forward = lambda x: x  # bypasses the hooks: still unsharded
        del model.decoder.blocks[1]
    model(tokens(0)).sum().backward()


def other_order(model: nn.Module) -> None:
    if is_stray():
        model.decoder.blocks = nn.ModuleList(reversed(model.decoder.blocks))
    model(tokens(0)).sum().backward()


def one_batch_less(model: nn.Module) -> None:
    for _ in range(1 if is_stray() else 2):
        model(tokens(0)).sum().backward()
    clip_grad_norm_(model, 1.0)


def no_backward(model: nn.Module) -> None:
    loss = model(tokens(0)).sum()
    if is_stray():
        model(tokens(0))
    else:
        loss.backward()


def summons_alone(model: nn.Module) -> None:
    if is_stray():
        with summon_full_params(model):
            pass
    else:
        model(tokens(0))


def late(model: nn.Module) -> None:
    if is_stray():
        time.sleep(LIMIT_S + 1.5)  # longer than the others collect reports
    model(tokens(0)).sum().backward()


# Each rank's operation, and the part of the error about it: (on the correct ranks, on the diverging one).
CASES: dict[str, tuple[Callable[[nn.Module], None], str, str]] = {
    "skips a block": (
        skips_a_block,
        "the all-gather of decoder.blocks.1 in forward",
        "the all-gather of decoder.blocks.2 in forward",
    ),
    "other order": (
        other_order,
        "the all-gather of decoder.blocks.0 in forward",
        "the all-gather of decoder.blocks.2 in forward",
    ),
    "one batch less": (one_batch_less, "the all-gather of decoder in forward", "clip_grad_norm_"),
    "no backward": (
        no_backward,
        "the all-gather of decoder.blocks.2 in backward",
        "the all-gather of decoder.blocks.0 in forward",
    ),
    "summons alone": (summons_alone, "the all-gather of decoder in forward", "summon_full_params"),
}


def message_of(work: Callable[[nn.Module], None], model: nn.Module) -> str:
    try:
        work(model)
    except RanksDivergedError as error:
        return str(error)
    raise AssertionError("nothing raised")


@on_ranks(2, timeout_s=TIME_LIMIT_S)
def test_every_rank_says_where_they_diverged(folder: str) -> None:
    """Each rank names the module, instead of hanging for half an hour."""
    for name, (work, right, stray) in CASES.items():
        lines = message_of(work, model_for()).splitlines()
        assert f"  rank 0 stands before {right}" in lines, lines
        assert f"  rank 1 stands before {stray}" in lines, lines
        if name == "skips a block":
            assert "all were together at the all-gather of decoder.blocks.0 in forward" in lines[0], lines


@reports_soon
def check_late() -> tuple[str, float]:
    model = model_for(collective_guard=LIMIT_S)
    start = time.monotonic()
    message = message_of(late, model)
    return message, time.monotonic() - start


@pytest.mark.any_torch
def test_a_rank_that_does_not_come():
    """The other ranks name it after the limit; and it raises, too, because they are gone."""
    (of_waiting, seconds), (of_late, _) = run_ranks(check_late, 2, timeout_s=TIME_LIMIT_S)
    assert f"ranks did not meet within {LIMIT_S} s" in of_waiting
    assert "rank 1 has not come" in of_waiting
    assert "rank 0 stands before the all-gather of decoder in forward" in of_waiting
    assert LIMIT_S <= seconds < LIMIT_S + 10
    assert "rank 0 stands before the all-gather of decoder in forward" in of_late


CONFIGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "last": {"gradient_sync": "last", "reshard_after_backward": False},
    "recomputed": {"activation_checkpointing": True},
    "groups": {"process_group": "self"},
}


def check_together(config: dict[str, Any]) -> None:
    gradients = []
    for guard in (None, 60):
        with mock.patch.object(Node, "send", autospec=True, side_effect=Node.send) as send:
            model = model_for(**config | {"collective_guard": guard})
            for seed in range(2):
                model(tokens(seed + dist.get_rank())).square().mean().backward()
            gradients.append([full(p.grad) for p in model.parameters()])
            with torch.no_grad():
                model(tokens(0))
            clip_grad_norm_(model, 1.0)
        assert (send.call_count > 0) == (guard is not None), send.call_count
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_ranks_that_stay_together_are_let_through():
    """A guard that changed a run, or raised without cause, would be turned off."""
    cases = {name: (config,) for name, config in CONFIGS.items()}
    run_ranks(for_each, 2, check_together, cases, timeout_s=TIME_LIMIT_S)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "60", True])
def test_limits_that_are_none(value: Any):
    """A limit that is infinite, or zero, is a mistake in the file."""
    with pytest.raises(ConfigError, match="collective_guard"):
        translate({"collective_guard": value})


def test_it_is_in_the_plan():
    """The guard takes time, so the report mentions it."""
    assert "waiting up to 30 s" in plan_sharding(Model(), config_of({"collective_guard": 30})).explain()
    assert "guard" not in plan_sharding(Model(), config_of({})).explain()
