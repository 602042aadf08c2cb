"""The zip archive that ``torch.save`` writes, as a table of uncompressed records in a file.

A ``.pt`` file is one such archive; a ``.distcp`` file is a concatenation of one archive per entry. Records are stored
uncompressed, so a part of a tensor is a range of bytes in the file. Each record has a CRC32.
"""

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from composer_fsdp2.checkpoint.archive.disk import opened, read_at
from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_LOCAL_HEADER_MAGIC = 0x04034B50


@dataclass(frozen=True, slots=True)
class Blob:
    """A contiguous range of bytes in a file, with its ``crc32`` if the file has one."""

    path: Path
    offset: int
    num_bytes: int
    crc32: int | None = None

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def damage(self, crc32: int) -> str | None:
        """Describe the difference of ``crc32`` from the record's own; None if they are equal or the file has none."""
        is_damaged = self.crc32 is not None and crc32 != self.crc32
        return f"CRC32 {crc32:08x}, the file says {self.crc32:08x}" if is_damaged else None


@dataclass(frozen=True, slots=True)
class Archive:
    """A ``torch.save`` archive: the byte range of each record.

    Args:
        blobs: By record name without the archive's own folder: ``data.pkl``, ``data/0``, ``version``.
        where: The file, and the entry in it, for messages.
    """

    where: str
    blobs: dict[str, Blob]

    @classmethod
    def open(cls, path: Path, offset: int = 0, num_bytes: int | None = None) -> "Archive":
        """Read the directory of the archive in these bytes of a file. Without ``num_bytes``, up to the end of the file.

        Raises:
            CheckpointError: the bytes are not such an archive, or its directory contradicts the file.
        """
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if num_bytes is None:
                num_bytes = size - offset
            where = str(path) if offset == 0 and num_bytes == size else f"{path} at byte {offset}"
            if num_bytes < 0 or offset + num_bytes > size:
                raise CheckpointError(f"{where}: needs {num_bytes} bytes, the file ends at {size} (truncated?)")
            if num_bytes == 0:
                raise CheckpointError(f"{where}: empty")
            return cls(where, _blobs(path, file, offset, num_bytes, where))

    def read(self, name: str) -> bytes:
        """Read a small record as a whole, and check its CRC32."""
        blob = self.blobs.get(name)
        if blob is None:
            raise CheckpointError(f"{self.where}: has no record {name}")
        data = read_at(blob.path, blob.offset, blob.num_bytes)
        if (damage := blob.damage(zlib.crc32(data))) is not None:
            raise CheckpointError(f"{self.where}: record {name} is damaged ({damage})")
        return data

    def unpickle(self, *, trust: bool, inert: frozenset[str] = frozenset()) -> Any:
        """Unpickle ``data.pkl``, with a ``StoredTensor`` for each tensor; see ``read_pickle``."""
        if "byteorder" in self.blobs and self.read("byteorder") != b"little":
            raise CheckpointError(f"{self.where}: written on a big-endian machine, which is not supported")
        return read_pickle(
            self.read("data.pkl"),
            where=self.where,
            trust=trust,
            inert=inert,
            storages=lambda key: self.storage(key).num_bytes,
            disk_bytes=sum(blob.num_bytes for blob in self.blobs.values()),
        )

    def storage(self, key: str) -> Blob:
        """The record of a ``Storage``'s key."""
        blob = self.blobs.get(f"data/{key}")
        if blob is None:
            raise CheckpointError(f"{self.where}: the record of storage {key} is missing")
        return blob


class _Window:
    """A byte range of a file as a file object, for ``zipfile``."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file, self._offset, self.num_bytes = file, offset, num_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        if at < 0:
            raise OSError("seek before the start")  # as a file would
        self._at = at
        return at

    def last(self, size: int) -> bytes:
        self.seek(max(0, self.num_bytes - size))
        return self.read()

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.num_bytes - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


_BYTES_PER_BYTE = 24  # of memory for each byte of a directory
_END, _LOCATOR_64, _END_64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_END_BYTES, _LOCATOR_BYTES, _END_64_BYTES = 22, 20, 56
_ALL_ENDS_BYTES = _END_BYTES + _LOCATOR_BYTES + _END_64_BYTES
_MAX_COMMENT_BYTES = 1 << 16


def _directory_end(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Find the zip directory that ends in ``data``; None if not found.

    Args:
        at: The offset in ``data`` of the end record, which is the archive's last one.
    Returns:
        The end of the directory in ``data``, its length, and its offset in the archive.
    """
    if at < 0 or not data.startswith(_END, at):
        return None
    at_locator, at_64 = at - _LOCATOR_BYTES, at - _LOCATOR_BYTES - _END_64_BYTES
    if at_64 >= 0 and data.startswith(_LOCATOR_64, at_locator) and data.startswith(_END_64, at_64):
        return at_64, *struct.unpack_from("<QQ", data, at_64 + 40)
    return at, *struct.unpack_from("<II", data.ljust(at + _END_BYTES, b"\0"), at + 12)


def archive_start(path: Path, start: int, end: int) -> int | None:
    """The offset of the archive that ends at byte ``end`` of a file, without a comment; None if not found.

    Args:
        start: The smallest possible offset.
    """
    first = max(start, end - _ALL_ENDS_BYTES)
    data = read_at(path, first, end - first)
    if (found := _directory_end(data, len(data) - _END_BYTES)) is None:
        return None
    at, num_bytes, offset = found
    begin = first + at - num_bytes - offset
    return begin if start <= begin < end else None


def _refuse_large_directory(window: _Window, where: str) -> None:
    """Check the length of the zip directory, as the archive's last bytes contain it, before ``zipfile`` reads it.

    Searches in the same places as ``zipfile``: at the very end, and behind a comment only if that fails.
    """
    tail = window.last(_ALL_ENDS_BYTES)
    end = _directory_end(tail, len(tail) - _END_BYTES) if tail.endswith(b"\0\0") else None
    if end is None:
        tail = window.last(_MAX_COMMENT_BYTES + len(tail))
        end = _directory_end(tail, tail.rfind(_END))
    # Without a directory zipfile raises.
    if end is not None:
        Budget.of(where, window.num_bytes).spend(f"a directory of {end[1]} bytes", num_bytes=_BYTES_PER_BYTE * end[1])


def zip_names(path: Path) -> list[str]:
    """The names in any zip file.

    Raises:
        CheckpointError: it is not a zip file.
    """
    with opened(path) as file:
        return [entry.filename for entry in _directory(_Window(file, 0, path.stat().st_size), str(path))[0]]


def _directory(window: _Window, where: str) -> tuple[list[zipfile.ZipInfo], int]:
    """The entries of the zip directory, and its offset in the window."""
    _refuse_large_directory(window, where)
    try:
        with zipfile.ZipFile(window) as archive:
            return archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, OSError, struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{where}: not the zip archive that torch.save writes, or truncated ({error})") from error


def _blobs(path: Path, file: IO[bytes], offset: int, num_bytes: int, where: str) -> dict[str, Blob]:
    entries, start_dir = _directory(_Window(file, offset, num_bytes), where)
    records_end = offset + start_dir
    has_crcs = any(entry.CRC for entry in entries)  # all are 0 after torch.serialization.set_crc32_options(False)
    blobs: dict[str, Blob] = {}
    starts: dict[str, int] = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(
                f"{where}: record {entry.filename} is compressed; torch.save stores records as they are"
            )
        name = entry.filename.partition("/")[2] or entry.filename
        if name in blobs:
            raise CheckpointError(f"{where}: record {entry.filename} is there twice")
        starts[name] = start = offset + entry.header_offset
        if not offset <= start < records_end:
            raise CheckpointError(f"{where}: the directory points to byte {start} for {entry.filename}")
        file.seek(start)
        header = file.read(_LOCAL_HEADER.size).ljust(_LOCAL_HEADER.size, b"\0")
        magic, *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        if magic != _LOCAL_HEADER_MAGIC or file.read(name_length) != entry.filename.encode():
            raise CheckpointError(
                f"{where}: the directory points to byte {start} for {entry.filename}, and that record is not there"
            )
        data_start = start + _LOCAL_HEADER.size + name_length + extra_length
        blobs[name] = Blob(path, data_start, entry.file_size, entry.CRC if has_crcs else None)
    last_end = offset
    for name, start in sorted(starts.items(), key=lambda item: item[1]):
        blob = blobs[name]
        if start < last_end or blob.end > records_end:
            raise CheckpointError(
                f"{where}: record {name} at bytes {blob.offset} to {blob.end} overlaps another or ends too late"
            )
        last_end = blob.end
    return blobs
