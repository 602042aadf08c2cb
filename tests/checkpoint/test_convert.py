"""Checkpoints converted to another layout, compared with the values that stock torch reads from the source."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gzip
import itertools
import json
import os
import resource
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints.conversions import (
    Normed,
    contents,
    convert,
    loaded,
    loaded_folder,
    planned,
    save_by_position,
    staging_of,
    without_empty_dicts,
)
from support.checkpoints.corruptions import flip
from support.checkpoints.samples import LEGACY, bytes_of, composer_state, peak_anonymous_bytes
from support.comparing import assert_same
from support.ranks import impatient, run_ranks
from torch import nn

from composer_fsdp2 import CheckpointError, ConfigError, inspect_checkpoint
from composer_fsdp2.checkpoint import layouts
from composer_fsdp2.checkpoint import read as reading
from composer_fsdp2.checkpoint.convert import conversion, copying
from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint
from composer_fsdp2.checkpoint.convert.state import _unique_matching, state_to_write
from composer_fsdp2.checkpoint.hugging_face import without_ties
from composer_fsdp2.checkpoint.layouts import packed

pytestmark = pytest.mark.any_torch

FULL = [LEGACY / "c172/full/ep0-ba3-rank0.pt"]
SHARDED = [LEGACY / f"{kind}/ep0-ba3" for kind in ("c172/sharded", "c220/sharded-mesh")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A monolithic checkpoint in the current format, with empty dicts."""
    state = composer_state()
    state["state"] |= {"scaler": {}, "schedulers": {}, "run_name": "r"}
    torch.save(state, tmp_path / "source.pt")
    return tmp_path / "source.pt"


# ---------------------------------------------------------------------------------------------------------------------
# Between layouts


@pytest.mark.parametrize("path", [*FULL, *SHARDED], ids=str)
def test_shards_of_safetensors(tmp_path: Path, path: Path):
    """The safetensors library reads every weight once and bit for bit, and the report lists the omitted entries."""
    safetensors = pytest.importorskip("safetensors")
    shutil.copytree(path, tmp_path / "old") if path.is_dir() else shutil.copy(path, tmp_path / "old")
    report = convert(tmp_path / "old", tmp_path / "hf", "safetensors", files=2)
    assert {"state.optimizers.DecoupledAdamW", "state.timestamp", "rng"} <= set(report.dropped)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    found = {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            for name in shard.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][name] == file.name and name not in found
                found[name] = shard.get_tensor(name)
    model = (loaded_folder(tmp_path / "old") if path.is_dir() else loaded(path))["state"]["model"]
    assert_same(found, dict(model), in_bits=True)
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert index["metadata"]["total_size"] == sum(len(bytes_of(tensor)) for tensor in model.values())


def test_a_hugging_face_folder(tmp_path: Path, source: Path):
    """Weights are converted back from Hugging Face's layout; if the folder has a config.json, under Composer's names.

    A conversion to other shards copies the files that ``from_pretrained`` needs, and not the old index.
    """
    convert(source, tmp_path / "hf", "safetensors", files=2)
    report = convert(tmp_path / "hf", tmp_path / "back.pt", "monolithic")
    assert_same(loaded(tmp_path / "back.pt"), {"state": {"model": loaded(source)["state"]["model"]}}, in_bits=True)
    assert report.unchecked_bytes == report.read_bytes  # safetensors has no checksums
    others = ["config.json", "tokenizer.json", "tokenizer.model"]
    for name in others:
        (tmp_path / "hf" / name).write_text('{"hidden_size": 3}')
    convert(tmp_path / "hf", tmp_path / "one", "safetensors")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted([*others, "model.safetensors"])
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    convert(tmp_path / "one", tmp_path / "folder", "dcp")
    names = {f"model.{name}" for name in loaded(source)["state"]["model"]}
    assert set(loaded_folder(tmp_path / "folder")["state"]["model"]) == names


@pytest.mark.parametrize("to", ["monolithic", "safetensors"])
def test_a_compressed_checkpoint(tmp_path: Path, to: str):
    """The temporary unpacked file is removed. Ties are known only after unpacking; the output reserved space for both
    copies."""
    weight = torch.arange(200.0).view(10, 20)
    torch.save({"state": {"model": {"a": weight, "b": weight}}}, tmp_path / "source.pt")
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress((tmp_path / "source.pt").read_bytes()))
    report = convert(tmp_path / "packed.pt.gz", tmp_path / "of packed", to)
    convert(tmp_path / "source.pt", tmp_path / "of source", to)
    assert report.source == str(tmp_path / "packed.pt.gz")
    assert {p.name for p in tmp_path.iterdir()} == {"source.pt", "packed.pt.gz", "of packed", "of source"}
    sizes = [[size for size, _ in contents(tmp_path / name).values()] for name in ("of packed", "of source")]
    assert sizes[0] == sizes[1]
    if to == "monolithic":
        assert_same(loaded(tmp_path / "of packed"), loaded(tmp_path / "source.pt"), in_bits=True)


# ---------------------------------------------------------------------------------------------------------------------
# Contents and names


@pytest.mark.parametrize("to", ["monolithic", "dcp"])
def test_a_cast_changes_floating_weights_alone(tmp_path: Path, source: Path, to: str):
    """A conversion to bf16 for inference does not change the dtype of optimizer state or counters."""
    convert(source, tmp_path / "new", to, dtype=torch.bfloat16)
    expected = without_empty_dicts(loaded(source))
    model = expected["state"]["model"]
    expected["state"]["model"] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.items()}
    found = loaded_folder(tmp_path / "new") if to == "dcp" else loaded(tmp_path / "new")
    assert_same(without_empty_dicts(found), expected, in_bits=True)
    assert {tensor.dtype for tensor in expected["state"]["model"].values()} == {torch.bfloat16, torch.int64}


def test_a_subset(tmp_path: Path, source: Path):
    """Without the optimizer, everything else is still converted. Selected weights keep their state, and the
    param_groups list only them."""
    report = convert(source, tmp_path / "without.pt", "monolithic", optimizer=False)
    expected = loaded(source)
    adam = expected["state"].pop("optimizers")["AdamW"]
    assert_same(loaded(tmp_path / "without.pt"), expected, in_bits=True)
    assert report.dropped == ("state.optimizers.AdamW",)
    report = convert(source, tmp_path / "new.pt", "monolithic", include=["*.bias", "model.seen"])
    del expected["state"]["model"]["model.weight"], adam["state"]["model.weight"]
    adam["param_groups"][0]["params"] = ["model.bias"]
    expected["state"]["optimizers"] = {"AdamW": adam}
    assert_same(loaded(tmp_path / "new.pt"), expected, in_bits=True)
    assert report.dropped == ("state.model.model.weight", "state.optimizers.AdamW.state.model.weight")


def test_names_of_wrappers_are_taken_off(tmp_path: Path):
    """The prefixes of FSDP1 and activation checkpointing are removed from the names of weights and optimizer state
    alike.

    The step count that FSDP1 shares among parameters is copied for each; otherwise one step would increment it for all.
    """
    state = composer_state()
    optimizer = state["state"]["optimizers"]["AdamW"]
    old = "model._fsdp_wrapped_module._checkpoint_wrapped_module.weight"
    state["state"]["model"][old] = state["state"]["model"].pop("model.weight")
    optimizer["state"][old] = optimizer["state"].pop("model.weight")
    optimizer["param_groups"][0]["params"][0] = old
    optimizer["state"][old]["step"] = optimizer["state"]["model.bias"]["step"]  # FSDP1 shares one among parameters
    torch.save(state, tmp_path / "source.pt")
    report = convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    new = loaded(tmp_path / "new.pt")["state"]
    assert report.renamed == {old: "model.weight"}
    assert set(new["model"]) == {"model.weight", "model.bias", "model.seen"}
    entries = new["optimizers"]["AdamW"]["state"]
    assert set(entries) == {"model.weight", "model.bias"}
    entries["model.bias"]["step"] += 1
    assert entries["model.weight"]["step"].item() == 3, "a step would count for both"
    assert new["optimizers"]["AdamW"]["param_groups"][0]["params"] == ["model.weight", "model.bias"]


def test_tied_weights_keep_both_names_and_one_storage(tmp_path: Path):
    """A tied model's file does not grow and has both names; a safetensors file has one, as its library requires."""
    tied = torch.randn(100, 100)
    state = {"state": {"model": {"lm_head.weight": tied, "wte.weight": tied, "same.by.chance": tied.clone()}}}
    torch.save(state, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), state, in_bits=True)
    assert os.path.getsize(tmp_path / "new.pt") == pytest.approx(os.path.getsize(tmp_path / "source.pt"), abs=1000)
    report = convert(tmp_path / "source.pt", tmp_path / "hf", "safetensors")
    assert report.num_tensors == 2
    assert "leaves out lm_head.weight (tied to wte.weight), which is the same bytes" in report.remarks


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers keyed by position


def test_positions_stay_in_a_monolithic_file(tmp_path: Path):
    """Stock torch reads positions unchanged from a monolithic file."""
    save_by_position(nn.Linear(3, 2), tmp_path / "source.pt", groups=2)
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    assert_same(loaded(tmp_path / "new.pt"), loaded(tmp_path / "source.pt"), in_bits=True)


@pytest.mark.parametrize(
    ("model", "groups", "says"),
    [(Normed(), 1, "several ways.*--model"), (nn.Linear(3, 2), 2, "2 groups.*--no-optimizer")],
    ids=["buffers", "groups"],
)
def test_positions_that_could_be_several_names_are_refused(tmp_path: Path, model: nn.Module, groups: int, says: str):
    """The conversion never guesses which parameter a moment belongs to."""
    save_by_position(model, tmp_path / "source.pt", groups)
    with pytest.raises(CheckpointError, match=says):
        convert(tmp_path / "source.pt", tmp_path / "folder", "dcp")
    convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", optimizer=False)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def test_what_would_be_done_is_what_is_done(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """A dry run changes nothing; the progress bar reaches the number of bytes it announced; a script reads the
    report."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 32)
    before, options = contents(tmp_path), {"files": 2, "include": ["*.bias"]}
    plan = planned(source, tmp_path / "folder", "dcp", **options)
    assert contents(tmp_path) == before
    text = str(plan)
    assert "__1_0.distcp" in text and "leaves out (3)" in text and "state.model.model.weight" in text
    seen: list[tuple[int, int]] = []
    report = convert(source, tmp_path / "folder", "dcp", progress=lambda *numbers: seen.append(numbers), **options)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 3
    assert {total for _, total in seen} == {report.read_bytes} == {seen[-1][0]}
    data = json.loads(json.dumps(report.as_dict()))
    assert data["to"] == "dcp" and data["num_tensors"] == report.num_tensors
    size = sum(p.stat().st_size for p in (tmp_path / "folder").iterdir())
    assert plan.write_bytes == data["written_bytes"] == size


def test_a_destination_that_cannot_be_taken(tmp_path: Path, source: Path):
    """No existing checkpoint is overwritten; a file in place of a folder is a CheckpointError with its path."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("gone")
    before = sorted(tmp_path.iterdir())
    for name, says in {"file": "exists; remove it", "folder": "exists", "link": "exists", "file/x": "written"}.items():
        with pytest.raises(CheckpointError, match=says):
            convert(source, tmp_path / name, "monolithic")
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "mine"


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "layout": (None, {"to": "zip"}, "expected one of dcp, safetensors, monolithic"),
    "two files of one": (None, {"to": "monolithic", "files": 2}, "has one file"),
    "no file": (None, {"to": "dcp", "files": 0}, "at least one"),
    "dtype": (None, {"to": "dcp", "dtype": torch.int8}, "floating-point"),
    "complex": (None, {"to": "safetensors", "dtype": torch.complex64}, "floating-point"),
    "pattern": (
        None,
        {"to": "dcp", "include": ["model.wieght"]},
        "matches model.wieght; its names are like model.weight",
    ),
    "no pattern": (None, {"to": "dcp", "include": []}, "empty list"),
    # The error names the tensor instead of showing the library's own error; DCP's flattening also refuses these keys.
    "what safetensors does not know": (
        {"phase": torch.zeros(2, dtype=torch.complex128)},
        {"to": "safetensors"},
        r"phase \(torch.complex128\)",
    ),
    "keys that would be one": ({"x": {"b": 1}, "x.b": 2}, {"to": "dcp"}, r"would both be state\.model\.x\.b"),
    "flat parameters": (LEGACY / "c172/local-flat/ep0-ba3", {"to": "monolithic"}, "model=, --model module:function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_an_error(tmp_path: Path, source: Path, case: str):
    """A misspelt option, or data that the layout cannot store, is an error before hours of work."""
    model, options, says = WRONG[case]
    if isinstance(model, dict):
        torch.save({"state": {"model": {"a": torch.ones(1)} | model}}, source)
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress(source.read_bytes()))
    before = contents(tmp_path)
    for path in (model,) if isinstance(model, Path) else (source, tmp_path / "packed.pt.gz"):
        with pytest.raises((CheckpointError, ConfigError), match=says):
            convert_checkpoint(path, tmp_path / "folder" / "new", **options)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("to", ["monolithic", "dcp"])
def test_keys_that_are_no_names(tmp_path: Path, to: str):
    """A user-defined optimizer may key its state by neither names nor positions; the state is converted unchanged."""
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
# Failures


def with_a_flipped_bit(path: Path, tensor: torch.Tensor) -> None:
    flip(path, path.read_bytes().index(bytes_of(tensor)) + 5, bit=4)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_flipped_bit_in_the_source_is_found(tmp_path: Path, source: Path, is_folder: bool):
    """A damaged tensor is named, and not written into a new checkpoint with a valid checksum."""
    if is_folder:
        convert(source, tmp_path / "folder", "dcp")
    path = tmp_path / "folder/__0_0.distcp" if is_folder else source
    with_a_flipped_bit(path, loaded(source)["state"]["model"]["model.weight"])
    with pytest.raises(CheckpointError, match=r"(?s)source is damaged.*model\.weight"):
        convert(tmp_path / "folder" if is_folder else source, tmp_path / "new.pt", "monolithic")
    assert not (tmp_path / "new.pt").exists() and not staging_of(tmp_path / "new.pt").exists()


WHOLE = torch.arange(100.0)
# Views of one storage, and bytes of it that belong to no tensor or to two. Bytes of two are read twice and checked
# once.
VIEWS: dict[str, tuple[dict[str, torch.Tensor], slice]] = {
    "beside": ({"a": WHOLE[10:40], "b": WHOLE[::3][20:]}, slice(1, 8)),
    "overlapping": ({"a": WHOLE[:60], "b": WHOLE[40:], "c": WHOLE[:60]}, slice(44, 52)),
}


@pytest.mark.parametrize("views", VIEWS)
def test_damage_in_a_storage_of_views(tmp_path: Path, views: str):
    """The full record of a view's storage is checked, whichever of its bytes the tensors use."""
    model, damaged = VIEWS[views]
    torch.save({"state": {"model": model}}, tmp_path / "source.pt")
    convert(tmp_path / "source.pt", tmp_path / "good.pt", "monolithic")
    assert_same(loaded(tmp_path / "good.pt"), {"state": {"model": model}}, in_bits=True)
    with_a_flipped_bit(tmp_path / "source.pt", WHOLE[damaged])
    with pytest.raises(CheckpointError, match="source is damaged"):
        convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error has the required and the free bytes. ``shutil.disk_usage`` is mocked to report a full disk."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"needs \d{4,} bytes, .* has 100 free"):
        convert(source, tmp_path / "new.pt", "monolithic")
    assert contents(tmp_path) == before


def test_a_disk_that_fills_up(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """The error names the path of the finished part, and with free space the same call continues from it. ``os.pwrite``
    is mocked to fail."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Concurrent conversions


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
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # the lock file is removed


def test_a_file_system_without_locks(tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture):
    """Converting works with a warning. If another process has put its mark in the folder, the result is not
    published."""
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


def next_header(file: Path) -> None:
    flip(file, file.read_bytes().index(b'"dtype"') - 4)


# The kind of the source, and how it changes during the conversion.
CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a value": ("model.safetensors", lambda file: flip(file, -1)),
    "the header": ("model.safetensors", next_header),
    "what was packed": ("source.pt.gz", lambda file: os.utime(file, (1, 1))),  # the unpacked copy was converted
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, source: Path, change: str):
    """safetensors has no CRC32, so half of one file and half of another would be a checkpoint that no run saved."""
    name, changing = CHANGES[change]
    folder, target = tmp_path / "weights", tmp_path / "new"
    convert(source, folder, "safetensors")
    (folder / "source.pt.gz").write_bytes(gzip.compress(source.read_bytes()))
    with pytest.raises(CheckpointError, match=r"changed during the conversion|damaged|beside|disagree|ends at byte"):
        convert(folder / name, target, "dcp", progress=lambda *unused: changing(folder / name))
    assert not target.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "source.pt.gz"])
def test_a_source_that_changes_while_it_is_planned(tmp_path: Path, source: Path, name: str):
    """A source that changes after it was unpacked or planned; without CRC32s nothing else shows it."""
    convert(source, tmp_path / "weights", "safetensors")
    (tmp_path / "weights" / "source.pt.gz").write_bytes(gzip.compress(source.read_bytes()))
    file = tmp_path / "weights" / name
    read = conversion.inventory_of

    def reads_and_changes(*arguments: Any, **options: Any) -> Any:
        inventory = read(*arguments, **options)
        os.utime(file, (1, 1))
        return inventory

    with (
        mock.patch.object(conversion, "inventory_of", reads_and_changes),
        pytest.raises(CheckpointError, match="changed during the conversion"),
    ):
        convert(file, tmp_path / "new", "dcp")
    assert not (tmp_path / "new").exists()


def test_a_link_where_unfinished_conversions_are(tmp_path: Path, source: Path):
    """A symbolic link at the path of unfinished conversions is not followed; its target belongs to the user."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    staging_of(tmp_path / "new").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="a link"):
        convert(source, tmp_path / "new", "dcp")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_more_files_than_may_be_open(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """Folders of 512 ranks convert under the usual limit of 1,024 open files, with eight threads."""
    monkeypatch.setattr(copying, "NUM_THREADS", 4)
    monkeypatch.setattr(reading, "_MAX_OPEN_FILES", 4)
    torch.save({"state": {"model": {"w": torch.arange(400.0).view(100, 4)}}}, tmp_path / "wide.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        convert(tmp_path / "wide.pt", tmp_path / "folder", "dcp", files=100)
        convert(tmp_path / "folder", tmp_path / "back.pt", "monolithic")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "folder").iterdir())) == 101
    assert_same(loaded(tmp_path / "back.pt"), loaded(tmp_path / "wide.pt"), in_bits=True)


def test_a_destination_inside_of_the_source(tmp_path: Path):
    """A destination inside the source folder is refused; its files would be part of the source while they are
    written."""
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


def test_memory_is_a_few_chunks_whatever_the_tensor(tmp_path: Path):
    """A checkpoint larger than the machine's memory converts; here one tensor of 128 MiB in less than 48 MiB."""
    torch.save({"state": {"model": {"w": torch.ones(32, 1 << 20)}}}, tmp_path / "source.pt")
    with peak_anonymous_bytes() as samples:
        convert(tmp_path / "source.pt", tmp_path / "folder", "dcp", files=2)
        convert(tmp_path / "folder", tmp_path / "back.pt", "monolithic")
    assert max(samples) < 48 << 20 and len(samples) > 20
    assert os.path.getsize(tmp_path / "back.pt") > 128 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


def check_two_ranks(folder: str) -> tuple[int, int, list[str]]:
    """Convert between both layouts, in many tasks."""
    copying.CHUNK_BYTES = 64
    path = Path(folder)
    assert planned(path / "source.pt", path / "folder", "dcp", files=2).write_bytes
    there = convert(path / "source.pt", path / "folder", "dcp", files=2)
    convert(path / "folder", path / "back.pt", "monolithic")
    try:
        with mock.patch.object(conversion.Copier, "copy", side_effect=OSError(errno.EIO, "the disk is gone")):
            convert(path / "source.pt", path / "never.pt", "monolithic")
    except CheckpointError as error:
        message = str(error)
    return there.read_bytes, there.written_bytes, [message]


def test_two_ranks_have_one_result(tmp_path: Path, source: Path):
    """A script that all ranks run converts once, with the same bytes as one process; an error is raised on every
    rank."""
    results = run_ranks(check_two_ranks, 2, str(tmp_path), fresh=True)
    convert(source, tmp_path / "alone", "dcp", files=2)
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "folder" / file.name).read_bytes() == file.read_bytes(), file.name
    assert_same(loaded(tmp_path / "back.pt"), loaded(source), in_bits=True)
    assert not (tmp_path / "never.pt").exists()
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == planned(source, tmp_path / "x", "dcp").read_bytes
    assert all("the disk is gone" in message for _, _, [message] in results)


@pytest.mark.parametrize("num_threads", [1, 5])
def test_any_number_of_threads_writes_the_same(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
):
    """A machine of 96 cores and one of a single core write the same bytes."""
    convert(source, tmp_path / "expected", "dcp", files=3)
    monkeypatch.setattr(copying, "NUM_THREADS", num_threads)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 32)
    convert(source, tmp_path / "folder", "dcp", files=3)
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "folder" / file.name).read_bytes() == file.read_bytes(), file.name


def check_packed_on_two_ranks(folder: str) -> None:
    """Reading and unpacking a compressed file each take longer than the collectives' timeout."""
    path = Path(folder)
    read, unpack = conversion.inventory_of, packed.unpacked

    def slow(function: Any) -> Any:
        return lambda *arguments, **options: time.sleep(1.5) or function(*arguments, **options)

    layout = dataclasses.replace(packed.LAYOUT, unpack=slow(unpack))
    known = tuple(layout if each.name == layout.name else each for each in layouts.LAYOUTS)
    with (
        impatient(1.0),
        mock.patch.object(layouts, "LAYOUTS", known),
        mock.patch.object(conversion, "inventory_of", slow(read)),
    ):
        convert(path / "packed.pt.gz", path / "folder", "dcp", files=2)


def test_two_ranks_convert_what_is_packed(tmp_path: Path, source: Path):
    """While one rank unpacked, the others failed at Composer's dist_timeout."""
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress(source.read_bytes()))
    run_ranks(check_packed_on_two_ranks, 2, str(tmp_path))
    convert(source, tmp_path / "alone", "dcp", files=2)
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "folder" / file.name).read_bytes() == file.read_bytes(), file.name


def test_an_ordered_dict_and_trusted_objects_need_trust(tmp_path: Path):
    """A class that a pickle names is neither run nor written without ``trust=True``."""
    state = composer_state()
    state["state"]["callbacks"] = OrderedDict(own=Path("x"))
    torch.save(state, tmp_path / "source.pt")
    with pytest.raises(CheckpointError, match="pathlib"):
        convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic")
    convert(tmp_path / "source.pt", tmp_path / "new.pt", "monolithic", trust=True)
    assert loaded(tmp_path / "new.pt")["state"]["callbacks"] == {"own": Path("x")}


def test_a_tokenizer_whose_files_have_names_of_the_models(tmp_path: Path):
    """A tokenizer file with the name of the weights' index or of the configuration would replace it."""
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
    """The number of calls of Python functions in these files during ``work``."""
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


def test_ties_among_thousands_of_experts(tmp_path: Path):
    """Each of 18,432 expert matrices was compared with all before it, which took four minutes for every pass over the
    metadata."""
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

    # Comparisons are generated by dataclasses, whose methods have "<string>" as their file.
    files = ("same_bytes.py", "hugging_face.py", "optimizer_order.py", "convert/state.py", "<string>")
    counts = [num_calls(lambda: ties(number), files) for number in found]  # noqa: B023
    assert counts[1] < 2.2 * counts[0], f"not linear: {counts}"


def test_every_way_to_match_positions_is_counted():
    """A second possible match that was overlooked would assign moments to the wrong parameters."""
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
        assert _unique_matching(shapes, candidates) == expected, (shapes, candidates)
