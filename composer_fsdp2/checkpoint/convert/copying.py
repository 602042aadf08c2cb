"""Copy tensor bytes from a checkpoint to the locations in a plan, a few MiB at a time.

[Note: copy tasks] The plan is divided into tasks of about ``CHUNK_BYTES``, in the same way in every run. A task is
read, cast and written, and then recorded in the journal. Memory is that of a task, for any size of a tensor. The CRC32
of a tensor is combined from those of its parts (``shifted``).
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import read_at, write_all
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import NestedArchive, Strided, TensorRecord
from composer_fsdp2.checkpoint.layouts._layout import OutputFile
from composer_fsdp2.checkpoint.read import Reader, bytes_of
from composer_fsdp2.checkpoint.records import ReadRange, damage_of, ranges_by_record, shifted
from composer_fsdp2.config.text import lines_and_more
from composer_fsdp2.errors import CheckpointError

CHUNK_BYTES = 4 << 20
NUM_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A part of a tensor that is contiguous in the output file.

    Args:
        file: The index of the file.
        write: The index of the write in the file.
        at: The offset of the part's first byte in the file.
        following: The number of bytes of the same write that come after the part.
    """

    number: int
    file: int
    write: int
    box: Box
    at: int
    num_bytes: int
    following: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a task: the CRC32 of the written bytes, and the source's ranges that were read."""

    crc32: int
    parts: tuple[ReadRange, ...]


def tasks_of(files: Sequence[OutputFile]) -> list[CopyTask]:
    """The tasks of a plan, in the order of the files."""
    tasks: list[CopyTask] = []
    for number, file in enumerate(files):
        for place, write in enumerate(file.writes):
            itemsize = write.slot.dtype.itemsize
            at, end = write.at, write.at + write.num_bytes
            # The larger of the sizes before and after a cast.
            for box in write.box.pieces(max(1, CHUNK_BYTES // max(itemsize, write.record.dtype.itemsize))):
                if num_bytes := box.numel * itemsize:
                    tasks.append(CopyTask(len(tasks), number, place, box, at, num_bytes, end - at - num_bytes))
                    at += num_bytes
    return tasks


class Copier:
    """Executes tasks in threads. Use it in a with block."""

    def __init__(self, files: Sequence[OutputFile]) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="copy")
        # Unused buffers. Buffers are reused, because new pages cost more time than the copy.
        self._readers = [(Reader(), torch.empty(CHUNK_BYTES, dtype=torch.uint8)) for _ in range(NUM_THREADS)]

    def __enter__(self) -> "Copier":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._threads.shutdown(cancel_futures=True)
        for reader, _ in self._readers:
            reader.__exit__(*exception)

    def copy(self, tasks: Iterable[CopyTask], path: Callable[[int], Path]) -> Iterator[tuple[CopyTask, Copied]]:
        """Read, cast and write the tasks. Yields each task after it is written, in order.

        Args:
            path: Returns the path of a file by its index.
        Raises:
            CheckpointError: the source is damaged or too short.
            OSError: the destination cannot be written.
        """
        started: deque[tuple[CopyTask, Future[Copied]]] = deque()
        for task in tasks:
            started.append((task, self._threads.submit(self._copy, task, path(task.file))))
            if len(started) > NUM_THREADS:
                first, copied = started.popleft()
                yield first, copied.result()
        for task, copied in started:
            yield task, copied.result()

    def _copy(self, task: CopyTask, path: Path) -> Copied:
        write, (reader, buffer) = self._files[task.file].writes[task.write], self._readers.pop()
        try:
            reader.parts.clear()
            reader.is_in_order = True
            num_bytes = task.box.numel * write.record.dtype.itemsize
            tensor = buffer[:num_bytes].view(write.record.dtype).view(task.box.sizes)
            try:
                reader.read(write.record, task.box, tensor)
            except OSError as error:
                raise CheckpointError(f"{write.record.name}: cannot be read: {error.strerror or error}") from error
            parts = tuple(reader.parts)
            is_one_run = reader.is_in_order and len(parts) == 1 and parts[0].end - parts[0].start == task.num_bytes
            data = bytes_of(tensor := tensor.to(write.slot.dtype))
            with open(path, "r+b") as output:
                write_all(output, data, task.at)
            # Cast tensors have other bytes than the source.
            is_same = is_one_run and write.record.dtype == write.slot.dtype
            return Copied(parts[0].crc32 if is_same else zlib.crc32(data), parts)
        finally:
            self._readers.append((reader, buffer))


def is_written(task: CopyTask, copied: Copied, path: Path) -> bool:
    """Whether a file has the bytes that an earlier run recorded for a task."""
    return zlib.crc32(read_at(path, task.at, task.num_bytes)) == copied.crc32


def crcs_of_writes(
    file: int, files: Sequence[OutputFile], tasks: Sequence[CopyTask], copied: Mapping[int, Copied]
) -> list[int]:
    """The CRC32 of each write of a file, combined from those of its tasks."""
    crcs = [0] * len(files[file].writes)
    for task in tasks:
        if task.file == file:
            crcs[task.write] ^= shifted(copied[task.number].crc32, task.following)
    return crcs


def check_sources(parts: Iterable[ReadRange], files: Sequence[OutputFile]) -> int:
    """Compare the source's records with the CRC32s in the file.

    A CRC32 covers the entire record. Bytes of a record that no task has read (padding of a flat parameter, another
    tensor in a shared storage) are therefore read here.

    Returns:
        The number of bytes of records without a CRC32.
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
