"""What is wrong with a checkpoint, as data: where, of what, what should be there and what is."""

import enum
from dataclasses import dataclass
from pathlib import Path

from composer_fsdp2.config.value import Value


class FaultKind(enum.Enum):
    """The part of a checkpoint in which a fault shows."""

    STRUCTURE = "structure"  # files, offsets, headers and the metadata contradict each other
    CONTENT = "content"  # bytes contradict their CRC32
    DIFFERENCE = "difference"  # from another checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Value):
    """One fault.

    Args:
        name: The tensor, entry or record; '' where it is the file.
    """

    kind: FaultKind
    file: Path
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.name}" if self.name else str(self.file)
        return f"{where}: expected {self.expected}, found {self.found}"
