"""The on-disk layouts, one file each; load, save, convert and verify know only this list: they work on inventories."""

from pathlib import Path

from composer_fsdp2.checkpoint.layouts import (
    composer_package,
    dcp,
    monolithic,
    packed,
    per_rank,
    safetensors,
)
from composer_fsdp2.checkpoint.layouts._layout import Layout, LayoutWriter

__all__ = ["LAYOUTS", "Layout", "LayoutWriter", "recognized", "written_layouts"]

# In the order in which ``recognized`` tries them.
LAYOUTS: tuple[Layout, ...] = (
    dcp.LAYOUT,
    composer_package.LAYOUT,  # whose parts may be DCP directories
    safetensors.LAYOUT,
    per_rank.LAYOUT,
    monolithic.LAYOUT,  # whose files look like one rank's
    packed.LAYOUT,
)


def recognized(path: Path) -> Layout | None:
    """The layout of a file or folder; None if it is not a checkpoint."""
    return next((layout for layout in LAYOUTS if layout.recognize(path)), None)


def written_layouts() -> dict[str, LayoutWriter]:
    """The layouts that ``convert_checkpoint`` writes, by the names that its ``to`` takes."""
    return {layout.written.name: layout.written for layout in LAYOUTS if layout.written is not None}
