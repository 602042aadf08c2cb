"""A checkpoint whose tensors can be read, on all ranks alike."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from composer_fsdp2.agreement import agree, gather
from composer_fsdp2.checkpoint.exchange import ranks_of_node
from composer_fsdp2.checkpoint.formats import compressed
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.locate import locate
from composer_fsdp2.errors import CheckpointError

__all__ = ["Opened", "opened_checkpoint", "together"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """An inventory, and whether its file is gone after the with block."""

    inventory: CheckpointInventory
    is_temporary: bool


@contextlib.contextmanager
def opened_checkpoint(path: str | Path, *, trust: bool = False) -> Iterator[Opened]:
    """Inspect a checkpoint; a compressed one is unpacked, once on each node, for the length of the with block.

    Raises:
        CheckpointError: on all ranks; see ``inspect_checkpoint``.
    Called on all ranks, or in one process without a group; gathers a word from each.
    """
    located = together(lambda: locate(path))
    if not any(gather(compressed.is_packed(located))):
        inventory = together(lambda: inspect_checkpoint(path, trust=trust), lambda found: found.layout)
        yield Opened(inventory, is_temporary=False)
        return
    first = ranks_of_node()[0]
    is_first = first == (dist.get_rank() if dist.is_initialized() else 0)
    folder = Path(tempfile.mkdtemp(prefix="composer_fsdp2-")) if is_first else None
    try:
        unpacked = together(lambda: compressed.unpacked(located, folder) if folder else None)
        file = gather(unpacked)[first]
        inventory = together(lambda: inspect_checkpoint(file, trust=trust), lambda found: found.layout)
        yield Opened(inventory, is_temporary=True)
        gather(None)  # until every rank has read
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def together(decide: Callable[[], T], fingerprint: Callable[[T], str] = lambda _: "") -> T:
    """``decide`` on all ranks; if it raises on one, all raise CheckpointError. See ``agree``."""

    def attempt() -> T:
        try:
            return decide()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or 'reading'}: {error.strerror or error}") from error

    return agree(attempt, fingerprint, CheckpointError)
