"""Save a sharded state as one file: all ranks send slices of their shards to rank 0, in rounds, and rank 0 writes them.

See [Note: rounds] in rounds.py. In a round a rank waits for at most one write of rank 0, for any size of the file, so
no watchdog times out. All communication is by collectives, because NCCL would create a communicator for each pair of
ranks that exchange messages.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.collectives import all_gather_single
from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2.checkpoint.archive.disk import sync, sync_folder, write_all
from composer_fsdp2.checkpoint.archive.writer import Slot, plan_archive
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.read import bytes_of
from composer_fsdp2.checkpoint.records import shifted
from composer_fsdp2.checkpoint.save.rounds import Piece, Routes, Timetable, cut
from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.checkpoint.trees import dotted, leaves
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import all_gather_object, device_of_group, sends_from_host

log = logging.getLogger(__name__)

T = TypeVar("T")

# The number of bytes after which the file is synced; otherwise the last sync would wait for the entire file.
_SYNC_BYTES = 1 << 30


class FirstError:
    """The first error of this rank, stored until all ranks gather their errors. Until then all ranks continue.

    Attributes:
        text: The text of the error; None if there was none.
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
            except Exception as error:  # pickling runs the user's code; memory may be exhausted
                self.text = f"{type(error).__name__}: {error}"
        return None


def require_plain_bytes(tensor: torch.Tensor) -> None:
    """Raise for a tensor that is not stored as one element after another: sparse, quantized, nested, or on ``meta``."""
    local = local_tensor(tensor)
    if local.layout is not torch.strided or local.is_quantized or local.is_nested or local.is_meta:
        what = "quantized" if local.is_quantized else "nested" if local.is_nested else str(local.layout)
        raise TypeError(f"a tensor ({'on meta' if local.is_meta else what}) whose bytes are not those of a plain one")


class StagedFile:
    """The file that rank 0 writes, next to its destination until it is complete.

    Attributes:
        plain: The tensors in the state that are not DTensors.
    """

    def __init__(self, path: Path, state: Any, shards: Sequence[DTensor]) -> None:
        self.path = path
        self.plain: list[torch.Tensor] = []
        self._slots: list[Slot | None] = [None] * len(shards)  # by the tensor's index: shards, then plain tensors
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._unsynced_bytes = 0
        self._plan = plan_archive(state, slot_for=self._slot_for)
        self._staged = path.with_name(f".{path.name}.saving")
        self._staged.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._staged, "wb")  # noqa: SIM115 - closed by publish
        try:
            self._file.truncate(self._plan.num_bytes)
        except OSError:
            self.leave_nothing()
            raise

    def _slot_for(self, tensor: torch.Tensor) -> Slot:
        require_plain_bytes(tensor)
        slot = Slot(tuple(tensor.shape), tensor.dtype)
        if not isinstance(tensor, DTensor):
            self.plain.append(tensor)
            self._slots.append(slot)
        elif id(tensor) in self._numbers:
            self._slots[self._numbers[id(tensor)]] = slot
        else:
            raise TypeError("a sharded tensor inside of an object; only dicts, lists and tuples may hold them")
        return slot

    @property
    def plain_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.plain)

    def add(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Write pieces of the tensors. Their bytes are in host memory."""
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

    def publish(self, crcs: Sequence[int]) -> None:
        """Complete the file and rename it to its destination.

        Args:
            crcs: The CRC32 of each tensor.
        """
        self._plan.finish(self._file, {slot: crc for slot, crc in zip(self._slots, crcs, strict=True) if slot})
        sync(self._file)
        self._file.close()
        os.replace(self._staged, self.path)
        try:
            sync_folder(self.path.parent)
        except OSError as error:  # the file is complete and renamed
            log.warning("%s is written, but a power cut may still undo its name: %s", self.path, error)

    def leave_nothing(self) -> None:
        """Remove the file if it was never published."""
        with contextlib.suppress(OSError):  # the error has already been raised
            self._file.close()
        with contextlib.suppress(OSError):
            self._staged.unlink(missing_ok=True)


def save_monolithic(state: Any, path: str | Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write ``state`` as ``torch.save`` would write it with every DTensor unsharded. Replaces ``path`` at the end.

    Rank 0 writes a file next to ``path`` and renames it. In addition to the state, rank 0 needs host memory for two
    rounds (a round has 16 MiB per rank, at most 128 MiB), and for 64 MiB of its own shards if they are on a device.
    Every other rank needs host memory for its slice of a round, and for a copy of its shard's part of that if the shard
    is not contiguous. If the group cannot send from host memory (NCCL), each rank needs device memory for one round.

    Args:
        state: Nested dicts, lists and tuples, with the same DTensors in the same order on all ranks. Of all other
            values, including plain tensors, rank 0's are saved.
        path: On rank 0's file system.
        group: A process group of all ranks; None means the default group. No other thread may use it during the call.
    Raises:
        CheckpointError: on all ranks: the file cannot be written, a rank cannot read its shards, ranks have different
            tensors, or no rank has some part of a tensor. No file is left behind, and an existing one is unchanged.

    Called on all ranks. Gathers the ranks' boxes of each tensor. One gather per round (an all-gather if the group
    cannot send from host memory), one of the CRC32s, and four of the ranks' errors.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> save_monolithic({"state": {"model": model.state_dict()}}, "ep1.pt")
        >>> torch.load("ep1.pt")["state"]["model"]["0.weight"].shape
        torch.Size([2, 4])
    """
    named = _dtensors(state)
    shards = [shard for _, shard in named]
    routes = _routes(named, path, group)
    errors = FirstError()
    is_writer = dist.get_rank(group) == 0
    file = errors.attempt(lambda: StagedFile(Path(path), state, shards)) if is_writer else None
    try:
        [plain_bytes, *_] = all_gather_object(file.plain_bytes if file is not None else None, group)
        _require_none(errors, path, group)
        timetable = Timetable(routes, plain_bytes)
        source = _ShardReader(shards, file.plain if file is not None else [])
        rounds = errors.attempt(lambda: _Rounds(source, routes, timetable, errors, group))
        _require_none(errors, path, group)
        assert rounds is not None
        rounds.send() if file is None else rounds.receive(file)
        crcs = _all_crcs(source, len(shards), group)
        _require_none(errors, path, group)
        if file is not None:
            errors.attempt(functools.partial(file.publish, crcs))
        _require_none(errors, path, group)
    finally:
        if file is not None:
            file.leave_nothing()


def _dtensors(state: Any) -> list[tuple[str, DTensor]]:
    """Every DTensor in a nested value once, by the path of its first occurrence."""
    found: dict[int, tuple[str, DTensor]] = {}
    for path, value in leaves(state):
        if isinstance(value, DTensor):
            found.setdefault(id(value), (dotted(path), value))
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# The shards of the ranks


def _routes(named: Sequence[tuple[str, DTensor]], path: str | Path, group: dist.ProcessGroup | None) -> Routes:
    """Compute what each rank sends. Called on all ranks; gathers four bytes per tensor, and each part that differs.

    Raises:
        CheckpointError: on all ranks, if they have different tensors, or no rank has some part of a tensor.
    """
    described = [f"{name} {tuple(shard.shape)} {shard.dtype}" for name, shard in named]
    digest = hashlib.sha256(
        "\n".join(described).encode(errors="backslashreplace")
    ).digest()  # the names themselves are long
    parts = _local_boxes([shard for _, shard in named], 0 if group is None else dist.get_global_rank(group, 0))
    gathered = all_gather_object((digest, parts), group)
    if any(of_rank != digest for of_rank, _ in gathered):
        raise CheckpointError(f"{path}: not written: {_first_difference(all_gather_object(described, group))}")
    routes = Routes([parts for _, parts in gathered], [shard.element_size() for _, shard in named])
    if (number := routes.incomplete([shard.shape for _, shard in named])) is not None:
        raise CheckpointError(
            f"{path}: not written: the ranks of this group do not hold all of {described[number]}; save with a group "
            "of all ranks of its mesh that includes rank 0"
        )
    return routes


def _local_boxes(shards: Sequence[DTensor], writer: int) -> list[Box | None]:
    """This rank's part of each tensor; None if the tensor's mesh does not contain the rank that writes.

    If groups of ranks train separately, their values differ. The values of the writing rank's group are saved.
    """
    boxes = [LocalBox.of(shard) if bool((shard.device_mesh.mesh == writer).any()) else None for shard in shards]
    parts = [None if box is None else Box(box.offsets, box.sizes) for box in boxes]
    known = dict(zip(parts, parts, strict=True))
    return [known[part] for part in parts]  # a pickle stores the same object once


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    """Describe the first difference between rank 0's tensors and another rank's."""
    rank, of_rank = next((rank, of_rank) for rank, of_rank in enumerate(described) if of_rank != described[0])
    for ours, theirs in zip(described[0], of_rank, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours} where rank {rank} has {theirs}; save the same state on every rank"
    return f"rank 0 has {len(described[0])} sharded tensors, rank {rank} {len(of_rank)}; save the same on every rank"


# ---------------------------------------------------------------------------------------------------------------------
# The rounds


class _ShardReader:
    """Reads the bytes of this rank's shards (and of rank 0's plain tensors), and computes their parts of the CRC32s.

    A CRC32 is computed on the rank that owns the bytes. It therefore covers the transfer, and the work is distributed.
    """

    def __init__(self, shards: Sequence[DTensor], plain: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = [*shards, *plain]
        self._num_shards = len(shards)
        self._bytes: tuple[int, torch.Tensor] | None = None  # of the tensor that is being read
        self.crcs = [0] * len(self.tensors)

    def plain_pieces(self) -> Iterator[Piece]:
        for number, tensor in enumerate(self.tensors[self._num_shards :], self._num_shards):
            full = Box.full(tuple(tensor.shape))
            yield Piece(number, full, 0, tensor.numel() * tensor.element_size())

    def read(self, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
        """Copy each piece to host memory as a 1D uint8 tensor. Each piece must be read once only."""
        for piece in pieces:
            tensor = self.tensors[piece.number]
            found = self._bytes_of(piece.number)[piece.start : piece.end].cpu()
            data, num_bytes, at = bytes_of(found), tensor.numel() * tensor.element_size(), 0
            for first, count in piece.runs(tensor.shape, tensor.element_size()):
                self.crcs[piece.number] ^= shifted(zlib.crc32(data[at : at + count]), num_bytes - first - count)
                at += count
            yield found

    def _bytes_of(self, number: int) -> torch.Tensor:
        if self._bytes is None or self._bytes[0] != number:
            self._bytes = None  # a copy is freed before the next one is made
            local = local_tensor(self.tensors[number].detach()).resolve_conj().resolve_neg()
            self._bytes = number, local.contiguous().view(-1).view(torch.uint8)
        return self._bytes[1]


@dataclass(slots=True)
class _Rounds:
    """The rounds of a save on one rank. All memory is allocated here."""

    source: _ShardReader
    routes: Routes
    timetable: Timetable
    errors: FirstError
    group: dist.ProcessGroup | None
    memories: list[torch.Tensor] = field(init=False)
    writer: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        for tensor in self.source.tensors:
            require_plain_bytes(tensor)
        rank, sizes = dist.get_rank(self.group), self.timetable.sizes(0)
        # Rank 0 writes a round while it receives the next one.
        num_bytes = [sizes[rank]] if rank else [_memory_bytes(sizes, self.group)] * 2
        self.memories = [_host_memory(size, self.group) for size in num_bytes]
        self.writer = ThreadPoolExecutor(1, threading.current_thread().name)
        self.writer.submit(int).result()  # the writer's thread runs

    def send(self) -> None:
        """Send all pieces of this rank to rank 0, round by round. Called on all ranks except rank 0."""
        [memory], rank = self.memories, dist.get_rank(self.group)
        mine = cut(self.routes.pieces(rank), self.timetable.slice_bytes)
        for number in range(self.timetable.num_rounds):
            sizes = self.timetable.sizes(number)
            # After an error the others continue, and so does this rank.
            self.errors.attempt(functools.partial(self._fill, memory, next(mine, [])))
            _exchange(memory[: sizes[rank]], sizes, self.group)

    def _fill(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        at = 0
        for data in self.source.read(pieces):
            memory[at : at + len(data)] = data
            at += len(data)

    def receive(self, file: StagedFile) -> None:
        """Receive all ranks' pieces and write them to the file. Called on rank 0."""
        routes, timetable = self.routes, self.timetable
        own = cut(itertools.chain(routes.pieces(0), self.source.plain_pieces()), timetable.own_slice_bytes)
        others = [cut(routes.pieces(rank), timetable.slice_bytes) for rank in range(1, routes.num_ranks)]
        written: list[Future[None]] = []
        with self.writer as writer:
            for number in range(timetable.num_rounds):
                if number >= 2:
                    written[number - 2].result()
                received = _exchange(self.memories[number % 2], timetable.sizes(number), self.group)
                pieces = self.errors.attempt(functools.partial(self._read, next(own, []))) or []
                for data, other in zip(received, others, strict=True):
                    of_rank = next(other, [])
                    parts = data[: sum(piece.num_bytes for piece in of_rank)].split([p.num_bytes for p in of_rank])
                    pieces += zip(of_rank, parts, strict=True)
                written.append(writer.submit(self.errors.attempt, functools.partial(file.add, pieces)))

    def _read(self, pieces: Sequence[Piece]) -> list[tuple[Piece, torch.Tensor]]:
        return list(zip(pieces, self.source.read(pieces), strict=True))


def _exchange(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """One round. Called on all ranks.

    Args:
        memory: The bytes that this rank sends; on rank 0, the ``_memory_bytes`` to receive into.
        sizes: The number of bytes that each rank sends.
    Returns:
        On rank 0, the bytes that each other rank sent.
    """
    if len(sizes) == 1:
        return []
    return (_from_hosts if sends_from_host(group) else _from_devices)(memory, sizes, group)


def _from_hosts(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Each rank sends to rank 0. gloo's gather does the same, but makes two copies of the data in rank 0's memory."""
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
    """All-gather on the devices. This uses the existing connections of training, not one from each rank to rank 0."""
    is_writer, size = dist.get_rank(group) == 0, max(sizes)
    own = torch.empty(size, dtype=torch.uint8, device=device_of_group(group))
    gathered = own.new_empty(len(sizes) * size)
    if not is_writer:
        own[: len(memory)] = memory
    all_gather_single(gathered, own, group)
    if not is_writer:
        gathered[:1].cpu()  # waits: the watchdog counts from when a collective is begun, and none is begun too early
        return []
    memory = memory[: len(gathered)].copy_(gathered)
    return [row[:sent] for row, sent in zip(memory.split(size), sizes, strict=True)][1:]


def _memory_bytes(sizes: Sequence[int], group: dist.ProcessGroup | None) -> int:
    """The memory that rank 0 needs for a round in which the ranks send ``sizes``."""
    return sum(sizes) if sends_from_host(group) else len(sizes) * max(sizes)


def _host_memory(num_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device_of_group(group).type != "cpu")


def _all_crcs(source: _ShardReader, num_shards: int, group: dist.ProcessGroup | None) -> list[int]:
    """The CRC32 of each tensor, on rank 0. Called on all ranks; gathers 8 bytes per tensor and rank."""
    own = torch.tensor(source.crcs[:num_shards], dtype=torch.int64, device=device_of_group(group))
    of_ranks = own.new_empty(dist.get_world_size(group) * num_shards)
    all_gather_single(of_ranks, own, group)
    of_shards = functools.reduce(torch.bitwise_xor, of_ranks.cpu().split(num_shards)).tolist() if num_shards else []
    return [*of_shards, *source.crcs[num_shards:]]


def _require_none(errors: FirstError, path: str | Path, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks if one has an error. Called on all ranks; gathers a few bytes from each."""
    for rank, text in enumerate(all_gather_object(errors.text, group)):
        if text is not None:
            who = f"rank {rank}: " if rank else ""
            raise CheckpointError(f"{path}: cannot be written: {who}{text}; an existing file is unchanged")
