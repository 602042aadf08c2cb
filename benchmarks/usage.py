"""What a call takes of a Linux machine: ``measured(call)``; and files that are in its page cache, or not."""

import concurrent.futures
import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Usage", "available_bytes", "drop_from_cache", "files_of", "in_new_process", "measured", "read_through"]

T = TypeVar("T")

# A process of its own, because a thread would wait for the interpreter's lock while a pickle or a header is read.
_WATCHER = """
import os, select, sys
status = os.open(f"/proc/{sys.argv[1]}/status", os.O_RDONLY)
def anonymous_bytes():
    return 1024 * int(os.pread(status, 8192, 0).partition(b"RssAnon:")[2].split(None, 1)[0])
first = peak = anonymous_bytes()
print("watching", flush=True)
while not select.select([0], [], [], 0.002)[0]:
    peak = max(peak, anonymous_bytes())
print(max(peak, anonymous_bytes()) - first)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one call took in its process.

    Args:
        processor_seconds: Of all its threads; programs beside it disturb this less.
        anonymous_bytes: The peak of anonymous memory (``RssAnon``, every 2 ms) beyond what was resident before; a
            mapped file is not in it.
        read_bytes: By ``read`` and its like (``rchar``), from the disk or the page cache; mapped files are not in it.
        disk_bytes: From the disk, mapped files too (``read_bytes``).
    """

    seconds: float
    processor_seconds: float
    anonymous_bytes: int
    read_bytes: int
    disk_bytes: int


def measured(call: Callable[[], T]) -> tuple[T, Usage]:
    """``call()``, and what it took in this process alone. Anything that was freed before is given back first."""
    gc.collect()
    # What the allocator kept would be used again without being seen.
    ctypes.CDLL(None).malloc_trim(0)
    with _watcher() as watcher:
        before, start, processor_start = _io(), time.perf_counter(), time.process_time()
        result = call()
        seconds, processor_seconds, after = time.perf_counter() - start, time.process_time() - processor_start, _io()
        peak, _ = watcher.communicate()
    return result, Usage(
        seconds=seconds,
        processor_seconds=processor_seconds,
        anonymous_bytes=int(peak),
        read_bytes=after["rchar"] - before["rchar"],
        disk_bytes=after["read_bytes"] - before["read_bytes"],
    )


@contextmanager
def _watcher() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-ISc", _WATCHER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        yield watcher


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def available_bytes() -> int:
    """Memory that new processes may have without swapping."""
    _, _, rest = Path("/proc/meminfo").read_text().partition("MemAvailable:")
    return 1024 * int(rest.split(None, 1)[0])


def in_new_process(function: Callable[[Any], T], argument: Any) -> T:
    """``function(argument)`` in a process that has imported torch and our package, and done nothing else."""
    context = multiprocessing.get_context("forkserver")  # imports once
    context.set_forkserver_preload(["composer_fsdp2.checkpoint.load.into_model"])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, argument).result()


def files_of(path: Path) -> list[Path]:
    """The file, or all files in the folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def drop_from_cache(path: Path) -> None:
    """Have the next read come from the disk. The machine below may still have a cache of its own."""
    for each in files_of(path):
        with open(each, "rb") as file:
            os.fsync(file.fileno())  # A page that is not on the disk yet stays.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path) -> float:
    """Read everything once, in order; bytes a second. Afterwards it is in the page cache, as far as that holds it."""
    buffer = bytearray(4 << 20)
    num_bytes, start = 0, time.perf_counter()
    for each in files_of(path):
        with open(each, "rb", buffering=0) as file:
            while num_read := file.readinto(buffer):
                num_bytes += num_read
    return num_bytes / (time.perf_counter() - start)
