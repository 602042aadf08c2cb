"""One file per rank: written by real FSDP1 and by torch 1.13, merged without a process group."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints.samples import FIXTURES, values_of
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from composer_fsdp2 import CheckpointError, inspect_checkpoint

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
OLD = FIXTURES / "per-rank-checkpoints"
KINDS = ("sharded", "local")
TYPES: dict[str, Any] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig()),
}


def build() -> nn.Module:
    """Odd sizes, so that pieces are padded; a weight of fewer rows than ranks; buffers that FSDP1 does not shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=False))


def wrapped(use_orig_params: bool) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """A trained model of two units. A process group, and no mesh, makes ShardedTensors."""
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": use_orig_params,
        "process_group": dist.group.WORLD,
    }
    model = build()
    model[0] = FullyShardedDataParallel(model[0], **options)
    whole = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for step in range(2):
        whole(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole, optimizer


def state_of(model: Any, optimizer: Any, kind: str, *, by_id: bool = False) -> dict[str, Any]:
    type_, config, optimizer_config = TYPES[kind]
    with FullyShardedDataParallel.state_dict_type(model, type_, config, optimizer_config):
        weights = {"model." + name: value for name, value in model.state_dict().items()}
        state = optimizer.state_dict() if by_id else FullyShardedDataParallel.optim_state_dict(model, optimizer)
    timestamp = {"Timestamp": {"epoch": 0, "batch": 2, "sample": 8}}
    rng = [{"torch": torch.get_rng_state(), "rank": rank} for rank in range(dist.get_world_size())]
    return {"state": {"model": weights, "optimizers": {"AdamW": state}, "timestamp": timestamp}, "rng": rng}


def check_saved(folder: str) -> None:
    """Every kind of file, and what is in the whole model, from this rank."""
    rank = dist.get_rank()
    for use_orig_params in (True, False):
        model, optimizer = wrapped(use_orig_params)
        for kind in ("sharded", "local"):
            name = f"{folder}/{kind}-orig{use_orig_params}"
            torch.save(state_of(model, optimizer, kind), f"{name}-rank{rank}.pt")
            torch.save(state_of(model, optimizer, kind, by_id=True), f"{name}-byid-rank{rank}.pt")
        # FSDP1 gathers optimizer state on the CPU into memory that it uses again: a copy of each, one at a time.
        full = state_of(model, optimizer, "full")
        if rank == 0:
            torch.save(full, f"{folder}/full-orig{use_orig_params}.pt")
        # The flat parameters, as they lie on this rank.
        flats = [value.detach().clone() for value in model.parameters()]
        torch.save([flats, optimizer.state_dict()], f"{folder}/raw-orig{use_orig_params}-rank{rank}.pt")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("per rank")
    run_ranks(check_saved, 2, str(folder))
    return folder


def shown(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("named", ["rank0.pt", "rank1.pt", "rank{rank}.pt"])
def test_sharded_files_hold_what_fsdp1_gathers(files: Path, use_orig_params: bool, named: str):
    """Checkpoints of Composer 0.13 to 0.15 open again, weights and optimizer, whichever of their files is named."""
    inventory = inspect_checkpoint(f"{files}/sharded-orig{use_orig_params}-{named}")
    full = torch.load(files / f"full-orig{use_orig_params}.pt", weights_only=False)["state"]
    with_orig = torch.load(files / "full-origFalse.pt", weights_only=False)["state"]["optimizers"]["AdamW"]
    values = values_of(inventory)
    found = {path[2]: shown(value) for path, value in values.items() if path[:2] == ("state", "model")}
    assert found == {name: shown(value) for name, value in full["model"].items()}
    state = {path[4:]: shown(v) for path, v in values.items() if path[1] == "optimizers" and path[3] == "state"}
    # On the CPU and with use_orig_params=True, FSDP1 gathers wrong values (exp_avg twice); those without are right.
    assert state == {(name, key): shown(v) for name, kv in with_orig["state"].items() for key, v in kv.items()}
    assert inventory.groups("AdamW")[0]["params"] == full["optimizers"]["AdamW"]["param_groups"][0]["params"]


def test_sharded_files_say_who_wrote_them(files: Path):
    """World size, step and the random state of every rank are known from the files."""
    inventory = inspect_checkpoint(files / "sharded-origTrue-rank1.pt")
    assert inventory.layout == "one file per rank" and inventory.writer.world_size == 2
    assert "ShardedTensor" in str(inventory.writer.sharding) and not inventory.flat
    assert inventory.timestamp["batch"] == 2
    assert [state["rank"] for state in inventory.tree(("rng",))] == [0, 1]
    assert {path.name for path, _ in inventory.files} == {f"sharded-origTrue-rank{rank}.pt" for rank in (0, 1)}
    assert len(inventory.model["model.0.weight"].chunks) == 2  # type: ignore[union-attr]
    assert len(inventory.model["model.2.weight"].chunks) == 1  # type: ignore[union-attr]


def end_to_end(files: Path, number: int, key: str | None, numel: int) -> list[float]:
    """A flat parameter by its number, or a part of its optimizer state, without the padding."""
    raw = [torch.load(files / f"raw-origFalse-rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    parts = [flats[number] if key is None else optimizer["state"][number][key] for flats, optimizer in raw]
    return torch.cat(parts)[:numel].tolist()


@pytest.mark.parametrize("by_id", [False, True])
def test_local_files_hold_the_flat_parameters(files: Path, by_id: bool):
    """``local`` of torch 2 (optimizer by name) and of torch 1.13 (by position, with padding) come out as vectors."""
    inventory = inspect_checkpoint(files / f"local-origFalse{'-byid' * by_id}-rank0.pt")
    assert inventory.flat and "flat" in str(inventory.writer.sharding)
    values = values_of(inventory)
    root, inner = ("model._flat_param", 15), ("model.0._flat_param", 20)  # 10 of BatchNorm and 5; 15 and 5
    for number, (name, numel) in enumerate((root, inner)):
        assert values["state", "model", name].tolist() == end_to_end(files, number, None, numel)
    assert set(inventory.model) == {root[0], inner[0], *(f"model.1.{n}" for n in BUFFERS)}
    (optimizer,) = inventory.optimizers
    if not by_id:
        assert optimizer.keyed_by == "name" and "0.weight" in optimizer.state
        return
    assert optimizer.keyed_by == "flat parameter"
    assert inventory.groups("AdamW")[0]["params"] == [root[0], inner[0]]
    for number, (name, numel) in enumerate((root, inner)):
        for key in ("exp_avg", "exp_avg_sq"):
            found = values["state", "optimizers", "AdamW", "state", name, key]
            assert found.tolist() == end_to_end(files, number, key, numel)
        assert values["state", "optimizers", "AdamW", "state", name, "step"] == 2


@pytest.mark.parametrize("by_id", [False, True])
def test_local_files_of_original_parameters_are_refused(files: Path, by_id: bool):
    """They hold pieces of parameters that nobody can put together; the way out is said."""
    with pytest.raises(CheckpointError, match=r"use_orig_params=True.*sharded or full"):
        inspect_checkpoint(files / f"local-origTrue{'-byid' * by_id}-rank0.pt")


# --- of the torch that Composer 0.13 used


@pytest.mark.any_torch
def test_files_of_torch_1_13_are_read():
    """The pickles that are really out there, not only those of today's torch.

    The vector was called flat_param there, and its optimizer state had only a position.
    """
    whole, (sharded, local) = torch.load(OLD / "whole.pt"), (inspect_checkpoint(OLD / f"{n}-rank0.pt") for n in KINDS)
    values = values_of(sharded)
    for name, value in {"weight": whole["weight"], "bias": whole["bias"], "buffer": torch.arange(3)}.items():
        assert torch.equal(values["state", "model", f"model.{name}"], value)
    prefix = ("state", "optimizers", "AdamW", "state", "model.weight")
    assert torch.equal(values[*prefix, "exp_avg"], whole["weight"] * 2) and values[*prefix, "step"] == 3
    # Each file has one random state here; the list is over ranks.
    assert sharded.tree(("rng",)) == [{"rank": 0}, {"rank": 1}]
    values, name = values_of(local), "model._flat_param"
    assert local.flat and torch.equal(values["state", "model", name], whole["flat"])
    assert torch.equal(values["state", "optimizers", "AdamW", "state", name, "exp_avg"], whole["flat"] * 2)
    assert local.groups("AdamW")[0]["params"] == [name]


# --- what is missing or mixed up


def of_step_2() -> bytes:
    """The archive with another step in its pickle, and the CRC32s made to fit."""
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
# What lies there, of which the first is named, and what is said.
MIXED_UP: dict[str, tuple[dict[str, bytes], str]] = {
    "a rank is missing": ({"x-rank1.pt": RANKS[1]}, r"2 ranks.*x-rank0\.pt"),
    "swapped": ({"x-rank0.pt": RANKS[1], "x-rank1.pt": RANKS[0]}, r"x-rank0\.pt.*is of rank 1 of 2"),
    # Rank 1's file of an older step fits in shape, and would be half of the wrong weights.
    "two steps": (
        {"x-rank0.pt": RANKS[0], "x-rank1.pt": of_step_2()},
        r"'batch': 2.*'batch': 3",
    ),
    "no rank in the name": ({"checkpoint.pt": RANKS[0]}, "one rank's part"),
}


@pytest.mark.any_torch
@pytest.mark.parametrize("case", MIXED_UP)
def test_half_of_a_checkpoint_is_refused(tmp_path: Path, case: str):
    """A file under another rank's name is of another save, or was renamed by mistake."""
    files, says = MIXED_UP[case]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        inspect_checkpoint(tmp_path / next(iter(files)))


@pytest.mark.any_torch
def test_folder_of_ranks_files_is_found(tmp_path: Path):
    """0.13 put all steps into one folder, 0.15 each step into its own: the newest with all its ranks is taken."""
    (tmp_path / "ep1-ba12").mkdir()
    for name in ("ep0-ba3-rank0", "ep0-ba3-rank1", "ep0-ba6-rank0", "ep1-ba9-rank0", "ep1-ba12/ep1-ba12-rank0"):
        (tmp_path / f"{name}.pt").write_bytes(RANKS[int(name[-1])])
    inventory = inspect_checkpoint(tmp_path)
    assert inventory.path.name == "ep0-ba3-rank0.pt"
    assert all(name in " ".join(inventory.remarks) for name in ("ep0-ba6", "ep1-ba9", "ep1-ba12"))
    (tmp_path / "ep1-ba12" / "ep1-ba12-rank1.pt").write_bytes(RANKS[1])
    assert inspect_checkpoint(tmp_path).path == tmp_path / "ep1-ba12" / "ep1-ba12-rank0.pt"
