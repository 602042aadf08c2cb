"""Compare or share the batches of ranks that must train on the same batch.

[Note: data blocks] The ranks that TP-shard a layer, or divide a sequence, must have the same batch. They form a data
block: ``tensor degree x context degree`` consecutive ranks, as both axes are the innermost. A loader does not know
about data blocks. If each rank of a block reads a different batch, layers add partial results of different samples: all
losses are finite, and the model learns nothing.

[Note: same draws] Modules outside of the layer plan run in full on each rank of the tensor axis. Dropout in such a
module must drop the same elements on all of these ranks. Otherwise TP-sharded layers add partial results of different
inputs, and the ranks' copies of replicated parameters get different gradients and diverge, without an error. Composer
seeds every rank differently. The ranks of the tensor axis therefore continue with the RNG states of their first rank:
those of torch, numpy (used by Composer's GyroDropout) and Python. Inside a TP-sharded module each rank drops its
features with the same pattern.
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
from composer_fsdp2.parallel.contents import BatchValue, batch_values, bytes_of, digest_of
from composer_fsdp2.parallel.joining import join_rows
from composer_fsdp2.sharding.agree import agree, all_gather_object
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.sharding.random_states import random_states, set_random_states
from composer_fsdp2.training.run import BatchGroup

_TIMEOUT = timedelta(minutes=30)  # the default of torch's groups; loaders may be slow


def make_batch_group(config: ShardingConfig) -> BatchGroup | None:
    """The ranks that share this rank's batch; None if every rank has its own.

    Called on all ranks; creates process groups.
    """
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


def sync_random_states(block: BatchGroup) -> None:
    """Copy the states of all RNGs from the first rank of the tensor axis to its other ranks.

    Called on all ranks of the block, after sharding and before shared batches. Sends 15 kB per rank.
    """
    if block.tensor_degree == 1:
        return
    index = block.ranks.index(dist.get_rank())
    set_random_states(all_gather_object(random_states(), block.group)[index - index % block.tensor_degree])


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def check_batch(batch: Any, group: dist.ProcessGroup | None = None, *, what: str = "this batch") -> None:
    """Raise on every rank of the world if ranks of one group have different batches.

    Args:
        batch: Any structure. Values, shapes and dtypes are compared bitwise.
        group: The ranks that share this rank's batch; None means all.
        what: The name of the batch in messages.
    Raises:
        ConfigError: names the ranks, the difference, and the alternatives.

    Called on all ranks. Synchronizes with the device, so compare only the first batch of an epoch, which shows
    whether a loader divides its data over all ranks.
    """
    check_values(batch_values(batch), group, what=what)


def check_values(
    parts: list[BatchValue], group: dist.ProcessGroup | None = None, *, what: str, alternatives: str | None = None
) -> None:
    """As ``check_batch``, for the result of ``batch_values``.

    Args:
        alternatives: The alternatives in the message; None means those for a loader.
    """
    is_same = len(set(all_gather_object(digest_of(parts), group))) == 1
    of_ranks = [] if is_same else all_gather_object(parts, group)
    agree(
        lambda: None if is_same else _refuse(of_ranks, _ranks_of(group), what, alternatives), lambda _: "", ConfigError
    )


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _refuse(parts: Sequence[Sequence[BatchValue]], ranks: Sequence[int], what: str, alternatives: str | None) -> None:
    other, size = next(number for number, each in enumerate(parts) if each != parts[0]), len(ranks)
    alternatives = alternatives or (
        f"Give the ranks of a group the same data: a DistributedSampler with num_replicas=world_size // {size} and "
        f"rank=rank // {size} (composer.utils.dist.get_sampler takes both); a StreamingDataset with replication={size} "
        f"(`replication: {size}` in the dataset section of an LLM Foundry YAML); or broadcast_batch: first or gather "
        "in the fsdp section, whatever the loader reads"
    )
    raise ConfigError(
        f"ranks {ranks[0]} and {ranks[other]} compute one batch together (as each {size} ranks in a row do) and "
        f"have different ones at {what}: {_difference(parts[0], parts[other])}. {alternatives}; check_data: false "
        "trains on all the same",
        keys=("check_data", "broadcast_batch"),
    )


def _difference(ours: Sequence[BatchValue], theirs: Sequence[BatchValue]) -> str:
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
    """Replace the batches of a group's ranks by one batch.

    Args:
        batch: What this rank's loader returned: tensors in any structure that can be pickled. Not modified.
        group: The ranks that share a batch; None means all. With gloo and a batch in host memory, no rank synchronizes
            with its device.
        how: ``first``: the first rank's batch. ``gather``: the rows of all ranks, in rank order, padded to the longest
            sequence; if all ranks have the same batch, that batch. ``False``: this rank's ``batch``.
        counts: Whether ``gather`` includes this rank's rows. If it includes no rank's, the result is the first rank's
            batch.
    Returns:
        The same batch on all ranks of the group, with tensors on this rank's device.
    Raises:
        ConfigError: on every rank of the group: a batch cannot be sent, or rows do not fit together.

    Called on all ranks of the group.
    """
    how = BroadcastBatch(how)
    if how is BroadcastBatch.OFF or dist.get_world_size(group) == 1:
        return batch
    return _broadcast_first(batch, group) if how is BroadcastBatch.FIRST else _gather_rows(batch, group, counts)


def _broadcast_first(batch: Any, group: dist.ProcessGroup | None) -> Any:
    is_source = dist.get_rank(group) == 0
    sent = [Packed.of(batch) if is_source else Packed()]
    dist.broadcast_object_list(sent, _ranks_of(group)[0], group)
    return batch if is_source and not sent[0].error else sent[0].open()


def _gather_rows(batch: Any, group: dist.ProcessGroup | None, counts: bool) -> Any:
    packed, digest = Packed.of(batch), digest_of(batch_values(batch))
    headers = all_gather_object((digest, packed.error, counts), group)
    if len({(digest, error) for digest, error, _ in headers}) == 1 and not packed.error:
        return batch  # replicated data: concatenation would repeat its rows
    batches = [each.open() for each in all_gather_object(packed, group)]
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
        """Unpickle the value, with its tensors on this rank's device.

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
    """Pickles a tensor as its bytes, which is faster than torch's own way, an archive per tensor."""

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
