"""The on-disk layouts, one file each; a file in this folder is found by being here, and nothing else names it.

Each file has one ``LAYOUT``, which is all that load, save, convert and verify know of it: they work on inventories.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.output import Output, WriteRequest
from composer_fsdp2.checkpoint.trees import EntryPath

__all__ = ["Layout", "LayoutWriter", "layouts", "recognized", "written_layouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutWriter:
    """How ``convert_checkpoint`` writes a layout.

    Args:
        word: What its ``to`` says.
        lay_out: Every byte's place; reads no tensor, and writes nothing. Raises CheckpointError.
        max_files: More than so many ``files`` are refused; None where tensors are split over any number.
        holds_only, name_prefix: As in the ``CheckpointInventory`` of what is written.
        by_name: Optimizer state is stored by parameters' names, never by position.
    """

    word: str
    lay_out: Callable[[WriteRequest], Output]
    max_files: int | None = None
    holds_only: EntryPath | None = None
    name_prefix: str = ""
    by_name: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One form that a checkpoint has on disk.

    Args:
        name: As ``inspect`` says it.
        title: What reports call the layout of the checkpoint at a path, where that says more than ``name`` does
            (``monolithic, compressed (gz)``); None where they show the name.
        order: Layouts with a lower one are asked earlier.
        recognize: By names and first bytes; never raises for other files.
        read: From a recognized path, and whether its pickles are trusted. Raises CheckpointError.
        incomplete: Of a recognized path: why its save was cut short, at a glance; None if it was not.
        unpack: Writes the checkpoint that is in a file into a folder, and gives its path; None where it lies open.
        reads_in_place: Tensors can be read without unpacking.
        holds_entries: Whether a file of a folder holds archives, one after another, which the folder's metadata names.
        files_beside: Of a recognized file: the files that belong to the same checkpoint, there or not.
        has_names: Whether a folder with files of these names, relative to it, is a checkpoint of this layout.
        metadata: The file of a folder that tells what the others are, where it alone can be read first; or ''.
        read_metadata: As ``read``, where of the folder perhaps only ``metadata`` is there yet.
        written: How it is written; None where nothing writes it any more.
    """

    name: str
    order: int
    recognize: Callable[[Path], bool]
    read: Callable[[Path, bool], CheckpointInventory]
    title: Callable[[Path], str] | None = None
    incomplete: Callable[[Path], str | None] = lambda path: None
    unpack: Callable[[Path, Path], Path] | None = None
    reads_in_place: bool = True
    holds_entries: Callable[[Path], bool] = lambda file: False
    files_beside: Callable[[Path], Sequence[Path]] = lambda path: ()
    has_names: Callable[[Collection[str]], bool] = lambda names: False
    metadata: str = ""
    read_metadata: Callable[[Path, bool], CheckpointInventory] | None = None
    written: LayoutWriter | None = None

    def title_of(self, path: Path) -> str:
        return self.name if self.title is None else self.title(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_name, (self.name,)  # every rank has the same ones


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """Every layout, in the order in which they are asked."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    modules: list[Any] = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(sorted((module.LAYOUT for module in modules), key=lambda layout: layout.order))


def _of_name(name: str) -> Layout:
    return next(layout for layout in layouts() if layout.name == name)


def recognized(path: Path) -> Layout | None:
    """The layout of a file or folder; None if it is not a checkpoint."""
    return next((layout for layout in layouts() if layout.recognize(path)), None)


def written_layouts() -> dict[str, LayoutWriter]:
    """The layouts that ``convert_checkpoint`` writes, by their words."""
    return {layout.written.word: layout.written for layout in layouts() if layout.written is not None}
