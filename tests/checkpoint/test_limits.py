"""A few bytes cost a few seconds and some memory, whatever unpacked size they claim.

``THOROUGH=1 python -m pytest tests/checkpoint/test_limits.py -s`` runs them at full size, and prints the cost of each.
"""

from __future__ import annotations

import multiprocessing
import pickle
import re
import time
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from support.checkpoints.bombs import BOMBS, MIB, SCALE
from support.examples import IS_THOROUGH

from composer_fsdp2.checkpoint import budget
from composer_fsdp2.checkpoint.budget import OverBudgetError
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.layouts.dcp import _METADATA_NAMES, LAYOUT
from composer_fsdp2.checkpoint.open import Located, inventory_of
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.verify.verification import verify_checkpoint
from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.any_torch

MAX_MEMORY_BYTES = (20 << 20) + 480 * MIB
TIME_LIMIT_S = 120  # ends a hang; under 5 s are expected
CPU_LIMIT_S = 10


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def inspected(path: Path) -> str:
    """The error, or an empty text."""
    try:
        inspect_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return ""


def verified(path: Path) -> str:
    try:
        report = verify_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return "" if report.ok else str(report)


def measure(path: Path, answer: Connection) -> None:
    budget.BASE_BYTES //= SCALE
    budget.BASE_OBJECTS //= SCALE
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, text, seconds = peak_bytes(), [], []
    # verify inspects first, except for a compressed file, which it unpacks.
    for command in (inspected, verified) if IS_THOROUGH or path.suffix in (".gz", ".bz2", ".xz") else (verified,):
        started = time.process_time()
        text.append(command(path))
        seconds.append(time.process_time() - started)
    answer.send((text, max(seconds), peak_bytes() - before))


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_hostile_file_may_cost(name: str, tmp_path: Path):
    """A user can inspect a stranger's checkpoint: it is refused before it fills the memory or takes all day."""
    path = BOMBS[name](tmp_path)
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=measure, args=(path, send))
    process.start()
    send.close()
    try:
        assert receive.poll(TIME_LIMIT_S), f"{name}: not refused after {TIME_LIMIT_S} s"
        text, seconds, num_bytes = receive.recv()
    finally:
        process.kill()
        process.join()
    size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]))
    print(f"\n{name}: {size / 2**20:.3f} MiB, {seconds:.1f} s, {num_bytes / 2**20:.0f} MiB: {text[0][-110:]}")
    assert all(text), f"{name} was not refused: {text}"
    assert name not in ("in bz2", "in xz") or all("unpacks to more than" in each for each in text), text
    assert num_bytes < MAX_MEMORY_BYTES and seconds < CPU_LIMIT_S, f"{name}: {num_bytes / 2**20:.0f} MiB, {seconds} s"


def test_no_limit_is_beyond_what_a_laptop_has():
    """A limit of gigabytes would be useless; the results of the bombs above at a sixteenth also apply to these
    sizes."""
    assert budget.BASE_BYTES <= 512 << 20 and budget.BASE_OBJECTS <= 1_000_000


def metadata_of_ranks(num_ranks: int, num_tensors: int) -> tuple[bytes, int]:
    """The ``.metadata`` of FSDP's shards, pickled, and the size of each rank's file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    sizes, num_bytes = torch.Size((16, 8192)), 16 * 8192 * 4 + 1000
    names = {f"state.model.transformer.blocks.{number}.attn.Wqkv.weight": number for number in range(num_tensors)}
    offsets = [torch.Size((16 * rank, 0)) for rank in range(num_ranks)]
    metadata = Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size((16 * num_ranks, 8192)),
                chunks=[ChunkStorageMetadata(offset, sizes) for offset in offsets],
            )
            for name in names
        },
        planner_data={name: ("state", "model", name.removeprefix("state.model.")) for name in names},
        storage_data={
            MetadataIndex(name, offset, rank): _StorageInfo(f"__{rank}_0.distcp", number * num_bytes, num_bytes)
            for name, number in names.items()
            for rank, offset in enumerate(offsets)
        },
    )
    return pickle.dumps(metadata), num_tensors * num_bytes


def test_a_large_checkpoint_may_have_large_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """70B parameters with Adam on 512 ranks have 152 MiB of metadata; a limit for all sizes refused a valid
    checkpoint."""
    num_ranks, num_tensors = (512, 723 * 3) if IS_THOROUGH else (64, 60)
    if not IS_THOROUGH:
        monkeypatch.setattr(budget, "BASE_BYTES", 1 << 20)
    data, num_bytes = metadata_of_ranks(num_ranks, num_tensors)
    (tmp_path / ".metadata").write_bytes(data)
    for rank in range(num_ranks):
        with open(tmp_path / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(num_bytes)  # sparse
    inventory = inspect_checkpoint(tmp_path)
    assert len(inventory.tensors) == num_tensors
    assert all(len(record.chunks) == num_ranks for record in inventory.tensors.values())
    # In an object store the folder's other files are absent, and its tensors are no views of those bytes.
    remote = inventory_of(Located(tmp_path, LAYOUT, fetch=lambda file: None))
    assert remote.tensors.keys() == inventory.tensors.keys()
    # The same claims without files of that size.
    with pytest.raises(OverBudgetError, match="its many objects"):
        read_pickle(data, where="alone", inert=_METADATA_NAMES)


def test_views_are_limited_together_by_the_size_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Masks that models expand from one row are no bomb if the weights are as large."""
    monkeypatch.setattr(budget, "BASE_BYTES", 1 << 20)
    masks = {f"mask{number}": torch.ones(1, dtype=torch.uint8).expand(800_000) for number in range(3)}
    torch.save({"state": {"model": {"w": torch.randn(1 << 19), **masks}}}, tmp_path / "a.pt")
    assert len(inspect_checkpoint(tmp_path / "a.pt").tensors) == 4
    assert verify_checkpoint(tmp_path / "a.pt").ok


def test_data_that_looks_like_a_directorys_end(tmp_path: Path):
    """One in 60,000 small archives has those four bytes in its tensors, and is valid."""
    looks = b"PK\6\6" + b"\xff" * 60 + b"PK\5\6" + b"\xff" * 60
    for number in range(3):
        path = tmp_path / f"{number}.pt"
        torch.save(
            {"state": {"model": {"w": torch.frombuffer(bytearray(looks * (number + 1)), dtype=torch.uint8)}}}, path
        )
        assert inspect_checkpoint(path).tensors and verify_checkpoint(path).ok
    commented = tmp_path / "commented.pt"
    commented.write_bytes(path.read_bytes())
    with zipfile.ZipFile(commented, "a") as archive:
        archive.comment = b"from here to there"
    assert inspect_checkpoint(commented).tensors
