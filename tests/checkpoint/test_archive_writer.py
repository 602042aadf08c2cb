"""Archives laid out before their tensors are there: the bytes of torch.save, and torch reads them."""

from __future__ import annotations

import datetime
import io
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.checkpoints.samples import DTYPES, bytes_of, random_tensor
from support.comparing import assert_same

from composer_fsdp2.checkpoint.archive.writer import ArchivePlan, Slot, plan_archive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def with_slots(value: Any, tensors: dict[Slot, torch.Tensor]) -> Any:
    """The value with a slot for each tensor object, noted in ``tensors``."""
    if isinstance(value, torch.Tensor):
        known = next((slot for slot, tensor in tensors.items() if tensor is value), None)
        slot = known or Slot(tuple(value.shape), value.dtype)
        tensors[slot] = value
        return slot
    if isinstance(value, dict):
        return {key: with_slots(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_slots(part, tensors) for part in value)
    return value


def write(path: Path, value: Any, *, at: int = 0) -> ArchivePlan:
    """What ``torch.save(value, path)`` does, the last tensor first."""
    tensors: dict[Slot, torch.Tensor] = {}
    plan = plan_archive(with_slots(value, tensors))
    with open(path, "r+b" if path.exists() else "wb") as file:
        for slot, tensor in reversed(tensors.items()):
            os.pwrite(file.fileno(), bytes_of(tensor), at + plan.offset_of(slot))
        plan.finish(file, {slot: zlib.crc32(bytes_of(tensor)) for slot, tensor in tensors.items()}, at=at)
    return plan


def checkpoint() -> dict[str, Any]:
    """A value with every kind of thing that a checkpoint has, and every dtype."""
    tied = torch.randn(3, 4)
    return {
        "state": {
            "model": {"wte.weight": tied, "lm_head.weight": tied, "scale": torch.tensor(2.5)},
            "dtypes": {str(dtype): random_tensor((3, 5), dtype) for dtype in DTYPES},
            "empty": [torch.empty(0, 3), (torch.empty(3, 0, 2), {}, [])],
            "timestamp": {"batch": 3, "total_wct": datetime.timedelta(seconds=7)},
        },
        "rng": [{"numpy": ("MT19937", numpy.arange(5, dtype="uint32"), 0.5), "torch": torch.get_rng_state()}],
    }


def test_the_bytes_are_those_of_torch_save(tmp_path: Path):
    """A file of ours is one of torch's to whatever reads it: it differs in the 40 digits of its id, and their CRC."""
    value = checkpoint()
    plan = write(tmp_path / "ours.pt", value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    ours, theirs = (tmp_path / "ours.pt").read_bytes(), buffer.getvalue()
    assert len(ours) == len(theirs) == plan.num_bytes
    with zipfile.ZipFile(buffer) as archive:
        entry = archive.getinfo("archive/.data/serialization_id")
    start = theirs.index(b"PK\x01\x02", entry.header_offset)  # after its data and data descriptor
    its_crc = theirs.rindex(b"archive/.data/serialization_id") - 30
    for begin, end in ((its_crc, its_crc + 4), (entry.header_offset, start)):
        ours, theirs = ours[:begin] + ours[end:], theirs[:begin] + theirs[end:]
    assert ours == theirs


@pytest.mark.parametrize("options", [{"weights_only": False}, {"weights_only": False, "mmap": True}], ids=str)
def test_torch_loads_it(tmp_path: Path, options: dict[str, Any]):
    """Every dtype, 0-d and empty tensors and plain data come back; the same slot twice is one tensor."""
    value = checkpoint()
    write(tmp_path / "ours.pt", value)
    loaded = torch.load(tmp_path / "ours.pt", **options)
    assert_same(loaded, value, in_bits=True)
    assert loaded["state"]["model"]["wte.weight"] is loaded["state"]["model"]["lm_head.weight"]


def test_torch_loads_weights_only(tmp_path: Path):
    """A file of tensors needs nothing beyond torch's own allow-list."""
    value = {"model": checkpoint()["state"]["dtypes"], "of": {"params": ["a", "b"], "lr": 0.1}}
    write(tmp_path / "ours.pt", value)
    assert_same(torch.load(tmp_path / "ours.pt", weights_only=True), value, in_bits=True)


def test_zip_tools_find_it_whole(tmp_path: Path):
    """Each record's CRC32 is right, so damage can be told from what was written; and its data is aligned."""
    plan = write(tmp_path / "ours.pt", checkpoint())
    with zipfile.ZipFile(tmp_path / "ours.pt") as archive:
        assert archive.testzip() is None
        assert len(archive.infolist()) == len(plan.slots) + 6
    assert {plan.offset_of(slot) % 64 for slot in plan.slots} == {0}


def test_an_archive_in_the_middle_of_a_file(tmp_path: Path):
    """A .distcp file holds one archive after the other."""
    path = tmp_path / "two"
    first = write(path, {"a": torch.ones(3)})
    second = write(path, {"b": torch.arange(7)}, at=first.num_bytes)
    data = path.read_bytes()
    assert len(data) == first.num_bytes + second.num_bytes
    assert_same(torch.load(io.BytesIO(data[: first.num_bytes])), {"a": torch.ones(3)}, in_bits=True)
    assert_same(torch.load(io.BytesIO(data[first.num_bytes :])), {"b": torch.arange(7)}, in_bits=True)


LARGE = {
    "a": ((3,), torch.float32),
    "beyond 4 GiB": ((5 << 30,), torch.uint8),
    "behind it": ((3,), torch.float32),
    "as large as 32 bits say": (((1 << 32) - 1,), torch.uint8),
    "one less": (((1 << 32) - 2,), torch.uint8),
    "empty": ((0,), torch.float32),
}


def test_sizes_and_offsets_beyond_4_gib_are_those_of_torch_save(tmp_path: Path):
    """Large checkpoints need the zip64 fields exactly where torch puts them; torch writes the same without data."""
    with torch.serialization.skip_data():
        torch.save({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in LARGE.items()}, _named(tmp_path))
    plan = plan_archive({name: Slot(shape, dtype) for name, (shape, dtype) in LARGE.items()})
    assert os.path.getsize(_named(tmp_path)) == plan.num_bytes > 13 << 30
    different = 0
    with open(_named(tmp_path), "rb") as theirs:
        for offset, ours in plan.frame(dict.fromkeys(plan.slots, 0)):
            theirs.seek(offset)
            different += sum(a != b for a, b in zip(ours, theirs.read(len(ours)), strict=True))
    assert different <= 48  # the id and twice its CRC32


def test_a_file_beyond_4_gib_is_read(tmp_path: Path):
    """The last tensor of a large file is found, where offsets no longer fit into 32 bits."""
    slots = {name: Slot(shape, dtype) for name, (shape, dtype) in LARGE.items()}
    plan = plan_archive(slots)
    expected = torch.tensor([1.0, 2.0, 3.0])
    with open(_named(tmp_path), "wb") as file:
        os.pwrite(file.fileno(), bytes_of(expected), plan.offset_of(slots["behind it"]))
        plan.finish(file, dict.fromkeys(plan.slots, 0))
    loaded = torch.load(_named(tmp_path), mmap=True)
    assert torch.equal(loaded["behind it"], expected)
    assert {name: (tuple(t.shape), t.dtype) for name, t in loaded.items()} == LARGE


def _named(folder: Path) -> Path:
    """torch calls the records after the file."""
    return folder / "archive.pt"


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [{"x": t}]], ids=["alone", "nested"])
def test_a_tensor_is_refused(wrap: Callable[[torch.Tensor], Any]):
    """A tensor given by mistake is not pickled by another way, which torch.load would not know."""
    with pytest.raises(TypeError, match="give a Slot"):
        plan_archive(wrap(torch.ones(2)))
