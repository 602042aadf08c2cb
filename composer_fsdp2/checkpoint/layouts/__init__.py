"""The on-disk layouts, one module each. Load, save, convert and verify use inventories, which all layouts share."""

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
from composer_fsdp2.config.text import and_more

__all__ = ["LAYOUTS", "Layout", "LayoutWriter", "listing", "recognized", "unrecognized", "written_layouts"]

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


def unrecognized(path: Path) -> str:
    """Describe a path that is not a checkpoint, for an error message."""
    if path.is_dir():
        return f"no checkpoint of a known layout; the folder holds {listing(path)}"
    if not path.is_file():  # opening a pipe would block
        return "neither a file nor a folder, but a pipe, a socket or a device"
    with open(path, "rb") as file:
        head = file.read(40)
    return f"no checkpoint of a known layout; it begins with {head!r}" if head else "empty: its save was cut short"


def listing(folder: Path) -> str:
    """The first names in a folder."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return and_more(names, 8) or "nothing"
