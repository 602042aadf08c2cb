"""Tests on the machine's GPUs, and with the same bodies on the CPU: ``@on_gpus(4)``, then ``ranks.run(check)``.

    def check_sum(device):  # top-level, so that a rank can import it
        tensor = torch.ones((), device=device)
        dist.all_reduce(tensor)
        return tensor.item()

    @on_gpus(2)
    def test_sum(ranks):
        assert ranks.run(check_sum) == [2, 2]

This defines two tests: ``test_sum[gpus]``, marked ``gpu``, with one rank for each GPU over NCCL, and
``test_sum[rehearsal]`` on the CPU over gloo, which tests the body on machines without a GPU. A test is skipped if GPUs
or packages are missing, and its reason names them; ``tools/gpu.py`` summarizes these.
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
    """The ranks of a test's body: one for each device."""

    device: str  # "cuda" or "cpu"
    number: int

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    def run(self, check: Callable[..., Any], *args: Any, timeout_s: float = TIME_LIMIT_S, **options: Any) -> list[Any]:
        """Return ``check(device, *args)`` of every rank, in rank order, with the options of ``run_ranks``."""
        backend = "gloo" if self.is_rehearsal else "nccl"
        return run_ranks(check, self.number, self.device, *args, timeout_s=timeout_s, backend=backend, **options)

    def record(self, record_property: Recorder, table: str, cells: dict[str, str]) -> None:
        """Put a row of measurements into pytest's report, which tools/gpu.py reads; a rehearsal records nothing.

        Args:
            record_property: pytest's fixture.
            table: The title of the table for these rows.
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
    """Pass a test its ``ranks``: on the machine's GPUs, and once more on the CPU.

    Args:
        at_least: The number of GPUs required.
        at_most: The number of GPUs used if the machine has more; ``at_least`` by default.
        packages: Required packages beside torch, by their pip names.
        capability: The minimum compute capability.
        disk_gib: Free space required in the folder of temporary files, on GPUs.
        rehearsal: Ranks on the CPU, by default ``at_most``; 0 for a body that cannot run there.
        slow: On GPUs, run only in `make gpu` and `make test-all`.
        slow_rehearsal: On the CPU, run only in `make test-all`.
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
    """torch raises if the host would synchronize with the GPU. On the CPU nothing synchronizes."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_marks(at_least: int = 1) -> list[pytest.MarkDecorator]:
    """For a test that starts its ranks itself: marked ``gpu``, and skipped with fewer GPUs."""
    return _marks(lacking(at_least))


def lacking(
    num_gpus: int, packages: tuple[str, ...] = (), capability: tuple[int, int] = (0, 0), disk_gib: int = 0
) -> str:
    """The missing requirements of a test, after "needs"; '' for none."""
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
    """Packages that are not installed; without importing them, which takes seconds and might find a folder of tests."""
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
