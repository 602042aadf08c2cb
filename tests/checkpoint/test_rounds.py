"""The sends of each round: plain numbers, also for more ranks than any test machine has."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.save.rounds import OWN_SLICE_BYTES, ROUND_BYTES, Routes, Timetable, cut

pytestmark = pytest.mark.any_torch

Shape = tuple[int, ...]


def parts(shape: Shape, dim: int | None, num_shards: int, num_replicas: int) -> list[Box | None]:
    """The shards of each rank as ``fully_shard`` creates them: first all shards, then their replicas."""
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


def routes_of(cuts: list[list[Box | None]], itemsizes: list[int], num_ranks: int) -> Routes:
    """The routes for each rank's part of each tensor."""
    return Routes([[of_ranks[rank] for of_ranks in cuts] for rank in range(num_ranks)], itemsizes)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[tuple[Shape, int]], Routes]:
    """(shape and bytes an element) of some tensors, and the rank that sends each part."""
    shards, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4))
    itemsizes = [draw(st.sampled_from([1, 2, 8])) for _ in shapes]
    cuts = [parts(shape, draw(st.sampled_from([None, *range(len(shape))])), shards, replicas) for shape in shapes]
    others = draw(st.sets(st.integers(1, max(1, shards * replicas - 1)), max_size=1)) if replicas > 1 else set()
    for of_ranks in cuts:
        for rank in others:  # of a group that trains independently
            of_ranks[rank] = None
    return list(zip(shapes, itemsizes, strict=True)), routes_of(cuts, itemsizes, shards * replicas)


@given(tensors(), st.integers(1, 9))
@examples(60)
def test_every_byte_is_sent_once(drawn: tuple[list[tuple[Shape, int]], Routes], num_bytes: int):
    """A byte that no rank sends would be a zero in the checkpoint."""
    shapes, routes = drawn
    seen = [torch.zeros(math.prod(shape) * itemsize, dtype=torch.int64) for shape, itemsize in shapes]
    for rank in range(routes.num_ranks):
        groups = list(cut(routes.pieces(rank), num_bytes))
        sizes = [sum(piece.num_bytes for piece in group) for group in groups]
        assert sum(sizes) == routes.num_bytes()[rank] and all(size == num_bytes for size in sizes[:-1])
        for piece in itertools.chain(*groups):
            runs = list(piece.runs(*shapes[piece.number]))
            assert sum(count for _, count in runs) == piece.num_bytes
            for first, count in runs:
                seen[piece.number][first : first + count] += 1
    for (shape, _), counts in zip(shapes, seen, strict=True):
        assert torch.equal(counts, torch.ones_like(counts)), shape


# (shape, number of tensors): one shape that 512 ranks shard unevenly, and 16 GiB with Adam's moments.
SHAPES = [((4096, 4096), 80), ((4096,), 81), ((10000, 4096), 2)]


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(512, 1), (8, 64)])
def test_512_ranks(num_shards: int, num_replicas: int):
    """Simulated: the number of rounds of a full save with Adam's moments depends only on its bytes."""
    cuts = [parts(shape, 0, num_shards, num_replicas) for shape, count in SHAPES for _ in range(3 * count)]
    routes = routes_of(cuts, [4] * len(cuts), 512)
    timetable = Timetable(routes, plain_bytes=0)
    total_bytes = sum(3 * 4 * math.prod(shape) * count for shape, count in SHAPES)
    sent = routes.num_bytes()
    assert sum(sent) == total_bytes and sent[0] == pytest.approx(total_bytes / num_shards, rel=0.01)
    for number in (0, timetable.num_rounds // 2, timetable.num_rounds - 1):
        sizes = timetable.sizes(number)
        assert sizes[0] == 0 and min(sizes[1:]) >= 1 and max(sizes) * len(sizes) <= ROUND_BYTES
    # Rank 0 writes its own while it receives, so the longer of the two counts; tensors end within a slice.
    needed = max(sent[0] / OWN_SLICE_BYTES, (total_bytes - sent[0]) / ROUND_BYTES)
    assert needed <= timetable.num_rounds <= 1.2 * needed + 1
