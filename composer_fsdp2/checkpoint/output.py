"""A checkpoint to be: files whose every byte has its place, before any tensor is read.

Tensors in a state are ``Slot``s, whose ``source`` is the ``TensorRecord`` to read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.writer import Slot
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord

# Where nobody says how many files: Hugging Face's limit for a shard.
_MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A box of a tensor, row-major, at a place in a file."""

    slot: Slot
    box: Box
    at: int

    @classmethod
    def full(cls, slot: Slot, at: int) -> "TensorWrite":
        return cls(slot, Box.full(slot.shape), at)

    @property
    def record(self) -> TensorRecord:
        assert isinstance(self.slot.source, TensorRecord)
        return self.slot.source

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.slot.dtype.itemsize


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """What a layout is asked to lay out.

    Args:
        inventory: The source.
        state: ``{'state': {...}, 'rng': [...]}`` with a ``Slot`` for each tensor.
        dtype: What the weights are cast to; None if they are not.
        num_files: Over which tensors are split; None lets the layout choose.
        renamed: Parameters: from the name in the source.
    """

    inventory: CheckpointInventory
    state: Mapping[str, Any]
    dtype: torch.dtype | None
    num_files: int | None
    renamed: Mapping[str, str]

    @property
    def model(self) -> dict[str, Any]:
        """The model's entries; Slots but for extra state."""
        found: dict[str, Any] = self.state.get("state", {}).get("model", {})
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A layout's answer.

    Args:
        renamed: As in the request, after the layout's own renaming.
        dropped: Keys of the state that have no place in the layout.
        remarks: What else the user should know.
    """

    files: tuple[OutputFile, ...]
    renamed: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def num_files_for(num_bytes: int) -> int:
    """The number of files that keeps each within Hugging Face's limit."""
    return max(1, -(-num_bytes // _MAX_FILE_BYTES))
