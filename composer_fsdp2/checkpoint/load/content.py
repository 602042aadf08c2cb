"""Check the CRC32 of each record, computed from the parts that the ranks have read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.inventory import TensorRecord
from composer_fsdp2.checkpoint.read import Reader
from composer_fsdp2.checkpoint.records import Range, damage_of, ranges_by_record, shifted
from composer_fsdp2.config.text import lines_and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import all_gather_object, device_of_group

# The number of bytes that one all-reduce sums.
_ROUND_BYTES = 16 << 20
_CRC_BITS = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank read of a record."""

    blob: Blob
    ranges: Sequence[Range]

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end, _ in self.ranges)

    @property
    def crc32(self) -> int:
        """What these bytes add to the record's CRC32."""
        crc32 = 0
        for _, end, part in self.ranges:
            crc32 ^= shifted(part, self.blob.num_bytes - end)
        return crc32


def check_content(reader: Reader, records: Iterable[TensorRecord], checkpoint: Path) -> int:
    """Compare the CRC32 of every record that was read, completely or in part, with the one in the file.

    A record that one rank read completely is checked on that rank. Otherwise the sizes and CRC32s of all ranks' parts
    are summed, the CRC32s bit by bit: the record's CRC32 is that sum modulo 2. The sum does not match if the record is
    damaged, if no rank read some of it (FSDP1's padding) or if ranks read some of it twice (views, groups of ranks that
    train separately). Then one of the ranks reads the missing bytes, or the entire record.

    Args:
        records: All records that ranks may have read in part, in the same order on all ranks.
        checkpoint: The path of the file or folder on this rank.
    Returns:
        The number of bytes read by all ranks from files without CRC32s (safetensors).
    Raises:
        CheckpointError: on all ranks, naming every damaged record.

    Called on all ranks, or in one process without a process group. All-reduces 264 bytes for each record, at most 16
    MiB at a time, and two numbers; gathers the ranges of records whose sums do not match.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return check_own_content(reader, checkpoint)
    numbers = _numbers(records)
    parts, damaged, unchecked = _local_parts(reader, numbers, checkpoint)
    mismatched = {
        number
        for number, *total in _totals(parts, len(numbers))
        if total != [parts[number].blob.num_bytes, parts[number].blob.crc32]
    }
    totals = torch.tensor([unchecked, len(mismatched) + len(damaged)], device=device_of_group())
    dist.all_reduce(totals)
    unchecked, num_problems = totals.tolist()
    if num_problems:
        damaged |= _read_again(parts, mismatched, checkpoint)
        _raise_if({name: what for of_rank in all_gather_object(damaged) for name, what in of_rank.items()}, checkpoint)
    return int(unchecked)


def check_own_content(reader: Reader, checkpoint: Path) -> int:
    """Check the CRC32s of the records that this rank read; see ``check_content``. Does not communicate."""
    _, damaged, unchecked = _local_parts(reader, {}, checkpoint)
    _raise_if(damaged, checkpoint)
    return unchecked


def _numbers(records: Iterable[TensorRecord]) -> dict[tuple[Path, int], int]:
    """Number the locations of all tensors in the files."""
    numbers: dict[tuple[Path, int], int] = {}
    for record in records:
        while record.flat is not None:
            record = record.flat.flat
        for chunk in record.chunks:
            if chunk.source.place is not None:
                numbers.setdefault(chunk.source.place, len(numbers))
    return numbers


def _local_parts(
    reader: Reader, numbers: Mapping[tuple[Path, int], int], checkpoint: Path
) -> tuple[dict[int, _Part], dict[str, str], int]:
    """This rank's reads: records read in part, by number; damage of complete records; bytes without a CRC32."""
    by_record, unchecked = ranges_by_record(reader.parts)
    parts: dict[int, _Part] = {}
    damaged: dict[str, str] = {}
    for blob, ranges in by_record.items():
        part, number = _Part(blob, _joined(ranges)), numbers.get(reader.place_of(blob))
        if number is not None and number not in parts and part.num_bytes < blob.num_bytes:
            parts[number] = part
        elif (problem := damage_of(blob, ranges)) is not None:
            damaged[_name(blob, checkpoint)] = problem
    return parts, damaged, unchecked


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort the ranges, and join those that are adjacent."""
    joined: list[Range] = []
    for start, end, crc32 in sorted(ranges):
        if joined and joined[-1][1] == start:
            first, _, before = joined.pop()
            start, crc32 = first, shifted(before, end - start) ^ crc32
        joined.append((start, end, crc32))
    return joined


def _totals(parts: Mapping[int, _Part], num_records: int) -> Iterator[tuple[int, int, int]]:
    """The number of parts, and the sums of sizes and CRC32s, of each record. Called on all ranks; all-reduces."""
    bits = torch.arange(_CRC_BITS)
    num_at_once = max(1, _ROUND_BYTES // ((1 + _CRC_BITS) * bits.element_size()))
    for first in range(0, num_records, num_at_once):
        rows = torch.zeros(min(num_at_once, num_records - first), 1 + _CRC_BITS, dtype=torch.int64)
        numbers = [number for number in parts if first <= number < first + num_at_once]
        at = torch.tensor(numbers, dtype=torch.int64) - first
        rows[at, 0] = torch.tensor([parts[number].num_bytes for number in numbers], dtype=torch.int64)
        crc32s = torch.tensor([parts[number].crc32 for number in numbers], dtype=torch.int64)
        rows[at, 1:] = crc32s.unsqueeze(1) >> bits & 1
        rows = rows.to(device_of_group())
        dist.all_reduce(rows)
        found = rows.cpu()[at]
        yield from zip(numbers, found[:, 0].tolist(), ((found[:, 1:] & 1) << bits).sum(1).tolist(), strict=True)


def _read_again(parts: Mapping[int, _Part], numbers: set[int], checkpoint: Path) -> dict[str, str]:
    """Check the numbered records by reading them, each on one of the ranks that read a part of it.

    Called on all ranks; gathers the ranges that they have read of these records.
    """
    gathered = all_gather_object({number: parts[number].ranges for number in numbers})
    damaged: dict[str, str] = {}
    for number in numbers:
        readers = [rank for rank, of_rank in enumerate(gathered) if number in of_rank]
        if readers[number % len(readers)] == dist.get_rank():  # a different rank for each record
            blob = parts[number].blob
            problem = damage_of(blob, [each for rank in readers for each in gathered[rank][number]])
            if problem is not None:
                damaged[_name(blob, checkpoint)] = problem
    return damaged


def _raise_if(damaged: Mapping[str, str], checkpoint: Path) -> None:
    if damaged:
        lines = [f"{name}: {damaged[name]}" for name in sorted(damaged)]
        raise CheckpointError(f"{checkpoint}: damaged content; nothing was changed:\n{lines_and_more(lines, 50, '  ')}")


def _name(blob: Blob, checkpoint: Path) -> str:
    """The name of a record with a path relative to the checkpoint, whose path may differ between ranks."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    name = blob.path.relative_to(folder) if blob.path.is_relative_to(folder) else blob.path
    return f"{name}, the record at byte {blob.offset}"
