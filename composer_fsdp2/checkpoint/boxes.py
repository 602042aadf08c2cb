"""Boxes, hyperrectangular parts of tensors: the chunks of a file, shards, reads and writes."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor. It has an offset and a size in elements for every dimension, as DCP's chunks."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def full(shape: Shape) -> "Box":
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: "Box") -> "Box | None":
        """The box of the elements that are in both boxes; None if they are disjoint."""
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + s, b + t) - first
            for a, s, b, t, first in zip(self.offsets, self.sizes, other.offsets, other.sizes, low, strict=True)
        )
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, origin: Shape) -> tuple[slice, ...]:
        """The slices that select this box in a tensor that begins at ``origin``."""
        return tuple(slice(a - o, a - o + size) for a, o, size in zip(self.offsets, origin, self.sizes, strict=True))

    def pieces(self, max_numel: int) -> Iterator["Box"]:
        """Split this box into contiguous row-major pieces: some rows, or a part of one row, of at least one element."""
        if self.numel <= max_numel or not self.sizes:
            yield self
            return
        num_rows = max_numel // math.prod(self.sizes[1:])
        first, end = self.offsets[0], self.offsets[0] + self.sizes[0]
        for row in range(first, end, max(num_rows, 1)):
            if num_rows:
                yield Box((row, *self.offsets[1:]), (min(num_rows, end - row), *self.sizes[1:]))
            else:
                for inner in Box(self.offsets[1:], self.sizes[1:]).pieces(max_numel):
                    yield Box((row, *inner.offsets), (1, *inner.sizes))


def row_major(shape: Shape) -> Shape:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


_MAX_CORNERS = 1 << 21  # 10,000 chunks along seven dimensions


def untiled(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Describe how boxes fail to cover each element of a tensor exactly once; None if they do not fail.

    A box is the sum of its corners, with signs that alternate from one to the next, as an interval [a, b) is the step
    at a minus the step at b. So boxes tile the tensor exactly if all their corners add up to the tensor's own.
    """
    split = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(boxes) << len(split) > _MAX_CORNERS:
        return f"its {len(boxes)} chunks are split along {len(split)} dimensions, too many to check"
    corners: Counter[Shape] = Counter()
    for sign, each in ((1, boxes), (-1, [Box.full(shape)])):
        for box in each:
            edges = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in split]
            for corner in itertools.product(*edges):
                corners[tuple(at for at, _ in corner)] += sign * math.prod(direction for _, direction in corner)
    if not any(corners.values()):
        return None
    covered = sum(box.numel for box in boxes)
    return f"its chunks hold {covered} of {math.prod(shape)} elements, with gaps or overlaps"
