"""verify_checkpoint: every record of every archive, and equality with another checkpoint, bit by bit."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import math
import shutil
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.corruptions import flip, record_at
from support.checkpoints.samples import (
    LEGACY,
    composer_state,
    leaves,
    peak_anonymous_bytes,
    values_of,
    write_safetensors,
)
from support.comparing import assert_same
from support.examples import examples
from torch import nn

from composer_fsdp2.checkpoint import records
from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint
from composer_fsdp2.checkpoint.differences import FaultKind
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.load.into_model import load_checkpoint
from composer_fsdp2.checkpoint.verify import comparing, verification
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch

FIXTURES = [
    LEGACY / "c172" / "full" / "ep0-ba3-rank0.pt",
    LEGACY / "c172" / "sharded" / "ep0-ba3",
    LEGACY / "c172" / "local-flat" / "ep0-ba3",
    LEGACY / "c220" / "full" / "ep0-ba3-rank0.pt",
    LEGACY / "c220" / "sharded" / "ep0-ba3",
    LEGACY / "c220" / "sharded-mesh" / "ep0-ba3",
]


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


# --- content


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_old_checkpoints_are_whole(path: Path):
    """An old checkpoint is verified without a manifest: no fault is reported, and no byte is skipped."""
    report = verify_checkpoint(path)
    assert report.ok and not report.differences, str(report)
    signature, files = b"PK\x01\x02", [path] if path.is_file() else [*path.glob("*.distcp")]
    assert report.num_records == sum(file.read_bytes().count(signature) for file in files)
    assert report.unchecked == (() if path.is_file() else ("content of files without a checksum: .metadata",))


@pytest.mark.parametrize("path", FIXTURES[:2], ids=lambda path: "/".join(path.parts[-3:-1]))
def test_converted_folders_are_whole(path: Path, tmp_path: Path):
    """Every byte of a folder from `convert --to dcp` is verified, including Composer's empty dicts, which are listed
    separately."""
    convert_checkpoint(path, tmp_path / "dcp", to="dcp")
    report = verify_checkpoint(tmp_path / "dcp", path)
    assert report.ok, str(report)
    data = (tmp_path / "dcp" / "__0_0.distcp").read_bytes()
    assert report.num_records == data.count(b"PK\x01\x02")


def test_every_record_counts(tmp_path: Path):
    """A flipped bit in any record is found and reported: in a tensor's, in the pickle's, or in one that no load
    reads."""
    whole, seen = saved(tmp_path / "whole.pt", composer_state()), []
    report = verify_checkpoint(whole, whole, progress=lambda done, total: seen.append((done, total)))
    assert seen and sorted(seen) == seen and seen[-1][0] == seen[-1][1] >= report.num_bytes
    with zipfile.ZipFile(whole) as file:
        names = [name.partition("/")[2] for name in file.namelist() if file.getinfo(name).file_size]
    assert len(names) > 8 and "version" in names
    for name in names:
        damaged = tmp_path / "damaged.pt"
        shutil.copy(whole, damaged)
        flip(damaged, record_at(damaged, name)[1])
        report = verify_checkpoint(damaged)
        assert not report.ok and str(report).endswith("1 fault" if len(report.faults) == 1 else "faults")
        number, fault = next(found for found in enumerate(report.faults) if name in str(found[1]))
        data = json.loads(json.dumps(report.to_json()))["faults"][number]
        assert data["file"] == str(damaged) and data["name"] == fault.name
        assert (data["expected"], data["found"]) == (fault.expected, fault.found) and "CRC32" in str(fault)


def test_a_disk_that_cannot_be_read_is_a_fault(tmp_path: Path):
    """Each unreadable record is named, as if its bytes were wrong."""
    path = saved(tmp_path / "file.pt", composer_state())
    with mock.patch.object(records, "opened", side_effect=OSError(5, "Input/output error")):
        report = verify_checkpoint(path)
    assert report.faults and all("Input/output error" in fault.found for fault in report.faults)


def test_progress_that_raises_ends_the_reading(tmp_path: Path):
    """After Ctrl-C, for example, records that no thread has started are not read."""
    path = saved(tmp_path / "file.pt", {"state": {"model": {str(n): torch.ones(3) for n in range(50)}}, "rng": []})

    def interrupt(*numbers: int) -> None:
        raise KeyboardInterrupt

    slow = mock.Mock(side_effect=lambda *arguments: time.sleep(0.02))
    with mock.patch.object(verification, "damage_of", slow), pytest.raises(KeyboardInterrupt):
        verify_checkpoint(path, progress=interrupt)
    assert slow.call_count < 10


def test_archive_without_crcs(tmp_path: Path):
    """If torch was configured to compute no CRC32s, the report lists the content as unchecked."""
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "file.pt", composer_state())
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify_checkpoint(path)
    assert_same(values_of(inspect_checkpoint(path)), dict(leaves(torch.load(path, weights_only=False))), in_bits=True)
    assert report.ok and "saved without CRC32s" in " ".join(report.unchecked) and "file.pt" in report.unchecked[0]


def test_all_faults_of_one_pass(tmp_path: Path):
    """Three damaged tensors in two files are three lines of one report."""
    path = tmp_path / "ep0-ba3"
    shutil.copytree(FIXTURES[4], path)
    for file, number in (("__0_0.distcp", 0), ("__0_0.distcp", 3), ("__1_0.distcp", 2)):
        data = (path / file).read_bytes()
        ends = [0, *(at + 22 for at in range(len(data)) if data.startswith(b"PK\x05\x06", at))]
        tensors = [pair for pair in itertools.pairwise(ends) if b"archive/data/0" in data[slice(*pair)]]
        flip(path / file, record_at(path / file, "data/0", *tensors[number])[1])
    report = verify_checkpoint(path)
    assert len(report.faults) == 3 and {fault.kind for fault in report.faults} == {FaultKind.CONTENT}, str(report)
    assert [fault.file.name for fault in report.faults] == ["__0_0.distcp", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("named", ["folder", "file"])
def test_data_is_checked_where_metadata_is_lost(named: str, tmp_path: Path):
    """Without .metadata, or for a single recovered file, every archive is found from its end, not only the last."""
    folder = tmp_path / "ep0-ba3"
    shutil.copytree(FIXTURES[4], folder)
    (folder / ".metadata").unlink()
    file = folder / "__0_0.distcp"
    path, files = (folder, [*folder.iterdir()]) if named == "folder" else (file, [file])
    whole = verify_checkpoint(path)
    assert [fault.kind for fault in whole.faults] == [FaultKind.STRUCTURE]  # one part alone is no checkpoint
    assert whole.num_records == sum(each.read_bytes().count(b"PK\x01\x02") for each in files)
    flip(file, record_at(file, "data/0")[1])
    assert [fault.kind for fault in verify_checkpoint(path).faults] == [FaultKind.STRUCTURE, FaultKind.CONTENT]


@pytest.mark.parametrize("container", ["tar", "gz"])
def test_packed_files(container: str, tmp_path: Path):
    """A compressed or tarred checkpoint is checked record by record too, and reported under the user's file name."""
    inner = saved(tmp_path / "composer_states.pt", composer_state())
    path = _packed(inner, tmp_path / "good", container)
    assert verify_checkpoint(path).ok
    flip(inner, record_at(inner, "data/0")[1])
    path = _packed(inner, tmp_path / "bad", container)
    [fault] = verify_checkpoint(path).faults
    assert fault.file == path and "CRC32" in str(fault)


NO_CHECKPOINTS = {
    "text": (b"../secret.pt", "begins with b'../secret"),
    "empty": (b"", "empty"),
    "noise": (bytes(range(128, 256)), r"begins with b'\x80\x81"),
    "packed twice": (gzip.compress(b"a log"), r"\x1f\x8b"),
    "another value": (None, "holds a list"),
}


@pytest.mark.parametrize("content", NO_CHECKPOINTS)
def test_packed_file_that_holds_no_checkpoint(content: str, tmp_path: Path):
    """The file should be a checkpoint, so this is a fault, reported for the user's file and not for our unpacked
    copy."""
    inner, (data, says) = saved(tmp_path / "inner", [1, 2]), NO_CHECKPOINTS[content]
    if data is not None:
        inner.write_bytes(data)
    path = _packed(inner, tmp_path / "bad", "tar" if content == "empty" else "gz")
    [fault] = verify_checkpoint(path).faults
    assert fault.file == path and fault.kind is FaultKind.STRUCTURE
    assert fault.found.startswith(f"{path}: ") and says in fault.found
    for action in (
        lambda: load_checkpoint(path, nn.Linear(1, 1)),
        lambda: verify_checkpoint(saved(tmp_path / "good.pt", composer_state()), path),
    ):
        with pytest.raises(CheckpointError) as raised:
            action()
        assert str(raised.value).startswith(str(path))


def test_damage_in_a_tar_file_names_the_users_file(tmp_path: Path):
    """A tar file has no checksum; damage is detected in the unpacked copy, which is removed when the error is
    raised."""
    model = nn.Linear(64, 64, bias=False)
    inner = saved(tmp_path / "inner.pt", {"state": {"model": {"weight": torch.ones(64, 64)}}})
    flip(inner, record_at(inner, "data/0")[1] + 5)
    path = _packed(inner, tmp_path / "bad", "tar")
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="damaged content") as raised:
        load_checkpoint(path, model)
    assert str(raised.value).startswith(f"{path}: ") and torch.equal(model.weight, before)


def _packed(inner: Path, folder: Path, container: str) -> Path:
    folder.mkdir()
    if container == "gz":
        (folder / "ep0.pt.gz").write_bytes(gzip.compress(inner.read_bytes(), 1))
        return folder / "ep0.pt.gz"
    with tarfile.open(folder / "ep0.tar", "w") as tar:
        tar.add(inner, "composer_states.pt")
    return folder / "ep0.tar"


def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    """A checkpoint larger than memory can be checked and compared."""
    path = saved(tmp_path / "file.pt", {"state": {"model": {"w": torch.ones(32 << 20)}}, "rng": []})  # 128 MiB
    with peak_anonymous_bytes() as samples:
        assert verify_checkpoint(path, path).ok
    assert max(samples) < 64 << 20 and len(samples) > 20  # buffers, and masks of a block


# --- equality with another checkpoint


def test_two_runs_differ_in_what_they_measured():
    """The same training saved with two strategies differs only in wall clock times; everything else is compared."""
    report = verify_checkpoint(FIXTURES[1], FIXTURES[0])
    assert report.ok and not report.differences
    assert {fault.name.rpartition(".")[2] for fault in report.bookkeeping} == {"total_wct", "epoch_wct", "batch_wct"}
    assert "bookkeeping (clocks, paths, names of runs) differs in" in str(report)


def of_bits(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def state_with(**model: Any) -> dict[str, Any]:
    state = composer_state()
    state["state"]["model"] |= model
    return state


@pytest.mark.parametrize(
    ("mine", "other", "says"),
    [
        (torch.ones(3), torch.ones(3) * 2, "3 of 3 elements differ; the largest absolute difference is 1"),
        (torch.tensor(-0.0), torch.tensor(0.0), "1 of 1 elements differ; the largest absolute difference is 0"),
        (torch.ones(3), torch.ones(3).double(), "expected torch.float64 of shape (3,), found torch.float32"),
        (torch.ones(3), torch.ones(1, 3), "expected torch.float32 of shape (1, 3), found torch.float32 of shape (3,)"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 elements differ"),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), "the largest absolute difference is 2"),
        (
            torch.tensor([1 + 1j] * 2).to(torch.complex128),
            torch.tensor([1 + 1j, 1 + 3j]).to(torch.complex128),
            "1 of 2",
        ),
        (torch.tensor([1.0]), torch.tensor([1 + 3j]), "the largest absolute difference is 3"),
        (torch.tensor([torch.inf]), torch.tensor([1.0]), "the largest absolute difference is inf"),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), None),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), "2 of 2 elements differ"),
        (torch.empty(0), torch.empty(0), None),
        # NaN equals itself but not another NaN: a copy is equal, a damaged NaN is not.
        (of_bits(0x7FC00000), of_bits(0x7FC00000), None),
        (of_bits(0x7FC00000), of_bits(0x7FC00001), "1 of 1 elements differ"),
    ],
)
def test_each_difference_is_named(mine: torch.Tensor, other: torch.Tensor, says: str | None, tmp_path: Path):
    """The number of differing elements and the largest difference, or the shapes and dtypes: enough to judge it."""
    torch.manual_seed(0)
    a = saved(tmp_path / "a.pt", state_with(w=mine))
    torch.manual_seed(0)
    b = saved(tmp_path / "b.pt", state_with(w=other))
    report = verify_checkpoint(a, b)
    assert {fault.name for fault in report.differences} == (set() if says is None else {"state.model.w"})
    assert says is None or says in str(report)


def test_values_that_python_cannot_compare(tmp_path: Path):
    """An integer too large for a float, and a deque of arrays, ended the command with a Python error."""
    values = {"large": 10**400, "queue": collections.deque([numpy.ones(2)])}
    a = saved(tmp_path / "a.pt", {"state": {"model": {"w": torch.ones(1)}, "callbacks": values}})
    other = {"large": 1.0, "queue": collections.deque([numpy.zeros(2)])}
    b = saved(tmp_path / "b.pt", {"state": {"model": {"w": torch.ones(1)}, "callbacks": other}})
    assert verify_checkpoint(a, a).ok
    names = [fault.name for fault in verify_checkpoint(a, b, rtol=0.1).differences]
    assert names == ["state.callbacks.large", "state.callbacks.queue.0"]


values = st.sampled_from([0.0, -0.0, 1.0, 1.001, 1.1, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan])


@given(
    pairs=st.lists(st.tuples(values, values), min_size=1, max_size=6),
    rtol=st.sampled_from([0.0, 1e-2]),
    atol=st.sampled_from([1e-6, 0.5]),
    block=st.integers(1, 64),
)
@examples(25)
def test_tolerance_is_torchs(pairs: list[tuple[float, float]], rtol: float, atol: float, block: int):
    """The tolerance is that of torch.isclose, however the tensor is divided into blocks."""
    mine, other = (torch.tensor(column) for column in zip(*pairs, strict=True))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(comparing, "_BLOCK_BYTES", block):
        files = [saved(Path(folder) / f"{n}.pt", {"state": {"model": {"w": w}}}) for n, w in enumerate((mine, other))]
        report = verify_checkpoint(*files, rtol=rtol, atol=atol)
    far = ~torch.isclose(mine.double(), other.double(), rtol=rtol, atol=atol, equal_nan=True)
    assert report.ok == (not far.any())
    if far.any():
        assert f"{int(far.sum())} of {len(pairs)} elements differ" in str(report)
        largest = (mine.double() - other.double()).abs()[far].nan_to_num(nan=math.inf, posinf=math.inf).max()
        assert f"is {float(largest):.6g}" in str(report)


def test_names_match_through_wrappers(tmp_path: Path):
    """A file of an FSDP1 or compiled model equals the same weights under names without wrappers."""
    state = composer_state()
    plain = saved(tmp_path / "plain.pt", state)
    prefix = "_orig_mod.model._fsdp_wrapped_module."
    renamed = {name: prefix + name.removeprefix("model.") for name in state["state"]["model"]}
    state["state"]["model"] = {renamed[name]: value for name, value in state["state"]["model"].items()}
    optimizer = state["state"]["optimizers"]["AdamW"]
    optimizer["state"] = {renamed[name]: value for name, value in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [renamed[name] for name in group["params"]]
    report = verify_checkpoint(saved(tmp_path / "wrapped.pt", state), plain)
    assert report.ok, str(report)
    state["state"]["model"] |= {f"_orig_mod.{name}": value for name, value in state["state"]["model"].items()}
    report = verify_checkpoint(saved(tmp_path / "twice.pt", state), plain)
    assert "names differ by wrappers alone" in str(report), "two names are no match for one"


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (lambda s: s["optimizers"]["AdamW"]["param_groups"][0].update(lr=0.02), "param_groups.0.lr", "found 0.02"),
        (
            lambda s: s["timestamp"]["Timestamp"].update(batch=4),
            "state.timestamp.Timestamp.batch",
            "expected 3, found 4",
        ),
        (lambda s: s["optimizers"].clear(), "state.optimizers", "entries, found nothing"),
        (lambda s: s["model"].pop("model.bias"), "state.model.model.bias", "found nothing"),
        (lambda s: s.update(other=[1]), "state.other", "expected nothing, found 1 entries"),
    ],
)
def test_every_part_is_compared(change: Any, name: str, says: str, tmp_path: Path):
    """A hyperparameter, a step count or a missing part is a difference, named by its path."""
    torch.manual_seed(0)
    state = composer_state()
    original = saved(tmp_path / "a.pt", state)
    change(state["state"])
    (fault,) = verify_checkpoint(saved(tmp_path / "b.pt", state), original).differences
    assert name in fault.name and says in str(fault)


def test_optimizer_by_position_needs_the_model(tmp_path: Path):
    """DDP's optimizer state is keyed by position, FSDP's by name: the report lists them as not compared."""
    torch.manual_seed(0)
    by_name = saved(tmp_path / "a.pt", composer_state())
    torch.manual_seed(0)
    by_id = saved(tmp_path / "b.pt", composer_state(by_id=True))
    (fault,) = verify_checkpoint(by_id, by_name).differences
    assert fault.name == "state.optimizers.AdamW" and "without the model" in fault.found


def test_flat_parameters_have_no_names():
    """An FSDP1 `local` checkpoint cannot be compared with another layout: the error names the next step."""
    with pytest.raises(CheckpointError, match=r"flat parameters.*convert"):
        verify_checkpoint(FIXTURES[2], FIXTURES[1])
    assert verify_checkpoint(FIXTURES[2], FIXTURES[2]).ok


@pytest.mark.parametrize("prefix", ["", "model."])
def test_safetensors_against_a_checkpoint(prefix: str, tmp_path: Path):
    """Exported weights equal the source checkpoint, whose names have the prefix of the attribute in Composer's
    model."""
    torch.manual_seed(0)
    state = composer_state()
    del state["state"]["model"]["model.seen"]  # safetensors has only float32 here
    checkpoint = saved(tmp_path / "a.pt", state)
    weights = {prefix + name.removeprefix("model."): value for name, value in state["state"]["model"].items()}
    write_safetensors(tmp_path / "model.safetensors", weights)
    report = verify_checkpoint(tmp_path / "model.safetensors", checkpoint)
    assert report.ok and "everything but the tensors of state.model" in " ".join(report.unchecked)
    assert "without a checksum: model.safetensors" in " ".join(report.unchecked)
    flip(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    alone = verify_checkpoint(tmp_path / "model.safetensors")  # without metadata it cannot be detected
    assert alone.ok and not alone.is_content_checked and "no content was checked" in str(alone)
    assert not verify_checkpoint(tmp_path / "model.safetensors", checkpoint).ok
    assert not verify_checkpoint(checkpoint, tmp_path / "model.safetensors").ok
