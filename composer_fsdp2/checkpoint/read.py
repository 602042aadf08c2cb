"""Read any box of any tensor in a checkpoint, and no other bytes."""

import ctypes
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import opened
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.boxes import Box, row_major
from composer_fsdp2.checkpoint.inventory import Chunk, FlatRange, InMemory, Strided, TensorRecord
from composer_fsdp2.checkpoint.records import ReadRange
from composer_fsdp2.checkpoint.trees import mapped
from composer_fsdp2.errors import CheckpointError

# One read: large enough for the disk, small enough that its CRC is computed in the CPU's cache.
SLICE_BYTES = 4 << 20
# A strided tensor is read including its gaps if that is less than this; otherwise range by range.
_GAP_BYTES = 1 << 20
_MAX_OPEN_FILES = 32


@dataclass(slots=True)
class Reader:
    """Reads boxes of tensors, and records the ranges that it read, to be checked later. Use it in a with block.

    Attributes:
        num_bytes: The number of bytes of tensor data that were read.
        parts: Every range that was read, with its CRC32.
        is_in_order: Whether all tensors that were read are row-major in their files.
    """

    num_bytes: int = 0
    parts: list[ReadRange] = field(default_factory=list)
    is_in_order: bool = True
    _files: dict[Path, Any] = field(default_factory=dict, repr=False)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)
    _located: dict[Any, Strided] = field(default_factory=dict, repr=False)
    _places: dict[Blob, tuple[Path, int]] = field(default_factory=dict, repr=False)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, record: TensorRecord, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor into ``out``.

        Args:
            out: On the CPU, with the box's sizes and the record's dtype; contiguous, or a view of a contiguous tensor.
        Raises:
            CheckpointError: a file ends too early, or an entry contradicts its metadata.
        """
        assert out.shape == box.sizes and out.dtype == record.dtype and out.device.type == "cpu", record.name
        if not box.numel:
            return
        if record.flat is not None:
            self._read_flat(record, record.flat, box, out)
            return
        for chunk in record.chunks:
            if (common := box.overlap(chunk)) is None:
                continue
            view = out[common.slices(box.offsets)]
            if isinstance(chunk.source, InMemory):
                view.copy_(chunk.source.tensor[common.slices(chunk.offsets)])
                continue
            source = self._locate(chunk, record)
            steps = zip(common.offsets, chunk.offsets, source.stride, strict=True)
            first = source.offset + sum((a - b) * step for a, b, step in steps)
            self._read_strided(source.blob, first, source.stride, view)

    def _locate(self, chunk: Chunk, record: TensorRecord) -> Strided:
        """The byte range of a chunk. Each archive is opened once, for any number of boxes that are read from it."""
        assert not isinstance(chunk.source, InMemory)
        if isinstance(chunk.source, Strided):
            return chunk.source
        key = (chunk.source, chunk.sizes, record.dtype)
        if key not in self._located:
            if len(self._located) >= 4096:
                self._located.clear()
            try:
                self._located[key] = chunk.source.locate(chunk, record.dtype)
            except CheckpointError as error:
                raise type(error)(f"{record.name}: {error}") from error
            assert chunk.source.place is not None, "found"
            self._places[self._located[key].blob] = chunk.source.place
        return self._located[key]

    def place_of(self, blob: Blob) -> tuple[Path, int]:
        """The ``place`` of the source from which a record was read."""
        return self._places.get(blob, (blob.path, blob.offset))

    def read_full(self, record: TensorRecord) -> torch.Tensor:
        """All of a tensor, in memory."""
        out = torch.empty(record.shape, dtype=record.dtype)
        self.read(record, record.box, out)
        return out

    def _read_flat(self, record: TensorRecord, flat: FlatRange, box: Box, out: torch.Tensor) -> None:
        for start, view in _runs(record.shape, box, out):
            run = view.reshape(-1)  # mostly a view: ranges of a contiguous tensor are contiguous
            self.read(flat.flat, Box((flat.start + start,), (run.numel(),)), run)
            if run.data_ptr() != view.data_ptr():
                view.copy_(run.view_as(view))

    def _read_strided(self, blob: Blob, first: int, stride: tuple[int, ...], out: torch.Tensor) -> None:
        """Read elements of a blob into ``out``, starting at ``first``, with these strides."""
        if out.numel() == 0:
            return
        out, steps = _in_order_of_file(out, stride)
        if steps and steps[-1] == 0:  # an expanded view: each element is in the file once
            self._read_strided(blob, first, steps[:-1], out[..., 0])
            out[..., 1:] = out[..., :1]
            return
        itemsize = out.element_size()
        span = 1 + sum((size - 1) * step for size, step in zip(out.shape, steps, strict=True))
        if _is_row_major(steps, tuple(out.shape)) and out.is_contiguous():
            self._read_bytes(blob, first * itemsize, bytes_of(out))
        elif span * itemsize <= _GAP_BYTES or (span == out.numel() and out.dim() <= 1):
            self._read_with_gaps(blob, first, span, steps, out)
        elif out.dim() == 1:  # large gaps, or many elements: piece by piece
            size = max(1, _GAP_BYTES // itemsize // steps[0])
            for at in range(0, out.shape[0], size):
                self._read_strided(blob, first + at * steps[0], steps, out[at : at + size])
        else:
            for at in range(out.shape[0]):
                self._read_strided(blob, first + at * steps[0], steps[1:], out[at])

    def _read_with_gaps(self, blob: Blob, first: int, span: int, steps: tuple[int, ...], out: torch.Tensor) -> None:
        """Read a small range of the file, including the elements between the requested ones."""
        self.is_in_order = False
        itemsize = out.element_size()
        # Ranks with column shards read overlapping ranges, whose CRC32s cannot be summed: read all of a small record.
        is_small = blob.num_bytes <= _GAP_BYTES and blob.num_bytes % itemsize == 0
        start, numel = (0, blob.num_bytes // itemsize) if is_small else (first, span)
        buffer = torch.empty(numel, dtype=out.dtype)
        self._read_bytes(blob, start * itemsize, bytes_of(buffer))
        if first + span > start + numel:
            raise CheckpointError(f"{blob.path}: element {first + span} of a record of {numel} elements is needed")
        out.copy_(buffer.as_strided(out.shape, steps, first - start))

    def _read_bytes(self, blob: Blob, start: int, out: memoryview) -> None:
        """Read ``len(out)`` bytes of the blob, starting at byte ``start``."""
        if start < 0 or start + len(out) > blob.num_bytes:
            raise CheckpointError(
                f"{blob.path}: bytes {start} to {start + len(out)} of a record of {blob.num_bytes} bytes are needed"
            )
        file = self._files.get(blob.path)
        if file is None:
            if len(self._files) >= _MAX_OPEN_FILES:
                self.__exit__()
            file = self._files[blob.path] = self._stack.enter_context(opened(blob.path))
        crc, at = 0, 0
        while at < len(out):
            wanted = out[at : at + SLICE_BYTES]
            num_read = os.preadv(file.fileno(), [wanted], blob.offset + start + at)
            if num_read == 0:
                raise CheckpointError(f"{blob.path}: ends at byte {blob.offset + start + at}, needs {blob.end}")
            crc = zlib.crc32(wanted[:num_read], crc)
            at += num_read
        self.num_bytes += len(out)
        self.parts.append(ReadRange(blob, start, start + len(out), crc))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to it writes to the tensor, which must outlive it."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def materialized(value: Any, reader: Reader) -> Any:
    """Read the ``TensorRecord``s in a nested value as tensors."""
    return mapped(value, lambda part, _: reader.read_full(part) if isinstance(part, TensorRecord) else part)


def _is_row_major(stride: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(sizes, stride, row_major(sizes), strict=True))


def _in_order_of_file(out: torch.Tensor, stride: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view of ``out`` with dimensions ordered by decreasing stride in the file, and these strides.

    Dimensions of one element do not affect the order, and are removed.
    """
    order = sorted((dim for dim in range(out.dim()) if out.shape[dim] > 1), key=lambda dim: -stride[dim])
    steps = tuple(stride[dim] for dim in order)
    out = out.permute(order + [dim for dim in range(out.dim()) if dim not in order])
    return (out.flatten(len(order))[..., 0] if out.dim() > len(order) else out), steps


def _runs(shape: tuple[int, ...], box: Box, out: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Split a box of a contiguous tensor into contiguous ranges.

    Yields the index of the first element, and the part of ``out``.
    """
    inner = math.prod(shape[1:])
    if box.sizes[1:] == shape[1:]:
        yield (box.offsets[0] * inner if shape else 0), out
        return
    for row in range(box.sizes[0]):
        for start, view in _runs(shape[1:], Box(box.offsets[1:], box.sizes[1:]), out[row]):
            yield (box.offsets[0] + row) * inner + start, view
