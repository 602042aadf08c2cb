"""Boxes of tensors: pieces, overlaps, places; against tensors that are indexed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.checkpoint.boxes import Box, first_overlap, row_major

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)))


def marked(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Where a box is in a tensor."""
    found = torch.zeros(shape, dtype=torch.int)
    found[box.slices((0,) * len(shape))] += 1
    return found


@given(shape=shapes, max_numel=st.integers(1, 30), data=st.data())
@examples(100)
def test_pieces_tile_a_box(shape: tuple[int, ...], max_numel: int, data: st.DataObject):
    """A gap would be memory that was never written; an overlap, bytes read twice; a large piece, memory."""
    box = data.draw(boxes(shape))
    elements = torch.arange(torch.Size(box.sizes).numel()).view(box.sizes)
    covered, last = torch.zeros(box.sizes, dtype=torch.int), -1
    for piece in box.pieces(max_numel):
        part = elements[piece.slices(box.offsets)]
        assert part.numel() == piece.numel <= max_numel
        assert part.flatten().tolist() == [*range(last + 1, last + 1 + piece.numel)], "one run, in row-major order"
        last += piece.numel
        covered[piece.slices(box.offsets)] += 1
    assert bool((covered == 1).all())


@given(shape=shapes, data=st.data())
@examples(100)
def test_what_two_boxes_have_in_common(shape: tuple[int, ...], data: st.DataObject):
    """A rank reads of a chunk what it keeps, and nothing beside it."""
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = marked(shape, one) * marked(shape, other)
    common = one.overlap(other)
    assert (common is not None) == bool(both.any())
    if common is not None:
        assert torch.equal(marked(shape, common), both)


@given(shape=shapes, data=st.data())
@examples(60)
def test_overlapping_chunks_are_found(shape: tuple[int, ...], data: st.DataObject):
    """One of two chunks that share an element would be read over the other."""
    found = [box for box in data.draw(st.lists(boxes(shape), max_size=5)) if box.numel]
    shared = bool((sum((marked(shape, box) for box in found), torch.zeros(shape)) > 1).any())
    assert (first_overlap(found) is not None) == shared


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
@examples(40)
def test_strides_are_those_of_a_contiguous_tensor(shape: tuple[int, ...]):
    """A stride off by one dimension reads a neighbour's row."""
    assert row_major(shape) == torch.empty(shape).stride()
