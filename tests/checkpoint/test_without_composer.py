"""Folders of torch.distributed.checkpoint without Composer: accelerate's, and those of a user's script."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.comparing import full
from support.models import Decoder
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch.distributed.fsdp import fully_shard

from composer_fsdp2 import convert_checkpoint, inspect_checkpoint, verify_checkpoint
from composer_fsdp2.errors import CheckpointError


def save(folder: str) -> dict[str, torch.Tensor]:
    model = Decoder(tied=False)
    fully_shard(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/flat")
    return {name: full(each) for name, each in model.state_dict().items()}


def test_a_models_state_dict_is_inspected_converted_and_verified(tmp_path: Path):
    """accelerate's ``pytorch_model_fsdp_0`` has the prefix ``model``; ``dcp.save(model.state_dict())`` has none."""
    expected = run_ranks(save, 2, str(tmp_path))[0]
    for name in ("pytorch_model_fsdp_0", "flat"):
        path, converted = tmp_path / name, tmp_path / f"{name}-converted"
        assert len(inspect_checkpoint(path).tensors) == len(expected)
        convert_checkpoint(path, converted, to="safetensors")
        found = load_file(converted / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert verify_checkpoint(path, converted).ok


@on_ranks(1)
def test_other_folders_are_refused_with_their_keys(folder: str):
    dcp.save({"model": {"w": torch.ones(2)}, "step": 3}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match=r"not by Composer.*model, step"):
        inspect_checkpoint(folder)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@on_ranks(1)
def test_accelerates_own_folders_name_what_is_not_read(folder: str):
    """``inspect`` said "no optimizer state" of a folder with ``optimizer.bin``, and named files that are none."""
    import accelerate

    model = torch.nn.Linear(2, 2)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(f"{folder}/ddp")
    [remark] = inspect_checkpoint(f"{folder}/ddp").remarks
    assert "not read: optimizer.bin, random_states_0.pkl" in remark
    sharded = Path(folder) / "sharded"
    dcp.save({"model": prepared.state_dict()}, checkpoint_id=sharded / "pytorch_model_fsdp_0")
    for rank in range(2):
        torch.save({}, sharded / f"random_states_{rank}.pkl")
    with pytest.raises(CheckpointError, match=r"contains .* checkpoints; name one: pytorch_model_fsdp_0"):
        inspect_checkpoint(sharded)
