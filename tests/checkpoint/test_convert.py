"""Checkpoints in another layout, compared with what stock torch reads from the source."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gzip
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from support.checkpoints.conversions import (
    contents,
    convert,
    loaded,
    loaded_folder,
    planned,
    staging_of,
    without_empty_dicts,
)
from support.checkpoints.samples import FIXTURES, LEGACY, bytes_of, composer_state
from support.comparing import assert_same
from support.ranks import impatient, run_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from composer_fsdp2 import CheckpointError, inspect_checkpoint
from composer_fsdp2.checkpoint import layouts
from composer_fsdp2.checkpoint.convert import conversion, copying
from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint
from composer_fsdp2.checkpoint.convert.optimizer_order import _only_matching
from composer_fsdp2.checkpoint.convert.state import state_to_write
from composer_fsdp2.checkpoint.hugging_face import without_ties
from composer_fsdp2.checkpoint.layouts import compressed
from tests.checkpoint.test_composer_package import write as write_composer_package

FULL = [LEGACY / "c172/full/ep0-ba3-rank0.pt", LEGACY / "c220/full/ep0-ba3-rank0.pt"]
SHARDED = [LEGACY / f"{kind}/ep0-ba3" for kind in ("c172/sharded", "c220/sharded", "c220/sharded-mesh")]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(LEGACY).parent) for path in paths]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A monolithic checkpoint of now, with empty dicts."""
    state = composer_state()
    state["state"] |= {"scaler": {}, "schedulers": {}, "run_name": "r"}
    torch.save(state, tmp_path / "source.pt")
    return tmp_path / "source.pt"


# ---------------------------------------------------------------------------------------------------------------------
# Between layouts


@pytest.mark.parametrize("path", FULL, ids=names(FULL))
def test_a_monolithic_checkpoint_is_the_same_value_again(tmp_path: Path, path: Path):
    """Schedulers, timestamp, random states, metadata and empty entries all survive, not the tensors alone."""
    convert(path, tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), loaded(path), in_bits=True)


@pytest.mark.parametrize("files", [1, 2, 3])
@pytest.mark.parametrize("path", FULL, ids=names(FULL))
def test_a_monolithic_checkpoint_as_a_folder_and_back(tmp_path: Path, path: Path, files: int):
    """Stock torch reads the folder as the file's value, and nothing is lost on the way back, empty dicts included."""
    report = convert(path, tmp_path / "folder", "dcp", files=files)
    assert_same(loaded_folder(tmp_path / "folder"), without_empty_dicts(loaded(path)), in_bits=True)
    assert sorted(Path(file).name for file in report.files) == sorted(p.name for p in (tmp_path / "folder").iterdir())
    assert len(report.files) == files + 1
    convert(tmp_path / "folder", tmp_path / "back.pt", "monolithic")
    assert_same(loaded(tmp_path / "back.pt"), loaded(path), in_bits=True)


@pytest.mark.parametrize("path", SHARDED, ids=names(SHARDED))
def test_an_old_folder_as_a_file_and_as_a_new_folder(tmp_path: Path, path: Path):
    """ShardedTensor and DTensor folders, with the optimizer at the root or not, become today's layouts."""
    shutil.copytree(path, tmp_path / "old")
    expected = loaded_folder(tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), expected, in_bits=True)
    convert(tmp_path / "old", tmp_path / "new", "dcp", files=3)
    assert_same(loaded_folder(tmp_path / "new"), without_empty_dicts(expected), in_bits=True)


@pytest.mark.any_torch
@pytest.mark.parametrize("path", [*FULL, *SHARDED], ids=names([*FULL, *SHARDED]))
def test_weights_as_safetensors(tmp_path: Path, path: Path):
    """The safetensors library reads every weight bit for bit, and the report says what was left out."""
    torch_of = pytest.importorskip("safetensors.torch")
    shutil.copytree(path, tmp_path / "old") if path.is_dir() else shutil.copy(path, tmp_path / "old")
    value = loaded_folder(tmp_path / "old") if path.is_dir() else loaded(path)
    report = convert(tmp_path / "old", tmp_path / "hf", "safetensors")
    assert_same(torch_of.load_file(tmp_path / "hf/model.safetensors"), dict(value["state"]["model"]), in_bits=True)
    assert {"state.optimizers.DecoupledAdamW", "state.timestamp", "rng"} <= set(report.dropped)


@pytest.mark.any_torch
def test_shards_of_safetensors(tmp_path: Path, source: Path):
    """Large models come as numbered shards with an index, which together hold every tensor once."""
    safetensors = pytest.importorskip("safetensors")
    convert(source, tmp_path / "hf", "safetensors", files=2)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    found = {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            for name in shard.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][name] == file.name and name not in found
                found[name] = shard.get_tensor(name)
    model = loaded(source)["state"]["model"]
    assert_same(found, model, in_bits=True)
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert index["metadata"]["total_size"] == sum(len(bytes_of(tensor)) for tensor in model.values())


@pytest.mark.any_torch
def test_safetensors_as_a_file_and_a_folder(tmp_path: Path, source: Path):
    """Weights come back from Hugging Face's layout; with a config beside them, under Composer's names."""
    convert(source, tmp_path / "hf", "safetensors", files=2)
    report = convert(tmp_path / "hf", tmp_path / "back.pt", "monolithic")
    assert_same(loaded(tmp_path / "back.pt"), {"state": {"model": loaded(source)["state"]["model"]}}, in_bits=True)
    assert report.unchecked_bytes == report.read_bytes  # safetensors has no checksums
    (tmp_path / "hf/config.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "folder", "dcp")
    assert set(loaded_folder(tmp_path / "folder")["state"]["model"]) == {
        "model.model.weight",
        "model.model.bias",
        "model.model.seen",
    }


@pytest.mark.any_torch
def test_a_hugging_face_folder_in_other_shards(tmp_path: Path, source: Path):
    """What ``from_pretrained`` needs beside the weights goes with them; the old index does not."""
    convert(source, tmp_path / "hf", "safetensors", files=2)
    for name in ("config.json", "tokenizer.json", "tokenizer.model"):
        (tmp_path / "hf" / name).write_text('{"hidden_size": 3}')
    convert(tmp_path / "hf", tmp_path / "one", "safetensors")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    convert(tmp_path / "one", tmp_path / "back.pt", "monolithic")
    names = {f"model.{name}" for name in loaded(source)["state"]["model"]}
    assert set(loaded(tmp_path / "back.pt")["state"]["model"]) == names


@pytest.mark.any_torch
def test_a_compressed_checkpoint(tmp_path: Path, source: Path):
    """Compressed files convert like others; what was unpacked on the way is gone."""
    packed = tmp_path / "packed.pt.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    report = convert(packed, tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), loaded(source), in_bits=True)
    assert report.source == str(packed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.pt", "packed.pt.gz", "source.pt"]


@pytest.mark.any_torch
@pytest.mark.parametrize("to", ["monolithic", "safetensors"])
def test_a_compressed_checkpoint_with_ties(tmp_path: Path, to: str):
    """Ties show once a file is unpacked; the output had room for both copies, and safetensors refused to open it."""
    weight = torch.arange(200.0).view(10, 20)
    torch.save({"state": {"model": {"a": weight, "b": weight}}}, tmp_path / "source.pt")
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress((tmp_path / "source.pt").read_bytes()))
    for source in ("source.pt", "packed.pt.gz"):
        convert(tmp_path / source, tmp_path / f"{source}-{to}", to)
    sizes = {
        source: sorted(file.stat().st_size for file in tmp_path.rglob("*") if f"/{source}-{to}" in str(file))
        for source in ("source.pt", "packed.pt.gz")
    }
    assert sizes["packed.pt.gz"] == sizes["source.pt"] != []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("form", ["one file", "DCP"])
def test_a_folder_of_composers_checkpoint_package(tmp_path: Path, form: str):
    """Its parts come together in one file; that it does not say the optimizer's class, the report says."""
    (tmp_path / "source").mkdir()
    whole = write_composer_package(tmp_path / "source", form)
    report = convert(tmp_path / "source", tmp_path / "new.pt", "monolithic")
    found = loaded(tmp_path / "new.pt")
    for part in ("model", "timestamp", "schedulers", "callbacks"):
        assert_same(found["state"][part], whole["state"][part], part, in_bits=True)
    assert_same(found["rng"], whole["rng"], in_bits=True)
    assert_same(found["state"]["optimizers"], {"": whole["state"]["optimizers"]["AdamW"]}, in_bits=True)
    assert any("optimizer's class" in remark for remark in report.remarks)


@pytest.mark.parametrize("to", ["monolithic", "dcp"])
def test_files_of_each_rank(tmp_path: Path, to: str):
    """What Composer 0.13 to 0.15 left, a pickled ShardedTensor for each rank, becomes a layout that is still read."""
    convert(FIXTURES / "per-rank-checkpoints/sharded-rank0.pt", tmp_path / "new", to)
    found = loaded_folder(tmp_path / "new") if to == "dcp" else loaded(tmp_path / "new")
    whole = loaded(FIXTURES / "per-rank-checkpoints/whole.pt")
    model = {"model.weight": whole["weight"], "model.bias": whole["bias"], "model.buffer": torch.arange(3)}
    assert_same(found["state"]["model"], model, in_bits=True)
    assert_same(
        found["state"]["optimizers"]["AdamW"]["state"]["model.weight"]["exp_avg"], whole["weight"] * 2, in_bits=True
    )


@pytest.mark.any_torch
def test_rows_are_split_as_ranks_would_hold_them(tmp_path: Path):
    """N files load at N ranks without a rank reading another's file: the boxes are torch.chunk's, as FSDP's are."""
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_the_folder_into_a_state_dict_with_empty_dicts(tmp_path: Path, source: Path):
    """Our list of empty dicts does not make torch take the folder for one of torch 2.3, whose keys are others."""
    convert(source, tmp_path / "folder", "dcp")
    target = loaded(source)
    for tensor in target["state"]["model"].values():
        tensor.zero_()
    target["state"]["run_name"] = ""
    torch_dcp.load(target, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert_same(target, loaded(source), in_bits=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and under which names


@pytest.mark.any_torch
def test_without_the_optimizer(tmp_path: Path, source: Path):
    """Leaving the optimizer out leaves out nothing else."""
    report = convert(source, tmp_path / "new.pt", "monolithic", optimizer=False)
    expected = loaded(source)
    del expected["state"]["optimizers"]
    assert_same(loaded(tmp_path / "new.pt"), expected, in_bits=True)
    assert report.dropped == ("state.optimizers.AdamW",)


@pytest.mark.parametrize("to", ["monolithic", "dcp"])
def test_a_cast_changes_floating_weights_alone(tmp_path: Path, source: Path, to: str):
    """bf16 weights for inference do not cost the optimizer its precision, nor counters their type."""
    convert(source, tmp_path / "new", to, dtype=torch.bfloat16)
    expected = without_empty_dicts(loaded(source))
    model = expected["state"]["model"]
    expected["state"]["model"] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.items()}
    found = loaded_folder(tmp_path / "new") if to == "dcp" else loaded(tmp_path / "new")
    assert_same(without_empty_dicts(found), expected, in_bits=True)
    assert {tensor.dtype for tensor in expected["state"]["model"].values()} == {torch.bfloat16, torch.int64}


@pytest.mark.any_torch
def test_a_subset_by_pattern(tmp_path: Path, source: Path):
    """Only the chosen weights go, with their optimizer state, and no group names a parameter that is gone."""
    report = convert(source, tmp_path / "new.pt", "monolithic", include=["*.bias", "model.seen"])
    expected = loaded(source)
    adam = expected["state"]["optimizers"]["AdamW"]
    del expected["state"]["model"]["model.weight"], adam["state"]["model.weight"]
    adam["param_groups"][0]["params"] = ["model.bias"]
    assert_same(loaded(tmp_path / "new.pt"), expected, in_bits=True)
    assert report.dropped == ("state.model.model.weight", "state.optimizers.AdamW.state.model.weight")


@pytest.mark.any_torch
def test_names_of_wrappers_are_taken_off(tmp_path: Path):
    """FSDP1's and checkpointing's prefixes are not part of a name; weights and optimizer state lose them alike."""
    state = composer_state()
    optimizer = state["state"]["optimizers"]["AdamW"]
    old = "model._fsdp_wrapped_module._checkpoint_wrapped_module.weight"
    state["state"]["model"][old] = state["state"]["model"].pop("model.weight")
    optimizer["state"][old] = optimizer["state"].pop("model.weight")
    optimizer["param_groups"][0]["params"][0] = old
    torch.save(state, tmp_path / "source.pt")
    report = convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    new = loaded(tmp_path / "new.pt")["state"]
    assert report.renamed == {old: "model.weight"}
    assert set(new["model"]) == {"model.weight", "model.bias", "model.seen"}
    assert set(new["optimizers"]["AdamW"]["state"]) == {"model.weight", "model.bias"}
    assert new["optimizers"]["AdamW"]["param_groups"][0]["params"] == ["model.weight", "model.bias"]


def test_tied_weights_keep_both_names_and_one_storage(tmp_path: Path):
    """A tied model's file does not grow, and both names are there; safetensors gets one, as its library asks for."""
    tied = torch.randn(100, 100)
    state = {"state": {"model": {"lm_head.weight": tied, "wte.weight": tied, "same.by.chance": tied.clone()}}}
    torch.save(state, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), state, in_bits=True)
    assert os.path.getsize(tmp_path / "new.pt") == pytest.approx(os.path.getsize(tmp_path / "source.pt"), abs=1000)
    report = convert(tmp_path / "source.pt", tmp_path / "hf", "safetensors")
    assert report.num_tensors == 2
    assert "leaves out lm_head.weight (tied to wte.weight), which is the same bytes" in report.remarks


@pytest.mark.any_torch
def test_shared_step_tensors_are_separated(tmp_path: Path):
    """FSDP1 shares one step among parameters; loaded so, a step counts for all of them, and training goes wrong."""
    state = composer_state()
    entries = state["state"]["optimizers"]["AdamW"]["state"]
    entries["model.bias"]["step"] = entries["model.weight"]["step"]
    torch.save(state, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    new = loaded(tmp_path / "new.pt")["state"]["optimizers"]["AdamW"]["state"]
    new["model.bias"]["step"] += 1
    assert new["model.weight"]["step"].item() == 3


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers keyed by position


class Normed(nn.Module):
    """Has buffers of the shape of its parameters, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


def save_by_position(model: nn.Module, path: Path, groups: int = 1) -> torch.optim.Optimizer:
    """What Composer saved without FSDP."""
    parameters = list(model.parameters())
    split: Any = parameters if groups == 1 else [{"params": parameters[1:]}, {"params": parameters[:1]}]
    optimizer = torch.optim.Adam(split)
    sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save({"state": {"model": model.state_dict(), "optimizers": {"Adam": optimizer.state_dict()}}}, path)
    return optimizer


@pytest.mark.parametrize(("build", "give_model"), [(lambda: nn.Linear(3, 2), False), (Normed, True)])
def test_positions_become_names(tmp_path: Path, build: Any, give_model: bool):
    """A DDP run's optimizer goes on under FSDP, where states are found by name."""
    model = build()
    optimizer = save_by_position(model, tmp_path / "source.pt")
    options = {"model": model} if give_model else {}
    convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", **options)
    found = loaded_folder(tmp_path / "folder")["state"]["optimizers"]["Adam"]
    expected = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert_same(found["state"], expected, in_bits=True)
    assert found["param_groups"][0]["params"] == list(expected)


@pytest.mark.any_torch
def test_positions_stay_in_a_monolithic_file(tmp_path: Path):
    """There stock torch reads them as they are."""
    save_by_position(nn.Linear(3, 2), tmp_path / "source.pt", groups=2)
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), loaded(tmp_path / "source.pt"), in_bits=True)


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("model", "groups", "says"),
    [(Normed(), 1, "several ways.*--model"), (nn.Linear(3, 2), 2, "2 groups.*--no-optimizer")],
    ids=["buffers", "groups"],
)
def test_positions_that_could_be_several_names_are_refused(tmp_path: Path, model: nn.Module, groups: int, says: str):
    """A moment is never given to another parameter by a guess."""
    save_by_position(model, tmp_path / "source.pt", groups)
    with pytest.raises(CheckpointError, match=says):
        convert(tmp_path / "source.pt", tmp_path / "folder", "dcp")
    convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", optimizer=False)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.any_torch
def test_a_dry_run_changes_nothing(tmp_path: Path, source: Path):
    """What would be written can be looked at first."""
    before = contents(tmp_path)
    plan = planned(source, tmp_path / "folder", "dcp", files=2, include=["*.bias"])
    assert contents(tmp_path) == before
    text = str(plan)
    assert "__1_0.distcp" in text and "leaves out (3)" in text and "state.model.model.weight" in text
    convert(source, tmp_path / "folder", "dcp", files=2, include=["*.bias"])
    assert plan.write_bytes == sum(p.stat().st_size for p in (tmp_path / "folder").iterdir())


@pytest.mark.any_torch
@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_destination_that_exists_is_left_alone(tmp_path: Path, source: Path, kind: str):
    """Nobody's checkpoint is replaced."""
    target = tmp_path / "there"
    target.write_text("mine") if kind == "file" else target.mkdir() if kind == "folder" else target.symlink_to("gone")
    before = contents(tmp_path) if kind != "dangling link" else None
    with pytest.raises(CheckpointError, match="exists; remove it"):
        convert(source, target, "monolithic")
    assert before is None or contents(tmp_path) == before


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "zip"}, "expected one of dcp, safetensors, monolithic"),
        ({"to": "monolithic", "files": 2}, "has one file"),
        ({"to": "dcp", "files": 0}, "at least one"),
        ({"to": "dcp", "dtype": torch.int8}, "floating-point"),
        ({"to": "dcp", "include": ["model.wieght", "*.bias"]}, "matches model.wieght; its names are like model.weight"),
        ({"to": "dcp", "include": []}, "empty list"),
        ({"to": "safetensors", "dtype": torch.complex64}, "floating-point"),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error(tmp_path: Path, source: Path, options: dict[str, Any], says: str):
    """A typing mistake is said before hours of work."""
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        convert_checkpoint(source, tmp_path / "new", **options)
    assert contents(tmp_path) == before


@pytest.mark.any_torch
def test_flat_parameters_need_the_model(tmp_path: Path):
    """A file without names is not converted into one with wrong names; the error says what to give."""
    with pytest.raises(CheckpointError, match="model=, --model"):
        convert(LEGACY / "c172/local-flat/ep0-ba3", tmp_path / "new.pt", "monolithic")


@pytest.mark.any_torch
def test_a_dtype_that_safetensors_does_not_know(tmp_path: Path):
    """The tensor is named, not the library's own error shown."""
    torch.save({"state": {"model": {"phase": torch.zeros(2, dtype=torch.complex128)}}}, tmp_path / "source.pt")
    with pytest.raises(CheckpointError, match=r"phase \(torch.complex128\)"):
        convert(tmp_path / "source.pt", tmp_path / "hf", "safetensors")


@pytest.mark.any_torch
def test_keys_that_would_be_one_in_a_folder(tmp_path: Path):
    """torch's flattening would refuse it too; our error says which."""
    torch.save({"state": {"model": {"a": torch.ones(1)}, "x": {"b": 1}, "x.b": 2}}, tmp_path / "source.pt")
    with pytest.raises(CheckpointError, match=r"would both be state\.x\.b"):
        convert(tmp_path / "source.pt", tmp_path / "folder", "dcp")


@pytest.mark.any_torch
@pytest.mark.parametrize("to", ["monolithic", "dcp"])
def test_keys_that_are_no_names(tmp_path: Path, to: str):
    """An optimizer of one's own may have state by other keys than names and positions, and keeps it."""
    state = composer_state()
    moment = {"exp_avg": torch.ones(2)}
    state["state"]["model"][("head", 0)] = torch.ones(2)
    state["state"]["optimizers"]["AdamW"]["state"] |= {("head", 0): moment, 1.5: moment}
    torch.save(state, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "new", to)
    found = inspect_checkpoint(tmp_path / "new")
    assert "('head', 0)" in found.model
    assert {"('head', 0)", "1.5"} <= set(map(str, found.optimizers[0].state))


# ---------------------------------------------------------------------------------------------------------------------
# When it goes wrong


def with_a_flipped_bit(path: Path, tensor: torch.Tensor) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(tensor)) + 5] ^= 16
    path.write_bytes(data)


@pytest.mark.any_torch
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_flipped_bit_in_the_source_is_found(tmp_path: Path, source: Path, is_folder: bool):
    """Damage is not carried into a new checkpoint with a right checksum; the tensor is named."""
    if is_folder:
        convert(source, tmp_path / "folder", "dcp")
    path = tmp_path / "folder/__0_0.distcp" if is_folder else source
    with_a_flipped_bit(path, loaded(source)["state"]["model"]["model.weight"])
    with pytest.raises(CheckpointError, match=r"(?s)source is damaged.*model\.weight"):
        convert(tmp_path / "folder" if is_folder else source, tmp_path / "new.pt", "monolithic")
    assert not (tmp_path / "new.pt").exists() and not staging_of(tmp_path / "new.pt").exists()


@pytest.mark.any_torch
def test_damage_beside_a_tensor_in_its_storage_is_found(tmp_path: Path):
    """A view's record is checked whole, with the bytes that belong to no tensor."""
    whole = torch.randn(100)
    torch.save({"state": {"model": {"a": whole[10:40], "b": whole[::3][20:]}}}, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "good.pt", "monolithic")
    assert_same(
        loaded(tmp_path / "good.pt"), {"state": {"model": {"a": whole[10:40], "b": whole[::3][20:]}}}, in_bits=True
    )
    with_a_flipped_bit(tmp_path / "source.pt", whole[:8])
    with pytest.raises(CheckpointError, match="source is damaged"):
        convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")


@pytest.mark.any_torch
def test_tensors_that_overlap_in_their_storage(tmp_path: Path):
    """Bytes that two tensors share are read twice, and checked once."""
    whole = torch.randn(100)
    state = {"state": {"model": {"a": whole[:60], "b": whole[40:], "c": whole[:60]}}}
    torch.save(state, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), state, in_bits=True)
    with_a_flipped_bit(tmp_path / "source.pt", whole[44:52])
    with pytest.raises(CheckpointError, match="source is damaged"):
        convert(tmp_path / "source.pt", tmp_path / "again.pt", "monolithic")


@pytest.mark.any_torch
def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    """With both numbers. The disk is full by a fake ``shutil.disk_usage``."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage._replace(free=100))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"needs \d{4,} bytes, .* has 100 free"):
        convert(source, tmp_path / "new.pt", "monolithic")
    assert contents(tmp_path) == before


@pytest.mark.any_torch
def test_a_disk_that_fills_up(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """The error says where the finished part is; with space again, the same call goes on. The write fails by a fake."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 32)
    left = iter(range(3))
    original = os.pwrite

    def pwrite(*arguments: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(CheckpointError, match=r"No space left.*\.new\.pt\.converting: call again"):
            convert(source, tmp_path / "new.pt", "monolithic")
    assert not (tmp_path / "new.pt").exists()
    report = convert(source, tmp_path / "new.pt", "monolithic")
    assert report.kept_bytes > 0
    assert_same(loaded(tmp_path / "new.pt"), loaded(source), in_bits=True)


@pytest.mark.any_torch
def test_a_destination_that_cannot_be_written(tmp_path: Path, source: Path):
    """A folder that is a file, here: an error of ours, with the path."""
    with pytest.raises(CheckpointError, match=r"source.pt/new.pt: cannot be written"):
        convert(source, source / "new.pt", "monolithic")


@pytest.mark.any_torch
def test_what_another_conversion_left_is_not_used(tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture):
    """After a changed source or other options, nothing of the earlier attempt gets into the result."""
    staging = staging_of(tmp_path / "new.pt")
    (staging / "files").mkdir(parents=True)
    (staging / "plan").write_text("another plan")
    (staging / "files/new.pt").write_bytes(b"x" * 10_000)
    convert(source, tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), loaded(source), in_bits=True)
    assert "of another conversion" in caplog.text


@pytest.mark.any_torch
# ---------------------------------------------------------------------------------------------------------------------
# Others at work


def test_two_conversions_to_one_destination(tmp_path: Path, source: Path):
    """The files of two conversions were mixed, and both ended with exit code 0."""
    other, target = tmp_path / "other.pt", tmp_path / "new"
    torch.save({"state": {"model": {"model.0": torch.zeros(3)}}}, other)
    message = []

    def meanwhile(*unused: int) -> None:
        with pytest.raises(CheckpointError, match="another process converts to this destination now") as raised:
            convert(other, target, "dcp")
        message.append(str(raised.value))

    convert(source, target, "dcp", progress=meanwhile)
    assert message and f"process {os.getpid()} on " in message[0]
    assert_same(loaded_folder(target), without_empty_dicts(loaded(source)), in_bits=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # no lock is left


def test_a_file_system_without_locks(tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture):
    """It works, with a warning; and who finds another's mark in its folder does not publish what both have written."""
    no_locks = OSError(errno.ENOLCK, "No locks available")
    target = tmp_path / "new"
    with mock.patch.object(fcntl, "flock", side_effect=no_locks):
        convert(source, tmp_path / "alone", "dcp")
        assert "cannot be locked here" in caplog.text

        def meanwhile(*unused: int) -> None:
            (staging_of(target) / "owner").write_text("another process")

        with pytest.raises(CheckpointError, match="another process converts to it, too"):
            convert(source, target, "dcp", progress=meanwhile)
    assert not target.exists()


@pytest.mark.parametrize("change", ["a value", "the header"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, source: Path, change: str):
    """safetensors has no CRC32: half of one file and half of another would be a checkpoint that nobody saved."""
    folder, target = tmp_path / "weights", tmp_path / "new"
    convert(source, folder, "safetensors")
    (file,) = folder.glob("*.safetensors")

    def meanwhile(*unused: int) -> None:
        data = bytearray(file.read_bytes())
        at = -1 if change == "a value" else data.index(b'"dtype"') - 4
        data[at] ^= 1
        file.write_bytes(data)

    with pytest.raises(CheckpointError, match=r"changed during the conversion|damaged|beside|disagree"):
        convert(folder, target, "dcp", progress=meanwhile)
    assert not target.exists()


def test_a_packed_source_that_changes(tmp_path: Path, source: Path):
    """A copy of it was converted; by the end it is another file, of which nobody knows."""
    packed, target = tmp_path / "source.pt.gz", tmp_path / "new"
    packed.write_bytes(gzip.compress(source.read_bytes()))

    def meanwhile(*unused: int) -> None:
        os.utime(packed, (1, 1))

    with pytest.raises(CheckpointError, match="changed during the conversion; run it again"):
        convert(packed, target, "dcp", progress=meanwhile)
    assert not target.exists()


def test_a_destination_inside_of_the_source(tmp_path: Path):
    """Its files would be the source's while they are written."""
    folder = tmp_path / "ep0-ba3"
    shutil.copytree(SHARDED[0], folder)
    before = contents(folder)
    for name in ("new", "new.pt", "below/new"):
        with pytest.raises(CheckpointError, match="lies inside of the source"):
            convert(folder, folder / name, "dcp")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointError, match="lies inside of the source"):
        convert(folder, tmp_path / "link" / "new", "dcp")
    assert contents(folder) == before


def test_progress_ends_at_the_whole(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """The bar counts the bytes to do, and reaches them."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 32)
    seen: list[tuple[int, int]] = []
    report = convert(source, tmp_path / "new.pt", "monolithic", progress=lambda *numbers: seen.append(numbers))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 3
    assert {total for _, total in seen} == {report.read_bytes} == {seen[-1][0]}


@pytest.mark.any_torch
def test_the_report_is_data(tmp_path: Path, source: Path):
    """For scripts: --json prints it."""
    report = convert(source, tmp_path / "folder", "dcp", files=2)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["to"] == "dcp" and data["num_tensors"] == report.num_tensors == 8
    assert data["written_bytes"] == sum(p.stat().st_size for p in (tmp_path / "folder").iterdir())


MEMORY = """
import sys, threading, time, torch, torch.distributed.checkpoint
from composer_fsdp2.checkpoint import layouts
from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint
from composer_fsdp2.checkpoint.convert.optimizer_order import _only_matching
from composer_fsdp2.checkpoint.convert.state import state_to_write
from composer_fsdp2.checkpoint.hugging_face import without_ties
from composer_fsdp2.checkpoint.layouts import compressed

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024

before = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
source, folder, back = sys.argv[1:]
convert_checkpoint(source, folder, to="dcp", files=2)
convert_checkpoint(folder, back, to="monolithic")
print(peak - before)
"""


@pytest.mark.any_torch
def test_memory_is_a_few_chunks_whatever_the_tensor(tmp_path: Path):
    """A checkpoint larger than the machine's memory converts; here one tensor of 128 MiB in less than 48."""
    torch.save({"state": {"model": {"w": torch.ones(32, 1 << 20)}}}, tmp_path / "source.pt")
    paths = [str(tmp_path / name) for name in ("source.pt", "folder", "back.pt")]
    ended = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 48
    assert os.path.getsize(tmp_path / "back.pt") > 128 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


def check_two_ranks(folder: str) -> tuple[int, int, list[str]]:
    """Converts both ways, in many units."""
    copying.CHUNK_BYTES = 64
    path = Path(folder)
    there = convert(path / "source.pt", path / "folder", "dcp", files=2)
    convert(path / "folder", path / "back.pt", "monolithic")
    try:
        if dist.get_rank() == 1:
            conversion.Copier.copy = failing  # type: ignore[method-assign]
        convert(path / "source.pt", path / "never.pt", "monolithic")
    except CheckpointError as error:
        message = str(error)
    return there.read_bytes, there.written_bytes, [message]


def failing(self: Any, *arguments: Any) -> Any:
    raise OSError(errno.EIO, "this rank's disk is gone")


def test_two_ranks_share_the_work_and_fail_together(tmp_path: Path, source: Path):
    """The result is one process's to the byte; a rank that fails leaves none waiting, and nothing published."""
    results = run_ranks(check_two_ranks, 2, str(tmp_path), fresh=True)
    convert(source, tmp_path / "alone", "dcp", files=2)
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "folder" / file.name).read_bytes() == file.read_bytes(), file.name
    assert_same(loaded(tmp_path / "back.pt"), loaded(source), in_bits=True)
    assert not (tmp_path / "never.pt").exists()
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == planned(source, tmp_path / "x", "dcp").read_bytes
    assert "rank 1" in results[0][2][0] and "this rank's disk is gone" in results[0][2][0]


def check_packed_on_two_ranks(folder: str) -> None:
    """Reading what is packed, and unpacking it, each takes longer than collectives wait."""
    path = Path(folder)
    read, unpack = compressed.inventory_of, compressed.unpacked

    def slow(function: Any) -> Any:
        return lambda *arguments: time.sleep(2) or function(*arguments)

    layout = dataclasses.replace(compressed.LAYOUT, unpack=slow(unpack))
    known = tuple(layout if each.name == layout.name else each for each in layouts.layouts())
    with (
        impatient(1.0),
        mock.patch.object(layouts, "layouts", return_value=known),
        mock.patch.object(compressed, "inventory_of", slow(read)),
    ):
        convert(path / "packed.pt.gz", path / "folder", "dcp", files=2)


def test_two_ranks_convert_what_is_packed(tmp_path: Path, source: Path):
    """Its contents were sent between ranks with a function in them, which does not pickle: one rank raised, and the
    others waited. Unpacked by one rank, it ended the others after Composer's dist_timeout."""
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress(source.read_bytes()))
    run_ranks(check_packed_on_two_ranks, 2, str(tmp_path))
    convert(source, tmp_path / "alone", "dcp", files=2)
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "folder" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.any_torch
@pytest.mark.parametrize(
    "path",
    [
        *(LEGACY / kind for kind in ("c172/full/ep0-ba3-rank0.pt", "c220/sharded/ep0-ba3")),
        *(FIXTURES / "per-rank-checkpoints" / name for name in ("sharded-rank0.pt", "local-rank0.pt")),
    ],
    ids=lambda path: path.name,
)
def test_what_lies_in_a_checkpoint_can_be_sent(path: Path):
    """Ranks that share an unpacked file send each other what lies in it."""
    found = inspect_checkpoint(path)
    sent = pickle.loads(pickle.dumps(found))
    assert sent.tensors == found.tensors
    values = [{path: entry.value() for path, entry in each.objects.items()} for each in (sent, found)]
    assert pickle.dumps(values[0]) == pickle.dumps(pickle.loads(pickle.dumps(values[1])))


@pytest.mark.any_torch
def test_an_ordered_dict_and_trusted_objects_need_trust(tmp_path: Path):
    """A class that a pickle names is not run, and not written, unless the user says so."""
    state = composer_state()
    state["state"]["callbacks"] = OrderedDict(own=Path("x"))
    torch.save(state, tmp_path / "source.pt")
    with pytest.raises(CheckpointError, match="pathlib"):
        convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic", trust=True)
    assert loaded(tmp_path / "new.pt")["state"]["callbacks"] == {"own": Path("x")}


def test_a_tokenizer_whose_files_have_names_of_the_models(tmp_path: Path):
    """One called like the index of the weights, or like the configuration, would replace it."""
    content: dict[str, Any] = {"weight_map": {"w": "elsewhere.safetensors"}}
    names = ("model.safetensors.index", "config", "../config", "/etc/x", ".hidden", "a/b", "half \ud800", "vocab")
    tokenizer = {name: {"file_extension": ".json", "content": content} for name in names}
    tokenizer |= {"model.safetensors": {"file_extension": ".model", "content": b"weights"}}
    tokenizer |= {"merges": {"file_extension": ".txt", "content": ["half \ud800"]}}
    config = {"content": {"model_type": "x", "hidden_size": 3}, "class": "transformers.X"}
    state = {
        "model": {f"model.{number}": torch.ones(30) for number in range(3)},
        "integrations": {"huggingface": {"model": {"config": config}, "tokenizer": tokenizer}},
    }
    torch.save({"state": state}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "new", "safetensors", files=2)
    written = {path.name for path in (tmp_path / "new").iterdir()}
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"0", "1", "2"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["hidden_size"] == 3
    assert written == {*index["weight_map"].values(), "model.safetensors.index.json", "config.json", "vocab.json"} | {
        "model.safetensors.model"
    }
    assert sum("tokenizer file" in remark for remark in (*report.remarks, *report.dropped)) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Ties


def num_calls(work: Any, files: tuple[str, ...]) -> int:
    """How often ``work`` enters a Python function of these files."""
    found = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.endswith(files)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def experts(folder: Path, number: int) -> Any:
    """A checkpoint of experts of one shape and a tied output, keyed by position."""
    model = {f"experts.{number}.weight": torch.full((2, 3), float(number)) for number in range(number)}
    model |= {"wte.weight": torch.arange(6.0).view(2, 3)}
    model |= {"tied.weight": model["wte.weight"], "lm_head.weight": model["wte.weight"].clone()}
    entries = {place: {"exp_avg": torch.zeros(2, 3)} for place in range(number + 1)}
    groups = [{"lr": 0.1, "params": list(entries)}]
    optimizers = {"Adam": {"state": entries, "param_groups": groups}}
    torch.save({"state": {"model": model, "optimizers": optimizers}}, folder / f"{number}.pt")
    return inspect_checkpoint(folder / f"{number}.pt")


@pytest.mark.any_torch
def test_ties_among_thousands_of_experts(tmp_path: Path):
    """Each of 18,432 expert matrices was compared with all before it: four minutes on every pass over the metadata."""
    found = {number: experts(tmp_path, number) for number in (200, 400)}

    def ties(number: int) -> None:
        state = state_to_write(found[number], named_optimizer=True)
        weights = state.state["state"]["model"]
        assert weights["tied.weight"] is weights["wte.weight"] is not weights["lm_head.weight"]
        assert len({id(slot) for slot in weights.values()}) == number + 2
        assert "wte.weight" in state.state["state"]["optimizers"]["Adam"]["state"]
        kept, left_out = without_ties(weights, {"tie_word_embeddings": True})
        assert left_out == ["tied.weight (tied to wte.weight)", "lm_head.weight (tied to wte.weight)"]
        assert len(kept) == number + 1

    # Comparisons are dataclasses' own: "<string>" is where Python has their methods from.
    files = ("same_bytes.py", "hugging_face.py", "optimizer_order.py", "convert/state.py", "<string>")
    counts = [num_calls(lambda: ties(number), files) for number in found]  # noqa: B023
    assert counts[1] < 2.2 * counts[0], f"not linear: {counts}"


@pytest.mark.any_torch
def test_every_way_to_match_positions_is_counted():
    """A second way that was overlooked would give moments to the wrong parameters."""
    a, b = (1,), (2,)
    for shapes, candidates in itertools.product(
        [each for n in range(4) for each in itertools.product([a, b, None], repeat=n)],
        [each for n in range(5) for each in itertools.product([a, b], repeat=n)],
    ):
        ways = [
            list(places)
            for places in itertools.combinations(range(len(candidates)), len(shapes))
            if all(shape in (None, candidates[place]) for shape, place in zip(shapes, places, strict=True))
        ]
        expected = ways[0] if len(ways) == 1 else "there are several ways" if ways else "there is no way"
        assert _only_matching(shapes, candidates) == expected, (shapes, candidates)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_keys_that_may_have_been_text_are_named(tmp_path: Path):
    """A callback's {'5': ...} comes back as {5: ...} from a converted folder; whoever converts reads which dicts."""
    state = {
        "model": {"w": torch.ones(2), "m._extra_state": {"7": 1}},
        "callbacks": {"Counting": {"5": 1, "seen": {"a": 1}}},
    }
    torch_dcp.save({"state": state, "rng": []}, checkpoint_id=tmp_path / "sharded")
    report = convert_checkpoint(tmp_path / "sharded", tmp_path / "full.pt", to="monolithic")
    [remark] = [text for text in report.remarks if "text or an int" in text]
    assert "'5' becomes 5" in remark
    assert remark.endswith("below state.model.m._extra_state, state.callbacks.Counting")
