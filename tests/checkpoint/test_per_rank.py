"""One file per rank: written by real FSDP1 and by torch 1.13, merged without a process group."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints.samples import FIXTURES, values_of
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from composer_fsdp2 import CheckpointError, inspect_checkpoint

OLD = FIXTURES / "per-rank-checkpoints"
KINDS = ("sharded", "local")


# --- local files; tests/compat/test_load_fsdp1.py loads these and sharded ones into a run


def check_saved(folder: str) -> None:
    """Saves local files of this rank for both values of use_orig_params, with optimizer state by name, and its flat
    parameters."""
    for use_orig_params in (True, False):
        torch.manual_seed(0)  # odd sizes, to force padding
        model = FullyShardedDataParallel(
            nn.Linear(3, 5),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            process_group=dist.group.WORLD,
        )  # creates ShardedTensors
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        named = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            weights = {f"model.{name}": value for name, value in model.state_dict().items()}
        rng = [{"rank": rank} for rank in range(dist.get_world_size())]
        root = {"state": {"model": weights, "optimizers": {"AdamW": named}}, "rng": rng}
        torch.save(root, f"{folder}/orig{use_orig_params}-rank{dist.get_rank()}.pt")
    torch.save(next(model.parameters()).detach().clone(), f"{folder}/flat{dist.get_rank()}.pt")


def test_local_files(tmp_path: Path):
    """``local`` checkpoints of torch 2 are read as vectors without their padding. With use_orig_params=True they
    contain shards that cannot be assembled; the error names another state_dict_type."""
    run_ranks(check_saved, 2, str(tmp_path))
    inventory = inspect_checkpoint(tmp_path / "origFalse-rank{rank}.pt")
    assert inventory.flat and "flat" in str(inventory.writer.sharding)
    whole = torch.cat([torch.load(tmp_path / f"flat{rank}.pt") for rank in (0, 1)])[: 3 * 5 + 5]
    assert values_of(inventory)["state", "model", "model._flat_param"].tolist() == whole.tolist()
    (optimizer,) = inventory.optimizers
    assert optimizer.keyed_by == "name" and set(optimizer.state) == {"weight", "bias"}
    assert inventory.tree(("rng",)) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(CheckpointError, match=r"use_orig_params=True.*sharded or full"):
        inspect_checkpoint(tmp_path / "origTrue-rank0.pt")


# --- files of torch 1.13, which Composer 0.13 used


@pytest.mark.any_torch
def test_files_of_torch_1_13_are_read():
    """Pickles of torch 1.13 are read, because such files exist, not only those of the current torch.

    The flat parameter was named flat_param there, and its optimizer state was keyed by position only.
    """
    whole, (sharded, local) = torch.load(OLD / "whole.pt"), (inspect_checkpoint(OLD / f"{n}-rank1.pt") for n in KINDS)
    values = values_of(sharded)
    for name, value in {"weight": whole["weight"], "bias": whole["bias"], "buffer": torch.arange(3)}.items():
        assert torch.equal(values["state", "model", f"model.{name}"], value)
    assert sharded.layout == "one file per rank" and sharded.writer.world_size == 2 and not sharded.flat
    assert "ShardedTensor" in str(sharded.writer.sharding) and sharded.timestamp["batch"] == 3
    assert {path.name for path, _ in sharded.files} == {"sharded-rank0.pt", "sharded-rank1.pt"}
    prefix = ("state", "optimizers", "AdamW", "state", "model.weight")
    assert torch.equal(values[*prefix, "exp_avg"], whole["weight"] * 2) and values[*prefix, "step"] == 3
    # Each file has one RNG state here; the list is over ranks.
    assert sharded.tree(("rng",)) == [{"rank": 0}, {"rank": 1}]
    values, name = values_of(local), "model._flat_param"
    assert local.flat and torch.equal(values["state", "model", name], whole["flat"])
    assert torch.equal(values["state", "optimizers", "AdamW", "state", name, "exp_avg"], whole["flat"] * 2)
    assert local.groups("AdamW")[0]["params"] == [name]


# --- missing or mixed files


def of_step_2() -> bytes:
    """The archive with another step in its pickle and matching CRC32s."""
    out = io.BytesIO()
    with zipfile.ZipFile(OLD / "sharded-rank1.pt") as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                at = content.index(b"K\x03", content.index(b"batch"))
                content = content[:at] + b"K\x02" + content[at + 2 :]
            target.writestr(name, content)
    return out.getvalue()


RANKS = [(OLD / f"sharded-rank{rank}.pt").read_bytes() for rank in (0, 1)]
# For each case, the files (the first is inspected) and the expected error.
MIXED_UP: dict[str, tuple[dict[str, bytes], str]] = {
    "a rank is missing": ({"x-rank1.pt": RANKS[1]}, r"2 ranks.*x-rank0\.pt"),
    "swapped": ({"x-rank0.pt": RANKS[1], "x-rank1.pt": RANKS[0]}, r"x-rank0\.pt.*is of rank 1 of 2"),
    # Rank 1's file of an older step has the same shapes, but half of the weights would be wrong.
    "two steps": (
        {"x-rank0.pt": RANKS[0], "x-rank1.pt": of_step_2()},
        r"'batch': 2.*'batch': 3",
    ),
    "no rank in the name": ({"checkpoint.pt": RANKS[0]}, "one rank's part"),
}


@pytest.mark.any_torch
@pytest.mark.parametrize("case", MIXED_UP)
def test_half_of_a_checkpoint_is_refused(tmp_path: Path, case: str):
    """A file under another rank's name is from another save, or was renamed by mistake."""
    files, says = MIXED_UP[case]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        inspect_checkpoint(tmp_path / next(iter(files)))


@pytest.mark.any_torch
def test_folder_of_ranks_files_is_found(tmp_path: Path):
    """Composer 0.13 saved all steps in one folder, 0.15 each step in its own: the newest step with files of all ranks
    is used."""
    (tmp_path / "ep1-ba12").mkdir()
    for name in ("ep0-ba3-rank0", "ep0-ba3-rank1", "ep0-ba6-rank0", "ep1-ba9-rank0", "ep1-ba12/ep1-ba12-rank0"):
        (tmp_path / f"{name}.pt").write_bytes(RANKS[int(name[-1])])
    inventory = inspect_checkpoint(tmp_path)
    assert inventory.path.name == "ep0-ba3-rank0.pt"
    assert all(name in " ".join(inventory.remarks) for name in ("ep0-ba6", "ep1-ba9", "ep1-ba12"))
    (tmp_path / "ep1-ba12" / "ep1-ba12-rank1.pt").write_bytes(RANKS[1])
    assert inspect_checkpoint(tmp_path).path == tmp_path / "ep1-ba12" / "ep1-ba12-rank0.pt"
