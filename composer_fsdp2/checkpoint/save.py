"""A sharded state as one file: all ranks send slices of their shards to rank 0, in rounds, and rank 0 writes them.

See [Note: rounds] in rounds.py. In each round a rank that waits for rank 0 waits for one write, whatever the size of
the file, so that no watchdog ends the job; and there is no message between two ranks alone, for which NCCL would keep a
communicator for each of them.
"""

import functools
import hashlib
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch import own_part
from composer_fsdp2.agreement import device_of_group, sends_from_host
from composer_fsdp2.checkpoint.reading import bytes_of
from composer_fsdp2.checkpoint.rounds import Part, Piece, Routes, Timetable, cut, numbered
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

# So often the disk is waited for, or the last wait would be for all of the file.
_SYNC_BYTES = 1 << 30


def save_monolithic(state: Any, path: str | Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write ``state`` as ``torch.save`` would write it with every DTensor whole, replacing ``path`` at the end.

    Rank 0 writes beside ``path`` and renames. Beyond what the state holds, rank 0 needs host memory for two rounds: of
    16 MiB a rank, of 128 MiB from 8 ranks on; and for 64 MiB of its own shards, if they lie on a device. Every other
    rank needs it for a slice, which is its share of a round, and where its shard is not contiguous for a copy of that.
    Where the group cannot send from the host's memory (NCCL), all need device memory for one round.

    Args:
        state: Nested dicts, lists and tuples; the same DTensors in the same order on all ranks. All other values, plain
            tensors too, are rank 0's.
        path: On rank 0's file system.
        group: Of all ranks; None is the default group. Its collectives must be free for the length of the call.
    Raises:
        CheckpointError: on all ranks: the file cannot be written, or ranks hold different tensors. Nothing is left of
            it then, and a file of that name is as it was.

    Called on all ranks. Gathers what each holds of each tensor; then a gather (an all-gather, if the group cannot send
    from the host's memory) for each round, and one of the CRC32s.
    """
    named = _dtensors(state)
    shards = [shard for _, shard in named]
    routes = _routes(named, path, group)
    file = _File(Path(path), state, shards) if dist.get_rank(group) == 0 else None
    [(plain_bytes, error), *_] = _gather((file.plain_bytes, file.error) if file is not None else None, group)
    if error is None:
        timetable = Timetable(routes, plain_bytes)
        source = _Source(shards, file.plain if file is not None else [])
        if file is None:
            _send(source, routes, timetable, group)
        else:
            _receive(source, routes, timetable, file, group)
        crcs = _all_crcs(source, len(shards), group)
        [error, *_] = _gather(file.publish(crcs) if file is not None else None, group)
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
# Who holds what


def _routes(named: Sequence[tuple[str, DTensor]], path: str | Path, group: dist.ProcessGroup | None) -> Routes:
    """Called on all ranks; gathers four bytes for each tensor, and each part that differs from others.

    Raises:
        CheckpointError: on all ranks, if they hold different tensors.
    """
    described = [f"{name} {tuple(shard.shape)} {shard.dtype}" for name, shard in named]
    digest = hashlib.sha256("\n".join(described).encode()).digest()  # the names themselves are long
    parts = _own_parts([shard for _, shard in named], 0 if group is None else dist.get_global_rank(group, 0))
    gathered = _gather((digest, numbered(parts)), group)
    if any(of_rank != digest for of_rank, _ in gathered):
        raise CheckpointError(f"{path}: not written: {_first_difference(_gather(described, group))}")
    return Routes([parts for _, parts in gathered], [shard.element_size() for _, shard in named])


def _own_parts(shards: Sequence[DTensor], writer: int) -> list[Part | None]:
    """This rank's part of each tensor; None where the tensor's mesh is without the rank that writes.

    Groups of ranks that train apart hold values of their own; the file has those of that rank's group.
    """
    boxes = [Box.of(shard) if bool((shard.device_mesh.mesh == writer).any()) else None for shard in shards]
    return [None if box is None else Part(box.offsets, box.sizes) for box in boxes]


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    """Where the first rank whose tensors are not rank 0's departs from them."""
    rank, of_rank = next((rank, of_rank) for rank, of_rank in enumerate(described) if of_rank != described[0])
    for ours, theirs in zip(described[0], of_rank, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours} where rank {rank} has {theirs}; save the same state on every rank"
    return f"rank 0 has {len(described[0])} sharded tensors, rank {rank} {len(of_rank)}; save the same on every rank"


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# The rounds


class _Source:
    """The bytes of this rank's shards, and of rank 0's plain tensors; and what they add to the tensors' CRC32s.

    A CRC32 is taken where the bytes lie, so that it covers their way to the file, and no rank computes all of them.
    """

    def __init__(self, shards: Sequence[DTensor], plain: Sequence[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor] = [*shards, *plain]
        self._num_shards = len(shards)
        self._bytes: tuple[int, torch.Tensor] | None = None  # of the tensor that is being read
        self.crcs = [0] * len(self._tensors)

    def plain_pieces(self) -> Iterator[Piece]:
        for number, tensor in enumerate(self._tensors[self._num_shards :], self._num_shards):
            whole = Part((0,) * tensor.dim(), tuple(tensor.shape))
            yield Piece(number, whole, 0, tensor.numel() * tensor.element_size())

    def read(self, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
        """Each piece in host memory, a uint8 tensor of one dimension. A piece is read once."""
        for piece in pieces:
            tensor = self._tensors[piece.number]
            found = self._bytes_of(piece.number)[piece.start : piece.end].cpu()
            data, num_bytes, at = bytes_of(found), tensor.numel() * tensor.element_size(), 0
            for first, count in piece.runs(tensor.shape, tensor.element_size()):
                self.crcs[piece.number] ^= shifted(zlib.crc32(data[at : at + count]), num_bytes - first - count)
                at += count
            yield found

    def _bytes_of(self, number: int) -> torch.Tensor:
        if self._bytes is None or self._bytes[0] != number:
            self._bytes = None  # where it is a copy, it goes before the next one is made
            local = own_part(self._tensors[number].detach())
            self._bytes = number, local.contiguous().view(-1).view(torch.uint8)
        return self._bytes[1]


def _send(source: _Source, routes: Routes, timetable: Timetable, group: dist.ProcessGroup | None) -> None:
    """All that this rank has, to rank 0. Called on all ranks but that one."""
    rank = dist.get_rank(group)
    mine = cut(routes.pieces(rank), timetable.slice_bytes)
    memory = _host_memory(timetable.sizes(0)[rank], group)
    for number in range(timetable.num_rounds):
        sizes, at = timetable.sizes(number), 0
        for data in source.read(next(mine, ())):
            memory[at : at + len(data)] = data
            at += len(data)
        _exchange(memory[: sizes[rank]], sizes, group)


def _receive(
    source: _Source, routes: Routes, timetable: Timetable, file: "_File", group: dist.ProcessGroup | None
) -> None:
    """All that the ranks have, into the file. Called on rank 0."""
    own = cut(itertools.chain(routes.pieces(0), source.plain_pieces()), timetable.own_slice_bytes)
    others = [cut(routes.pieces(rank), timetable.slice_bytes) for rank in range(1, routes.num_ranks)]
    # While a round is written the next one is under way.
    memories = [_host_memory(_memory_bytes(timetable.sizes(0), group), group) for _ in range(2)]
    written: list[Future[None]] = []
    with ThreadPoolExecutor(1, threading.current_thread().name) as writer:
        for number in range(timetable.num_rounds):
            if number >= 2:
                written[number - 2].result()
            received = _exchange(memories[number % 2], timetable.sizes(number), group)
            pieces = _read(source, next(own, []), file)
            for data, other in zip(received, others, strict=True):
                pieces += _apart(data, next(other, ()))
            written.append(writer.submit(file.add, pieces))


def _read(source: _Source, pieces: Sequence[Piece], file: "_File") -> list[tuple[Piece, torch.Tensor]]:
    """Rank 0's own; what cannot be read (a sparse tensor) is the file's error, for the others go on sending."""
    read: list[tuple[Piece, torch.Tensor]] = []
    file.attempt(lambda: read.extend(zip(pieces, source.read(pieces), strict=True)))
    return read


def _apart(data: torch.Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A slice as the pieces that it is made of."""
    at = 0
    for piece in pieces:
        yield piece, data[at : at + piece.num_bytes]
        at += piece.num_bytes


def _exchange(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """One round. Called on all ranks.

    Args:
        memory: What this rank sends; on rank 0, ``_memory_bytes`` for what comes.
        sizes: What each rank sends.
    Returns:
        On rank 0, what each other rank sent.
    """
    if len(sizes) == 1:
        return []
    return (_from_hosts if sends_from_host(group) else _from_devices)(memory, sizes, group)


def _from_hosts(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Each rank sends to rank 0. gloo's gather would be the same, but for two copies of everything in its memory."""
    if dist.get_rank(group) != 0:
        dist.send(memory, group=group, group_dst=0)
        return []
    rows = list(memory[: sum(sizes)].split(sizes[1:]))
    works = [dist.irecv(row, group=group, group_src=rank) for rank, row in enumerate(rows, 1)]
    for work in works:
        assert work is not None
        work.wait()
    return rows


def _from_devices(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """All ranks gather: the connections are those of training, not one from each rank to rank 0."""
    is_writer, size = dist.get_rank(group) == 0, max(sizes)
    own = torch.empty(size, dtype=torch.uint8, device=device_of_group(group))
    gathered = own.new_empty(len(sizes) * size)
    if not is_writer:
        own[: len(memory)] = memory
    dist.all_gather_into_tensor(gathered, own, group)
    if not is_writer:
        gathered[:1].cpu()  # waits: the watchdog counts from when a collective is begun, and none is begun too early
        return []
    memory = memory[: len(gathered)].copy_(gathered)
    return [row[:sent] for row, sent in zip(memory.split(size), sizes, strict=True)][1:]


def _memory_bytes(sizes: Sequence[int], group: dist.ProcessGroup | None) -> int:
    """What rank 0 needs for a round in which the ranks send so much."""
    return sum(sizes) if sends_from_host(group) else len(sizes) * max(sizes)


def _host_memory(num_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device_of_group(group).type != "cpu")


def _all_crcs(source: _Source, num_shards: int, group: dist.ProcessGroup | None) -> list[int]:
    """The CRC32 of each of ``source``'s tensors, on rank 0. Called on all ranks; gathers 8 bytes for each and rank."""
    own = torch.tensor(source.crcs[:num_shards], dtype=torch.int64, device=device_of_group(group))
    of_ranks = own.new_empty(dist.get_world_size(group) * num_shards)
    dist.all_gather_into_tensor(of_ranks, own, group)
    of_shards = functools.reduce(torch.bitwise_xor, of_ranks.cpu().split(num_shards)).tolist() if num_shards else []
    return [*of_shards, *source.crcs[num_shards:]]


# ---------------------------------------------------------------------------------------------------------------------
# Rank 0's file


class _File:
    """What rank 0 writes. An error is kept until the end, because the other ranks go on sending.

    Attributes:
        plain: The tensors in the state that are no DTensors.
    """

    def __init__(self, path: Path, state: Any, shards: Sequence[DTensor]) -> None:
        self.path = path
        self.staged = path.with_name(f".{path.name}.saving")
        self.error: str | None = None
        self.plain: list[torch.Tensor] = []
        self._slots: list[Slot | None] = [None] * len(shards)  # by the tensor's number: shards, then plain ones
        self._unsynced_bytes = 0
        self._plan: ArchivePlan
        self._file: IO[bytes] | None = None
        self.attempt(lambda: self._open(state, shards))
        if self.error is not None:
            self._leave_nothing()

    @property
    def plain_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.plain)

    def add(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Write pieces of the tensors: their bytes, in host memory."""
        self.attempt(lambda: self._add(pieces))

    def publish(self, crcs: Sequence[int]) -> str | None:
        """Give the file its name, or leave nothing of it; what went wrong, if anything did.

        Args:
            crcs: The CRC32 of each tensor.
        """
        self.attempt(lambda: self._publish(crcs))
        if self.error is not None:
            self._leave_nothing()
        elif self._file is not None:
            self._file.close()
        return self.error

    def _leave_nothing(self) -> None:
        if self._file is not None:
            self._file.close()
            self.staged.unlink(missing_ok=True)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do it, unless something went wrong before; what goes wrong is kept."""
        if self.error is None:
            try:
                work()
            except OSError as error:
                self.error = error.strerror or str(error)
            except Exception as error:  # pickling runs the user's code
                self.error = f"{type(error).__name__}: {error}"

    def _open(self, state: Any, shards: Sequence[DTensor]) -> None:
        numbers = {id(shard): number for number, shard in enumerate(shards)}

        def slot_for(tensor: torch.Tensor) -> Slot:
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
        os.replace(self.staged, self.path)
        sync_folder(self.path.parent)
