"""Which bytes of a sharded state each rank sends to rank 0, and in which order. Equal on all ranks.

[Note: rounds] Every rank sends a slice in every round, so all ranks run the same few collectives, for any number of
tensors and any sharding. Replicas divide the bytes that they have in common, unless rank 0 is one of them: rank 0
writes its own shards from its own memory. A slice may end within a tensor.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from composer_fsdp2.checkpoint.boxes import Box, row_major

# The maximum number of bytes of a round: of all ranks, and of one rank.
ROUND_BYTES = 128 << 20
SLICE_BYTES = 16 << 20
# The number of bytes that rank 0 writes from its own memory in a round.
OWN_SLICE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes of a rank's part of a tensor.

    Args:
        number: The index of the tensor.
        start, end: The range in the part, in row-major order.
    """

    number: int
    box: Box
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def runs(self, shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
        """The ranges of these bytes in the full tensor of this shape, in order: (first byte, number of bytes)."""
        # The last dimension is in bytes. Trailing dimensions that the part covers are merged with the previous one.
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


class Routes:
    """The bytes that each rank sends.

    Args:
        parts: For each rank, its part of each tensor; None if the rank sends none of the tensor.
        itemsizes: For each tensor, the number of bytes of an element.
    """

    def __init__(self, parts: Sequence[Sequence[Box | None]], itemsizes: Sequence[int]) -> None:
        self.num_ranks = len(parts)
        known: dict[tuple[Box | None, ...], _Senders] = {}  # equal for tensors that are sharded in the same way
        for boxes in dict.fromkeys(zip(*parts, strict=True)):
            known[boxes] = _senders(boxes)
        self._tensors = [
            (known[boxes], itemsize) for boxes, itemsize in zip(zip(*parts, strict=True), itemsizes, strict=True)
        ]

    def incomplete(self, shapes: Sequence[Sequence[int]]) -> int | None:
        """The index of the first tensor that has an element on no rank; None if there is none."""
        for number, ((senders, _), shape) in enumerate(zip(self._tensors, shapes, strict=True)):
            if sum(part.numel for part in {part for part, _, _ in senders.values()}) != math.prod(shape):
                return number
        return None

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The pieces that a rank sends, in order. Rank 0 writes its own."""
        for number, (senders, itemsize) in enumerate(self._tensors):
            if rank in senders:
                part, place, num_places = senders[rank]
                start, end = _share(part, place, num_places, itemsize)
                if end > start:
                    yield Piece(number, part, start, end)

    def num_bytes(self) -> list[int]:
        """What each rank sends altogether."""
        totals = [0] * self.num_ranks
        by_id = {id(senders): senders for senders, _ in self._tensors}
        for (key, itemsize), count in Counter((id(senders), itemsize) for senders, itemsize in self._tensors).items():
            for rank, (part, place, num_places) in by_id[key].items():
                start, end = _share(part, place, num_places, itemsize)
                totals[rank] += count * (end - start)
        return totals


# By rank: its part, its index among the replicas of this part, and their number.
_Senders: TypeAlias = dict[int, tuple[Box, int, int]]


def _share(box: Box, place: int, num_places: int, itemsize: int) -> tuple[int, int]:
    """The range of a box's bytes that one of several replicas sends: (first, end)."""
    num_bytes = box.numel * itemsize
    return num_bytes * place // num_places, num_bytes * (place + 1) // num_places


def _senders(parts: Sequence[Box | None]) -> _Senders:
    """The ranks that send some of a tensor."""
    holders: dict[Box, list[int]] = {}
    for rank, part in enumerate(parts):
        if part is not None and 0 not in part.sizes:
            holders.setdefault(part, []).append(rank)
    senders = {part: ranks[:1] if ranks[0] == 0 else ranks for part, ranks in holders.items()}
    return {rank: (part, place, len(ranks)) for part, ranks in senders.items() for place, rank in enumerate(ranks)}


def cut(pieces: Iterator[Piece], num_bytes: int) -> Iterator[list[Piece]]:
    """Cut the pieces into groups of ``num_bytes``, one for each round. The last group may have fewer bytes."""
    group: list[Piece] = []
    room = num_bytes
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            end = min(piece.end, start + room)
            group.append(Piece(piece.number, piece.box, start, end))
            room -= end - start
            start = end
            if not room:
                yield group
                group, room = [], num_bytes
    if group:
        yield group


class Timetable:
    """The number of bytes in each round.

    Args:
        plain_bytes: The bytes of plain tensors, which rank 0 writes in addition.
    Attributes:
        slice_bytes: The bytes that a rank sends in each round but its last.
        own_slice_bytes: The bytes that rank 0 writes from its own memory in each round.
        num_rounds: The number of rounds until all bytes are written.
    """

    def __init__(self, routes: Routes, plain_bytes: int) -> None:
        self.slice_bytes = max(1, min(SLICE_BYTES, ROUND_BYTES // routes.num_ranks))
        self.own_slice_bytes = OWN_SLICE_BYTES
        self._num_bytes = routes.num_bytes()
        of_others = -(-max(self._num_bytes[1:], default=0) // self.slice_bytes)
        self.num_rounds = max(of_others, -(-(self._num_bytes[0] + plain_bytes) // self.own_slice_bytes))

    def sizes(self, number: int) -> list[int]:
        """The number of bytes that each rank sends in a round: one if it has no more bytes, and zero for rank 0.

        Every rank thus takes part in every round, and waits for at most one write.
        """
        left = (num_bytes - number * self.slice_bytes for num_bytes in self._num_bytes[1:])
        return [0, *(max(1, min(self.slice_bytes, num_bytes)) for num_bytes in left)]
