"""Folders of Composer's newer checkpoint package, laid out by hand as it does; its own are in tests/compat."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.checkpoints.samples import composer_state, leaves, values_of
from support.comparing import assert_same

from composer_fsdp2 import CheckpointError, inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def write(folder: Path, form: str) -> dict[str, Any]:
    """A folder whose model and optimizer are one file or a DCP directory each; what is in it."""
    whole = composer_state()
    state = whole["state"]
    model, optimizer = state["model"], state["optimizers"]["AdamW"]
    if form == "one file":
        for name, value in (("model", model), ("optim", optimizer)):
            (folder / name).mkdir()
            torch.save(value, folder / name / f"{name}.pt")
    else:
        torch_dcp.save(dict(model), checkpoint_id=str(folder / "model"))
        torch_dcp.save(optimizer, checkpoint_id=str(folder / "optim"))
    resumption = {
        "timestamp": state["timestamp"]["Timestamp"],
        "schedulers": state["schedulers"],
        "callbacks": state["callbacks"],
        "rank_zero_seed": 17,
        "rng": whole["rng"],
    }
    (folder / "resumption.pkl").write_bytes(pickle.dumps(resumption))
    text = {"composer_version": "0.32.1", "torch_version": "2.7.0", "num_gpus": 2, "precision": "fp32"}
    (folder / "composer_metadata.json").write_text(json.dumps(text))
    return whole


@pytest.mark.parametrize("form", ["one file", "DCP"])
def test_parts_come_together_as_in_a_monolithic_file(tmp_path: Path, form: str):
    """Everything else in this package loads such a folder without knowing of it: weights, optimizer, the rest."""
    whole = write(tmp_path, form)
    inventory = inspect_checkpoint(tmp_path)
    state = whole["state"] | {"rank_zero_seed": 17}
    state["optimizers"] = {"": state["optimizers"]["AdamW"]}  # the class is not stored
    del state["metadata"]
    found = {path: value for path, value in values_of(inventory).items() if path[:2] != ("state", "metadata")}
    assert_same(found, dict(leaves({"state": state, "rng": whole["rng"]})), in_bits=True)
    assert inventory.timestamp["batch"] == 3 and inventory.remarks == ()


def test_folder_says_who_wrote_it(tmp_path: Path):
    """Versions and world size come from composer_metadata.json."""
    write(tmp_path, "one file")
    inventory = inspect_checkpoint(tmp_path)
    assert inventory.layout == "composer.checkpoint folder"
    writer = inventory.writer
    assert (writer.composer_version, writer.torch_version, writer.world_size) == ("0.32.1", "2.7.0", 2)
    assert inventory.num_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())


def test_parts_that_were_not_saved_are_said(tmp_path: Path):
    """save_optimizer=False and a save that was cut short look alike later, and both are told."""
    write(tmp_path, "one file")
    (tmp_path / "optim" / "optim.pt").unlink()
    (tmp_path / "optim").rmdir()
    (tmp_path / "composer_metadata.json").unlink()
    remarks = " ".join(inspect_checkpoint(tmp_path).remarks)
    assert "no optimizer state" in remarks and "composer_metadata.json" in remarks
    (tmp_path / "model" / "model.pt").unlink()
    (tmp_path / "model").rmdir()
    assert "no model" in " ".join(inspect_checkpoint(tmp_path).remarks)


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("resumption.pkl", b"", "damaged pickle"),
        ("resumption.pkl", pickle.dumps([1]), "no dict"),
        ("resumption.pkl", b"cposix\nsystem\n(S'true'\ntR.", r"posix\.system"),
        ("composer_metadata.json", b"{", "damaged"),
        ("composer_metadata.json", b"[1]", "damaged"),
        ("model/model.pt", b"PK\3\4", "truncated"),
        ("model/model.pt", b"", "empty"),
    ],
)
def test_damaged_part_is_named(tmp_path: Path, file: str, content: bytes, text: str):
    """Which of the files is broken, and no pickle run on the way."""
    write(tmp_path, "one file")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}.*{text}"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["weights.pt", "ep0-ba3-rank0.pt"])
def test_half_a_model_hides_no_checkpoint(tmp_path: Path, name: str):
    """An export that was cut short lies in the run's folder: the checkpoint beside it is found all the same."""
    write(tmp_path, "DCP")
    for path in (tmp_path / "model" / ".metadata", tmp_path / "resumption.pkl", tmp_path / "composer_metadata.json"):
        path.unlink()
    shutil.rmtree(tmp_path / "optim")
    torch.save(composer_state(), tmp_path / name)
    assert inspect_checkpoint(tmp_path).path == tmp_path / name


def test_directory_without_its_metadata_is_named(tmp_path: Path):
    """A DCP part that was cut short is not taken for one that was not saved."""
    write(tmp_path, "DCP")
    (tmp_path / "optim" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"optim.*no \.metadata"):
        inspect_checkpoint(tmp_path)
