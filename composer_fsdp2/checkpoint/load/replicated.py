"""State that ranks of one node hold alike: read to be checked, and, once all is checked, read again and passed on.

Staged like the rest, each of them would hold all of it in host memory: of a model of 7B parameters and Adam's moments
84 GB, eight times on a node. What a node's ranks split lies there once, and is read once (``staging``).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import TensorRecord
from composer_fsdp2.checkpoint.load.exchange import broadcast_replicas, replica_of
from composer_fsdp2.checkpoint.read import Reader, bytes_of
from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import device_of_group

# What is read, sent and put into place at once.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicated:
    """A tensor that several ranks of a node hold.

    Args:
        place: Gives this rank's memory for it; called once all is checked.
        owner: The number of the replica that reads it.
        copies: The file's other entries for it, of which only reading shows that they are equal.
        crc32s: Of each piece, those of the ranges that the owner read for it in the first pass.
    """

    record: TensorRecord
    box: LocalBox
    place: Callable[[], torch.Tensor]
    owner: int
    copies: Sequence[TensorRecord]
    crc32s: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def is_own(self) -> bool:
        return self.owner == replica_of(self.box)


class ReplicatedState:
    """The replicated tensors of one load: ``add`` each, ``check``, and once all ranks agree ``pass_on``.

    In host memory are never more than a few pieces of 64 MiB; on the rank that reads it, all of a tensor that lies in
    its file in another order than row by row.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.unlike: list[str] = []
        """Entries for one tensor that ``check`` found to differ, in words."""
        self._tensors: list[_Replicated] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)  # where a piece lies that is sent

    def add(
        self,
        record: TensorRecord,
        box: LocalBox,
        place: Callable[[], torch.Tensor],
        owner: int,
        copies: Sequence[TensorRecord] = (),
    ) -> None:
        """Note one more tensor; called on all ranks that hold it, in the same order."""
        self._tensors.append(_Replicated(record=record, box=box, place=place, owner=owner, copies=copies))

    def check(self, reader: Reader) -> None:
        """Read what is this rank's to read, and keep its CRC32s alone; communicates nothing.

        Memory for what will be sent is taken here, too, where a rank that has none can still say so.
        """
        if self._tensors:
            num_bytes = max(map(_largest_bytes, self._tensors))
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device_of_group())
        for tensor in self._tensors:
            if tensor.is_own:
                copies = [_pieces(reader, copy, tensor.box) for copy in tensor.copies]
                unlike = [False] * len(copies)
                for data in _pieces(reader, tensor.record, tensor.box, tensor.crc32s):
                    for number, copy in enumerate(copies):
                        unlike[number] |= bytes_of(next(copy)) != bytes_of(data)
                found = [copy for copy, differs in zip(tensor.copies, unlike, strict=True) if differs]
                self.unlike += [f"{tensor.record.name} = {copy.name}" for copy in found]

    @torch.no_grad()
    def pass_on(self, reader: Reader) -> None:
        """Read again, send to the other replicas and put into place, one piece after the other.

        Raises:
            CheckpointError: a piece could not be read, or is not what was checked. The model and the optimizer are
                partly changed.
        Called on all ranks; broadcasts everything that is replicated. A rank with an error goes on sending and
        receiving, so that nobody waits for it, and raises at the end.
        """
        errors: list[Exception] = []
        for tensor in self._tensors:
            dtype = tensor.record.dtype
            pieces = self._pieces_again(reader, tensor)
            for piece in _bounds(tensor.box, dtype.itemsize):
                buffer = self._buffer[: piece.numel * dtype.itemsize].view(dtype).view(piece.sizes)
                with _noting(errors):
                    if tensor.is_own and not errors:
                        buffer.copy_(next(pieces))
                broadcast_replicas(buffer, tensor.box, tensor.owner)
                with _noting(errors):
                    if not errors:
                        tensor.place()[piece.slices(tensor.box.offsets)].copy_(buffer)
        if errors:
            raise CheckpointError(
                f"{self.checkpoint}: was undamaged when it was checked, and could not be read a second time "
                f"({type(errors[0]).__name__}: {errors[0]}); the model and the optimizer are partly changed: load again"
            ) from errors[0]

    def _pieces_again(self, reader: Reader, tensor: _Replicated) -> Iterator[torch.Tensor]:
        again: list[tuple[int, ...]] = []
        for number, data in enumerate(_pieces(reader, tensor.record, tensor.box, again)):
            if again[number] != tensor.crc32s[number]:
                raise CheckpointError(f"{tensor.record.name}: its bytes differ from those of the first read")
            yield data


def _largest_bytes(tensor: _Replicated) -> int:
    """The size of the largest piece."""
    itemsize = tensor.record.dtype.itemsize
    return max(piece.numel for piece in _bounds(tensor.box, itemsize)) * itemsize


def _pieces(
    reader: Reader, record: TensorRecord, box: Box, crc32s: list[tuple[int, ...]] | None = None
) -> Iterator[torch.Tensor]:
    """A box of a tensor in pieces; ``crc32s`` takes those of the ranges that were read for each."""
    full = None
    if not reader.is_row_major(record, box):  # pieces would read one another's bytes, too
        full, found = _read(reader, record, box)
    for piece in _bounds(box, record.dtype.itemsize):
        if full is None:
            data, found = _read(reader, record, piece)
        else:
            data = full[piece.slices(box.offsets)].contiguous()
        if crc32s is not None:
            crc32s.append(found)
        yield data


def _read(reader: Reader, record: TensorRecord, box: Box) -> tuple[torch.Tensor, tuple[int, ...]]:
    data, num_parts = torch.empty(box.sizes, dtype=record.dtype), len(reader.parts)
    reader.read(record, box, data)
    return data, tuple(part.crc32 for part in reader.parts[num_parts:])


def _bounds(box: Box, itemsize: int) -> Iterator[Box]:
    """The pieces of a box, each contiguous in it, of ``_PIECE_BYTES`` at most."""
    return box.pieces(_PIECE_BYTES // itemsize)


@contextlib.contextmanager
def _noting(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
