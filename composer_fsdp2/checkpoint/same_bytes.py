"""Detect tensors of a checkpoint that have the same bytes (tied weights), from metadata only.

Records are looked up by a key instead of compared in pairs: a mixture of experts has 18,432 matrices of one shape.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from composer_fsdp2.checkpoint.inventory import Chunk, NestedArchive, Strided, TensorRecord

T = TypeVar("T")


def storage_key(record: TensorRecord) -> Hashable:
    """A key that is equal for equal views of the same bytes, as ``torch.save`` stores tied weights."""
    form = _form(record)
    return id(record) if form is None else (form, tuple(chunk.source for chunk in record.chunks))


class SameBytes(Generic[T]):
    """Maps records to items. Finds the first item whose record has the same bytes, without comparing all records."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._by_storage: dict[Hashable, int] = {}
        # By form: contents, which may have to be read, are compared only if the forms are equal.
        self._unread: dict[Hashable, list[tuple[int, TensorRecord]]] = {}
        self._by_content: dict[Hashable, dict[Hashable, int]] = {}

    def add(self, item: T, record: TensorRecord) -> None:
        number = len(self._items)
        self._items.append(item)
        self._by_storage.setdefault(storage_key(record), number)
        if (form := _form(record)) is not None:
            self._unread.setdefault(form, []).append((number, record))
            self._by_content.setdefault(form, {})

    def first(self, record: TensorRecord, *, copies: bool) -> T | None:
        """The first item whose record is the same storage; None if not found.

        Args:
            copies: Also accept an item with equal contents, by CRC32s. Tensors may be equal without being tied, such as
                ones.
        """
        found = [self._by_storage.get(storage_key(record))]
        form = _form(record)
        if copies and (contents := self._by_content.get(form)) is not None:
            for number, other in self._unread.pop(form, ()):
                contents.setdefault(_content_key(other), number)
            found.append(contents.get(_content_key(record)))
        numbers = [number for number in found if number is not None]
        return self._items[min(numbers)] if numbers else None


def same_content(a: object, b: object) -> bool | None:
    """Whether two entries for one parameter are equal; None if they must be read to decide that."""
    if not isinstance(a, TensorRecord) or not isinstance(b, TensorRecord):
        return None
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if storage_key(a) == storage_key(b):
        return True
    if _form(a) is None or _form(a) != _form(b):
        return None
    pairs = [
        (_record_fingerprint(one, a.dtype), _record_fingerprint(other, b.dtype))
        for one, other in zip(a.chunks, b.chunks, strict=True)
    ]
    known = [(one, other) for one, other in pairs if one is not None and other is not None and one[1:] == other[1:]]
    if any(one != other for one, other in known):
        return False
    return True if len(known) == len(pairs) else None


def _form(record: TensorRecord) -> Hashable | None:
    """The shape, dtype and boxes, which must be equal to compare contents. None for tensors in memory."""
    if not record.chunks or not all(isinstance(chunk.source, Strided | NestedArchive) for chunk in record.chunks):
        return None
    return record.shape, record.dtype, tuple((chunk.offsets, chunk.sizes) for chunk in record.chunks)


def _content_key(record: TensorRecord) -> Hashable:
    """A key that is equal for equal contents of the same form. For a chunk without a CRC32 it is the record's own."""
    fingerprints = tuple(_fingerprint(chunk, record.dtype) for chunk in record.chunks)
    return id(record) if None in fingerprints else fingerprints


def _record_fingerprint(chunk: Chunk, dtype: torch.dtype) -> tuple[object, ...] | None:
    """The fingerprint of a chunk that is a complete record, with its CRC32 first; None if no CRC32 is available."""
    source = chunk.source
    assert isinstance(source, Strided | NestedArchive)
    if isinstance(source, NestedArchive) and source.folder.fetch is not None:
        return None  # it may be missing on another machine, whose ranks must get the same result
    is_all_of_record = source.locate(chunk, dtype).blob.num_bytes == chunk.numel * dtype.itemsize
    return _fingerprint(chunk, dtype) if is_all_of_record else None


def _fingerprint(chunk: Chunk, dtype: torch.dtype) -> tuple[object, ...] | None:
    """A value that is equal for chunks of equal contents; None if the file has no CRC32 for the chunk."""
    assert isinstance(chunk.source, Strided | NestedArchive)
    source = chunk.source.locate(chunk, dtype)
    blob = source.blob
    return None if blob.crc32 is None else (blob.crc32, blob.num_bytes, source.offset, source.stride)
