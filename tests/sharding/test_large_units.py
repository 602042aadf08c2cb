"""A plan that unshards nearly all of a model at once reports it, with a way to split the unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.transformers_models import pretrained
from torch import nn

from composer_fsdp2.prepare import plan_run


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Stack(nn.Module):
    def __init__(self, num_layers: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(8, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(nn.Module):
    """Its direct child is the root."""

    def __init__(self, num_layers: int = 3, head: int = 4) -> None:
        super().__init__()
        self.inner = Stack(num_layers, head)


def notes(model: nn.Module, world_size: int = 8, **config: Any) -> list[str]:
    return [each for each in plan_run(model, config, world_size=world_size)[1].notes if "largest" in each]


def test_layers_in_one_unit_are_named_with_the_way_out():
    """As after a misplaced fsdp_wrap_fn: sharded, but with a peak as large as the model."""
    (note,) = notes(Model())
    assert "the largest of 1 units (inner) holds 100% of the parameters" in note
    assert note.endswith("wrap_policy: {transformer_layer_cls_to_wrap: [Layer]}")
    assert notes(Model(), wrap_policy={"transformer_layer_cls_to_wrap": ["Layer"]}) == []


def test_a_transformers_model_by_itself_has_two_units():
    """``prepare_fully_shard(LlamaForCausalLM(...))``: its direct children are the roots, and no hook chooses layers."""
    llama = pretrained("llama", num_hidden_layers=8)
    (note,) = notes(llama)
    assert "the largest of 2 units (model)" in note and note.endswith("{transformer_layer_cls_to_wrap: auto}")
    assert notes(llama, wrap_policy={"transformer_layer_cls_to_wrap": "auto"}) == []


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Model(num_layers=1), {}),  # no repeated layers
        (Model(head=200), {}),  # layers are a small part of it
        (nn.Sequential(nn.Sequential(Layer(), Layer())), {}),  # an MLP
        (Model(), {"world_size": 1}),
        (Model(), {"sharding_strategy": "NO_SHARD"}),  # nothing is all-gathered
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_gain(model: nn.Module, options: dict[str, Any]):
    assert notes(model, **options) == []
