"""Whether what was read is what was written: each record's CRC32, put together from the parts that the ranks read."""

import functools
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from composer_fsdp2._torch.collectives import all_gather_single
from composer_fsdp2.checkpoint.archive.crc import shifted
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.records import Range, ReadRange, damage_of, ranges_by_record
from composer_fsdp2.config.text import lines_and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import device_of_group, gather

# A rank's file (as the checkpoint's folder names it, for ranks may have copies in different places) and offset.
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a rank's file says of a record."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank read of a record.

    Args:
        ranges: Of which bytes, as one number: ranks that read the same ones have the same.
        crc32: What these bytes add to the record's CRC32, where none of them was read twice.
    """

    num_bytes: int
    ranges: int
    crc32: int


_Shares = list[tuple[_Stored, _Share]]


@dataclass(slots=True)
class _OwnRecord:
    """A record of which this rank read something."""

    key: _Key
    blob: Blob
    ranges: set[Range]

    @property
    def stored(self) -> _Stored:
        assert self.blob.crc32 is not None
        return _Stored(self.blob.num_bytes, self.blob.crc32)

    def share(self) -> _Share:
        crc32, num_bytes = 0, 0
        for start, end, crc in self.ranges:
            num_bytes += end - start
            crc32 ^= shifted(crc, self.blob.num_bytes - end)
        return _Share(num_bytes, _digest(sorted((start, end) for start, end, _ in self.ranges)), crc32)


@dataclass(slots=True)
class _Collected:
    """What one rank read: bytes without a CRC32, and records, by their numbers."""

    without: int
    records: dict[int, _OwnRecord]


def check_content(ranges: Iterable[ReadRange], checkpoint: Path) -> int:
    """Compare the CRC32 of every record of which a rank read a byte with what the file says.

    Each record is one rank's to put together from what the others say of it. Where every rank looked at all of them it
    took 131 MiB and 22 s on each of 1,024 ranks (benchmarks/many_ranks.py of commit fa43806). Of records that do not
    add up, because nobody read the rest (FSDP1's padding), or some of it twice (views), or because they are damaged,
    one of the ranks that read of them then reads what is missing, or all.

    Args:
        checkpoint: The file or folder, as this rank sees it.
    Returns:
        The number of bytes, of all ranks, that could not be checked, because the file says no CRC32 (safetensors).
    Raises:
        CheckpointError: on all ranks, naming every damaged record.
    Called on all ranks (alone without a process group): gathers 48 bytes for each record that a rank read, at most 16
    MiB at a time, and adds up two numbers; of the records that do not add up it gathers the ranges, too.
    """
    collected = _collected(ranges, checkpoint)
    unsettled, damaged = _judged(_regrouped(collected))
    totals = torch.tensor([collected.without, len(unsettled) + len(damaged)], device=_device())
    if _is_together():
        dist.all_reduce(totals)
    unchecked, num_open = totals.tolist()
    if num_open:
        damaged |= _settled(collected, unsettled)
        found = {number: stored for of_rank in gather(damaged) for number, stored in of_rank.items()}
        known = gather({number: own.key for number, own in collected.records.items() if number in found})
        if found:
            raise _error({key: found[number] for of_rank in known for number, key in of_rank.items()}, checkpoint)
    return int(unchecked)


def check_own_content(ranges: Iterable[ReadRange], checkpoint: Path) -> int:
    """Check the records that this rank read, by itself; does not communicate."""
    collected = _collected(ranges, checkpoint)
    problems = {own.key: damage_of(own.blob, own.ranges) for own in collected.records.values()}
    if damaged := {key: problem for key, problem in problems.items() if problem is not None}:
        raise _error(damaged, checkpoint)
    return collected.without


def _collected(ranges: Iterable[ReadRange], checkpoint: Path) -> _Collected:
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    by_record, unchecked_bytes = ranges_by_record(ranges)
    records = [
        _OwnRecord((os.path.relpath(blob.path, folder), blob.offset), blob, each) for blob, each in by_record.items()
    ]
    return _Collected(unchecked_bytes, {_number_of(own.key): own for own in records})


# ---------------------------------------------------------------------------------------------------------------------
# From those who read to the one who puts a record together


# What all ranks together send at once.
_ROUND_BYTES = 16 << 20


def _regrouped(collected: _Collected) -> dict[int, _Shares]:
    """What all ranks read of the records that are this rank's to judge, by the record's number."""
    return _shares(_passed_on(_rows(collected), _to_judge))


# Picks, of rows that begin with a record's number, those of one rank: ``(rows, rank, num_ranks)``.
_Pick: TypeAlias = Callable[[torch.Tensor, int, int], torch.Tensor]


def _passed_on(own: torch.Tensor, pick: _Pick) -> torch.Tensor:
    """The rows of all ranks that this rank picks.

    All gather all rows, some at a time, and keep their own: an all-to-all would have NCCL connect every two ranks, and
    keep gigabytes of the device's memory for that as long as the run lasts (NVIDIA/nccl#1685).
    """
    if not _is_together():
        return own
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), _device()
    num_rows = torch.tensor(len(own), device=device)
    dist.all_reduce(num_rows, dist.ReduceOp.MAX)
    most = int(num_rows)
    num_at_once = max(1, min(most, _ROUND_BYTES // (num_ranks * own.shape[1] * own.element_size())))
    mine = []
    for first in range(0, most, num_at_once):
        sent = torch.full((num_at_once, own.shape[1]), _NO_ROW, dtype=torch.int64)
        part = own[first : first + num_at_once]
        sent[: len(part)] = part
        received = torch.empty((num_ranks * num_at_once, own.shape[1]), dtype=torch.int64, device=device)
        all_gather_single(received, sent.to(device))
        mine.append(pick(received[received[:, 0] != _NO_ROW], rank, num_ranks).cpu())
    return torch.cat([own[:0], *mine])


# Where a rank has fewer rows than others; numbers are positive.
_NO_ROW = -1


def _to_judge(rows: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """The rows of the records that ``rank`` judges."""
    return rows[rows[:, 0] % num_ranks == rank]


def _rows(collected: _Collected) -> torch.Tensor:
    """A row of six numbers for each record."""
    rows = []
    for number, own in collected.records.items():
        share = own.share()
        rows.append((number, own.stored.num_bytes, own.stored.crc32, share.num_bytes, share.ranges, share.crc32))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)


def _shares(rows: torch.Tensor) -> dict[int, _Shares]:
    """What ranks read of each record, by its number."""
    records: dict[int, _Shares] = {}
    for number, said_bytes, said_crc32, *share in rows.tolist():
        records.setdefault(number, []).append((_Stored(said_bytes, said_crc32), _Share(*share)))
    return records


def _number_of(key: _Key) -> int:
    """A record's number: equal on all ranks, and that of no other record."""
    return _digest(f"{key[1]} {key[0]}")


def _digest(value: object) -> int:
    """63 bits, which two of all the records and ranges of a large run do not share."""
    digest = hashlib.sha256(str(value).encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _is_together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    return device_of_group() if _is_together() else torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def _judged(records: Mapping[int, _Shares]) -> tuple[set[int], dict[int, str]]:
    """The records that do not add up, and those of which ranks have read different things."""
    unsettled, damaged = set(), {}
    for number, found in records.items():
        stored = {stored for stored, _ in found}
        shares = {share for _, share in found}  # replicas that read the same count once
        if len(stored) > 1 or len({share.ranges for share in shares}) < len(shares):
            damaged[number] = "not the same for all ranks (files of different saves?)"
        elif not _adds_up(shares, next(iter(stored))):
            unsettled.add(number)
    return unsettled, damaged


def _adds_up(shares: Iterable[_Share], record: _Stored) -> bool:
    """Whether all that was read is complete records, or makes up one, with the CRC32 that the file says."""
    wholes = [share for share in shares if share.num_bytes == record.num_bytes]
    pieces = [share for share in shares if share.num_bytes != record.num_bytes]
    crc32s = {share.crc32 for share in wholes}
    if pieces:
        if sum(share.num_bytes for share in pieces) != record.num_bytes:
            return False
        crc32s.add(functools.reduce(operator.xor, (share.crc32 for share in pieces)))
    return crc32s == {record.crc32}


def _settled(collected: _Collected, unsettled: set[int]) -> dict[int, str]:
    """What is wrong with the unsettled records that this rank looks at, by their numbers.

    Args:
        unsettled: Those that this rank has judged.
    Called on all ranks; gathers the numbers of all of them, and their ranges at most 16 MiB at a time.
    """
    numbers = set[int]().union(*gather(unsettled))
    held = sorted(numbers & collected.records.keys())
    holders: dict[int, list[int]] = {}
    for rank, of_rank in enumerate(gather(held)):
        for number in of_rank:
            holders.setdefault(number, []).append(rank)
    # One of those that have the file, and not the same one for all.
    reader = {number: ranks[number % len(ranks)] for number, ranks in holders.items()}

    own_rank = dist.get_rank() if _is_together() else 0
    mine = torch.tensor([number for number, rank in reader.items() if rank == own_rank], dtype=torch.int64)
    mine = mine.to(_device())

    def pick(rows: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
        return rows[torch.isin(rows[:, 0], mine)]

    rows = [(number, *each) for number in held for each in sorted(collected.records[number].ranges)]
    ranges: dict[int, list[Range]] = {}
    for number, *each in _passed_on(torch.tensor(rows, dtype=torch.int64).reshape(-1, 4), pick).tolist():
        ranges.setdefault(number, []).append((each[0], each[1], each[2]))
    problems = {number: damage_of(collected.records[number].blob, found) for number, found in ranges.items()}
    return {number: problem for number, problem in problems.items() if problem is not None}


def _error(damaged: Mapping[_Key, str], checkpoint: Path) -> CheckpointError:
    lines = [f"{_name(key)}: {damaged[key]}" for key in sorted(damaged)]
    return CheckpointError(f"{checkpoint}: damaged content; nothing was changed:\n{lines_and_more(lines, 50, '  ')}")


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]}, the record at byte {key[1]}"
