"""Conversions to and from DCP folders, compared with the values that stock torch reads from both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.checkpoints.conversions import (
    Normed,
    convert,
    loaded,
    loaded_folder,
    save_by_position,
    without_empty_dicts,
)
from support.checkpoints.samples import LEGACY, composer_state
from support.comparing import assert_same
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.test_layouts import write_package as write_composer_package

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

SHARDED = [LEGACY / f"{kind}/ep0-ba3" for kind in ("c172/sharded", "c220/sharded", "c220/sharded-mesh")]


@pytest.mark.parametrize(("run", "files"), [("c172", 1), ("c220", 3)])
def test_a_monolithic_checkpoint_as_a_folder_and_back(tmp_path: Path, run: str, files: int):
    """Schedulers, timestamp, RNG states and empty entries are preserved; stock torch reads the folder."""
    path = LEGACY / run / "full/ep0-ba3-rank0.pt"
    report = convert(path, tmp_path / "folder", "dcp", files=files)
    assert_same(loaded_folder(tmp_path / "folder"), without_empty_dicts(loaded(path)), in_bits=True)
    assert sorted(Path(file).name for file in report.files) == sorted(p.name for p in (tmp_path / "folder").iterdir())
    assert len(report.files) == files + 1
    convert(tmp_path / "folder", tmp_path / "back.pt", "monolithic")
    convert(path, tmp_path / "again.pt", "monolithic")
    for name in ("back.pt", "again.pt"):
        assert_same(loaded(tmp_path / name), loaded(path), name, in_bits=True)


@pytest.mark.parametrize("path", SHARDED, ids=str)
def test_an_old_folder_as_a_file_and_as_a_new_folder(tmp_path: Path, path: Path):
    """ShardedTensor and DTensor folders, with the optimizer at the root or not, are converted to the current
    layouts."""
    shutil.copytree(path, tmp_path / "old")
    expected = loaded_folder(tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), expected, in_bits=True)
    convert(tmp_path / "old", tmp_path / "new", "dcp", files=3)
    assert_same(loaded_folder(tmp_path / "new"), without_empty_dicts(expected), in_bits=True)


@pytest.mark.parametrize("form", ["one file", "DCP"])
def test_a_folder_of_composers_checkpoint_package(tmp_path: Path, form: str):
    """The parts of a folder of Composer's checkpoint package are merged into one file; the report mentions that the
    optimizer's class is unknown."""
    (tmp_path / "source").mkdir()
    whole = write_composer_package(tmp_path / "source", form)
    report = convert(tmp_path / "source", tmp_path / "new.pt", "monolithic")
    found = loaded(tmp_path / "new.pt")
    for part in ("model", "timestamp", "schedulers", "callbacks"):
        assert_same(found["state"][part], whole["state"][part], part, in_bits=True)
    assert_same(found["rng"], whole["rng"], in_bits=True)
    assert_same(found["state"]["optimizers"], {"": whole["state"]["optimizers"]["AdamW"]}, in_bits=True)
    assert any("optimizer's class" in remark for remark in report.remarks)


def test_rows_are_split_as_ranks_would_hold_them(tmp_path: Path):
    """N files load on N ranks without a rank reading another's file: the boxes are torch.chunk's, as FSDP's are."""
    shapes = {"a": (7, 3), "b": (2, 5), "c": (), "d": (0, 4), "e": (4,)}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    torch.save({"state": {"model": model}, "rng": [{"torch": torch.get_rng_state()}]}, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", files=3)
    metadata = FileSystemReader(tmp_path / "folder").read_metadata()
    for name, tensor in model.items():
        parts = torch.chunk(tensor, 3) if tensor.dim() and tensor.numel() else [tensor]
        chunks = metadata.state_dict_metadata[f"state.model.{name}"].chunks  # type: ignore[union-attr]
        assert [tuple(chunk.sizes) for chunk in chunks] == [tuple(part.shape) for part in parts], name
        for rank, chunk in enumerate(chunks):
            index = torch_dcp.metadata.MetadataIndex(f"state.model.{name}", chunk.offsets)
            assert metadata.storage_data[index].relative_path == f"__{rank}_0.distcp"
    assert len(metadata.state_dict_metadata["rng.0.torch"].chunks) == 1  # type: ignore[union-attr]


def test_torch_loads_the_folder_into_a_state_dict_with_empty_dicts(tmp_path: Path):
    """With our list of empty dicts, torch does not take the folder for one of torch 2.3, which has other keys."""
    state, source = composer_state(), tmp_path / "source.pt"
    state["state"] |= {"scaler": {}, "schedulers": {}, "run_name": "r"}
    torch.save(state, source)
    convert(source, tmp_path / "folder", "dcp")
    target = loaded(source)
    for tensor in target["state"]["model"].values():
        tensor.zero_()
    target["state"]["run_name"] = ""
    torch_dcp.load(target, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert_same(target, loaded(source), in_bits=True)


@pytest.mark.parametrize(("build", "give_model"), [(lambda: nn.Linear(3, 2), False), (Normed, True)])
def test_positions_become_names(tmp_path: Path, build: Any, give_model: bool):
    """A DDP run's optimizer resumes under FSDP, where state is keyed by name."""
    model = build()
    optimizer = save_by_position(model, tmp_path / "source.pt")
    options = {"model": model} if give_model else {}
    convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", **options)
    found = loaded_folder(tmp_path / "folder")["state"]["optimizers"]["Adam"]
    expected = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert_same(found["state"], expected, in_bits=True)
    assert found["param_groups"][0]["params"] == list(expected)


def test_keys_that_may_have_been_text_are_named(tmp_path: Path):
    """A callback's {'5': ...} is restored as {5: ...} from a converted folder; the report lists these dicts."""
    state = {
        "model": {"w": torch.ones(2), "m._extra_state": {"7": 1}},
        "callbacks": {"Counting": {"5": 1, "seen": {"a": 1}}},
    }
    torch_dcp.save({"state": state, "rng": []}, checkpoint_id=tmp_path / "sharded")
    report = convert(tmp_path / "sharded", tmp_path / "full.pt", "monolithic")
    [remark] = [text for text in report.remarks if "text or an int" in text]
    assert "'5' becomes 5" in remark
    assert remark.endswith("below state.model.m._extra_state, state.callbacks.Counting")
