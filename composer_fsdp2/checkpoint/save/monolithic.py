"""A sharded state as one file: all ranks send slices of their shards to rank 0, in rounds, and rank 0 writes them.

See [Note: rounds] in shares.py. With NCCL the ranks all-gather instead of sending to rank 0, because NCCL would keep a
communicator for each pair of ranks.
"""

import functools
import hashlib
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.collectives import all_gather_single
from composer_fsdp2._torch.parts import local_tensor
from composer_fsdp2.checkpoint.archive.crc import shifted
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.read import bytes_of
from composer_fsdp2.checkpoint.save.shares import (
    OWN_SLICE_BYTES,
    Share,
    Shares,
    distinct,
    rounds,
    shares_of,
    slice_bytes,
)
from composer_fsdp2.checkpoint.save.staged_file import FirstError, StagedFile, require_plain_bytes
from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.checkpoint.trees import dotted, leaves
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import device_of_group, gather, sends_from_host


def save_monolithic(state: Any, path: str | Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write ``state`` as ``torch.save`` would write it with every DTensor unsharded, replacing ``path`` at the end.

    Rank 0 writes beside ``path`` and renames. Beyond the state, rank 0 needs host memory for two rounds, of 16 MiB a
    rank and 128 MiB at most, and for 64 MiB of its own shards, if they are on a device. Every other rank needs host
    memory for its slice of a round, and for a copy of a shard that is not contiguous. If the group cannot send from
    host memory (NCCL), all ranks need device memory for one round.

    Args:
        state: Nested dicts, lists and tuples; the same DTensors in the same order on all ranks. All other values, plain
            tensors too, are rank 0's.
        path: On rank 0's file system.
        group: Of all ranks; None is the default group. Its collectives must be free for the length of the call.
    Raises:
        CheckpointError: on all ranks: the file cannot be written, a rank cannot read what it has, or ranks hold
            different tensors, or not all of one. Nothing is left of it then, and an existing file is unchanged.

    Called on all ranks. Gathers each rank's part of each tensor; then for each round a gather (an all-gather, if the
    group cannot send from host memory), for all CRC32s one more, and four times the errors of the ranks.
    """
    named = _dtensors(state)
    shards = [shard for _, shard in named]
    shares = _all_shares(named, path, group)
    errors = FirstError()
    file = StagedFile(Path(path), state, shards, errors) if dist.get_rank(group) == 0 else None
    try:
        [plain, *_] = gather([(tuple(each.shape), each.nbytes) for each in file.plain] if file else None, group)
        _require_none(errors, path, group)
        shares += [{0: Share(Box.full(shape), 0, num_bytes)} for shape, num_bytes in plain]
        source = _ShardReader(shards, file.plain if file is not None else [])
        work = _Work(source, slice_bytes(shares, dist.get_world_size(group)), errors, group)
        exchange = errors.attempt(lambda: _Sender(work) if file is None else _Receiver(work, file))
        _require_none(errors, path, group)
        assert exchange is not None
        exchange.run(_schedule(shares, work.slice_bytes))
        crcs = _all_crcs(source, len(shards), group)
        _require_none(errors, path, group)
        if file is not None:
            file.publish(crcs)
        _require_none(errors, path, group)
    finally:
        if file is not None:
            file.leave_nothing()


def _dtensors(state: Any) -> list[tuple[str, DTensor]]:
    """Every DTensor in a nested value once, by the name of its first place."""
    found: dict[int, tuple[str, DTensor]] = {}
    for path, value in leaves(state):
        if isinstance(value, DTensor):
            found.setdefault(id(value), (dotted(path), value))
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# The ranks' parts


def _all_shares(
    named: Sequence[tuple[str, DTensor]], path: str | Path, group: dist.ProcessGroup | None
) -> list[Shares]:
    """Called on all ranks; gathers four bytes for each tensor, and each part that differs from others.

    Raises:
        CheckpointError: on all ranks, if they hold different tensors, or not all of one.
    """
    described = [f"{name} {tuple(shard.shape)} {shard.dtype}" for name, shard in named]
    digest = hashlib.sha256(
        "\n".join(described).encode(errors="backslashreplace")
    ).digest()  # the names themselves are long
    parts = _own_parts([shard for _, shard in named], 0 if group is None else dist.get_global_rank(group, 0))
    gathered = gather((digest, distinct(parts)), group)
    if any(of_rank != digest for of_rank, _ in gathered):
        raise CheckpointError(f"{path}: not written: {_first_difference(gather(described, group))}")
    shares = list(shares_of([parts for _, parts in gathered], [shard.element_size() for _, shard in named]))
    for of_ranks, (_, shard), text in zip(shares, named, described, strict=True):
        if sum(share.num_bytes for share in of_ranks.values()) != shard.numel() * shard.element_size():
            raise CheckpointError(
                f"{path}: not written: the ranks of this group do not hold all of {text}; save with a group of all "
                "ranks of its mesh that includes rank 0"
            )
    return shares


def _own_parts(shards: Sequence[DTensor], writer: int) -> list[Box | None]:
    """This rank's part of each tensor; None where the tensor's mesh is without the rank that writes.

    Groups of ranks that train separately have different values; the file has those of rank 0's group.
    """
    boxes = [LocalBox.of(shard) if bool((shard.device_mesh.mesh == writer).any()) else None for shard in shards]
    return [None if box is None else Box(box.offsets, box.sizes) for box in boxes]


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    """The first difference between rank 0's tensors and another rank's, as text."""
    rank, of_rank = next((rank, of_rank) for rank, of_rank in enumerate(described) if of_rank != described[0])
    for ours, theirs in zip(described[0], of_rank, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours} where rank {rank} has {theirs}; save the same state on every rank"
    return f"rank 0 has {len(described[0])} sharded tensors, rank {rank} {len(of_rank)}; save the same on every rank"


# ---------------------------------------------------------------------------------------------------------------------
# The rounds


class _ShardReader:
    """The bytes of this rank's shards, and of rank 0's plain tensors; and what they add to the tensors' CRC32s.

    CRC32s are computed by the rank that has the bytes: they cover the transfer, and ranks share the work.
    """

    def __init__(self, shards: Sequence[DTensor], plain: Sequence[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor] = [*shards, *plain]
        self._bytes: tuple[int, torch.Tensor] | None = None  # of the tensor that is being read
        self.crcs = [0] * len(self._tensors)

    def require_bytes(self) -> None:
        for tensor in self._tensors:
            require_plain_bytes(tensor)

    def read(self, number: int, share: Share) -> torch.Tensor:
        """A share in host memory, a uint8 tensor of one dimension; it is read once."""
        if self._bytes is None or self._bytes[0] != number:
            self._bytes = None  # free a copy before the next one is made
            local = local_tensor(self._tensors[number].detach()).resolve_conj().resolve_neg()
            self._bytes = number, local.contiguous().view(-1).view(torch.uint8)
        tensor, found = self._tensors[number], self._bytes[1][share.start : share.end].cpu()
        data, num_bytes, at = bytes_of(found), tensor.numel() * tensor.element_size(), 0
        for first, count in share.runs(tensor.shape, tensor.element_size()):
            self.crcs[number] ^= shifted(zlib.crc32(data[at : at + count]), num_bytes - first - count)
            at += count
        return found


# A tensor's number, what each rank has of it in a round, and whether the ranks send it to each other.
_Round = tuple[int, Shares, bool]


def _schedule(shares: Sequence[Shares], num_bytes: int) -> Iterator[_Round]:
    """The rounds of all tensors. Ranks send at least once for each ``OWN_SLICE_BYTES`` that rank 0 writes."""
    own_bytes = 0
    for number, of_ranks in enumerate(shares):
        for round_ in rounds(of_ranks, num_bytes):
            own_bytes += round_[0].num_bytes if 0 in round_ else 0
            is_sent = own_bytes >= OWN_SLICE_BYTES or any(round_)
            own_bytes = 0 if is_sent else own_bytes
            yield number, round_, is_sent


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rank has to do in the rounds, and with whom."""

    source: _ShardReader
    slice_bytes: int
    errors: FirstError
    group: dist.ProcessGroup | None


class _Sender:
    """Sends this rank's shares to rank 0. Allocates its memory when it is constructed."""

    def __init__(self, work: _Work) -> None:
        work.source.require_bytes()
        self._work = work
        self._rank = dist.get_rank(work.group)
        self._memory = _host_memory(work.slice_bytes, work.group)

    def run(self, schedule: Iterable[_Round]) -> None:
        for number, round_, is_sent in schedule:
            if is_sent:
                # An error is raised at the end: the other ranks continue to send.
                self._work.errors.attempt(functools.partial(self._read, number, round_.get(self._rank)))
                sizes = _sizes(round_, self._work.group)
                _exchange(self._memory[: sizes[self._rank]], sizes, self._work.group)

    def _read(self, number: int, share: Share | None) -> None:
        if share is not None:
            self._memory[: share.num_bytes] = self._work.source.read(number, share)


class _Receiver:
    """Writes all ranks' shares to the file, on rank 0. Allocates its memory when it is constructed."""

    def __init__(self, work: _Work, file: StagedFile) -> None:
        self._work, self._file = work, file
        # While a round is written the next one is under way.
        num_bytes = dist.get_world_size(work.group) * work.slice_bytes
        self._memories = [_host_memory(num_bytes, work.group) for _ in range(2)]
        self._writer = ThreadPoolExecutor(1, threading.current_thread().name)
        self._writer.submit(int).result()  # its thread runs

    def run(self, schedule: Iterable[_Round]) -> None:
        work, written = self._work, deque[Future[None]]()
        with self._writer as writer:
            for number, round_, is_sent in schedule:
                if len(written) == 2:
                    written.popleft().result()
                self._memories.reverse()
                received = _exchange(self._memories[0], _sizes(round_, work.group), work.group) if is_sent else []
                data = [(round_[rank], row) for rank, row in enumerate(received, 1) if rank in round_]
                if 0 in round_:
                    own = work.errors.attempt(functools.partial(work.source.read, number, round_[0]))
                    data += [] if own is None else [(round_[0], own)]
                written.append(writer.submit(self._file.add, number, data))


def _sizes(round_: Shares, group: dist.ProcessGroup | None) -> list[int]:
    """Bytes that each rank sends in a round: one at least, or it would wait for the writes of several rounds."""
    others = range(1, dist.get_world_size(group))
    return [0, *(round_[rank].num_bytes if rank in round_ else 1 for rank in others)]


def _exchange(memory: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """One round. Called on all ranks.

    Args:
        memory: What this rank sends; on rank 0, for what comes.
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
    all_gather_single(gathered, own, group)
    if not is_writer:
        gathered[:1].cpu()  # waits: the watchdog counts from when a collective is begun, and none is begun too early
        return []
    memory = memory[: len(gathered)].copy_(gathered)
    return [row[:sent] for row, sent in zip(memory.split(size), sizes, strict=True)][1:]


def _host_memory(num_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device_of_group(group).type != "cpu")


def _all_crcs(source: _ShardReader, num_shards: int, group: dist.ProcessGroup | None) -> list[int]:
    """The CRC32 of each of ``source``'s tensors, on rank 0. Called on all ranks; gathers 8 bytes for each and rank."""
    own = torch.tensor(source.crcs[:num_shards], dtype=torch.int64, device=device_of_group(group))
    of_ranks = own.new_empty(dist.get_world_size(group) * num_shards)
    all_gather_single(of_ranks, own, group)
    of_shards = functools.reduce(torch.bitwise_xor, of_ranks.cpu().split(num_shards)).tolist() if num_shards else []
    return [*of_shards, *source.crcs[num_shards:]]


def _require_none(errors: FirstError, path: str | Path, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks what one could not do. Called on all ranks; gathers a few bytes from each."""
    for rank, text in enumerate(gather(errors.text, group)):
        if text is not None:
            who = f"rank {rank}: " if rank else ""
            raise CheckpointError(f"{path}: cannot be written: {who}{text}; an existing file is unchanged")
