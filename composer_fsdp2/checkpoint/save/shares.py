"""The bytes of a sharded tensor that each rank sends to rank 0, and in which rounds; the same on all ranks.

[Note: rounds] Tensors are written one after the other, in rounds. In each round every rank sends a slice of its shard
to rank 0: no rank waits in a collective for longer than one write. Replicas send equal shares of their part, except
those of rank 0's own part: rank 0 writes that from its memory.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from composer_fsdp2.checkpoint.boxes import Box, row_major

# Bytes sent in a round by all ranks and by one rank, at most.
ROUND_BYTES = 128 << 20
SLICE_BYTES = 16 << 20
# Bytes of rank 0's own shards that it writes in a round.
OWN_SLICE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """Some bytes of a rank's part of a tensor: from ``start`` to before ``end``, in row-major order of the part."""

    box: Box
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def runs(self, shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
        """The runs of these bytes in the full tensor of this shape: (first byte, number of bytes), in their order."""
        # The last dimension counts bytes. Trailing ones that the part covers make one run with the one before them.
        full = (*shape[:-1], shape[-1] * itemsize) if shape else (itemsize,)
        sizes = (*self.box.sizes[:-1], self.box.sizes[-1] * itemsize) if shape else (itemsize,)
        offsets = (*self.box.offsets[:-1], self.box.offsets[-1] * itemsize) if shape else (0,)
        dim = len(full) - 1
        while dim and sizes[dim] == full[dim]:
            dim -= 1
        length = math.prod(sizes[dim:])
        strides = row_major(full)
        at = self.start
        while at < self.end:
            row, within = divmod(at, length)
            first = within + offsets[dim] * strides[dim]
            for d in range(dim - 1, -1, -1):
                row, index = divmod(row, sizes[d])
                first += (offsets[d] + index) * strides[d]
            count = min(length - within, self.end - at)
            yield first, count
            at += count


# By rank.
Shares = Mapping[int, Share]
# A rank's parts of all tensors, in few bytes: the parts that differ (None where it has none), and each tensor's number.
Parts = tuple[Sequence[Box | None], Sequence[int]]


def distinct(parts: Sequence[Box | None]) -> Parts:
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return list(numbers), array("I", [numbers[part] for part in parts])


def shares_of(parts: Sequence[Parts], itemsizes: Sequence[int]) -> Iterator[Shares]:
    """What each rank sends of each tensor, or writes if it is rank 0.

    Args:
        parts: Of each rank.
        itemsizes: Of each tensor, bytes an element.
    """
    known: dict[tuple[tuple[int, ...], int], Shares] = {}  # many tensors are cut alike
    for *numbers, itemsize in zip(*(numbers for _, numbers in parts), itemsizes, strict=True):
        key = tuple(numbers), itemsize
        if key not in known:
            known[key] = _shares([boxes[at] for (boxes, _), at in zip(parts, numbers, strict=True)], itemsize)
        yield known[key]


def _shares(boxes: Sequence[Box | None], itemsize: int) -> Shares:
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if box is not None and box.numel:
            holders.setdefault(box, []).append(rank)
    shares: dict[int, Share] = {}
    for box, ranks in holders.items():
        senders, num_bytes = ranks[:1] if ranks[0] == 0 else ranks, box.numel * itemsize
        for place, rank in enumerate(senders):
            ends = (num_bytes * at // len(senders) for at in (place, place + 1))
            shares[rank] = Share(box, *ends)
    return shares


def slice_bytes(shares: Sequence[Shares], num_ranks: int) -> int:
    """What a rank other than 0 sends in a round, at most."""
    largest = max((share.num_bytes for each in shares for rank, share in each.items() if rank), default=1)
    return max(1, min(SLICE_BYTES, ROUND_BYTES // num_ranks, largest))


def rounds(shares: Shares, num_bytes: int) -> Iterator[Shares]:
    """The rounds in which one tensor is written; ``num_bytes`` is the others' slice."""
    at = {rank: (share.start, num_bytes if rank else OWN_SLICE_BYTES) for rank, share in shares.items()}
    number = 0
    while left := {
        rank: replace(share, start=first, end=min(share.end, first + at[rank][1]))
        for rank, share in shares.items()
        if (first := at[rank][0] + number * at[rank][1]) < share.end
    }:
        yield left
        number += 1
