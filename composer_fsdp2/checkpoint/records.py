"""Check records against their CRC32s, from the parts that any ranks have read, in any order."""

import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from composer_fsdp2.checkpoint.archive.disk import opened
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.errors import CheckpointError

# (first byte, end, CRC32 when it was read) of a range of a record.
Range: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A range of bytes of a record, relative to its start, and the CRC32 of the bytes that were read."""

    blob: Blob
    start: int
    end: int
    crc32: int


def ranges_by_record(ranges: Iterable[ReadRange]) -> tuple[dict[Blob, set[Range]], int]:
    """The ranges that were read of each record with a CRC32, and the number of bytes read of records without one.

    Several tensors may be the same bytes, as the step counts of FSDP1's flat parameters are. These count once.
    """
    found: dict[Blob, set[Range]] = {}
    for read in ranges:
        found.setdefault(read.blob, set()).add((read.start, read.end, read.crc32))
    unchecked = sum(end - start for blob, each in found.items() if blob.crc32 is None for start, end, _ in each)
    return {blob: each for blob, each in found.items() if blob.crc32 is not None}, unchecked


_SLICE_BYTES = 4 << 20


def damage_of(blob: Blob, ranges: Iterable[Range]) -> str | None:
    """Describe the damage of a record, or of the ranges that were read of it; None if the CRC32 matches.

    If the ranges do not overlap, only the gaps between them are read. Otherwise the entire record is read, and every
    range is compared with it.

    Args:
        blob: The record; it has a CRC32.
        ranges: All ranges that were read, by all ranks, possibly with repetitions.
    """
    found = sorted(set(ranges))
    try:
        if any(after[0] < before[1] for before, after in itertools.pairwise(found)):
            crc32, changed = _compared(blob, found)
            if changed is not None:
                return f"bytes {changed[0]} to {changed[1]} changed after they were read"
        else:
            crc32 = _joined(blob, found)
    except (CheckpointError, OSError) as error:
        return f"cannot be checked: {error}"
    return blob.damage(crc32)


def _joined(blob: Blob, ranges: Sequence[Range]) -> int:
    """The record's CRC32, combined from those of ranges that do not overlap and from the bytes between them."""
    crc32, at = 0, 0
    for start, end, part in [*ranges, (blob.num_bytes, blob.num_bytes, 0)]:
        for data in _slices(blob, at, start):
            crc32 = zlib.crc32(data, crc32)
        crc32, at = shifted(crc32, end - start) ^ part, end
    return crc32


def _compared(blob: Blob, ranges: Sequence[Range]) -> tuple[int, Range | None]:
    """The record's current CRC32, and the first range that had different bytes when it was read.

    A range's CRC32 follows from those of the record up to its two ends, so no range is read or stored separately.
    """
    ends = sorted({0, blob.num_bytes}.union(*({start, end} for start, end, _ in ranges)))
    crc32, up_to = 0, {0: 0}
    for start, end in itertools.pairwise(ends):
        for data in _slices(blob, start, end):
            crc32 = zlib.crc32(data, crc32)
        up_to[end] = crc32
    changed = (each for each in ranges if up_to[each[1]] ^ shifted(up_to[each[0]], each[1] - each[0]) != each[2])
    return crc32, next(changed, None)


def _slices(blob: Blob, start: int, end: int) -> Iterator[bytes]:
    """Read the bytes of a record from ``start`` to ``end`` (exclusive), in slices."""
    if start == end:
        return
    with opened(blob.path) as file:
        file.seek(blob.offset + start)
        while start < end:
            data = file.read(min(_SLICE_BYTES, end - start))
            if not data:
                raise CheckpointError(f"{blob.path}: ends at byte {blob.offset + start}, needs {blob.end}")
            yield data
            start += len(data)


# ---------------------------------------------------------------------------------------------------------------------
# CRC32s of parts. The CRC of A followed by B is ``shifted(crc(A), len(B)) ^ crc(B)``: appending B multiplies A's
# remainder by x^(8 len(B)) modulo the CRC's polynomial (Mark Adler, zlib's ``crc32_combine``). So each part adds one
# number, in any order.

_POLYNOMIAL = 0xEDB88320  # CRC-32 of zip and zlib, bits reflected: bit 31 is x^0
_ONE = 1 << 31


def shifted(crc: int, num_bytes: int) -> int:
    """The contribution of a part's CRC32 to the total CRC32, if ``num_bytes`` follow the part."""
    return _multiply(_power(num_bytes), crc) if num_bytes else crc


@functools.lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8  # x^8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
