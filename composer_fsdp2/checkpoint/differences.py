"""Differences of a checkpoint from a model or from another checkpoint, and faults of a checkpoint, as values."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from composer_fsdp2.config.text import lines_and_more
from composer_fsdp2.config.value import Value


class DifferenceKind(enum.Enum):
    """The kind of a difference. Those with ``is_fatal`` raise even with ``strict=False``."""

    MISSING = "missing"
    SURPLUS = "surplus"
    SHAPE = "shape"
    DTYPE = "dtype"
    TYPE = "type"
    TIED = "tied"
    GROUPS = "param_groups"
    OPTIMIZER = "optimizer"

    @property
    def is_fatal(self) -> bool:
        return self not in (DifferenceKind.MISSING, DifferenceKind.SURPLUS, DifferenceKind.DTYPE)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: an entry that is missing, unexpected, or has a wrong shape, dtype or value."""

    kind: DifferenceKind
    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.name}: found {self.found}, expected {self.expected}"


def can_cast(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast preserves the kind of values: floats to floats, integers to integers."""

    def kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
        return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool

    return kind(found) == kind(wanted)


def names_by(kind: DifferenceKind, differences: Iterable[Difference]) -> list[str]:
    """What the differences of one kind are about."""
    return [each.name for each in differences if each.kind is kind]


def listed(differences: Iterable[Difference]) -> str:
    """Format one difference per line. Of many, list the first ones and the number of the others."""
    return lines_and_more([str(difference) for difference in differences], 50, "  ")


class FaultKind(enum.Enum):
    """The part of a checkpoint that is damaged."""

    STRUCTURE = "structure"  # files, offsets, headers and the metadata contradict each other
    CONTENT = "content"  # bytes contradict their CRC32
    DIFFERENCE = "difference"  # from another checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Value):
    """One fault of a checkpoint.

    Args:
        name: The tensor, entry or record; '' for the file itself.
    """

    kind: FaultKind
    file: Path
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.name}" if self.name else str(self.file)
        return f"{where}: expected {self.expected}, found {self.found}"
