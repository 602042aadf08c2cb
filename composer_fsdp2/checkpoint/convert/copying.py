"""Copies tensor bytes from a checkpoint to their places in a plan, a few MiB at a time.

[Note: copy tasks] The plan is cut into tasks of about ``CHUNK_BYTES``, the same in every run: a task is read, cast and
written, and noted in the journal once it is written. Memory is a task's, whatever the size of a tensor. The CRC32
of a tensor is that of its parts, combined (``shifted``).
"""

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from composer_fsdp2.checkpoint.archive.disk import read_at, write_all
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import NestedArchive, Strided, TensorRecord
from composer_fsdp2.checkpoint.layouts._layout import OutputFile, TensorWrite
from composer_fsdp2.checkpoint.read import Reader, bytes_of
from composer_fsdp2.checkpoint.records import ReadRange, damage_of, ranges_by_record, shifted
from composer_fsdp2.config.text import lines_and_more
from composer_fsdp2.errors import CheckpointError

CHUNK_BYTES = 4 << 20
NUM_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a write that is contiguous in the file.

    Args:
        write: Its number in the file.
        at: Its first byte in the file.
        following: Bytes of the same write that come after it.
    """

    write: int
    box: Box
    at: int
    num_bytes: int
    following: int


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Segments of one file that are copied together."""

    number: int
    file: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Copied:
    """A finished task: the CRC32 of each of its segments as written, and the source's parts that were read."""

    crcs: tuple[int, ...]
    parts: tuple[ReadRange, ...]


def tasks_of(files: Sequence[OutputFile]) -> list[CopyTask]:
    """All work of a plan, in the order of the files."""
    tasks: list[CopyTask] = []
    for number, file in enumerate(files):
        waiting: list[Segment] = []
        waiting_bytes = 0
        for place, write in enumerate(file.writes):
            for segment in _segments(place, write):
                in_memory = segment.box.numel * _itemsize(write)
                if waiting and waiting_bytes + in_memory > CHUNK_BYTES:
                    tasks.append(CopyTask(len(tasks), number, tuple(waiting)))
                    waiting, waiting_bytes = [], 0
                waiting.append(segment)
                waiting_bytes += in_memory
        if waiting:
            tasks.append(CopyTask(len(tasks), number, tuple(waiting)))
    return tasks


def _segments(place: int, write: TensorWrite) -> Iterator[Segment]:
    at, left = write.at, write.num_bytes
    for box in write.box.pieces(max(1, CHUNK_BYTES // _itemsize(write))):
        if num_bytes := box.numel * write.slot.dtype.itemsize:
            left -= num_bytes
            yield Segment(place, box, at, num_bytes, left)
            at += num_bytes


def _itemsize(write: TensorWrite) -> int:
    """The bytes of an element in memory: before or after a cast, whichever is more."""
    return max(write.slot.dtype.itemsize, write.record.dtype.itemsize)


class Copier:
    """Copies tasks, in threads. Use it in a with block."""

    def __init__(self, files: Sequence[OutputFile]) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="copy")
        self._readers = [(Reader(), _Buffer()) for _ in range(NUM_THREADS)]  # those that no thread uses now

    def __enter__(self) -> "Copier":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._threads.shutdown(cancel_futures=True)
        for reader, _ in self._readers:
            reader.__exit__(*exception)

    def copy(self, tasks: Iterable[CopyTask], outputs: Mapping[int, IO[bytes]]) -> Iterator[tuple[CopyTask, Copied]]:
        """Read, cast and write; each task is yielded when it is written, in the order of the tasks.

        Args:
            outputs: The tasks' files by number, open for writing.
        Raises:
            CheckpointError: the source is damaged or too short.
            OSError: the destination cannot be written.
        """
        started: deque[tuple[CopyTask, Future[Copied]]] = deque()
        for task in tasks:
            started.append((task, self._threads.submit(self._copy, task, outputs[task.file])))
            if len(started) > NUM_THREADS:
                first, copied = started.popleft()
                yield first, copied.result()
        for task, copied in started:
            yield task, copied.result()

    def _copy(self, task: CopyTask, output: IO[bytes]) -> Copied:
        reader, buffer = self._readers.pop()
        try:
            buffer.clear()
            crcs: list[int] = []
            parts: list[ReadRange] = []
            for segment in task.segments:
                write = self._files[task.file].writes[segment.write]
                tensor, crc = _read(write, segment, reader, buffer)
                write_all(output, bytes_of(tensor), segment.at)
                crcs.append(crc)
                parts.extend(reader.parts)
            return Copied(tuple(crcs), tuple(parts))
        finally:
            self._readers.append((reader, buffer))


def _read(write: TensorWrite, segment: Segment, reader: Reader, buffer: "_Buffer") -> tuple[torch.Tensor, int]:
    """A segment as it is written, and its CRC32."""
    tensor = buffer.tensor(segment.box.sizes, write.record.dtype)
    reader.parts.clear()
    reader.is_in_order = True
    try:
        reader.read(write.record, segment.box, tensor)
    except OSError as error:
        raise CheckpointError(f"{write.record.name}: cannot be read: {error.strerror or error}") from error
    parts = reader.parts
    is_one_run = reader.is_in_order and len(parts) == 1 and parts[0].end - parts[0].start == segment.num_bytes
    if is_one_run and write.record.dtype == write.slot.dtype:
        return tensor, parts[0].crc32  # the same bytes as in the source
    tensor = tensor.to(write.slot.dtype)
    return tensor, zlib.crc32(bytes_of(tensor))


class _Buffer:
    """Memory for one task, used again and again: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start = -(-self._used // 16) * 16  # the widest dtype
        self._used = start + prod(shape) * dtype.itemsize
        if self._used > self._bytes.numel():
            return torch.empty(shape, dtype=dtype)
        return self._bytes[start : self._used].view(dtype).view(shape)


def is_written(task: CopyTask, copied: Copied, path: Path) -> bool:
    """Whether a file has the bytes that an earlier run recorded."""
    if len(copied.crcs) != len(task.segments):
        return False
    pairs = zip(task.segments, copied.crcs, strict=True)
    return all(zlib.crc32(read_at(path, segment.at, segment.num_bytes)) == crc for segment, crc in pairs)


def crcs_of_writes(
    file: int, files: Sequence[OutputFile], tasks: Sequence[CopyTask], copied: Mapping[int, Copied]
) -> list[int]:
    """The CRC32 of each write of a file, from those of its segments."""
    crcs = [0] * len(files[file].writes)
    for task in tasks:
        if task.file == file:
            for segment, crc in zip(task.segments, copied[task.number].crcs, strict=True):
                crcs[segment.write] ^= shifted(crc, segment.following)
    return crcs


def check_sources(parts: Iterable[ReadRange], files: Sequence[OutputFile]) -> int:
    """Compare the source's records with the CRC32s in the file.

    What of a record belongs to no tensor that was read (padding of a flat parameter, a neighbour in a shared storage)
    is read here: a CRC32 is of the entire record.

    Returns:
        Bytes of records that have none.
    Raises:
        CheckpointError: names the damaged records and their tensors.
    """
    by_record, unchecked = ranges_by_record(parts)
    problems = {blob: damage_of(blob, ranges) for blob, ranges in by_record.items()}
    if damaged := {blob: problem for blob, problem in problems.items() if problem is not None}:
        names = _names(damaged, files)
        lines = [
            f"{blob.path}: {', '.join(names[blob]) or f'the record at byte {blob.offset}'} ({problem})"
            for blob, problem in damaged.items()
        ]
        raise CheckpointError(
            "the source is damaged, or was changed while it was read; nothing was converted. Take another checkpoint, "
            f"or copy this one again\n{lines_and_more(lines, 20, '  ')}"
        )
    return unchecked


def _names(blobs: Mapping[Blob, Any], files: Sequence[OutputFile]) -> dict[Blob, list[str]]:
    """The tensors in records."""
    names: dict[Blob, list[str]] = {blob: [] for blob in blobs}
    for record in {id(write.record): write.record for file in files for write in file.writes}.values():
        for blob in _blobs(record):
            if blob in names:
                names[blob].append(record.name)
    return names


def _blobs(record: TensorRecord) -> Iterator[Blob]:
    if record.flat is not None:
        yield from _blobs(record.flat.flat)
    for chunk in record.chunks:
        if isinstance(chunk.source, Strided | NestedArchive):
            yield chunk.source.locate(chunk, record.dtype).blob
