"""CRC32s of what many ranks read, each some of every record: put together by one rank for each record."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.ranks import run_ranks

from composer_fsdp2.checkpoint.inventory import Blob
from composer_fsdp2.checkpoint.loading import content
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.errors import CheckpointError

NUM_RANKS, NUM_RECORDS, RECORD_BYTES = 1024, 2160, 1 << 12


def read_by(rank: int, records: range, num_ranks: int, damaged: frozenset[int] = frozenset()) -> content._Collected:
    """A rank that read its part of each record; the record is one byte again and again."""
    length = RECORD_BYTES // num_ranks
    parts = []
    for number in records:
        data = bytes([number % 251]) * RECORD_BYTES
        mine = data[:length] if number not in damaged else b"?" * length
        blob = Blob(path=Path("folder/file.pt"), offset=number << 12, num_bytes=RECORD_BYTES, crc32=whole_crc(number))
        parts.append(Part(blob=blob, start=rank * length, end=(rank + 1) * length, crc32=zlib.crc32(mine)))
    return content._collected(parts, Path("folder/file.pt"))


def whole_crc(number: int) -> int:
    return zlib.crc32(bytes([number % 251]) * RECORD_BYTES)


@pytest.mark.any_torch
def test_no_rank_looks_at_what_all_have_read():
    """A thousand ranks gathered 141 MiB each, and took half a minute to look at it."""
    rows, counts = content._outgoing(read_by(7, range(NUM_RECORDS), NUM_RANKS), NUM_RANKS)
    assert rows.nbytes == NUM_RECORDS * 48 and sum(counts) == NUM_RECORDS
    assert max(counts) * NUM_RANKS * 48 <= 1 << 20  # what the one who judges most is sent by all


@pytest.mark.any_torch
@pytest.mark.parametrize("damaged", [frozenset(), frozenset({5})], ids=["whole", "damaged"])
def test_a_record_in_a_thousand_parts(damaged: frozenset[int]):
    """What every rank sends of some records, judged by the ranks whose they are; all of this in one process."""
    records = range(4, 7)
    of_ranks = [
        content._outgoing(read_by(rank, records, NUM_RANKS, damaged if rank == 600 else frozenset()), NUM_RANKS)
        for rank in range(NUM_RANKS)
    ]
    judges = [judge for judge in range(NUM_RANKS) if of_ranks[0][1][judge]]
    assert len(judges) == len(records)
    wrong: dict[int, str] = {}
    for judge in judges:
        received = torch.cat([rows.split(counts)[judge] for rows, counts in of_ranks])
        unchecked, found = content._judged(content._grouped(received))
        assert unchecked == 0
        wrong |= found
    assert list(wrong) == [content._number_of(("file.pt", number << 12)) for number in damaged]


def check_content(records: int, damaged_on: int | None) -> str:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    damaged = frozenset({0}) if rank == damaged_on else frozenset[int]()
    parts = []
    for number in range(records):
        length = RECORD_BYTES // num_ranks
        data = b"?" * length if number in damaged else bytes([number % 251]) * length
        blob = Blob(path=Path("folder/file.pt"), offset=number << 12, num_bytes=RECORD_BYTES, crc32=whole_crc(number))
        parts.append(Part(blob=blob, start=rank * length, end=(rank + 1) * length, crc32=zlib.crc32(data)))
    if rank == 0 and records > 1:
        parts.pop()  # and so nobody has read all of the last one
    try:
        unchecked = content.check_content(parts, Path("folder/file.pt"))
    except CheckpointError as error:
        return str(error)
    return f"{unchecked} unchecked"


def check_several() -> dict[str, str]:
    return for_each(
        check_content,
        {"none": (0, None), "one": (1, None), "many": (9, None), "damaged": (9, dist.get_world_size() - 1)},
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_judge_together(num_ranks: int):
    """Every rank has the same answer, also those that read nothing, or judge nothing."""
    missing = RECORD_BYTES // num_ranks * (num_ranks - 1)
    for found in run_ranks(check_several, num_ranks):
        assert found["none"] == found["one"] == "0 unchecked"
        assert found["many"] == f"{missing} unchecked"
        assert "damaged content" in found["damaged"] and "file.pt, the record at byte 0: CRC32" in found["damaged"]
