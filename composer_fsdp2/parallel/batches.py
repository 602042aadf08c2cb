"""Ranks that compute one batch together: compare what their loaders returned, or share it.

[Note: data blocks] A layer that is split over ranks, and a sequence that is, belong to one batch. The ranks that share
it, a data block, are consecutive: ``tensor degree x context degree`` of them, as both axes are the innermost. A loader
does not know about them. If each rank of a block reads another batch, parts of different samples are added up: all
losses are finite, and the model learns nothing.

[Note: same draws] Modules that a layer plan does not split run as a whole on each rank of the tensor axis. A dropout
among them must drop the same elements on all of these ranks: otherwise split layers add up parts of different inputs,
and the ranks' copies of unsplit parameters get different gradients and drift apart, without an error. Composer seeds
every rank differently. So the ranks of the tensor axis continue with the random states of their first rank: those of
torch, numpy (used by Composer's GyroDropout) and Python. Inside a split module each rank drops its features with the
same pattern.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
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
        how=config.effective_broadcast_batch,
        check=config.check_data is not False,
        tensor_degree=config.mesh.tensor_degree,
    )


def draw_alike(block: BatchGroup) -> None:
    """Copy the random states of all generators from the first rank of the tensor axis to its other ranks.

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
        what: The name of the batch in messages.
    Raises:
        ConfigError: names the ranks, what differs, and the ways out.

    Called on all ranks. Waits for the device, so compare the first batch of an epoch, which shows whether a loader is
    split over all ranks.
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
    other, size = next(number for number, each in enumerate(parts) if each != parts[0]), len(ranks)
    ways_out = ways_out or (
        f"Give the ranks of a group the same data: a DistributedSampler with num_replicas=world_size // {size} and "
        f"rank=rank // {size} (composer.utils.dist.get_sampler takes both); a StreamingDataset with replication={size} "
        f"(`replication: {size}` in the dataset section of an LLM Foundry YAML); or broadcast_batch: first or gather "
        "in the fsdp section, whatever the loader reads"
    )
    raise ConfigError(
        f"ranks {ranks[0]} and {ranks[other]} compute one batch together (as each {size} ranks in a row do) and "
        f"have different ones at {what}: {_difference(parts[0], parts[other])}. {ways_out}; check_data: false trains "
        "on all the same",
        keys=("check_data", "broadcast_batch"),
    )


def _difference(ours: Sequence[Part], theirs: Sequence[Part]) -> str:
    """Describe the first value that differs."""
    a, b = next((a, b) for a, b in zip_longest(ours, theirs) if a != b)
    if a is None or b is None:
        return f"one of them alone has {(a or b).path}"
    if a.path != b.path:
        return f"{a.path} is in one, {b.path} in the other"
    if a.kind != b.kind:
        return f"{a.path} is {a.kind} in one, {b.kind} in the other"
    return f"{a.path}, {a.kind}, has other values"


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
        group: The ranks that share a batch; None for all. With gloo and a batch in host memory, no rank waits for its
            device.
        how: ``first``: the first rank's. ``gather``: the rows of all, in the order of ranks;
            where all have read the same batch already, that one. Text of different lengths is padded to the longest.
            ``False`` returns ``batch``.
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
    is_source = dist.get_rank(group) == 0
    sent = [Packed.of(batch) if is_source else Packed()]
    dist.broadcast_object_list(sent, _ranks_of(group)[0], group)
    return batch if is_source and not sent[0].error else sent[0].open()


def _gathered(batch: Any, group: dist.ProcessGroup | None, counts: bool) -> Any:
    packed, digest = Packed.of(batch), digest_of(parts_of(batch))
    headers = gather((digest, packed.error, counts), group)
    if len({(digest, error) for digest, error, _ in headers}) == 1 and not packed.error:
        return batch  # replicated data: the rows of all would be each of them several times
    batches = [each.open() for each in gather(packed, group)]
    return join_rows([each for each, (_, _, counts) in zip(batches, headers, strict=True) if counts] or batches[:1])


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value for other ranks, or the error of pickling it. Tensors are stored without their device's index."""

    content: bytes = b""
    error: str = ""

    @classmethod
    def of(cls, value: Any) -> "Packed":
        file = io.BytesIO()
        try:
            _Pickler(file).dump(value)
        except Exception as error:  # of any type
            return cls(error=f"{type(error).__name__}: {error}"[:2000])
        return cls(file.getvalue())

    def open(self) -> Any:
        """The value, with tensors on this rank's device.

        Raises:
            ConfigError: it could not be pickled.
        """
        if self.error:
            raise ConfigError(
                f"broadcast_batch: a batch cannot be sent ({self.error}); give the ranks of a group the same data "
                "instead (num_replicas of a DistributedSampler, replication of a StreamingDataset), and leave the key "
                "out",
                keys=("broadcast_batch",),
            )
        return pickle.loads(self.content)


class _Pickler(pickle.Pickler):
    """Pickles the bytes of a tensor, which is faster than torch's reduction: that one writes an archive per tensor."""

    def reducer_override(self, value: Any) -> Any:
        # Subclasses define their own reduction.
        if type(value) is not torch.Tensor or (raw := bytes_of(value)) is None:
            return NotImplemented
        return _tensor, (bytearray(raw.numpy()), value.dtype, value.shape, value.device.type, value.is_pinned())


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: torch.Size, device_type: str, is_pinned: bool
) -> torch.Tensor:
    tensor = torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    # Copies to the device from memory that is not pinned are synchronous.
    return tensor.pin_memory() if is_pinned else tensor.to(device_type)
