"""A sharded state as one file, shard by shard through rank 0: no rank ever holds more than a piece of it."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2.agreement import device_of_group
from composer_fsdp2.checkpoint.reading import bytes_of
from composer_fsdp2.checkpoint.storage.archive_writer import (
    ArchivePlan,
    Slot,
    plan_archive,
    sync,
    sync_folder,
    write_all,
)
from composer_fsdp2.checkpoint.storage.crc import shifted
from composer_fsdp2.checkpoint.target import Box
from composer_fsdp2.errors import CheckpointError

__all__ = ["save_monolithic"]

# What rank 0 holds of other ranks' shards at a time.
PIECE_BYTES = 16 << 20

# Offsets and sizes of a shard, in elements of the whole tensor.
_Extent = tuple[tuple[int, ...], tuple[int, ...]]


def save_monolithic(state: Any, path: str | Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write ``state`` as ``torch.save`` would write it with every DTensor whole, replacing ``path`` at the end.

    Rank 0 writes beside ``path`` and renames. Beyond what the state holds, it needs memory for a piece of 16 MiB, and
    a rank whose shard is not contiguous for a copy of that shard.

    Args:
        state: Nested dicts, lists and tuples; the same DTensors in the same order on all ranks. All other values, plain
            tensors too, are rank 0's.
        path: On rank 0's file system.
        group: Of all ranks; None is the default group. Its collectives must be free for the length of the call.
    Raises:
        CheckpointError: on all ranks: the file cannot be written, or ranks hold different tensors. Nothing is left of
            it then, and a file of that name is as it was.

    Called on all ranks. Gathers what each holds of each tensor, then sends the shards to rank 0, one after the other.
    """
    named = _dtensors(state)
    shards = [shard for _, shard in named]
    extents = _extents_by_rank(named, path, group)
    file = _File(Path(path), state, shards) if dist.get_rank(group) == 0 else None
    # One for all pieces: freed ones would stay in the allocator.
    buffer = torch.empty(PIECE_BYTES if file is not None else 0, dtype=torch.uint8, device=device_of_group(group))
    for number, shard in enumerate(shards):
        for extent, rank in _holders([of_rank[number] for of_rank in extents]):
            for first, piece in _exchange(shard, extent, rank, buffer, group):
                if file is not None:
                    file.add(number, extent, first, piece)
    [error, *_] = _gather(file.finish() if file is not None else None, group)
    if error is not None:
        raise CheckpointError(f"{path}: cannot be written: {error}; a file of that name is as it was")


def _dtensors(state: Any) -> list[tuple[str, DTensor]]:
    """Every DTensor in a nested value once, by the name of its first place."""
    found: dict[int, tuple[str, DTensor]] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, DTensor):
            found.setdefault(id(value), (name, value))
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(part, f"{name}.{number}")

    walk(state, "")
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Who sends what


def _extents_by_rank(
    named: Sequence[tuple[str, DTensor]], path: str | Path, group: dist.ProcessGroup | None
) -> list[list[_Extent | None]]:
    """What each rank has of each tensor; None where the tensor's mesh is without rank 0. Called on all ranks."""
    writer = _global_rank(0, group)

    def extent(shard: DTensor) -> _Extent | None:
        # Groups of ranks that train apart hold values of their own; the file has those of rank 0's group.
        if not bool((shard.device_mesh.mesh == writer).any()):
            return None
        box = Box.of(shard)
        return box.offsets, box.sizes

    described = [f"{name} {tuple(shard.shape)} {shard.dtype}" for name, shard in named]
    digest = hashlib.sha256("\n".join(described).encode()).digest()  # the names themselves are long
    gathered = _gather(([extent(shard) for _, shard in named], digest), group)
    if any(of_rank != gathered[0][1] for _, of_rank in gathered):
        raise CheckpointError(f"{path}: not written: {_first_difference(_gather(described, group))}")
    return [extents for extents, _ in gathered]


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    """Where the first rank whose tensors are not rank 0's departs from them."""
    rank, of_rank = next((rank, of_rank) for rank, of_rank in enumerate(described) if of_rank != described[0])
    for ours, theirs in zip(described[0], of_rank, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours} where rank {rank} has {theirs}; save the same state on every rank"
    return f"rank 0 has {len(described[0])} sharded tensors, rank {rank} {len(of_rank)}; save the same on every rank"


def _holders(extents: Sequence[_Extent | None]) -> list[tuple[_Extent, int]]:
    """Each part of a tensor, and the lowest of the ranks that hold it."""
    first: dict[_Extent, int] = {}
    for rank, extent in enumerate(extents):
        if extent is not None and 0 not in extent[1]:
            first.setdefault(extent, rank)
    return list(first.items())


def _exchange(
    shard: DTensor, extent: _Extent, holder: int, buffer: torch.Tensor, group: dist.ProcessGroup | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The holder's shard on rank 0, piece by piece: (number of its first element, its bytes in host memory).

    Called on all ranks: the holder sends, rank 0 receives, into ``buffer``; the others go on at once.
    """
    me, itemsize = dist.get_rank(group), shard.element_size()
    if me not in (0, holder):
        return
    local = shard.to_local().detach().contiguous().view(-1).view(torch.uint8) if me == holder else None
    numel = torch.Size(extent[1]).numel()
    step = PIECE_BYTES // itemsize
    for first in range(0, numel, step):
        num_bytes = min(step, numel - first) * itemsize
        if local is None:
            piece = buffer[:num_bytes]
            dist.recv(piece, _global_rank(holder, group), group)
        else:
            piece = local[first * itemsize : first * itemsize + num_bytes]
        if me == 0:
            yield first, piece.cpu()
        else:
            dist.send(piece.to(buffer.device), _global_rank(0, group), group)


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


# ---------------------------------------------------------------------------------------------------------------------
# Rank 0's file


class _File:
    """What rank 0 writes. An error is kept until the end, because the other ranks go on sending."""

    def __init__(self, path: Path, state: Any, shards: Sequence[DTensor]) -> None:
        self.path = path
        self.staged = path.with_name(f".{path.name}.saving")
        self.error: str | None = None
        self.shards = shards
        self.slots: dict[int, Slot] = {}  # by the shard's number
        self.crcs: dict[Slot, int] = {}
        self.plan: ArchivePlan
        self.file: IO[bytes] | None = None
        self._attempt(lambda: self._open(state))

    def add(self, number: int, extent: _Extent, first: int, piece: torch.Tensor) -> None:
        """Write a piece of a shard: its bytes from element ``first`` on, in row-major order."""
        self._attempt(lambda: self._add(self.slots[number], extent, first, bytes_of(piece)))

    def finish(self) -> str | None:
        """Publish the file, or leave nothing of it; what went wrong, if anything did."""
        self._attempt(self._publish)
        if self.file is not None:
            self.file.close()
            if self.error is not None:
                self.staged.unlink(missing_ok=True)
        return self.error

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.error is None:
            try:
                work()
            except OSError as error:
                self.error = error.strerror or str(error)
            except Exception as error:  # pickling runs the user's code
                self.error = f"{type(error).__name__}: {error}"

    def _open(self, state: Any) -> None:
        numbers = {id(shard): number for number, shard in enumerate(self.shards)}

        def slot_for(tensor: torch.Tensor) -> Slot:
            if not isinstance(tensor, DTensor):
                return Slot(tuple(tensor.shape), tensor.dtype, tensor)
            if id(tensor) not in numbers:
                raise TypeError("a sharded tensor inside of an object; only dicts, lists and tuples may hold them")
            slot = Slot(tuple(tensor.shape), tensor.dtype)
            self.slots[numbers[id(tensor)]] = slot
            return slot

        self.plan = plan_archive(state, slot_for=slot_for)
        self.staged.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.staged, "wb")  # noqa: SIM115 - closed by finish
        self.file.truncate(self.plan.num_bytes)
        for slot in self.plan.slots:
            data = bytes_of(slot.source.detach().cpu().contiguous()) if slot.source is not None else b""
            write_all(self.file, data, self.plan.offset_of(slot))
            self.crcs[slot] = zlib.crc32(data)

    def _add(self, slot: Slot, extent: _Extent, first: int, data: memoryview) -> None:
        assert self.file is not None
        itemsize, at = slot.dtype.itemsize, 0
        for start, length in _runs(slot.shape, *extent, first, len(data) // itemsize):
            run = data[at : at + length * itemsize]
            write_all(self.file, run, self.plan.offset_of(slot) + start * itemsize)
            self.crcs[slot] ^= shifted(zlib.crc32(run), slot.num_bytes - (start + length) * itemsize)
            at += len(run)

    def _publish(self) -> None:
        assert self.file is not None
        self.plan.finish(self.file, self.crcs)
        sync(self.file)
        os.replace(self.staged, self.path)
        sync_folder(self.path.parent)


def _runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], first: int, count: int
) -> Iterator[tuple[int, int]]:
    """Elements ``first`` to ``first + count`` of a box, as runs of the whole tensor: (first element, length)."""
    # Trailing dimensions that the box has whole make one run with the dimension before them.
    dim = len(shape)
    while dim > 1 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = torch.Size(sizes[max(dim - 1, 0) :]).numel()
    strides = [torch.Size(shape[d + 1 :]).numel() for d in range(len(shape))]
    while count:
        row, column = divmod(first, inner)
        start = column + (offsets[dim - 1] * strides[dim - 1] if shape else 0)
        for d in range(dim - 2, -1, -1):
            row, index = divmod(row, sizes[d])
            start += (offsets[d] + index) * strides[d]
        length = min(count, inner - column)
        yield start, length
        first, count = first + length, count - length
