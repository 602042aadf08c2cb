"""A test whose body runs on several ranks: ``@on_ranks(2)``.

    @on_ranks(2)
    def test_sum(folder):  # the test's tmp_path, the same on all ranks
        total = torch.tensor(1)
        dist.all_reduce(total)
        assert total.item() == 2, total

The folder argument is optional. Its options are those of ``run_ranks``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.ranks import run_ranks


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[[Path], None]]:
    def decorate(body: Callable[..., None]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            if dist.is_initialized():  # on a rank, which looks the test up by its name
                body(*([os.fspath(tmp_path)] if inspect.signature(body).parameters else []))
            else:
                run_ranks(test, world_size, tmp_path, **options)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        return test

    return decorate
