"""One ``.pt``: what torch.load gives is what the inventory leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.samples import LEGACY, composer_state, leaves, values_of
from support.comparing import assert_same

from composer_fsdp2 import CheckpointError, inspect_checkpoint


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("run", ["c172", "c220"])
def test_old_file_holds_what_torch_load_gives(run: str):
    """Weights, optimizer, random states and the rest of a file of Composer 0.17 or 0.22 arrive as they were saved."""
    path = LEGACY / run / "full" / "ep0-ba3-rank0.pt"
    inventory = inspect_checkpoint(path)
    assert_same(
        values_of(inventory), dict(leaves(torch.load(path, weights_only=False, map_location="cpu"))), in_bits=True
    )


def test_old_file_says_who_wrote_it():
    """One sees which versions and how many ranks to go back to, and that nothing is missing."""
    inventory = inspect_checkpoint(LEGACY / "c172" / "full" / "ep0-ba3-rank0.pt")
    assert (inventory.writer.composer_version, inventory.writer.world_size) == ("0.17.2", 2)
    assert (inventory.writer.torch_version or "").startswith("2.1.2")
    assert inventory.layout == "monolithic" and inventory.remarks == ()
    assert {key: inventory.timestamp[key] for key in ("epoch", "batch", "sample")} == {
        "epoch": 0,
        "batch": 3,
        "sample": 24,
    }
    (optimizer,) = inventory.optimizers
    assert (optimizer.name, optimizer.keyed_by) == ("DecoupledAdamW", "name")


def test_tensors_of_every_form_are_found_in_the_file(tmp_path: Path):
    """Views into one storage (FSDP1's flat optimizer state), transposed and empty tensors, parameters, small dtypes."""
    base = torch.arange(24.0)
    float8 = torch.arange(4.0).to(torch.float8_e4m3fn)
    model = {
        "view": base[3:9].view(2, 3),
        "same storage": base[1::2],
        "transposed": torch.arange(6).view(2, 3).t(),
        "expanded": torch.tensor([2.5]).expand(4, 3),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
        "complex": torch.randn(2, dtype=torch.complex64),
        "float8": float8,
    }
    path = saved({"state": {"model": model}}, tmp_path / "x.pt")
    expected = {("state", "model", name): value for name, value in torch.load(path)["state"]["model"].items()}
    assert_same(values_of(inspect_checkpoint(path)), expected, in_bits=True)


def test_optimizer_of_ddp_is_told_from_fsdps(tmp_path: Path):
    """DDP's checkpoints name parameters by position; whoever loads them must know."""
    by_id = inspect_checkpoint(saved(composer_state(by_id=True), tmp_path / "ddp.pt"))
    state = composer_state()
    state["state"]["metadata"]["world_size"] = 8
    by_name = inspect_checkpoint(saved(state, tmp_path / "fsdp.pt"))
    assert [by_id.optimizers[0].keyed_by, by_name.optimizers[0].keyed_by] == ["id", "name"]
    assert by_id.writer.sharding == "not sharded" and "FSDP" in str(by_name.writer.sharding)
    assert by_id.groups("AdamW")[0]["params"] == [0, 1]


def test_what_a_run_would_miss_is_said(tmp_path: Path):
    """A weights-only file is not taken for one from which a run goes on."""
    state = composer_state()
    path = saved({"state": {"model": state["state"]["model"]}}, tmp_path / "weights.pt")
    remarks = " ".join(inspect_checkpoint(path).remarks)
    assert all(part in remarks for part in ("optimizer", "schedulers", "timestamp", "random"))


def test_bare_state_dicts_are_read(tmp_path: Path):
    """torch.save(model.state_dict()) and a pytorch_model.bin work without a wrapper around them."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights = inspect_checkpoint(saved(model.state_dict(), tmp_path / "pytorch_model.bin"))
    momenta = inspect_checkpoint(saved(optimizer.state_dict(), tmp_path / "optimizer.pt"))
    assert set(weights.model) == {"weight", "bias"} and "bare" in weights.remarks[0]
    assert momenta.optimizers[0].keyed_by == "id" and set(momenta.optimizers[0].state) == {0, 1}


def test_file_without_crcs_is_read(tmp_path: Path):
    """torch.serialization.set_crc32_options(False) leaves zeros, which are no damage."""
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(composer_state(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(values_of(inspect_checkpoint(path)), dict(leaves(torch.load(path, weights_only=False))), in_bits=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.ones(2)], "holds a list"),
        ({"epoch": 3, "net": {"w": torch.ones(2)}}, "epoch, net"),
        ({"state": {"model": [torch.ones(2)]}}, "state.model is a list"),
        ({"state": {"model": {}, "optimizers": {"AdamW": [1]}}}, "AdamW is a list"),
    ],
)
def test_other_torch_files_are_refused_by_what_they_hold(tmp_path: Path, value: Any, text: str):
    """Another trainer's file is named for what it is, in place of a load that changes nothing."""
    with pytest.raises(CheckpointError, match=text):
        inspect_checkpoint(saved(value, tmp_path / "x.pt"))


@pytest.mark.parametrize("kept_bytes", [100, 3000, -30])
def test_truncated_file_is_refused(tmp_path: Path, kept_bytes: int):
    """A full disk's half checkpoint is named, whether it ends in the pickle, the data or the directory."""
    path = saved(composer_state(), tmp_path / "x.pt")
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"x\.pt.*truncated"):
        inspect_checkpoint(path)
