"""The layouts that ``convert`` writes, one file each: a state dict as files whose every byte has its place.

Each has ``lay_out(state, ...) -> tuple[OutputFile, ...]``, which reads no tensor and writes nothing. Tensors in the
state are ``Slot``s, whose ``source`` is the ``TensorRecord`` to read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from composer_fsdp2.checkpoint.inventory import TensorRecord
from composer_fsdp2.checkpoint.storage.archive_writer import Slot

__all__ = ["MAX_FILE_BYTES", "OutputFile", "TensorWrite", "num_files_for"]

# Where nobody says how many files: Hugging Face's limit for a shard.
MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A box of a tensor, row-major, at a place in a file."""

    slot: Slot
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int

    @classmethod
    def whole(cls, slot: Slot, at: int) -> "TensorWrite":
        return cls(slot, (0,) * len(slot.shape), slot.shape, at)

    @property
    def record(self) -> TensorRecord:
        assert isinstance(self.slot.source, TensorRecord)
        return self.slot.source

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.slot.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of a checkpoint to be.

    Args:
        name: Within the destination; '' where the destination is one file.
        writes: The tensors in it, in the order of their places.
        rest: From the CRC32s of ``writes``: all other bytes, as runs with their offsets.
    """

    name: str
    num_bytes: int
    writes: tuple[TensorWrite, ...]
    rest: Callable[[Sequence[int]], Iterator[tuple[int, bytes]]]

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> "OutputFile":
        return cls(name, len(content), (), lambda crcs: iter([(0, content)]))

    def path(self, destination: Path) -> Path:
        return destination / self.name if self.name else destination


def num_files_for(num_bytes: int) -> int:
    """As many as keep each within Hugging Face's limit."""
    return max(1, -(-num_bytes // MAX_FILE_BYTES))
