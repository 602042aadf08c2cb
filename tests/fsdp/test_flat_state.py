"""State of runs with ``use_orig_params=False``, whose optimizer has flat parameters, and of FSDP1's ShardedTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp.test_state_dicts import FULL, RUN, SHARDED, assert_close, load, states
from fsdp.training import POLICIES, build, make_optimizer, step
from support.on_ranks import on_ranks
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP


def start_flat(cls: Any, steps: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Trained for some steps, with ``use_orig_params=False``, FSDP1's default."""
    model = cls(build(RUN), auto_wrap_policy=POLICIES["classes"], device_id=torch.device("cpu"), **options)
    optimizer = make_optimizer(model)
    for number in range(steps):
        step(model, optimizer, RUN, number)
    return model, optimizer


def resume(source: Any, target: Any, kind: StateDictType, **options: Any) -> dict[str, Any]:
    """Train under one class, resume under the other, and compare with the first continuing; returns the passed
    state."""
    model, optimizer = start_flat(source, 2, **options)
    passed = states(source, model, optimizer, kind)
    other, its_optimizer = start_flat(target, 1, **options)
    load(target, other, its_optimizer, kind, passed)
    assert_close(states(target, other, its_optimizer, FULL), states(source, model, optimizer, FULL))
    assert step(other, its_optimizer, RUN, 5) == pytest.approx(step(model, optimizer, RUN, 5), rel=1e-6)
    assert_close(states(target, other, its_optimizer, FULL), states(source, model, optimizer, FULL))
    return passed


def kinds_of(state: dict[str, Any]) -> set[type]:
    """The types of matrices and their moments."""
    moments = (value for values in state["optimizer"]["state"].values() for value in values.values())
    return {type(each) for each in (*state["model"].values(), *moments) if each.dim() == 2}


@on_ranks(2)
def test_full_state_of_flat_parameters_resumes_on_either_side():
    """The optimizer of an old run has flat parameters; its checkpoint uses the original names."""
    resume(FSDP1, FSDP, FULL)
    resume(FSDP, FSDP1, FULL)


@on_ranks(2)
def test_sharded_tensors_of_fsdp1_load():
    """Without device_mesh FSDP1 returns ShardedTensors; scripts stored them by ``torch.save`` on each rank."""
    assert kinds_of(resume(FSDP1, FSDP, SHARDED)) == {ShardedTensor}


@on_ranks(2)
def test_dtensors_load_on_either_side():
    """With device_mesh FSDP1 returns and accepts DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    assert kinds_of(resume(FSDP1, FSDP, SHARDED, device_mesh=mesh)) == {DTensor}
    assert kinds_of(resume(FSDP, FSDP1, SHARDED, device_mesh=mesh)) == {DTensor}
