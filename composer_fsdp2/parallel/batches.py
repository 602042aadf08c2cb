"""Ranks that compute one batch together have the same one: found out, or seen to.

[Note: data blocks] A layer that is split over ranks, and a sequence that is, belong to one batch. The ranks that share
it, a data block, are consecutive: ``tensor degree x context degree`` of them, as both axes are the innermost. Nothing
in a loader knows of them: with a batch of its own on each rank, the parts of different samples are added up, all losses
are finite, and the model learns from nothing.
"""

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.contents import Part, bytes_of, digest_of, parts_of
from composer_fsdp2.parallel.joining import join_rows
from composer_fsdp2.sharding.agree import agree, device_of_group, gather
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.training.run import BatchGroup

_TIMEOUT = timedelta(minutes=30)  # as that of any group of torch's: loaders may be as slow as they were


def make_batch_group(config: ShardingConfig) -> BatchGroup | None:
    """The ranks that share a batch, with this one; None where every rank has its own. Called on all ranks."""
    if (size := config.data_block_size) == 1:
        return None
    group = group_along((-1, size), 1, "batch", backend="gloo", timeout=_TIMEOUT)
    return BatchGroup(
        ranks=tuple(_ranks_of(group)),
        group=group,
        how=config.batches_are,
        check=config.check_data is not False,
        tensor_degree=config.mesh.tensor_degree,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def check_batch(batch: Any, group: dist.ProcessGroup | None = None, *, what: str = "this batch") -> None:
    """Raise on every rank of the world where ranks of one group have different batches.

    Args:
        batch: Of any structure; values, shapes and dtypes are compared, to the last bit.
        group: The ranks that share this rank's batch; None for all.
        what: The batch in a message's words.
    Raises:
        ConfigError: names the ranks, what differs, and the ways out.

    Called on all ranks. Waits for the device, so not for every batch: the first of an epoch shows a loader that gives
    each rank its own.
    """
    check_parts(parts_of(batch), group, what=what)


def check_parts(
    parts: list[Part], group: dist.ProcessGroup | None = None, *, what: str, ways_out: str | None = None
) -> None:
    """``check_batch`` of what ``parts_of`` found.

    Args:
        ways_out: In the place of those of a loader.
    """
    is_same = len(set(gather(digest_of(parts), group))) == 1
    of_ranks = [] if is_same else gather(parts, group)
    agree(lambda: None if is_same else _refuse(of_ranks, _ranks_of(group), what, ways_out), lambda _: "", ConfigError)


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _refuse(parts: Sequence[Sequence[Part]], ranks: Sequence[int], what: str, ways_out: str | None) -> None:
    other = next(number for number, each in enumerate(parts) if each != parts[0])
    raise ConfigError(
        f"ranks {ranks[0]} and {ranks[other]} compute one batch together (as each {len(ranks)} ranks in a row do) and "
        f"have different ones at {what}: {_difference(parts[0], parts[other])}. "
        f"{_ways_out(len(ranks)) if ways_out is None else ways_out}; check_data: false trains on all the same",
        keys=("check_data", "broadcast_batch"),
    )


def _difference(ours: Sequence[Part], theirs: Sequence[Part]) -> str:
    """The first value that differs, in words."""
    a, b = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), (None, None))
    if a is None or b is None:
        longer = max(ours, theirs, key=len)
        return f"one of them alone has {longer[min(len(ours), len(theirs))].path}"
    if a.path != b.path:
        return f"{a.path} is in one, {b.path} in the other"
    if a.kind != b.kind:
        return f"{a.path} is {a.kind} in one, {b.kind} in the other"
    return f"{a.path}, {a.kind}, has other values"


def _ways_out(size: int) -> str:
    """What gives the ranks of a group the same data."""
    return (
        f"Give the ranks of a group the same data: a DistributedSampler with num_replicas=world_size // {size} and "
        f"rank=rank // {size} (composer.utils.dist.get_sampler takes both); a StreamingDataset with replication={size} "
        f"(`replication: {size}` in the dataset section of an LLM Foundry YAML); or broadcast_batch: first or gather "
        "in the fsdp section, whatever the loader reads"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sharing


def share_batch(
    batch: Any,
    group: dist.ProcessGroup | None = None,
    how: BroadcastBatch | str = BroadcastBatch.FIRST,
    *,
    counts: bool = True,
) -> Any:
    """The batch that all ranks of a group take in the place of their own.

    Args:
        batch: What this rank read: tensors, in whatever structure can be pickled. It is not changed.
        group: The ranks that share a batch; None for all. Over gloo nobody waits for a device, if the batch is in host
            memory, too.
        how: ``first``: the first rank's. ``gather``: the rows of all, in the order of ranks, so that no sample is lost;
            where all have read the same batch already, that one. Text of different lengths is padded to the longest.
            ``False`` gives back the batch.
        counts: Whether this rank's rows are among those gathered; if no rank's are, the first rank's.
    Returns:
        The same on all ranks of the group, with tensors on this rank's device.
    Raises:
        ConfigError: on every rank of the group: a batch cannot be sent, or rows do not fit together.

    Called on all ranks of the group.
    """
    how = BroadcastBatch(how)
    if how is BroadcastBatch.OFF or dist.get_world_size(group) == 1:
        return batch
    return _first(batch, group) if how is BroadcastBatch.FIRST else _gathered(batch, group, counts)


def _first(batch: Any, group: dist.ProcessGroup | None) -> Any:
    source, device = _ranks_of(group)[0], device_of_group(group)
    own = _Packed.of(batch) if dist.get_rank() == source else None
    header = torch.tensor([0, 0] if own is None else own.sizes, device=device)
    dist.broadcast(header, source, group)
    sizes = header.tolist()
    content = (torch.empty(sum(map(abs, sizes)), dtype=torch.uint8) if own is None else own.content).to(device)
    dist.broadcast(content, source, group)
    received = _Packed(sizes, content.cpu())
    received.check()
    return received.open() if own is None else batch


def _gathered(batch: Any, group: dist.ProcessGroup | None, counts: bool) -> Any:
    packed, digest = _Packed.of(batch), digest_of(parts_of(batch))
    halves = [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]
    headers = _all_gather(torch.tensor([*packed.sizes, *halves, int(counts)]), group)
    digests, has_rows = {tuple(header[2:4].tolist()) for header in headers}, [bool(header[4]) for header in headers]
    if len(digests) == 1 and not packed.failed:
        return batch  # replicated data: the rows of all would be each of them several times
    sizes: list[list[int]] = [header[:2].tolist() for header in headers]
    longest = max(sum(map(abs, each)) for each in sizes)
    contents = _all_gather(nn.functional.pad(packed.content, (0, longest - len(packed.content))), group)
    batches = [_Packed(size, content) for size, content in zip(sizes, contents, strict=True)]
    for each in batches:
        each.check()
    taken = [rank for rank, counts in enumerate(has_rows) if counts] or [0]
    own = dist.get_rank(group)
    return join_rows([batch if rank == own else batches[rank].open() for rank in taken])


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors of all ranks, of one size, on the CPU."""
    sent = tensor.to(device_of_group(group))
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group)
    return [each.cpu() for each in received]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch as bytes: a pickle of all but its tensors, and those one after another.

    Args:
        sizes: Of the two; of a batch that could not be pickled, that of the reason, and -1.
    """

    sizes: list[int]
    content: torch.Tensor  # 1-D, uint8

    @classmethod
    def of(cls, batch: Any) -> "_Packed":
        file = io.BytesIO()
        pickler = _Pickler(file, protocol=5)
        try:
            pickler.dump(batch)
        except Exception as error:  # whatever the batch's own types raise
            reason = f"{type(error).__name__}: {error}".encode(errors="replace")[:2000]
            return cls([len(reason), -1], torch.tensor([*reason, 0], dtype=torch.uint8))
        pickled = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        tensors = torch.cat([torch.empty(0, dtype=torch.uint8), *pickler.tensors])
        return cls([len(pickled), len(tensors)], torch.cat([pickled, tensors]))

    @property
    def failed(self) -> bool:
        return self.sizes[1] < 0

    def check(self) -> None:
        if self.failed:
            raise ConfigError(
                f"broadcast_batch: a batch cannot be sent ({self._pickled.decode(errors='replace')}); give the "
                "ranks of a group the same data instead (num_replicas of a DistributedSampler, replication of a "
                "StreamingDataset), and leave the key out",
                keys=("broadcast_batch",),
            )

    def open(self) -> Any:
        return _Unpickler(io.BytesIO(self._pickled), self.content[self.sizes[0] : sum(self.sizes)]).load()

    @property
    def _pickled(self) -> bytes:
        return self.content[: self.sizes[0]].numpy().tobytes()


class _Pickler(pickle.Pickler):
    """Takes the tensors out, in the order in which they come."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:  # a subclass knows itself how it is pickled
            return None
        try:
            self.tensors.append(bytes_of(value))
        except (RuntimeError, NotImplementedError, TypeError):  # sparse: its indices and values come
            return None
        return value.dtype, tuple(value.shape), value.device.type, value.is_pinned()


class _Unpickler(pickle.Unpickler):
    """Reads what a rank of the same job wrote."""

    def __init__(self, file: io.BytesIO, tensors: torch.Tensor) -> None:
        super().__init__(file)
        self._tensors, self._at = tensors, 0

    def persistent_load(self, described: Any) -> torch.Tensor:
        dtype, shape, device_type, is_pinned = described
        start, self._at = self._at, self._at + math.prod(shape) * dtype.itemsize
        # A copy: at its place among the others it may lie where no element of its dtype can.
        tensor = self._tensors[start : self._at].clone().view(dtype).reshape(shape)
        # A copy to the device from memory that is not pinned would wait for it.
        return tensor.pin_memory() if is_pinned else tensor.to(device_type)
