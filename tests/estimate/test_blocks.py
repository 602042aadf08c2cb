"""Blocks that can represent others in a trace, and models in which none can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.examples import IS_THOROUGH
from support.models import Block, Chain
from support.translations import config_of
from torch import nn

from composer_fsdp2 import plan_sharding
from composer_fsdp2.estimate.blocks import find_blocks
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.sharding.plan import ShardingPlan

pytestmark = pytest.mark.any_torch  # test_trace.py has both

WIDTH = 6


class Stack(nn.Module):
    """Blocks in a container of any kind, run by one of its functions, with the rest of a model around them."""

    def __init__(self, blocks: nn.Module, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = blocks
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.run = run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.run(self.blocks, self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


def loss(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    return model(torch.zeros(rows, tokens, dtype=torch.int64))


def each(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def with_something_between(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    total = x
    for block in blocks:
        x = torch.tanh(block(x))
        total = total + x.sigmoid()
    return total


class Gate(Block):
    """A block with a switch, as in models that alternate window attention and full attention."""

    def __init__(self, is_wide: bool, place: int) -> None:
        super().__init__(WIDTH)
        self.is_wide = is_wide
        self.layer_idx = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x, x]).sigmoid()[: len(x)] if self.is_wide else x)


def blocks(number: int = 5) -> list[nn.Module]:
    return [Block(WIDTH) for _ in range(number)]


MODELS: dict[str, Callable[[], Stack]] = {
    "a list": lambda: Stack(nn.ModuleList(blocks()), each),
    "a dict": lambda: Stack(
        nn.ModuleDict({f"layer_{i}": block for i, block in enumerate(blocks())}),
        lambda found, x: each(found.values(), x),
    ),
    "a sequence": lambda: Stack(nn.Sequential(*blocks()), lambda found, x: found(x)),
    "from last to first": lambda: Stack(nn.ModuleList(blocks()), lambda found, x: each(reversed(found), x)),
    "each twice": lambda: Stack(nn.ModuleList(blocks()), lambda found, x: each(found, each(found, x))),
    "side by side": lambda: Stack(
        nn.ModuleList(blocks()), lambda found, x: torch.stack([block(x) for block in found]).sum(0)
    ),
    "with something between": lambda: Stack(nn.ModuleList(blocks()), with_something_between),
    "one block under several names": lambda: Stack(nn.ModuleList([Block(WIDTH)] * 5), each),
    "two kinds by a switch": lambda: Stack(nn.ModuleList(Gate(i % 3 == 1, i) for i in range(11)), each),
    "one block": lambda: Stack(nn.ModuleList(blocks(1)), each),
    "no blocks": lambda: Stack(nn.Identity(), lambda found, x: found(x)),
}  # fmt: skip


def plan_of(model: nn.Module, **config: Any) -> ShardingPlan:
    config = {"mixed_precision": "PURE", "activation_checkpointing_reentrant": False, **config}
    return plan_sharding(model, config_of(config, precision="amp_bf16"), precision="amp_bf16")


def check_all(stack: Stack, settings: dict[str, Any], every: int | None = None) -> None:
    """Checks that the trace of a few blocks equals the trace of all."""
    model = Chain(model=stack)
    for number, block in enumerate(stack.modules() if every else ()):
        block._activation_checkpointing = number % every == 0 and isinstance(block, Block)  # type: ignore[operator, assignment]
    plan = plan_of(model, **settings)
    before = {path: vars(module).copy() for path, module in model.named_modules()}
    found, full = (
        trace_microbatch(model, plan, loss, rows=2, tokens=5, precision="amp_bf16", num_blocks=number)
        for number in (3, None)
    )
    assert len(found.events) == len(full.events)
    assert found == full, next((a, b) for a, b in zip(found.events, full.events, strict=True) if a != b)
    assert {path: vars(module) for path, module in model.named_modules()} == before


@pytest.mark.parametrize("name", MODELS)
def test_a_few_blocks_stand_for_all_or_all_are_run(name: str):
    """However a model runs its blocks, no byte and no event of its trace is a guess."""
    is_even = list(MODELS).index(name) % 2 == 0
    for recomputed in (False, True) if IS_THOROUGH else (is_even,):
        check_all(MODELS[name](), {"activation_checkpointing": recomputed})


UNLIKE: dict[str, tuple[dict[str, Any], int | None]] = {
    "frozen below": ({"freeze": ["model.embed", *(f"model.blocks.{i}" for i in range(4))]}, None),
    "embeddings frozen": ({"freeze": ["model.embed"]}, None),
    "every third": ({"activation_checkpointing": True}, 3),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_blocks_in_unlike_surroundings_are_told_apart(name: str):
    """Frozen blocks below trained ones, and recomputation of every third block."""
    settings, every = UNLIKE[name]
    check_all(Stack(nn.ModuleList(blocks(11)), each), settings, every)


def test_few_blocks_are_run():
    """A trace of a hundred blocks takes as long as one of three."""
    model = Chain(model=MODELS["two kinds by a switch"]())
    [found] = find_blocks(model, plan_of(model), num_per_kind=3)
    assert found.present == ("0", "1", "2", "3", "4", "7")
    assert found.representatives["10"] == "7"
    assert found.representatives["9"] == "3"
