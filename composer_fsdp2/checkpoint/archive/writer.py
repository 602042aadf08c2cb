"""Write the zip archive of ``torch.save``, with a layout that is fixed before any tensor is available.

``torch.save`` requires every tensor in memory. Here the pickle and the offset of every record are computed from shapes
and dtypes, so tensor bytes may be written later, in any order and by several processes. The file has the same bytes as
that of ``torch.save``, except for one record: the checksum ``.data/serialization_id``.

    weight = Slot((4, 8), torch.float32)
    plan = plan_archive({"state": {"model": {"weight": weight}}})
    with open(path, "wb") as file:
        os.pwrite(file.fileno(), data, plan.offset_of(weight))  # row-major, weight.num_bytes bytes
        plan.finish(file, {weight: zlib.crc32(data)})  # all other bytes; CRC32s are at the end of a zip archive
"""

import hashlib
import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from composer_fsdp2._torch.private_names import rebuild_tensor, rebuild_untyped_tensor, storage_class
from composer_fsdp2.checkpoint.archive.disk import write_all

_ALIGNMENT = 64
_MAX_32 = 0xFFFFFFFF  # sizes from here on need zip64's fields
_MAX_16 = 0xFFFF

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_DESCRIPTOR = struct.Struct("<IIII")
_DESCRIPTOR_64 = struct.Struct("<IIQQ")
_UTF8, _HAS_DESCRIPTOR = 1 << 11, 1 << 3


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A placeholder for a contiguous CPU tensor in a value to save. The tensor's bytes are written later.

    The same slot in two places is one tensor in both.

    Args:
        source: The caller's reference to the tensor's source.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Any = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of the archive: its header at ``at``, then its data. ``content`` is None for the data of a slot."""

    name: bytes
    num_bytes: int
    at: int
    content: bytes | None = None

    @property
    def header(self) -> bytes:
        """The local header, padded to align the data to 64 bytes."""
        # miniz writes the sizes here before it knows the compressed one; torch keeps that.
        extra = self._zip64(self.num_bytes, 0)
        start = self.at + _LOCAL.size + len(self.name) + len(extra) + 4
        padding = -start % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        head = _LOCAL.pack(0x04034B50, 0, self._flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return head + self.name + extra

    @property
    def data_at(self) -> int:
        return self.at + len(self.header)

    @property
    def end(self) -> int:
        return self.data_at + self.num_bytes + len(self.descriptor(0))

    def descriptor(self, crc: int) -> bytes:
        """What follows the data."""
        if not self.num_bytes:
            return b""
        layout = _DESCRIPTOR_64 if self._zip64(0, 0) else _DESCRIPTOR
        return layout.pack(0x08074B50, crc, self.num_bytes, self.num_bytes)

    def central(self, crc: int) -> bytes:
        """The entry in the directory at the end."""
        size, at = min(self.num_bytes, _MAX_32), min(self.at, _MAX_32)
        extra = self._zip64(self.num_bytes, self.num_bytes)
        numbers = (0x02014B50, 0, 0, self._flags, 0, 0, 0, crc, size, size, len(self.name), len(extra), 0, 0, 0, 0, at)
        return _CENTRAL.pack(*numbers) + self.name + extra

    @property
    def _flags(self) -> int:
        return _UTF8 | (_HAS_DESCRIPTOR if self.num_bytes else 0)

    def _zip64(self, size: int, compressed_size: int) -> bytes:
        """The zip64 extra field for sizes of more than 32 bits; empty if the sizes are smaller."""
        numbers = [size, compressed_size] if self.num_bytes >= _MAX_32 else []
        if self.at >= _MAX_32:
            numbers.append(self.at)
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


@dataclass(frozen=True)
class ArchivePlan:
    """The layout of an archive. All offsets are relative to the start of the archive.

    Attributes:
        slots: In the order of the file.
        num_bytes: The size of the archive.
    """

    slots: tuple[Slot, ...]
    num_bytes: int
    _records: tuple[_Record, ...]
    _offsets: Mapping[Slot, int]
    _directory_at: int

    def offset_of(self, slot: Slot) -> int:
        """The first byte of the slot's data."""
        return self._offsets[slot]

    def finish(self, file: IO[bytes], crcs: Mapping[Slot, int], *, at: int = 0) -> None:
        """Write everything except the slots' bytes.

        Args:
            file: Open for writing. The slots' bytes may be written before or after.
            crcs: The CRC32 of each slot's bytes.
            at: The offset of the archive in the file.
        """
        for offset, data in self.frame(crcs):
            write_all(file, data, at + offset)

    def frame(self, crcs: Mapping[Slot, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes except the slots', as ranges with their offsets."""
        slots = iter(self.slots)
        run, run_at, directory, seen = bytearray(), 0, bytearray(), hashlib.sha256()
        for record in self._records:
            content = record.content
            if record.name.endswith(b"/.data/serialization_id"):
                content = _serialization_id(seen.digest())
            crc = crcs[next(slots)] if content is None else zlib.crc32(content)
            seen.update(record.name + crc.to_bytes(4, "little"))
            run += record.header
            if content is None and record.num_bytes:
                yield run_at, bytes(run)
                run, run_at = bytearray(), record.data_at + record.num_bytes
            else:
                run += content or b""
            run += record.descriptor(crc)
            directory += record.central(crc)
        yield run_at, bytes(run + directory + _ends(len(self._records), len(directory), self._directory_at))


def plan_archive(value: Any, *, slot_for: Callable[[torch.Tensor], Slot] | None = None) -> ArchivePlan:
    """Compute the layout of the archive that ``torch.save`` would write for this value.

    Args:
        value: Any picklable value, with ``Slot``s in place of tensors.
        slot_for: Called with each tensor in the value, at any depth; returns its slot.
    Raises:
        TypeError: the value contains a tensor and ``slot_for`` is None; pass a ``Slot``.

    Does not communicate.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, slot_for)
    pickler.dump(value)
    small: list[tuple[str, bytes]] = [
        ("data.pkl", buffer.getvalue()),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ]
    last: list[tuple[str, bytes]] = [("version", b"3\n"), (".data/serialization_id", _serialization_id(b""))]
    records: list[_Record] = []
    at = 0

    def add(name: str, num_bytes: int, content: bytes | None) -> _Record:
        nonlocal at
        # All records are in one folder. torch names it after the file, or uses this name for a stream.
        records.append(_Record(f"archive/{name}".encode(), num_bytes, at, content))
        at = records[-1].end
        return records[-1]

    for name, content in small:
        add(name, len(content), content)
    slots = tuple(pickler.slots)
    offsets = {slot: add(f"data/{key}", slot.num_bytes, None).data_at for key, slot in enumerate(slots)}
    for name, content in last:
        add(name, len(content), content)
    directory_bytes = sum(len(record.central(0)) for record in records)
    num_bytes = at + directory_bytes + len(_ends(0, 0, 0))
    return ArchivePlan(slots, num_bytes, tuple(records), offsets, at)


def _serialization_id(seen: bytes) -> bytes:
    """A hash of names and contents as 40 digits. torch uses another hash function; no reader checks it."""
    digest = hashlib.sha256(seen).digest()
    return b"%020d%020d" % (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))


def _ends(num_records: int, directory_bytes: int, directory_at: int) -> bytes:
    """The records that close the archive. torch always writes the zip64 form as well."""
    end_64 = _END_64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, num_records, num_records, directory_bytes, directory_at)
    locator = _LOCATOR_64.pack(0x07064B50, 0, directory_at + directory_bytes, 1)
    few, size, place = min(num_records, _MAX_16), min(directory_bytes, _MAX_32), min(directory_at, _MAX_32)
    return end_64 + locator + _END.pack(0x06054B50, 0, 0, few, few, size, place, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A slot's storage, for ``persistent_id``."""

    slot: Slot


class _Pickler(pickle.Pickler):
    """Pickles slots as torch pickles tensors, and records them in the order of their storages."""

    def __init__(self, file: IO[bytes], slot_for: Callable[[torch.Tensor], Slot] | None) -> None:
        super().__init__(file, protocol=2)
        self.slots: list[Slot] = []
        self._slot_for = slot_for

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if self._slot_for is None:
                raise TypeError("a tensor in the value of plan_archive; give a Slot of its shape and dtype")
            value = self._slot_for(value)
        elif not isinstance(value, Slot):
            return NotImplemented
        _, is_typed = storage_class(value.dtype)
        shape = tuple(size for size in value.shape)  # a new object, as in torch: a shared one would be pickled once
        args: tuple[Any, ...] = (_Storage(value), 0, shape, _stride(shape), False, OrderedDict())
        return (rebuild_tensor, args) if is_typed else (rebuild_untyped_tensor, (*args, value.dtype))

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not _Storage:
            return None
        kind, is_typed = storage_class(value.slot.dtype)
        self.slots.append(value.slot)
        numel = math.prod(value.slot.shape) if is_typed else value.slot.num_bytes
        return ("storage", kind, str(len(self.slots) - 1), "cpu", numel)


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch computes them for empty dimensions as well."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)
