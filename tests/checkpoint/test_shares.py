"""Who sends what in which round: plain numbers, also for more ranks than any machine here has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.save.shares import ROUND_BYTES, Shares, distinct, rounds, shares_of, slice_bytes

pytestmark = pytest.mark.any_torch

Shape = tuple[int, ...]


def parts(shape: Shape, dim: int | None, num_shards: int, num_replicas: int) -> list[Box | None]:
    """As ``fully_shard`` cuts, for each rank: shards beside each other, replicas of all of them one after the other."""
    unsharded = Box((0,) * len(shape), shape)
    if dim is None or not shape:
        return [unsharded] * (num_shards * num_replicas)
    step = -(-shape[dim] // num_shards) or 1
    of_shards: list[Box | None] = []
    for shard in range(num_shards):
        first = min(shard * step, shape[dim])
        offsets, sizes = list(unsharded.offsets), list(shape)
        offsets[dim], sizes[dim] = first, min(step, shape[dim] - first)
        of_shards.append(Box(tuple(offsets), tuple(sizes)))
    return of_shards * num_replicas


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[tuple[Shape, int]], list[Shares]]:
    """(shape and bytes an element) of some tensors, and who sends what of them."""
    num_shards, num_replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4))
    itemsizes = [draw(st.sampled_from([1, 2, 8])) for _ in shapes]
    cuts = [
        parts(shape, draw(st.sampled_from([None, *range(len(shape))])), num_shards, num_replicas) for shape in shapes
    ]
    num_ranks = num_shards * num_replicas
    others = draw(st.sets(st.integers(1, max(1, num_ranks - 1)), max_size=1)) if num_replicas > 1 else set()
    for of_ranks in cuts:
        for rank in others:  # of a group that trains apart
            of_ranks[rank] = None
    return list(zip(shapes, itemsizes, strict=True)), shares_by_tensor(cuts, itemsizes, num_ranks)


def shares_by_tensor(cuts: list[list[Box | None]], itemsizes: list[int], num_ranks: int) -> list[Shares]:
    """From each rank's part of each tensor."""
    return list(shares_of([distinct([of_ranks[rank] for of_ranks in cuts]) for rank in range(num_ranks)], itemsizes))


@given(tensors(), st.integers(1, 9))
@examples(60)
def test_every_byte_is_sent_once(drawn: tuple[list[tuple[Shape, int]], list[Shares]], num_bytes: int):
    """A byte that nobody sends is a zero in somebody's checkpoint."""
    for (shape, itemsize), shares in zip(*drawn, strict=True):
        seen = torch.zeros(math.prod(shape) * itemsize, dtype=torch.int64)
        for round_ in rounds(shares, num_bytes):
            assert all(share.num_bytes <= num_bytes for rank, share in round_.items() if rank)
            for share in round_.values():
                runs = list(share.runs(shape, itemsize))
                assert sum(count for _, count in runs) == share.num_bytes > 0
                for first, count in runs:
                    seen[first : first + count] += 1
        assert torch.equal(seen, torch.ones_like(seen)), shape


# (shape, how many tensors have it): one shape that 512 ranks cut unevenly, and 16 GiB with Adam's moments.
SHAPES = [((4096, 4096), 80), ((4096,), 81), ((10000, 4096), 2)]


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(512, 1), (8, 64)])
def test_512_ranks(num_shards: int, num_replicas: int):
    """Simulated: a full save with Adam's moments takes a collective for each tensor, and one for each 128 MiB."""
    shapes = [shape for shape, count in SHAPES for _ in range(3 * count)]
    shares = shares_by_tensor([parts(shape, 0, num_shards, num_replicas) for shape in shapes], [4] * len(shapes), 512)
    total_bytes = sum(4 * math.prod(shape) for shape in shapes)
    assert sum(share.num_bytes for of_ranks in shares for share in of_ranks.values()) == total_bytes
    num_bytes = slice_bytes(shares, 512)
    assert num_bytes * 512 <= ROUND_BYTES
    num_rounds = sum(1 for of_ranks in shares for _ in rounds(of_ranks, num_bytes))
    assert len(shapes) <= num_rounds <= total_bytes / ROUND_BYTES + len(shapes)
