"""The on-disk layouts, one file each; a file in this folder is found by being here.

Each file has::

    NAME = "monolithic"                                 # as inspect says it
    ORDER = 10                                          # asked earlier than those with a higher one
    def recognise(path) -> bool                         # by names and first bytes; never raises for foreign files
    def incomplete(path) -> str | None                  # of a recognised one: why its save was cut short, at a glance
    def read(path, *, trust) -> CheckpointInventory     # raises CheckpointError

and serves one layout to everything else: load, convert and verify know inventories only.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Protocol, cast

from composer_fsdp2.checkpoint.inventory import CheckpointInventory

__all__ = ["Format", "formats"]


class Format(Protocol):
    """What a file of this folder offers."""

    NAME: str
    ORDER: int

    def recognise(self, path: Path) -> bool: ...

    def incomplete(self, path: Path) -> str | None: ...

    def read(self, path: Path, *, trust: bool) -> CheckpointInventory: ...


def formats() -> list[Format]:
    """Every layout, in the order in which they are asked."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [cast(Format, importlib.import_module(f"{__name__}.{name}")) for name in names]
    return sorted(found, key=lambda layout: layout.ORDER)
