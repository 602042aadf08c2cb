"""Composer's FSDP1 itself, on meta models: FSDP2 starts from its values, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same, own_name
from support.on_ranks import on_ranks
from support.oracle import FSDP1
from support.training import FULL
from torch import nn

from tests.sharding.test_initialisation import SEED, build, values_of

pytestmark = pytest.mark.composer

# Models that FSDP1 can run: ties within a unit, one dtype in a unit, no scalars.
NAMES = ["decoder", "tied_decoder", "nested", "hooked", "partly_real"]


def prepare_fsdp1(model: nn.Module) -> None:
    from composer.core.state import _create_device_mesh
    from composer.devices import DeviceCPU
    from composer.distributed import prepare_fsdp_module
    from composer.utils.parallelism import FSDPConfig

    config = FSDPConfig(**FULL)
    mesh = _create_device_mesh(DeviceCPU(), config, None)
    assert mesh is not None and mesh.mesh_dim_names is not None
    config.device_mesh = mesh[tuple(mesh.mesh_dim_names)]
    with FSDP1():
        prepare_fsdp_module(model, None, config, "fp32", "cpu", False)


@on_ranks(2)
def test_meta_models_start_as_under_fsdp1():
    """Otherwise a run from scratch would start from other weights than under FSDP1, and its losses could not be
    compared."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from composer_fsdp2 import prepare_fully_shard

    def check(name: str) -> None:
        values: list[dict[str, Any]] = []
        for prepare in (prepare_fsdp1, lambda model: prepare_fully_shard(model, None, FULL, device="cpu")):
            model = build(name)
            torch.manual_seed(SEED)  # as Composer's State does on every rank
            prepare(model)
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                values.append({own_name(each): value for each, value in values_of(model).items()})
        theirs, ours = values
        assert_same(ours, theirs, name)
        assert sum(value.unique().numel() > 4 for value in ours.values()) >= 3, f"{name} is hardly random"

    for_each(check, {name: (name,) for name in NAMES})
