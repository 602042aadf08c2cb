"""Limits on the memory and the number of objects that a checkpoint's metadata may take, even if its files are small.

[Note: budgets] A pickle, a directory or a JSON text of a few MiB can describe gigabytes of objects. Before it creates
objects, each reader spends from a budget that does not depend on the file's own claims: a base, plus an amount for each
byte that is actually on disk. The number of objects also limits the time; a limit in seconds would reject healthy files
on slow disks.
"""

from dataclasses import dataclass

from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.errors import CheckpointError

BASE_BYTES = 384 << 20
BASE_OBJECTS = 1_000_000
_BYTES_PER_BYTE = 1 / 8  # a sharded checkpoint of 512 ranks: 2 GiB of objects for the metadata of some 100 GB


class OverBudgetError(CheckpointError):
    """Reading would take more memory or time than any valid checkpoint of that size needs."""


@dataclass(slots=True)
class Budget:
    """The remaining budget of one reader.

    Args:
        where: The file, for the error.
        total: The initial budget, for the error.
    """

    where: str
    total: str
    num_bytes: float
    num_objects: float

    @classmethod
    def of(cls, where: object, disk_bytes: int = 0, *, more_bytes: float = 0, more_objects: int = 0) -> "Budget":
        """The budget for a file or folder with this number of bytes on disk."""
        num_bytes, num_objects = BASE_BYTES + _BYTES_PER_BYTE * disk_bytes + more_bytes, BASE_OBJECTS + more_objects
        return cls(str(where), f"{human_bytes(int(num_bytes))}, {num_objects} objects", num_bytes, num_objects)

    def spend(self, what: str, *, num_bytes: float = 0, num_objects: int = 0) -> None:
        """Raises OverBudgetError: more than is left; names ``what``."""
        self.num_bytes -= num_bytes
        self.num_objects -= num_objects
        if min(self.num_bytes, self.num_objects) < 0:
            raise OverBudgetError(
                f"{self.where}: refused: {what} would take more memory or time than a checkpoint of its size needs "
                f"({self.total})"
            )
