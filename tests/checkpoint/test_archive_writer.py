"""Archives laid out before their tensors exist: the bytes equal torch.save's, and torch reads them."""

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

from composer_fsdp2.checkpoint.archive.writer import ArchivePlan, Slot, plan_archive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def with_slots(value: Any, tensors: dict[Slot, torch.Tensor]) -> Any:
    """The value with a slot for each tensor object, recorded in ``tensors``."""
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
    """Writes the file of ``torch.save(value, path)``, the last tensor first."""
    tensors: dict[Slot, torch.Tensor] = {}
    plan = plan_archive(with_slots(value, tensors))
    with open(path, "r+b" if path.exists() else "wb") as file:
        for slot, tensor in reversed(tensors.items()):
            os.pwrite(file.fileno(), bytes_of(tensor), at + plan.offset_of(slot))
        plan.finish(file, {slot: zlib.crc32(bytes_of(tensor)) for slot, tensor in tensors.items()}, at=at)
    return plan


def checkpoint() -> dict[str, Any]:
    """A value with every kind of object in a checkpoint, and every dtype."""
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
    """Any reader treats our file like one of torch's: they differ in the 40 digits of an id, and in its CRC.

    Every dtype, 0-d and empty tensors, and the same tensor twice, also in the middle of a file, as in a ``.distcp``.
    """
    value, before = checkpoint(), b"what was there" * 100
    (tmp_path / "ours.pt").write_bytes(before)
    plan = write(tmp_path / "ours.pt", value, at=len(before))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    ours, theirs = (tmp_path / "ours.pt").read_bytes().removeprefix(before), buffer.getvalue()
    assert len(ours) == len(theirs) == plan.num_bytes
    with zipfile.ZipFile(buffer) as archive:
        entry = archive.getinfo("archive/.data/serialization_id")
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert archive.testzip() is None
    start = theirs.index(b"PK\x01\x02", entry.header_offset)  # after its data and data descriptor
    its_crc = theirs.rindex(b"archive/.data/serialization_id") - 30
    for begin, end in ((its_crc, its_crc + 4), (entry.header_offset, start)):
        ours, theirs = ours[:begin] + ours[end:], theirs[:begin] + theirs[end:]
    assert ours == theirs


LARGE = {
    "a": ((3,), torch.float32),
    "beyond 4 GiB": ((5 << 30,), torch.uint8),
    "behind it": ((3,), torch.float32),
    "as large as 32 bits say": (((1 << 32) - 1,), torch.uint8),
    "one less": (((1 << 32) - 2,), torch.uint8),
    "empty": ((0,), torch.float32),
}


def test_sizes_and_offsets_beyond_4_gib_are_those_of_torch_save(tmp_path: Path):
    """Large checkpoints need the zip64 fields exactly where torch writes them; torch writes the same without data."""
    path = tmp_path / "archive.pt"  # torch names the records after it
    with torch.serialization.skip_data():
        torch.save({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in LARGE.items()}, path)
    plan = plan_archive({name: Slot(shape, dtype) for name, (shape, dtype) in LARGE.items()})
    assert os.path.getsize(path) == plan.num_bytes > 13 << 30
    different = 0
    with open(path, "rb") as theirs:
        for offset, ours in plan.frame(dict.fromkeys(plan.slots, 0)):
            theirs.seek(offset)
            different += sum(a != b for a, b in zip(ours, theirs.read(len(ours)), strict=True))
    assert different <= 48  # the id and twice its CRC32


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [{"x": t}]], ids=["alone", "nested"])
def test_a_tensor_is_refused(wrap: Callable[[torch.Tensor], Any]):
    """A tensor passed by mistake is not pickled in another form, which torch.load could not read."""
    with pytest.raises(TypeError, match="give a Slot"):
        plan_archive(wrap(torch.ones(2)))
