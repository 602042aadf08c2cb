"""CRC32s of what many ranks read, each some of every record: put together by one rank for each record."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.ranks import run_ranks

from composer_fsdp2.checkpoint.inventory import Blob
from composer_fsdp2.checkpoint.loading import content
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.errors import CheckpointError

NUM_RANKS, RECORD_BYTES = 1024, 1 << 12
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


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
@pytest.mark.parametrize("damaged", [frozenset(), frozenset({5})], ids=["whole", "damaged"])
def test_a_record_in_a_thousand_parts(damaged: frozenset[int]):
    """What every rank sends of some records, judged by the ranks whose they are; all of this in one process."""
    records = range(4, 7)
    rows = torch.cat(
        [
            content._rows(read_by(rank, records, NUM_RANKS, damaged if rank == 600 else frozenset()))
            for rank in range(NUM_RANKS)
        ]
    )
    of_judges = [content._to_judge(rows, judge, NUM_RANKS) for judge in range(NUM_RANKS)]
    assert sum(len(of_judge) for of_judge in of_judges) == len(records) * NUM_RANKS
    wrong: dict[int, str] = {}
    for of_judge in of_judges:
        unchecked, found = content._judged(content._grouped(of_judge))
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


def check_several(round_bytes: int) -> dict[str, str]:
    with mock.patch.object(content, "_ROUND_BYTES", round_bytes):
        return for_each(
            check_content,
            {"none": (0, None), "one": (1, None), "many": (9, None), "damaged": (9, dist.get_world_size() - 1)},
        )


def check_sent(records: int) -> list[tuple[str, int]]:
    """The collectives of a check, with the bytes of what each rank receives."""
    seen: list[tuple[str, int]] = []

    def noted(name: str, function: Any) -> Any:
        def call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((name, output.nbytes))
            return function(output, *args, **kwargs)

        return call

    names = (ALL_GATHER, "all_to_all_single", "all_reduce")
    with (
        mock.patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}),
        mock.patch.object(content, "_ROUND_BYTES", 4096),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", FutureWarning)  # of a name that this torch deprecates
        check_content(records, None)
    return seen


def test_what_is_sent_is_bounded():
    """A thousand ranks had 141 MiB of each other's shares in memory; and an all-to-all has NCCL connect every two."""
    for seen in run_ranks(check_sent, 2, 1000):
        assert {name for name, _ in seen} == {ALL_GATHER, "all_reduce"}
        assert max(num_bytes for _, num_bytes in seen) <= 4096
        assert sum(num_bytes for name, num_bytes in seen if name == ALL_GATHER) >= 999 * 48 * 2


@pytest.mark.parametrize(("num_ranks", "round_bytes"), [(2, 16 << 20), (4, 600)])
def test_ranks_judge_together(num_ranks: int, round_bytes: int):
    """Every rank has the same answer, also those that read nothing, or judge nothing."""
    missing = RECORD_BYTES // num_ranks * (num_ranks - 1)
    for found in run_ranks(check_several, num_ranks, round_bytes):
        assert found["none"] == found["one"] == "0 unchecked"
        assert found["many"] == f"{missing} unchecked"
        assert "damaged content" in found["damaged"] and "file.pt, the record at byte 0: CRC32" in found["damaged"]
