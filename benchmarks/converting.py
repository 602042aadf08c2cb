"""A checkpoint copied, converted and verified by one process: ``convert(task)`` and ``verify(task)``."""

import os
import subprocess
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from usage import Usage, files_of, measured

__all__ = ["CONVERTERS", "ConvertTask", "VerifyTask", "convert", "crc32_rate", "verify", "write_rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertTask:
    """One conversion (or copy), by one of ``CONVERTERS``."""

    converter: str
    source: Path
    destination: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTask:
    path: Path
    against: Path | None = None


def convert(task: ConvertTask) -> Usage:
    """What it took until all of it was on the disk; made for a new process."""
    warnings.simplefilter("ignore")  # torch's of itself
    call = CONVERTERS[task.converter]()  # with all that it imports

    def to_the_disk() -> None:
        call(task.source, task.destination)
        sync(task.destination)

    _, usage = measured(to_the_disk)
    return usage


def sync(path: Path) -> None:
    """Wait until a file, or all in a folder, is on the disk."""
    for each in files_of(path):
        with open(each, "rb") as file:
            os.fsync(file.fileno())


_Call = Callable[[Path, Path], object]


def _copy() -> _Call:
    # Byte by byte: a file system that can share the blocks of both would copy nothing.
    return lambda source, destination: subprocess.run(["cp", "--reflink=never", source, destination], check=True)


def _ours(to: str) -> _Call:
    from composer_fsdp2 import convert_checkpoint

    return lambda source, destination: convert_checkpoint(source, destination, to=to)


def _torch_to_dcp() -> _Call:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    return torch_save_to_dcp


def _torch_to_monolithic() -> _Call:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return dcp_to_torch_save


CONVERTERS: dict[str, Callable[[], _Call]] = {
    "cp": _copy,
    "ours to DCP": lambda: _ours("dcp"),
    "ours to monolithic": lambda: _ours("monolithic"),
    "torch to DCP": _torch_to_dcp,
    "torch to monolithic": _torch_to_monolithic,
}


def verify(task: VerifyTask) -> Usage:
    """What it took; SystemExit if the checkpoint is not in order, or not equal to the other one."""
    from composer_fsdp2 import verify_checkpoint

    report, usage = measured(lambda: verify_checkpoint(task.path, task.against))
    if not report.ok:
        raise SystemExit(str(report))
    return usage


def crc32_rate(num_bytes: int) -> float:
    """Bytes a second of one thread, out of the processor's cache."""
    data = os.urandom(1 << 20)
    start = perf_counter()
    for _ in range(max(1, num_bytes >> 20)):
        zlib.crc32(data)
    return max(1, num_bytes >> 20) * len(data) / (perf_counter() - start)


def write_rate(path: Path, num_bytes: int) -> float:
    """Bytes a second, until they are on the disk; the file is removed."""
    data = os.urandom(4 << 20)
    start = perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(max(1, num_bytes // len(data))):
            file.write(data)
        os.fsync(file.fileno())
    rate = max(1, num_bytes // len(data)) * len(data) / (perf_counter() - start)
    path.unlink()
    return rate
