"""Ranks that compute one batch together have the same one: found out, or seen to.

[Note: data blocks] A layer that is split over ranks, and a sequence that is, belong to one batch. The ranks that share
it, a data block, are consecutive: ``tensor degree x context degree`` of them, as both axes are the innermost. Nothing
in a loader knows of them: with a batch of its own on each rank, the parts of different samples are added up, all losses
are finite, and the model learns from nothing.

[Note: same draws] What a layer plan leaves whole, each rank of a group along the tensor axis computes whole. A dropout
there must drop the same elements on all of them: else split layers add up parts of different inputs, and what each rank
holds whole gets a gradient of its own and drifts apart, with finite losses and without an error. Composer seeds each
rank with a number of its own. So the ranks of a group go on from the random states of their first one: torch's, numpy's
(of which Composer's GyroDropout draws) and Python's. Inside of what is split, each drops its own features by the same
pattern.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.contents import Part, bytes_of, digest_of, parts_of
from composer_fsdp2.parallel.joining import join_rows
from composer_fsdp2.sharding.agree import agree, gather
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.sharding.random_states import random_states, set_random_states
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


def draw_alike(block: BatchGroup) -> None:
    """Give the ranks that split layers the random states of the first of them: of all generators in use.

    Called on all ranks of the block: after sharding, and before batches that are shared. Sends 15 kB a rank.
    """
    if block.tensor_degree == 1:
        return
    index = block.ranks.index(dist.get_rank())
    set_random_states(gather(random_states(), block.group)[index - index % block.tensor_degree])


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
    source = _ranks_of(group)[0]
    sent = [Packed.of(batch) if dist.get_rank() == source else None]
    dist.broadcast_object_list(sent, source, group)
    assert sent[0] is not None
    sent[0].check()
    return batch if dist.get_rank() == source else sent[0].open()


def _gathered(batch: Any, group: dist.ProcessGroup | None, counts: bool) -> Any:
    packed, digest = Packed.of(batch), digest_of(parts_of(batch))
    headers = gather((digest, counts, packed.error), group)
    if len({digest for digest, _, _ in headers}) == 1 and not packed.error:
        return batch  # replicated data: the rows of all would be each of them several times
    packed_batches: list[Packed] = gather(packed, group)
    taken = [rank for rank, (_, counts, _) in enumerate(headers) if counts] or [0]
    for each in packed_batches:
        each.check()
    own = dist.get_rank(group)
    return join_rows([batch if rank == own else packed_batches[rank].open() for rank in taken])


@dataclass(frozen=True, slots=True)
class Packed:
    """A value for other ranks: as bytes, in which tensors have no rank's own device, or why it cannot be pickled."""

    content: bytes = b""
    error: str = ""

    @classmethod
    def of(cls, value: Any) -> "Packed":
        file = io.BytesIO()
        try:
            _Pickler(file).dump(value)
        except Exception as error:  # whatever the value's own types raise
            return cls(error=f"{type(error).__name__}: {error}"[:2000])
        return cls(file.getvalue())

    def check(self) -> None:
        if self.error:
            raise ConfigError(
                f"broadcast_batch: a batch cannot be sent ({self.error}); give the ranks of a group the same data "
                "instead (num_replicas of a DistributedSampler, replication of a StreamingDataset), and leave the key "
                "out",
                keys=("broadcast_batch",),
            )

    def open(self) -> Any:
        """The value, with tensors on this rank's device."""
        return pickle.loads(self.content)


class _Pickler(pickle.Pickler):
    """Pickles a tensor without its rank's device, and faster than torch, which makes an archive of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:  # a subclass knows itself how it is pickled
            return NotImplemented
        try:
            content = bytearray(bytes_of(value).numpy())
        except (RuntimeError, NotImplementedError, TypeError):  # sparse: its indices and values come
            return NotImplemented
        return _tensor, (content, value.dtype, value.shape, value.device.type, value.is_pinned())


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: torch.Size, device_type: str, is_pinned: bool
) -> torch.Tensor:
    tensor = torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    # A copy to the device from memory that is not pinned would wait for it.
    return tensor.pin_memory() if is_pinned else tensor.to(device_type)
