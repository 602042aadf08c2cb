"""The CRC32 of what lies in a checkpoint's files, computed on all of them in pieces."""

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.archive.crc import shifted
from composer_fsdp2.checkpoint.archive.disk import opened
from composer_fsdp2.checkpoint.archive.torch_archive import Blob
from composer_fsdp2.errors import CheckpointError

_SLICE_BYTES = 256 << 10  # one read, small enough to lie in the cache when its CRC is computed
_PIECE_BYTES = 64 << 20  # what one thread takes at a time
_NUM_THREADS = 2  # a copy from the page cache takes about as long as the CRC


def checksums(blobs: list[Blob], advance: Callable[[int], None]) -> tuple[list[int], dict[Path, str]]:
    """The CRC32 of each run of bytes, and what went wrong in reading a file; the caller works as one of the threads."""
    crcs, errors = [0] * len(blobs), dict[Path, str]()
    pieces, lock = _pieces(blobs), threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(_SLICE_BYTES))
        with ExitStack() as stack:
            file: Any = None
            path: Path | None = None
            while True:
                with lock:
                    number, start, end = next(pieces, (-1, 0, 0))
                if number < 0:
                    return
                blob = blobs[number]
                try:
                    if path != blob.path:
                        stack.close()
                        path, file = blob.path, stack.enter_context(opened(blob.path))
                    crc = _checksum(file.fileno(), blob.offset + start, end - start, buffer)
                except (OSError, CheckpointError) as error:
                    path = None
                    with lock:
                        errors[blob.path] = str(error)
                    continue
                with lock:
                    crcs[number] ^= shifted(crc, blob.num_bytes - end)
                advance(end - start)

    others = [threading.Thread(target=work, daemon=True) for _ in range(_NUM_THREADS - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    return crcs, errors


def _pieces(blobs: Iterable[Blob]) -> Iterator[tuple[int, int, int]]:
    """(number of the blob, start, end), small enough to be shared out."""
    for number, blob in enumerate(blobs):
        for start in range(0, blob.num_bytes, _PIECE_BYTES):
            yield number, start, min(start + _PIECE_BYTES, blob.num_bytes)


def _checksum(fd: int, offset: int, num_bytes: int, buffer: memoryview) -> int:
    crc, end = 0, offset + num_bytes
    while offset < end:
        num_read = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
        if num_read == 0:
            raise OSError(f"the file ends at byte {offset}")
        crc = zlib.crc32(buffer[:num_read], crc)
        offset += num_read
    return crc
