"""Whether what was read is what was written: each record's CRC32, put together from the parts that the ranks read."""

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from composer_fsdp2.agreement import gather
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.checkpoint.storage.crc import shifted
from composer_fsdp2.errors import CheckpointError

__all__ = ["check_content", "check_own_content"]


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


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank's file says of a record."""

    num_bytes: int
    crc32: int


@dataclass(slots=True)
class _Collected:
    """What one rank read: bytes without a CRC32, and its share of each record, by file (as the checkpoint's folder
    names it, for ranks may have copies in different places) and offset."""

    without: int = 0
    shares: dict[tuple[str, int], tuple[_Said, _Share]] = field(default_factory=dict)


def check_content(parts: Iterable[Part], checkpoint: Path) -> int:
    """Compare the CRC32 of every record that the ranks read, each some of it, with what the file says.

    Args:
        checkpoint: The file or folder, as this rank sees it.
    Returns:
        The number of bytes, of all ranks, that could not be checked: the file says no CRC32 (safetensors), or nobody
        read the rest of the record.
    Raises:
        CheckpointError: on all ranks, naming every damaged record.
    Called on all ranks (alone without a process group); gathers a few numbers for each record that a rank read.
    """
    return _check(gather(_collected(parts, checkpoint)), checkpoint)


def check_own_content(parts: Iterable[Part], checkpoint: Path) -> int:
    """The same for what this rank read alone; does not communicate."""
    return _check([_collected(parts, checkpoint)], checkpoint)


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


def _check(of_ranks: list[_Collected], checkpoint: Path) -> int:
    unchecked = sum(collected.without for collected in of_ranks)
    damaged: list[str] = []
    for key in sorted({key for collected in of_ranks for key in collected.shares}):
        found = [collected.shares[key] for collected in of_ranks if key in collected.shares]
        said = {said for said, _ in found}
        shares = {share for _, share in found}  # replicas that read the same count once
        if len(said) > 1 or len({share.ranges for share in shares}) < len(shares):
            damaged.append(f"{_name(key)}: not the same for all ranks (files of different saves?)")
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
            damaged.append(f"{_name(key)}: CRC32 {min(wrong):08x}, the file says {record.crc32:08x}")
    if damaged:
        lines = [f"  {line}" for line in damaged[:50]]
        more = [f"  ... and {len(damaged) - 50} more"] if len(damaged) > 50 else []
        raise CheckpointError("\n".join([f"{checkpoint}: damaged content; nothing was changed:", *lines, *more]))
    return unchecked


def _joined(pieces: Iterable[_Share]) -> int:
    crc32 = 0
    for piece in pieces:
        crc32 ^= piece.crc32
    return crc32


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]}, the record at byte {key[1]}"
