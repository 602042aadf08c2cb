"""The file of a full checkpoint while rank 0 writes it: beside its place, until it is complete."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.parts import local_tensor
from composer_fsdp2.checkpoint.archive.disk import sync, sync_folder, write_all
from composer_fsdp2.checkpoint.archive.writer import ArchivePlan, Slot, plan_archive
from composer_fsdp2.checkpoint.read import bytes_of
from composer_fsdp2.checkpoint.save.rounds import Piece

log = logging.getLogger(__name__)

T = TypeVar("T")

# So often the disk is waited for, or the last wait would be for all of the file.
_SYNC_BYTES = 1 << 30


class FirstError:
    """What this rank could not do: kept until all ranks ask for it, because the others go on meanwhile.

    Attributes:
        text: In words; None where all went well.
    """

    def __init__(self) -> None:
        self.text: str | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do it, unless something went wrong before."""
        if self.text is None:
            try:
                return work()
            except OSError as error:
                self.text = error.strerror or str(error)
            except Exception as error:  # pickling runs the user's code; memory
                self.text = f"{type(error).__name__}: {error}"
        return None


def require_plain_bytes(tensor: torch.Tensor) -> None:
    """Raise for a tensor whose values are not its elements' bytes in rows: sparse, quantized, nested, on ``meta``."""
    local = local_tensor(tensor)
    if local.layout is not torch.strided or local.is_quantized or local.is_nested or local.is_meta:
        what = "quantized" if local.is_quantized else "nested" if local.is_nested else str(local.layout)
        raise TypeError(f"a tensor ({'on meta' if local.is_meta else what}) whose bytes are not those of a plain one")


class StagedFile:
    """What rank 0 writes, beside its place.

    Attributes:
        plain: The tensors in the state that are not DTensors.
    """

    def __init__(self, path: Path, state: Any, shards: Sequence[DTensor], errors: FirstError) -> None:
        self.path = path
        self.staged = path.with_name(f".{path.name}.saving")
        self.plain: list[torch.Tensor] = []
        self._errors = errors
        self._slots: list[Slot | None] = [None] * len(shards)  # by the tensor's number: shards, then plain ones
        self._unsynced_bytes = 0
        self._plan: ArchivePlan
        self._file: IO[bytes] | None = None
        errors.attempt(lambda: self._open(state, shards))

    @property
    def plain_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.plain)

    def add(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Write pieces of the tensors: their bytes, in host memory."""
        self._errors.attempt(lambda: self._add(pieces))

    def publish(self, crcs: Sequence[int]) -> None:
        """Give the file its name.

        Args:
            crcs: The CRC32 of each tensor.
        """
        self._errors.attempt(lambda: self._publish(crcs))

    def leave_nothing(self) -> None:
        """Remove the file if it was never published."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was to be told is told
                self._file.close()
            with contextlib.suppress(OSError):
                self.staged.unlink(missing_ok=True)

    def _open(self, state: Any, shards: Sequence[DTensor]) -> None:
        numbers = {id(shard): number for number, shard in enumerate(shards)}

        def slot_for(tensor: torch.Tensor) -> Slot:
            require_plain_bytes(tensor)
            slot = Slot(tuple(tensor.shape), tensor.dtype)
            if not isinstance(tensor, DTensor):
                self.plain.append(tensor)
                self._slots.append(slot)
            elif id(tensor) in numbers:
                self._slots[numbers[id(tensor)]] = slot
            else:
                raise TypeError("a sharded tensor inside of an object; only dicts, lists and tuples may hold them")
            return slot

        self._plan = plan_archive(state, slot_for=slot_for)
        self.staged.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.staged, "wb")  # noqa: SIM115 - closed by publish
        self._file.truncate(self._plan.num_bytes)

    def _add(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        assert self._file is not None
        for piece, tensor in pieces:
            slot, data, at = self._slots[piece.number], bytes_of(tensor), 0
            assert slot is not None
            for first, count in piece.runs(slot.shape, slot.dtype.itemsize):
                write_all(self._file, data[at : at + count], self._plan.offset_of(slot) + first)
                at += count
            self._unsynced_bytes += piece.num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            sync(self._file)
            self._unsynced_bytes = 0

    def _publish(self, crcs: Sequence[int]) -> None:
        assert self._file is not None
        self._plan.finish(self._file, {slot: crc for slot, crc in zip(self._slots, crcs, strict=True) if slot})
        sync(self._file)
        self._file.close()
        os.replace(self.staged, self.path)
        try:
            sync_folder(self.path.parent)
        except OSError as error:  # the file is complete, and has its name
            log.warning("%s is written, but a power cut may still undo its name: %s", self.path, error)
