"""What a checkpoint is, from its metadata."""

from pathlib import Path

from composer_fsdp2.checkpoint.formats import formats
from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.locate import locate
from composer_fsdp2.errors import CheckpointError

__all__ = ["inspect_checkpoint"]


def inspect_checkpoint(path: str | Path, *, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint of any layout, without reading tensor data or running a pickle.

    Raises:
        CheckpointError: there is nothing, it is of no known layout, or its metadata is damaged.
    """
    located = locate(path)
    for layout in formats():
        if layout.recognise(located):
            return layout.read(located, trust=trust)
    raise CheckpointError(f"{located}: of no layout that Composer wrote")
