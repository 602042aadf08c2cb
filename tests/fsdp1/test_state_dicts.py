"""FSDP1's state dict types without Composer: a script's own loop calls them on the unit directly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Model, tokens
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, adamw
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer_fsdp2 import prepare_fully_shard

FULL_TYPE = StateDictType.FULL_STATE_DICT
TENSOR = {
    "tensor_parallel_degree": 2,
    "layer_plan": {"decoder.blocks.0.fc_in": ColwiseParallel(), "decoder.blocks.0.fc_out": RowwiseParallel()},
}


def build(config: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model(**options)
    if config is not None:
        config = dict(config)
        tensor = config.pop("tensor_parallel", None) and TENSOR
        prepare_fully_shard(model, None, FULL | config, device="cpu", tensor_parallel=tensor)
    optimizer = adamw(model)
    model(tokens(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def check_round_trip(config: dict[str, Any], savers: list[int]) -> None:
    """For a tied model, whose first forward after the step is an evaluation."""
    (model, optimizer), (single, of_single) = build(config, tied=True), build(tied=True)
    with torch.no_grad():
        model(tokens(1))
    root = model.decoder
    first = FullStateDictConfig(rank0_only=True, offload_to_cpu=True), FullOptimStateDictConfig(rank0_only=True)
    with root.state_dict_type(model, FULL_TYPE, *first):
        of_savers, optimizers = dict(model.state_dict()), root.optim_state_dict(model, optimizer)
    assert bool(of_savers) == bool(optimizers) == (dist.get_rank() in savers)
    with root.state_dict_type(model, FULL_TYPE):
        state, osd = model.state_dict(), root.optim_state_dict(model, optimizer)
        assert isinstance(get_model_state_dict(model)["decoder.norm.weight"], DTensor)
    assert isinstance(model.state_dict()["decoder.norm.weight"], DTensor)
    torch.testing.assert_close(dict(state), dict(single.state_dict()))
    assert state["decoder.head.weight"] is state["decoder.embed.weight"]
    if of_savers:
        torch.testing.assert_close(of_savers, dict(state), rtol=0, atol=0)
        torch.testing.assert_close(optimizers["state"], osd["state"], rtol=0, atol=0)
    names = [name for name, _ in single.named_parameters()]
    expected = {names[place]: values for place, values in of_single.state_dict()["state"].items()}
    torch.testing.assert_close(osd["state"], expected)
    assert osd["param_groups"][0]["params"] == names

    kept = copy.deepcopy(osd)
    other, of_other = build(config, seed=1, tied=True)
    other.load_state_dict(state)
    of_other.load_state_dict(root.optim_state_dict_to_load(other, of_other, osd))
    for each, its_optimizer in ((other, of_other), (single, of_single)):
        each(tokens(5)).square().mean().backward()
        its_optimizer.step()
    with root.state_dict_type(other, FULL_TYPE):
        torch.testing.assert_close(dict(other.state_dict()), dict(single.state_dict()))
    torch.testing.assert_close(osd["state"], kept["state"], rtol=0, atol=0)


LAYOUTS = {
    "shards": ({}, 2, [0]),
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, 2, [0]),
    "replicas": (HSDP_2X2, 4, [0, 2]),
    "tensor parallel": ({"tensor_parallel": True}, 4, [0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(layout: str):
    """With rank0_only the first rank of each replica has the state dict, as under FSDP1; tied parameters share a
    tensor."""
    config, world_size, savers = LAYOUTS[layout]
    run_ranks(check_round_trip, world_size, config, savers)
