"""The interface of a layout: one format of a checkpoint on disk, and how it is read and written."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from composer_fsdp2.checkpoint.archive.disk import Folder
from composer_fsdp2.checkpoint.archive.writer import Slot
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord
from composer_fsdp2.checkpoint.trees import EntryPath

# If the number of files is not set: Hugging Face's limit for a shard.
_MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A box of a tensor, written row-major at an offset of a file."""

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
    """One file of a checkpoint to write.

    Args:
        name: The path in the destination; '' if the destination is one file.
        writes: The tensors in it, ordered by offset.
        rest: Called with the CRC32s of ``writes``. Returns all other bytes, as ranges with their offsets.
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
    """The arguments of ``lay_out``.

    Args:
        inventory: The source.
        state: ``{'state': {...}, 'rng': [...]}`` with a ``Slot`` for each tensor.
        dtype: The dtype to which the weights are cast; None if they are not cast.
        num_files: The number of files over which tensors are split; None lets the layout choose.
        renamed: The new names of parameters by their names in the source.
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
    """The result of ``lay_out``.

    Args:
        renamed: As in the request, plus the layout's own changes.
        dropped: Keys of the state that the layout cannot store.
        remarks: Messages for the user.
    """

    files: tuple[OutputFile, ...]
    renamed: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def num_files_for(num_bytes: int) -> int:
    """The number of files for which each is below Hugging Face's size limit."""
    return max(1, -(-num_bytes // _MAX_FILE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutWriter:
    """How ``convert_checkpoint`` writes a layout.

    Args:
        name: The value of ``to``.
        lay_out: Computes the offset of every byte; reads no tensor, and writes nothing. Raises CheckpointError.
        max_files: The largest supported ``files``; None if tensors can be split over any number.
        holds_only: As in the ``CheckpointInventory`` of the output.
        name_prefix: As in the ``CheckpointInventory`` of the output.
        by_name: Whether optimizer state must be keyed by parameters' names, not by position.
    """

    name: str
    lay_out: Callable[[WriteRequest], Output]
    max_files: int | None = None
    holds_only: EntryPath | None = None
    name_prefix: str = ""
    by_name: bool = False


_known: dict[str, "Layout"] = {}


def _refuse_packed(path: Path, trust: bool) -> NoReturn:
    raise AssertionError(f"{path} is read before it is unpacked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format of a checkpoint on disk.

    Args:
        name: The text that ``inspect`` prints.
        recognize: Whether a path has this layout, from names and first bytes. Never raises for other files.
        read: Reads a recognized path; the second argument is whether its pickles are trusted. Raises CheckpointError.
        incomplete: Returns the reason why a recognized checkpoint is incomplete, from a quick check; None if it is
            complete.
        unpack: Writes the checkpoint in a packed file to a folder, and returns its path. None if the layout is not
            packed.
        contains_entries: Whether a file of a folder is a concatenation of archives that the metadata lists.
        checkpoint_files: For a recognized file, all files of the same checkpoint, including missing ones.
        has_names: Whether a folder with files of these relative names has this layout.
        metadata: The file of a folder that describes the others, which are then downloaded at first access, and
            ``read`` for such a folder. None if there is no such file.
        written: How the layout is written; None if this package does not write it.
    """

    name: str
    recognize: Callable[[Path], bool]
    read: Callable[[Path, bool], CheckpointInventory] = _refuse_packed
    incomplete: Callable[[Path], str | None] = lambda path: None
    unpack: Callable[[Path, Path], Path] | None = None
    contains_entries: Callable[[Path], bool] = lambda file: False
    checkpoint_files: Callable[[Path], Sequence[Path]] = lambda path: ()
    has_names: Callable[[Collection[str]], bool] = lambda names: False
    metadata: tuple[str, Callable[[Folder, bool], CheckpointInventory]] | None = None
    written: LayoutWriter | None = None

    def __post_init__(self) -> None:
        _known.setdefault(self.name, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_name, (self.name,)  # every rank has the same ones


def _of_name(name: str) -> Layout:
    return _known[name]
