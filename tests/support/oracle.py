"""Composer with FSDP1, the reference, on the CPU, and with FSDP2: ``with FSDP1(): ...``, ``with FSDP2(): ...``.

Imports Composer only on the ranks, to keep test collection fast.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

Under = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def FSDP1() -> Iterator[None]:
    """Unmodified Composer, which requires a CUDA device, also to fill meta tensors; FSDP1 accepts any device."""
    to_empty = nn.Module.to_empty

    def to_empty_on_cpu(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        return to_empty(self, device="cpu", recurse=recurse)

    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch.object(nn.Module, "to_empty", to_empty_on_cpu),
    ):
        yield


@contextlib.contextmanager
def FSDP1_saving() -> Iterator[None]:
    """FSDP1 with full state on the CPU: torch frees tensors after moving them to the CPU, where they already are."""
    stays = contextlib.nullcontext()
    with FSDP1(), mock.patch("torch.distributed.fsdp._flat_param.FlatParamHandle.to_cpu", return_value=stays):
        yield


# Unmodified Composer; without a parallelism_config it trains unsharded models (DDP).
UNSHARDED: Under = contextlib.nullcontext
# With FSDP1, by device type; on the CPU Composer's check for a GPU is overridden.
FSDP1_ON: dict[str, Under] = {"cuda": UNSHARDED, "cpu": FSDP1}


@contextlib.contextmanager
def FSDP2() -> Iterator[None]:
    """Composer with the shim."""
    from composer_fsdp2.compat import fsdp2

    with few_modules(), fsdp2():
        yield


def few_modules() -> AbstractContextManager[Any]:
    """The shim replaces functions in all modules that import them. Checking all 7,000 modules takes longer than
    training a batch, so only a few are checked here. ``test_install.py`` covers all."""
    from composer_fsdp2.compat import seams

    return mock.patch.object(seams, "sys", _Modules())


class _Modules:
    """Replaces ``sys``: omits the modules of installed packages that do not use Composer."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if not _is_stranger(name.partition(".")[0])}


@functools.cache
def _is_stranger(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in ("composer", "llmfoundry") and path.startswith((sys.prefix, sys.base_prefix))
