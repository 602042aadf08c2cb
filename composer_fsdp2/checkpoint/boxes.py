"""Parts of tensors with straight edges: what a chunk, a shard, a read and a write have in common."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: offsets and sizes in elements, one of each for every dimension."""

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
        """The elements that both have; None where they have none in common."""
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
        """This box in row-major order, each piece one run of it: some rows, or a part of one; at least one element."""
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


_MOST_PAIRWISE = 256


def first_overlap(boxes: Sequence[Box]) -> tuple[Shape, Shape] | None:
    """Offsets of two boxes that share an element, or that no sharding lays out so; found in a short time.

    Boxes of a sharding lie in a grid: along some dimension they fall apart into groups that do not meet, and each group
    does so again. A few that do not are compared with each other; of many the first two are named.
    """
    work_left = 1_000_000 + 64 * len(boxes)
    waiting = [boxes]
    while waiting:
        group = waiting.pop()
        if len(group) < 2:
            continue
        if work_left < 0:
            return group[0].offsets, group[1].offsets
        for dim in range(len(group[0].offsets)):
            work_left -= len(group)
            if len(groups := _disjoint_groups(group, dim)) > 1:
                waiting.extend(groups)
                break
        else:
            if len(group) > _MOST_PAIRWISE:
                return group[0].offsets, group[1].offsets
            for one, other in itertools.combinations(group, 2):
                if one.overlap(other) is not None:
                    return one.offsets, other.offsets
    return None


def _disjoint_groups(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """The groups of boxes that do not meet along a dimension."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups
