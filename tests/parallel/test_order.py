"""The plan as a value, and what is found out late; what may be combined with what is in the folder beside."""

from __future__ import annotations

import copy

import pytest
import torch
from support.language import MLP, Language, layer_plan
from support.legality import TENSOR, state_of
from support.ranks import run_ranks
from support.training import FULL
from torch import nn

from composer_fsdp2 import PlanError, apply_plan, plan_sharding, prepare_fully_shard, translate

# --- the plan as a value


def check_plan_as_a_value() -> str:
    torch.manual_seed(0)
    model = Language()
    config = translate(FULL, device="cpu", world_size=4, tensor_parallel_degree=TENSOR).config
    assert config is not None
    plan = plan_sharding(model, config, tensor_parallel=layer_plan())
    same = plan_sharding(copy.deepcopy(model), config, tensor_parallel=layer_plan())
    assert plan == same and plan.digest == same.digest
    other = plan_sharding(model, config, tensor_parallel=layer_plan(ends=False))
    assert plan != other and plan.digest != other.digest
    apply_plan(model, plan)
    return plan.explain()


def test_a_plan_says_where_each_parameter_lies():
    """Its text names the modules that are split and how, and ranks that plan differently notice it by the digest."""
    text = run_ranks(check_plan_as_a_value, 4)[0]
    assert "model.layers.*.mlp.up (2 modules): weight Shard(dim=0), bias Shard(dim=0)" in text
    assert "model.layers.*.mlp.down (2 modules): weight Shard(dim=1), bias Replicate()" in text
    assert "tensor_parallel 2" in text


# --- what is found out late


class WithoutInitializer(nn.Module):
    """A parameter of its own on the meta device, which nothing fills: found out where values are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(MLP(16, 32), Scale())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))


def check_untouched_by_a_late_refusal() -> None:
    with torch.device("meta"):
        model = WithoutInitializer()
    before = state_of(model)
    config = FULL | {"tiled_mlp": {"classes": ["MLP"], "chunks": 2}}
    with pytest.raises(PlanError, match="has no reset_parameters"):
        prepare_fully_shard(model, None, config, device="cpu")
    assert state_of(model) == before


def test_a_model_whose_values_nobody_gives_is_not_divided_either():
    """Who catches the error, and builds that part on the CPU, would have its MLPs cut twice."""
    run_ranks(check_untouched_by_a_late_refusal, 2)
