"""Tests on the GPUs that a machine has, and the same bodies on the CPU: ``@on_gpus(4)``, then ``ranks.run(check)``.

    def check_sum(device):  # top-level, so that a rank can import it
        tensor = torch.ones((), device=device)
        dist.all_reduce(tensor)
        return tensor.item()

    @on_gpus(2)
    def test_sum(ranks):
        assert ranks.run(check_sum) == [2, 2]

That is two tests: ``test_sum[gpus]``, marked ``gpu``, with one rank for each GPU over NCCL, and ``test_sum[rehearsal]``
on the CPU over gloo, which shows wherever there is no GPU that the body is not broken. A test whose GPUs or packages
are missing is skipped, and its reason names them: ``tools/gpu.py`` sums those up.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

Recorder = Callable[[str, object], None]  # pytest's fixture record_property

TIME_LIMIT_S = 480.0  # a hang; pytest's own is 600 s


@dataclass(frozen=True)
class Ranks:
    """Where a test's body runs: one rank for each device."""

    device: str  # "cuda" or "cpu"
    number: int

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    def run(self, check: Callable[..., Any], *args: Any, timeout_s: float = TIME_LIMIT_S, **options: Any) -> list[Any]:
        """Return ``check(device, *args)`` of every rank, in rank order, as ``run_ranks`` does with these options."""
        backend = "gloo" if self.is_rehearsal else "nccl"
        return run_ranks(check, self.number, self.device, *args, timeout_s=timeout_s, backend=backend, **options)

    def record(self, record_property: Recorder, table: str, cells: dict[str, str]) -> None:
        """Put a row of measurements into pytest's report, whence tools/gpu.py takes it; of a rehearsal nothing.

        Args:
            record_property: pytest's fixture.
            table: What the rows of its name are about.
            cells: By column.
        """
        if not self.is_rehearsal:
            record_property(f"table: {table}", json.dumps({"GPUs": str(self.number), **cells}))


def on_gpus(
    at_least: int,
    at_most: int | None = None,
    *,
    packages: tuple[str, ...] = (),
    capability: tuple[int, int] = (0, 0),
    disk_gib: int = 0,
    rehearsal: int | None = None,
    slow: bool = False,
    slow_rehearsal: bool = False,
) -> pytest.MarkDecorator:
    """Give a test its ``ranks``: on the machine's GPUs, and once more on the CPU.

    Args:
        at_least: GPUs that it needs.
        at_most: GPUs that it uses where there are more; by default not more.
        packages: What must be installed beside torch, by the name that pip knows.
        capability: The least compute capability, for what only newer GPUs have.
        disk_gib: What must be free where temporary files lie, on the GPUs.
        rehearsal: Ranks on the CPU, by default ``at_most``; 0 for a body that cannot run there.
        slow: On GPUs left to `make gpu` and `make test-all`.
        slow_rehearsal: On the CPU left to `make test-all`.
    """
    at_most = at_most or at_least
    number = max(at_least, min(at_most, _num_gpus()))
    reason = lacking(at_least, packages, capability, disk_gib)
    marks = _marks(reason) + ([pytest.mark.slow] if slow else [])
    places = [pytest.param(Ranks("cuda", number), id="gpus", marks=marks)]
    if rehearsal != 0:
        absent = _absent(packages)
        skip = pytest.mark.skipif(bool(absent), reason=f"needs {'; '.join(absent)}")
        on_cpu = [skip, *([pytest.mark.slow] if slow_rehearsal else [])]
        places.append(pytest.param(Ranks("cpu", rehearsal or at_most), id="rehearsal", marks=on_cpu))
    return pytest.mark.parametrize("ranks", places)


@contextlib.contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """torch raises where the processor would wait for the GPU. On the CPU there is nothing to wait for."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_marks(at_least: int = 1) -> list[pytest.MarkDecorator]:
    """For a test that starts its ranks itself: marked ``gpu``, and skipped where there are not so many."""
    return _marks(lacking(at_least))


def lacking(
    num_gpus: int, packages: tuple[str, ...] = (), capability: tuple[int, int] = (0, 0), disk_gib: int = 0
) -> str:
    """All that this machine lacks for a test, after "needs"; '' for nothing."""
    lacks = [*_absent(packages), *_absent_gpus(num_gpus)]
    if not _why_no_gpu() and _capability() < capability:
        lacks.append("compute capability {}.{}, the devices have {}.{}".format(*capability, *_capability()))
    free_gib = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    if free_gib < disk_gib:
        lacks.append(f"{disk_gib} GiB of disk for temporary files (TMPDIR), {free_gib:.0f} GiB are free")
    return f"needs {'; '.join(lacks)}" if lacks else ""


def _absent_gpus(num_gpus: int) -> list[str]:
    wanted = f"{num_gpus} CUDA device{'s' if num_gpus > 1 else ''}"
    if why_not := _why_no_gpu():
        return [f"{wanted}, {why_not}"]
    visible = _num_gpus()
    return [f"{wanted}, {visible} {'is' if visible == 1 else 'are'} visible"] if visible < num_gpus else []


def _marks(reason: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]


def _absent(packages: tuple[str, ...]) -> list[str]:
    """The distributions that are not installed; not by import, which takes seconds and might find a folder of tests."""
    return [name for name in packages if not any(metadata.distributions(name=name))]


@functools.cache
def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "none is visible"
    if not dist.is_nccl_available():
        return "torch is built without NCCL"
    return ""


@functools.cache
def _num_gpus() -> int:
    return torch.cuda.device_count()


@functools.cache
def _capability() -> tuple[int, int]:
    return min(torch.cuda.get_device_capability(number) for number in range(_num_gpus()))
