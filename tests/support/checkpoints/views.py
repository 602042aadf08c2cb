"""Tensors with every kind of memory layout, as Hypothesis strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from support.checkpoints.samples import DTYPES


def numbered(numel: int, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """Elements with bytes that differ from the next one's, in any dtype."""
    data = (
        torch.arange(first, first + numel * dtype.itemsize, dtype=torch.int64).mul_(37).remainder_(251).to(torch.uint8)
    )
    return (data % 2 if dtype == torch.bool else data).view(dtype)


@st.composite
def strided(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> torch.Tensor:
    """Contiguous, transposed, sliced, expanded, overlapping itself, of up to four dimensions."""
    dtype, byte = draw(st.sampled_from(dtypes)), draw(st.integers(0, 250))  # the first byte
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        steps = [draw(st.integers(0, 5)) for _ in shape]  # for instance (3, 3) with strides of (2, 2)
        first = draw(st.integers(0, 3))
        numel = 1 + first + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        return numbered(numel, dtype, byte).as_strided(shape, steps, first)
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    tensor = numbered(math.prod(shape), dtype, byte).view(shape)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        dim = draw(st.integers(0, tensor.dim() - 1))
        start, step = draw(st.integers(0, tensor.shape[dim])), draw(st.integers(1, 3))
        tensor = tensor[(*(slice(None),) * dim, slice(start, None, step))]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.movedim(0, -1)
    return tensor
