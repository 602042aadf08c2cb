"""Composer with FSDP1, the reference, on the CPU; and with ours: ``with FSDP1(): ...``, ``with FSDP2(): ...``.

Imports Composer only when used on the ranks, so that collecting the tests stays cheap.
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
    """Composer as it is: it asks for a CUDA device, also to fill meta tensors, and FSDP1 takes any."""
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
    """FSDP1 with full state on the CPU: torch frees what it moves there, and it was there already."""
    stays = contextlib.nullcontext()
    with FSDP1(), mock.patch("torch.distributed.fsdp._flat_param.FlatParamHandle.to_cpu", return_value=stays):
        yield


# Composer as it is; without a parallelism_config it trains whole models (DDP).
UNSHARDED: Under = contextlib.nullcontext
# With FSDP1, by the type of device; on the CPU Composer has to be told that there is no GPU.
FSDP1_ON: dict[str, Under] = {"cuda": UNSHARDED, "cpu": FSDP1}


@contextlib.contextmanager
def FSDP2() -> Iterator[None]:
    """Composer with the shim."""
    from composer_fsdp2.compat import fsdp2

    with few_modules(), fsdp2():
        yield


def few_modules() -> AbstractContextManager[Any]:
    """The shim replaces names where they can be bound: to go through all 7,000 modules takes longer than to train a
    batch. ``test_install.py`` looks at every one."""
    from composer_fsdp2.compat import seams

    return mock.patch.object(seams, "sys", _Modules())


class _Modules:
    """In place of ``sys``: without the modules of installed packages that know nothing of Composer."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if not _is_stranger(name.partition(".")[0])}


@functools.cache
def _is_stranger(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in ("composer", "llmfoundry") and path.startswith((sys.prefix, sys.base_prefix))
