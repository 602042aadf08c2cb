"""The plan as a value; what may be combined with what is in the folder beside."""

from __future__ import annotations

import copy

import torch
from support.language import Language, layer_plan
from support.legality import TENSOR
from support.ranks import run_ranks
from support.training import FULL

from composer_fsdp2 import apply_plan, plan_sharding, translate


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
