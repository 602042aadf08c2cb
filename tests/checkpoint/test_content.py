"""CRC32s of records that many ranks read in parts: summed over the ranks."""

from __future__ import annotations

import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.on_ranks import on_ranks
from support.ranks import run_ranks

from composer_fsdp2.checkpoint.inventory import Blob, Strided, TensorRecord
from composer_fsdp2.checkpoint.load import content
from composer_fsdp2.checkpoint.read import Reader
from composer_fsdp2.checkpoint.records import ReadRange
from composer_fsdp2.errors import CheckpointError

RECORD_BYTES = 1 << 12


def record(number: int) -> bytes:
    return bytes((number + at) % 251 for at in range(RECORD_BYTES))


def blob_of(number: int, folder: str = "folder") -> Blob:
    return Blob(Path(folder, "file.pt"), number * RECORD_BYTES, RECORD_BYTES, zlib.crc32(record(number)))


def part(blob: Blob, start: int, end: int, data: bytes | None = None) -> ReadRange:
    """A range that a rank read, with the record's content or with other ``data``."""
    own = record(blob.offset // RECORD_BYTES)[start:end]
    return ReadRange(blob, start, end, zlib.crc32(own if data is None else data))


def written(folder: str, num_records: int) -> None:
    """Rank 0 writes the file with these records. Called on all ranks."""
    if dist.get_rank() == 0:
        Path(folder, "file.pt").write_bytes(b"".join(map(record, range(num_records))))
    dist.barrier()


# --- on ranks


def verdict(parts: list[ReadRange], blobs: list[Blob], folder: str) -> str:
    records = [
        TensorRecord.in_one_chunk("weight", (RECORD_BYTES,), torch.uint8, Strided(blob, torch.uint8, 0, (1,)))
        for blob in blobs
    ]
    try:
        return f"{content.check_content(Reader(parts=parts), records, Path(folder))} unchecked"
    except CheckpointError as error:
        return str(error)


def check_shares(folder: str, num_records: int, damaged_on: int | None) -> str:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    size = RECORD_BYTES // num_ranks
    parts = [
        part(
            blob_of(number, folder), rank * size, (rank + 1) * size, b"?" if (number, rank) == (0, damaged_on) else None
        )
        for number in range(num_records)
    ]
    if rank == 0 and num_records > 1:
        parts.pop()  # so no rank has read all of the last one
    return verdict(parts, [*map(blob_of, range(num_records))], folder)


def check_several(folder: str, round_bytes: int) -> dict[str, str]:
    written(folder, 9)
    with mock.patch.object(content, "_ROUND_BYTES", round_bytes):
        return for_each(
            lambda *case: check_shares(folder, *case),
            {"none": (0, None), "one": (1, None), "many": (9, None), "damaged": (9, dist.get_world_size() - 1)},
        )


def test_all_ranks_have_the_same_answer(tmp_path: Path):
    """All ranks get the same result, also those that read nothing or only undamaged records."""
    for found in run_ranks(check_several, 4, str(tmp_path), 600):
        assert found["none"] == found["one"] == found["many"] == "0 unchecked"
        assert "damaged content" in found["damaged"] and "file.pt, the record at byte 0: CRC32" in found["damaged"]


HALF, END = RECORD_BYTES // 2, RECORD_BYTES
# The ranges of one record that each of two ranks read, for different layouts and shardings.
WAYS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "its padding was not read": ([(0, HALF)], [(HALF, END - 8)]),
    "one rank read of it": ([], [(64, 128)]),
    "two views overlap": ([(0, HALF + 8)], [(HALF - 8, END)]),
    "two views add up to its size": ([(0, HALF)], [(64, HALF + 64)]),
    "by one rank, twice": ([(0, HALF), (0, HALF)], [(HALF, END)]),
    "whole by one, some of it by the other": ([(0, END)], [(3, 77)]),
    "replicas": ([(0, HALF), (HALF, END)], [(0, HALF), (HALF, END)]),
}


def check_way(folder: str, way: str, flipped: int | None) -> None:
    """Checks the file as written, or with a flipped byte that is in the bytes of every rank that read it."""
    data = bytearray(record(0))
    if flipped is not None:
        data[flipped] ^= 1 << (flipped % 8)
    if dist.get_rank() == 0:
        Path(folder, "file.pt").write_bytes(data)
    dist.barrier()
    ranges = WAYS[way][dist.get_rank()]
    found = verdict([part(blob_of(0, folder), a, b, bytes(data[a:b])) for a, b in ranges], [blob_of(0, folder)], folder)
    dist.barrier()
    if flipped is None:
        assert found == "0 unchecked", found
    else:
        assert "the record at byte 0: CRC32" in found, found


@pytest.mark.any_torch
@on_ranks(2)
def test_every_record_of_which_a_byte_is_used_is_checked(folder: str) -> None:
    """No rank reads FSDP1's padding, and views are read twice. A flipped bit beside them was loaded, as an average of
    1.6e36, and an undamaged file was refused where the sizes of two views add up to the record's size."""
    places = (0, 70, HALF - 1, HALF, END - 1)
    cases: list[tuple[str, int | None]] = [(way, None) for way in WAYS]
    cases += [(way, at) for number, way in enumerate(WAYS) for at in places[number % 2 :: 2]]
    for_each(lambda *case: check_way(folder, *case), {f"{way}, flipped: {at}": (way, at) for way, at in cases})


def check_changing(folder: str) -> tuple[str, str]:
    """Rank 1's copy in memory differs from the file; only rank 1 can detect it, and all ranges overlap."""
    written(folder, 1)
    start, data = (0, None) if dist.get_rank() == 0 else (HALF - 8, b"?" * (HALF + 8))
    changed = verdict([part(blob_of(0, folder), start, END if start else HALF, data)], [blob_of(0, folder)], folder)
    blob = Blob(Path(folder, "gone.pt"), 0, END, 7)
    return changed, verdict([part(blob, 0, 8)] if dist.get_rank() else [], [blob], folder)


def test_a_rank_that_read_something_else(tmp_path: Path):
    """A file that is replaced while ranks read it, or a bad cable: the file may be undamaged although the loaded bytes
    differ.

    If the rest of a record cannot be read any more, all ranks raise, and none waits for the others.
    """
    for changed, gone in run_ranks(check_changing, 2, str(tmp_path)):
        assert f"bytes {HALF - 8} to {END} changed after they were read" in changed
        assert "gone.pt, the record at byte 0: cannot be checked" in gone and "No such file" in gone


# --- communication


def check_sent(folder: str, num_records: int) -> list[int]:
    """The bytes of each all-reduce of a check of sound records."""
    with (
        mock.patch.object(content, "_ROUND_BYTES", 4096),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError),
    ):
        half = RECORD_BYTES // 2
        start = dist.get_rank() * half
        blobs = [*map(blob_of, range(num_records))]
        assert verdict([part(blob, start, start + half) for blob in blobs], blobs, folder) == "0 unchecked"
    return [call.args[0].nbytes for call in reduce.call_args_list]


def test_what_is_sent_is_bounded(tmp_path: Path):
    """A check communicates a bounded number of bytes. With a thousand ranks, each rank needed 141 MiB for the shares of
    the others, and an all-to-all makes NCCL connect every pair of ranks."""
    for seen in run_ranks(check_sent, 2, str(tmp_path), 300):
        assert max(seen) <= 4096 and sum(seen) == 300 * 33 * 8 + 2 * 8
