"""Whether what was read is what was written: each record's CRC32, put together from the parts that the ranks read."""

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from composer_fsdp2._torch import all_gather_single
from composer_fsdp2.agreement import device_of_group, gather
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.checkpoint.storage.crc import shifted
from composer_fsdp2.errors import CheckpointError

__all__ = ["check_content", "check_own_content"]


# A rank's file (as the checkpoint's folder names it, for ranks may have copies in different places) and offset.
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank's file says of a record."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank read of a record.

    Args:
        ranges: Of which bytes, as one number: ranks that read the same ones have the same.
        crc32: What these bytes add to the record's CRC32.
    """

    num_bytes: int
    ranges: int
    crc32: int


_Shares = list[tuple[_Said, _Share]]


@dataclass(slots=True)
class _Collected:
    """What one rank read: bytes without a CRC32, and its share of each record."""

    without: int = 0
    shares: dict[_Key, tuple[_Said, _Share]] = field(default_factory=dict)


def check_content(parts: Iterable[Part], checkpoint: Path) -> int:
    """Compare the CRC32 of every record that the ranks read, each some of it, with what the file says.

    Each record is one rank's to put together. Where every rank looked at all of them it took 131 MiB and 22 s on each
    of 1,024 ranks (benchmarks/many_ranks.py).

    Args:
        checkpoint: The file or folder, as this rank sees it.
    Returns:
        The number of bytes, of all ranks, that could not be checked: the file says no CRC32 (safetensors), or nobody
        read the rest of the record.
    Raises:
        CheckpointError: on all ranks, naming every damaged record.
    Called on all ranks (alone without a process group): gathers 48 bytes for each record that a rank read, at most 16
    MiB at a time, and adds up two numbers. Names are gathered only of what is damaged.
    """
    collected = _collected(parts, checkpoint)
    names = {_number_of(key): key for key in collected.shares}
    unchecked, damaged = _judged(_regrouped(collected))
    totals = torch.tensor([unchecked + collected.without, len(damaged)], device=_device())
    if _is_together():
        dist.all_reduce(totals)
    unchecked, num_damaged = totals.tolist()
    if num_damaged:
        found = {number: said for of_rank in gather(damaged) for number, said in of_rank.items()}
        known = gather({number: names[number] for number in found if number in names})
        raise _error({key: found[number] for of_rank in known for number, key in of_rank.items()}, checkpoint)
    return int(unchecked)


def check_own_content(parts: Iterable[Part], checkpoint: Path) -> int:
    """The same for what this rank read alone; does not communicate."""
    collected = _collected(parts, checkpoint)
    unchecked, damaged = _judged({_number_of(key): [share] for key, share in collected.shares.items()})
    if damaged:
        raise _error(
            {key: damaged[_number_of(key)] for key in collected.shares if _number_of(key) in damaged}, checkpoint
        )
    return unchecked + collected.without


def _collected(parts: Iterable[Part], checkpoint: Path) -> _Collected:
    collected = _Collected()
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    by_blob: dict[tuple[str, int, _Said], dict[tuple[int, int], int]] = {}
    for part in parts:
        blob = part.blob
        if blob.crc32 is None:
            collected.without += part.end - part.start
            continue
        said = _Said(blob.num_bytes, blob.crc32)
        # Several tensors may be one run of bytes, as the step counts of FSDP1's flat parameters are.
        by_blob.setdefault((str(blob.path), blob.offset, said), {})[part.start, part.end] = part.crc32
    for (path, offset, said), ranges in by_blob.items():
        crc32, num_bytes = 0, 0
        for (start, end), crc in ranges.items():
            num_bytes += end - start
            crc32 ^= shifted(crc, said.num_bytes - end)
        share = _Share(num_bytes, zlib.crc32(repr(sorted(ranges)).encode()), crc32)
        collected.shares[os.path.relpath(path, folder), offset] = (said, share)
    return collected


# ---------------------------------------------------------------------------------------------------------------------
# From those who read to the one who puts a record together


# What all ranks together send at once: rows of ``_rows``.
_ROUND_BYTES = 16 << 20


def _regrouped(collected: _Collected) -> dict[int, _Shares]:
    """What all ranks read of the records that are this rank's to judge, by the record's number.

    All gather all rows, some at a time, and keep their own: an all-to-all would have NCCL connect every two ranks, and
    keep gigabytes of the device's memory for that as long as the run lasts (NVIDIA/nccl#1685).
    """
    own = _rows(collected)
    if not _is_together():
        return _grouped(own)
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
        mine.append(_to_judge(received, rank, num_ranks).cpu())
    return _grouped(torch.cat([own[:0], *mine]))


# Where a rank has fewer rows than others; numbers are positive.
_NO_ROW = -1


def _to_judge(rows: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Those of a rank's records."""
    numbers = rows[:, 0]
    return rows[(numbers != _NO_ROW) & (numbers % num_ranks == rank)]


def _rows(collected: _Collected) -> torch.Tensor:
    """A row of six numbers for each record."""
    rows = [
        (_number_of(key), said.num_bytes, said.crc32, share.num_bytes, share.ranges, share.crc32)
        for key, (said, share) in collected.shares.items()
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)


def _grouped(rows: torch.Tensor) -> dict[int, _Shares]:
    records: dict[int, _Shares] = {}
    for number, said_bytes, said_crc32, *share in rows.tolist():
        records.setdefault(number, []).append((_Said(said_bytes, said_crc32), _Share(*share)))
    return records


def _number_of(key: _Key) -> int:
    """Of 63 bits, the same on all ranks, and as good as a record's own."""
    digest = hashlib.sha256(f"{key[1]} {key[0]}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _is_together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    return device_of_group() if _is_together() else torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def _judged(records: Mapping[int, _Shares]) -> tuple[int, dict[int, str]]:
    """How many bytes could not be checked, and what is wrong, by the record's number."""
    unchecked, damaged = 0, {}
    for number, found in records.items():
        said = {said for said, _ in found}
        shares = {share for _, share in found}  # replicas that read the same count once
        if len(said) > 1 or len({share.ranges for share in shares}) < len(shares):
            damaged[number] = "not the same for all ranks (files of different saves?)"
            continue
        (record,) = said
        wholes = {share for share in shares if share.num_bytes == record.num_bytes}
        pieces = shares - wholes
        crc32s = {share.crc32 for share in wholes}
        if sum(share.num_bytes for share in pieces) == record.num_bytes:
            crc32s.add(_joined(pieces))
        elif not wholes:
            unchecked += sum(share.num_bytes for share in pieces)
        if wrong := crc32s - {record.crc32}:
            damaged[number] = f"CRC32 {min(wrong):08x}, the file says {record.crc32:08x}"
    return unchecked, damaged


def _error(damaged: Mapping[_Key, str], checkpoint: Path) -> CheckpointError:
    lines = [f"  {_name(key)}: {damaged[key]}" for key in sorted(damaged)]
    more = [f"  ... and {len(lines) - 50} more"] if len(lines) > 50 else []
    return CheckpointError("\n".join([f"{checkpoint}: damaged content; nothing was changed:", *lines[:50], *more]))


def _joined(pieces: Iterable[_Share]) -> int:
    crc32 = 0
    for piece in pieces:
        crc32 ^= piece.crc32
    return crc32


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]}, the record at byte {key[1]}"
