"""Each layout's inventory, compared with the values that torch or the format's own library reads from the same
files."""

from __future__ import annotations

import fractions
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.checkpoints.samples import (
    LEGACY,
    bytes_read,
    composer_state,
    leaves,
    values_of,
    write_safetensors,
)
from support.comparing import assert_same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_fsdp2 import CheckpointError, inspect_checkpoint
from composer_fsdp2.checkpoint.describe import as_data, as_text
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

# --- one .pt


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("run", ["c172", "c220"])
def test_old_file_holds_what_torch_load_gives(run: str):
    """Weights, optimizer, RNG states and the rest of a file of Composer 0.17 or 0.22 are read as they were saved.

    The inventory names the versions and the number of ranks of the writing run, and that nothing is missing.
    """
    path = LEGACY / run / "full" / "ep0-ba3-rank0.pt"
    inventory, expected = inspect_checkpoint(path), torch.load(path, weights_only=False, map_location="cpu")
    assert_same(values_of(inventory), dict(leaves(expected)), in_bits=True)
    assert inventory.writer.composer_version == {"c172": "0.17.2", "c220": "0.22.0"}[run]
    assert (inventory.writer.torch_version or "").startswith({"c172": "2.1.2", "c220": "2."}[run])
    assert inventory.layout == "monolithic" and inventory.remarks == () and inventory.writer.world_size == 2
    assert [inventory.timestamp[key] for key in ("epoch", "batch", "sample")] == [0, 3, 24]
    assert [(each.name, each.keyed_by) for each in inventory.optimizers] == [("DecoupledAdamW", "name")]


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
    """DDP's optimizer state is keyed by position; a load must distinguish it from FSDP's."""
    by_id = inspect_checkpoint(saved(composer_state(by_id=True), tmp_path / "ddp.pt"))
    state = composer_state()
    state["state"]["metadata"]["world_size"] = 8
    by_name = inspect_checkpoint(saved(state, tmp_path / "fsdp.pt"))
    assert [by_id.optimizers[0].keyed_by, by_name.optimizers[0].keyed_by] == ["id", "name"]
    assert by_id.writer.sharding == "not sharded" and "FSDP" in str(by_name.writer.sharding)
    assert by_id.groups("AdamW")[0]["params"] == [0, 1]


def test_what_a_run_would_miss_is_said(tmp_path: Path):
    """A user does not resume from a weights-only file by mistake."""
    state = composer_state()
    path = saved({"state": {"model": state["state"]["model"]}}, tmp_path / "weights.pt")
    remarks = " ".join(inspect_checkpoint(path).remarks)
    assert all(part in remarks for part in ("optimizer", "schedulers", "timestamp", "random"))


def test_bare_state_dicts_are_read(tmp_path: Path):
    """torch.save(model.state_dict()) and a pytorch_model.bin are read without a surrounding dict."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adagrad(model.parameters())  # has state from the start
    weights = inspect_checkpoint(saved(model.state_dict(), tmp_path / "pytorch_model.bin"))
    momenta = inspect_checkpoint(saved(optimizer.state_dict(), tmp_path / "optimizer.pt"))
    assert set(weights.model) == {"weight", "bias"} and "bare" in weights.remarks[0]
    assert momenta.optimizers[0].keyed_by == "id" and set(momenta.optimizers[0].state) == {0, 1}


CYCLIC: dict[str, Any] = {"model": {"w": torch.ones(2)}, "callbacks": []}
CYCLIC["callbacks"].append(CYCLIC)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.ones(2)], "holds a list"),
        ({"epoch": 3, "net": {"w": torch.ones(2)}}, "epoch, net"),
        ({"state": {"model": [torch.ones(2)]}}, "state.model is a list"),
        ({"state": {"model": {}, "optimizers": {"AdamW": [1]}}}, "AdamW is a list"),
        ({"state": {"model": {"w": torch.ones(2)}, "optimizers": 3}}, r"x\.pt"),
        ({"state": {"model": {"w": torch.ones(2)}, "optimizers": {"A": {"state": [1]}}}}, r"x\.pt"),
        ({"state": CYCLIC}, r"x\.pt"),
    ],
)
def test_other_torch_files_are_refused_by_what_they_hold(tmp_path: Path, value: Any, text: str):
    """The error identifies another trainer's file, instead of a load that changes nothing."""
    with pytest.raises(CheckpointError, match=text):
        inspect_checkpoint(saved(value, tmp_path / "x.pt"))


# --- DCP directories


OLD = ["c172/sharded", "c172/local-flat", "c220/sharded", "c220/sharded-mesh"]


def of_torch(folder: Path, scratch: Path) -> dict[Any, Any]:
    """The full contents of a directory, read by torch."""
    dcp_to_torch_save(folder, scratch)
    whole = torch.load(scratch, weights_only=False)
    if "optimizers" in whole:  # torch < 2.3 wrote it beside the state
        whole["state"]["optimizers"] = whole.pop("optimizers")
    return dict(leaves(whole))


@pytest.mark.parametrize("name", OLD)
def test_old_directory_holds_what_torch_reads(tmp_path: Path, name: str):
    """ShardedTensor, DTensor and flat checkpoints of Composer 0.17 and 0.22 are read completely, entry by entry.

    The layout decides how they can be loaded: optimizer at the root, flat parameters, or neither.
    """
    folder, file = LEGACY / name / "ep0-ba3", tmp_path / "x.pt"
    inventory = inspect_checkpoint(folder)
    assert_same(values_of(inventory), of_torch(folder, file), in_bits=True)
    assert inventory.optimizer_at_root == name.startswith("c172") and inventory.flat == (name == "c172/local-flat")
    assert inventory.writer.composer_version == {"c172": "0.17.2", "c220": "0.22.0"}[name[:4]]
    assert str(inventory.writer.sharding).startswith("DTensor") == name.endswith("mesh")
    assert inventory.remarks == () and inventory.timestamp["batch"] == 3
    if name == "c220/sharded":  # equal values, one flattened and in boxes
        assert (report := verify_checkpoint(file, folder)).ok, str(report)
        assert (report := verify_checkpoint(folder, file)).ok, str(report)


def test_directory_of_this_torch_holds_what_was_saved(tmp_path: Path):
    """Since torch 2.4 every leaf is an entry; the original nested values are restored."""
    state = composer_state()
    torch_dcp.save(state, checkpoint_id=str(tmp_path))
    inventory = inspect_checkpoint(tmp_path)
    assert_same(values_of(inventory), dict(leaves(state)), in_bits=True)
    assert inventory.groups("AdamW")[0]["params"] == ["model.weight", "model.bias"]
    assert inventory.writer.composer_version == "0.32.1"


def test_directory_of_another_trainer_is_refused(tmp_path: Path):
    """torch's own examples save {'model': ..., 'optim': ...}: the error lists the keys, and nothing is guessed."""
    torch_dcp.save({"model": {"w": torch.ones(2)}, "optim": {"lr": 1.0}}, checkpoint_id=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"not by Composer.*model, optim"):
        inspect_checkpoint(tmp_path)


def test_tensors_of_a_directory_are_not_read(tmp_path: Path):
    """Inspecting a sharded checkpoint reads its .metadata and no tensor."""
    torch_dcp.save({"state": {"model": {"w": torch.randn(1 << 20)}}}, checkpoint_id=str(tmp_path))
    before = bytes_read()
    inspect_checkpoint(tmp_path)
    assert bytes_read() - before < 100_000


def test_entries_that_are_not_trusted_leave_the_rest_of_the_report(tmp_path: Path):
    """An untrusted callback's object in a sharded checkpoint does not hide the weights."""
    state = composer_state()["state"]
    state["timestamp"] = {"Timestamp": {"batch": fractions.Fraction(1, 3)}}
    torch_dcp.save({"state": state}, checkpoint_id=str(tmp_path))
    inventory = inspect_checkpoint(tmp_path)
    assert "cannot be read" in as_text(inventory) and "state.model.model.weight" in as_text(inventory)
    assert as_data(inventory)["timestamp"] == {}


def test_an_entry_without_its_path(tmp_path: Path):
    """The name ``rng.0.torch`` does not show that one of its parts is an integer key. (corruptions.py has other
    contradictions.)"""
    folder = tmp_path / "x"
    shutil.copytree(LEGACY / "c220" / "sharded" / "ep0-ba3", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data.pop(next(name for name in metadata.planner_data if name.startswith("rng.0")))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the path of rng\.0.* is that of another entry"):
        inspect_checkpoint(folder)


# --- Hugging Face's folders of weights


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(4, dtype=torch.bfloat16),
        "steps": torch.arange(6).view(2, 3),
        "mask": torch.tensor(True),
        "none": torch.empty(0, 2),
    }


def in_shards(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    weight_map = {}
    for number, (name, value) in enumerate(values.items(), start=1):
        file = f"model-{number:05}-of-{len(values):05}.safetensors"
        write_safetensors(folder / file, {name: value})
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected_of(values: dict[str, torch.Tensor]) -> dict[Any, Any]:
    return {("state", "model", name): value for name, value in values.items()}


@pytest.mark.any_torch
@pytest.mark.parametrize("form", ["file", "folder", "shards"])
def test_weights_are_found_in_the_file(tmp_path: Path, form: str):
    """A model from the Hub opens as a file, as a folder and in shards, each dtype with its values."""
    values = tensors()
    path = tmp_path if form == "shards" else write_safetensors(tmp_path / "model.safetensors", values)
    if form == "shards":
        in_shards(tmp_path, values)
    inventory = inspect_checkpoint(tmp_path if form == "folder" else path)
    assert_same(values_of(inventory), expected_of(values), in_bits=True)
    assert inventory.layout == "safetensors" and "optimizer" in inventory.remarks[0]
    assert inventory.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


@pytest.mark.any_torch
def test_what_the_library_writes_is_read(tmp_path: Path):
    """The safetensors library aligns headers and orders tensors in its own way, and has more dtypes."""
    library = pytest.importorskip("safetensors.torch")
    kinds = {"f16": torch.float16, "f64": torch.float64, "u8": torch.uint8, "f8": torch.float8_e4m3fn}
    values = {name: torch.arange(6.0).to(dtype) for name, dtype in kinds.items()} | tensors()
    library.save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(values_of(inspect_checkpoint(tmp_path)), expected_of(values), in_bits=True)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a.weight": {"dtype": "F99"}}, "F99"),
        ({"a.weight": {"shape": "no"}}, "damaged"),
        ({"a.weight": {"data_offsets": [-60, 0]}}, "damaged"),
    ],
)
def test_header_that_contradicts_the_file_is_refused(tmp_path: Path, changed: dict[str, Any], message: str):
    """Bytes of one tensor are never read as another's; support/checkpoints/corruptions.py has more cases."""
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(write_safetensors(tmp_path / "model.safetensors", tensors(), **changed))


# --- folders of Composer's newer checkpoint package, laid out by hand as it does; its own are in tests/cli


def write_package(folder: Path, form: str) -> dict[str, Any]:
    """Writes a folder with model and optimizer as a file or a DCP directory each, and returns its contents."""
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
    """Every other function loads such a folder like a monolithic file: weights, optimizer, and the rest."""
    whole = write_package(tmp_path, form)
    inventory = inspect_checkpoint(tmp_path)
    state = whole["state"] | {"rank_zero_seed": 17}
    state["optimizers"] = {"": state["optimizers"]["AdamW"]}  # the class is not stored
    del state["metadata"]
    found = {path: value for path, value in values_of(inventory).items() if path[:2] != ("state", "metadata")}
    assert_same(found, dict(leaves({"state": state, "rng": whole["rng"]})), in_bits=True)
    assert inventory.timestamp["batch"] == 3 and inventory.remarks == ()
    writer = inventory.writer
    assert (writer.composer_version, writer.torch_version, writer.world_size) == ("0.32.1", "2.7.0", 2)
    assert inventory.layout == "composer.checkpoint folder"
    assert inventory.num_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())


def test_parts_that_were_not_saved_are_said(tmp_path: Path):
    """save_optimizer=False and an interrupted save leave the same folder; the inventory reports both."""
    write_package(tmp_path, "one file")
    shutil.rmtree(tmp_path / "optim")
    (tmp_path / "composer_metadata.json").unlink()
    remarks = " ".join(inspect_checkpoint(tmp_path).remarks)
    assert "no optimizer state" in remarks and "composer_metadata.json" in remarks
    shutil.rmtree(tmp_path / "model")
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
        ("optim", None, r"no \.metadata"),  # an error, not a part that was never saved
    ],
)
def test_damaged_part_is_named(tmp_path: Path, file: str, content: bytes | None, text: str):
    """The error names the broken file, and no pickle is run."""
    write_package(tmp_path, "one file" if content is not None else "DCP")
    (tmp_path / file / ".metadata").unlink() if content is None else (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}.*{text}"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["weights.pt", "ep0-ba3-rank0.pt"])
def test_half_a_model_hides_no_checkpoint(tmp_path: Path, name: str):
    """An interrupted export in the run's folder does not hide the checkpoint beside it."""
    write_package(tmp_path, "DCP")
    for path in (tmp_path / "model" / ".metadata", tmp_path / "resumption.pkl", tmp_path / "composer_metadata.json"):
        path.unlink()
    shutil.rmtree(tmp_path / "optim")
    torch.save(composer_state(), tmp_path / name)
    assert inspect_checkpoint(tmp_path).path == tmp_path / name
