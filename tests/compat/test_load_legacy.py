"""Old files of old Composer versions go on training on FSDP2 as the run that wrote them did."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.legacy import (
    FLAT,
    KINDS,
    WITHOUT_OPTIMIZER,
    checkpoint_of,
    legacy_model,
    legacy_optimizer,
    next_steps,
    recorded,
)
from support.ranks import run_ranks
from support.trainers import optimizer_state

pytestmark = pytest.mark.composer

CONFIGS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"activation_checkpointing": True}, {"sharding_strategy": "NO_SHARD"}],
    4: [
        {},
        {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    ],
}
# The writing runs had 2 ranks and older torch; the order of sums is another one at other world sizes.
LOSS_TOLERANCE = {1: 2e-6, 2: 1e-6, 4: 2e-6}


def contents(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the optimizer's state, as torch itself reads the file."""
    path = checkpoint_of(kind)
    root = torch.load(path, weights_only=False) if path.is_file() else read_directory(path)
    weights = root["state"]["model"]
    optimizers = root["state"].get("optimizers") or root["optimizers"]
    if kind in FLAT:  # no names; the same run saved full tensors, too
        weights, _ = contents("c172/full")
    return weights, optimizers["DecoupledAdamW"]["state"]


def read_directory(path: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(path, file.name)
        return torch.load(file.name, weights_only=False)


def check_legacy(world_size: int) -> None:
    cases = {f"{kind}, {config}": (kind, config) for kind in KINDS for config in CONFIGS[world_size]}
    for_each(check_one, cases)


def check_one(kind: str, config: dict[str, Any]) -> None:
    from composer_fsdp2 import load_checkpoint, prepare_fully_shard

    model = legacy_model(kind)
    optimizer = legacy_optimizer(model)
    prepare_fully_shard(model, optimizer, dict(config), precision="fp32")
    report = load_checkpoint(checkpoint_of(kind), model, optimizer)
    assert report.left_out == (), report
    assert (len(report.loaded), len(report.optimizer_loaded)) == (18, 15), report
    weights, state = contents(kind)
    names = [name for name, _ in legacy_model(kind).named_parameters()]
    assert_same(full_parameters(model), {name: weights[name] for name in names})
    assert_same(optimizer_state(model, optimizer), state)
    expected = recorded(kind)
    has_optimizer = kind not in WITHOUT_OPTIMIZER
    logits, losses = next_steps(model, optimizer if has_optimizer else None)
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=2e-6)
    if has_optimizer:
        worst = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
        assert worst <= LOSS_TOLERANCE[dist.get_world_size()], f"{losses}, {expected['losses']}"


@pytest.mark.parametrize("world_size", CONFIGS)
def test_old_files_train_on(world_size: int):
    """Whoever has a checkpoint of Composer 0.17 or 0.22 goes on from its very bits, at that world size or another."""
    run_ranks(check_legacy, world_size, world_size)
