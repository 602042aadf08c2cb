"""Whether what was read is what was written: each record's CRC32, put together from the parts that the ranks read."""

from collections.abc import Iterable
from dataclasses import dataclass

from composer_fsdp2.agreement import gather
from composer_fsdp2.checkpoint.crc import shifted
from composer_fsdp2.checkpoint.reading import Part
from composer_fsdp2.errors import CheckpointError

__all__ = ["check_content", "check_own_content"]


@dataclass(slots=True)
class _Record:
    """A record of a file, as far as it was read: what its CRC32 should be, and what the parts read add to it."""

    num_bytes: int
    expected: int
    num_read: int = 0
    crc32: int = 0


_Records = dict[tuple[str, int], _Record]  # by file and offset


def check_content(parts: Iterable[Part]) -> int:
    """Compare the CRC32 of every record that the ranks read, each some of it, with what the file says.

    Returns:
        The number of bytes, of all ranks, that could not be checked: the file says no CRC32 (safetensors), or nobody
        read the rest of the record.
    Raises:
        CheckpointError: on all ranks, naming every damaged record.
    Called on all ranks (alone without a process group); gathers a few numbers for each record that a rank read.
    """
    return _check(gather(_collected(parts)))


def check_own_content(parts: Iterable[Part]) -> int:
    """The same for what this rank read alone; does not communicate."""
    return _check([_collected(parts)])


def _collected(parts: Iterable[Part]) -> tuple[int, _Records]:
    """The bytes without a CRC32, and what this rank's parts say of each record."""
    without, records = 0, _Records()
    for part in parts:
        blob = part.blob
        if blob.crc32 is None:
            without += part.end - part.start
            continue
        record = records.setdefault((str(blob.path), blob.offset), _Record(blob.num_bytes, blob.crc32))
        record.num_read += part.end - part.start
        record.crc32 ^= shifted(part.crc32, blob.num_bytes - part.end)
    return without, records


def _check(of_ranks: list[tuple[int, _Records]]) -> int:
    unchecked = sum(without for without, _ in of_ranks)
    shared = _Records()
    damaged: dict[tuple[str, int], _Record] = {}
    for _, records in of_ranks:
        for key, record in records.items():
            if record.num_read == record.num_bytes:  # by this rank alone, as others may have, too
                if record.crc32 != record.expected:
                    damaged[key] = record
                continue
            whole = shared.setdefault(key, _Record(record.num_bytes, record.expected))
            whole.num_read += record.num_read
            whole.crc32 ^= record.crc32
    for key, record in shared.items():
        if record.num_read != record.num_bytes:
            unchecked += record.num_read
        elif record.crc32 != record.expected:
            damaged[key] = record
    if damaged:
        lines = [
            f"  {path}, the record at byte {offset}: CRC32 {record.crc32:08x}, the file says {record.expected:08x}"
            for (path, offset), record in sorted(damaged.items())
        ]
        more = [f"  ... and {len(lines) - 50} more"] if len(lines) > 50 else []
        raise CheckpointError("\n".join(["damaged content; nothing was changed:", *lines[:50], *more]))
    return unchecked
