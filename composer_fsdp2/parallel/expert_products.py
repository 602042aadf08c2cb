"""Matrix products of rows with the weights of their experts, in one kernel or as few as possible."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from composer_fsdp2._torch.grouped_products import grouped_product, has_grouped_product

# The weights of a rank's experts, as one tensor [experts, out, in] or one tensor each.
Weights = torch.Tensor | Sequence[torch.Tensor]
# Padding at most doubles the number of computed rows; beyond that, experts are computed in sequence.
_MOST_PADDING = 2


def gated_mlp(
    rows: "Rows", gate_up: Sequence[Weights], down: Weights, apply_gate: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Apply ``down(apply_gate(...))`` to each row, with the weights of its expert.

    Args:
        gate_up: One weight or several, such as those of the gate and the up projection.
        apply_gate: Takes the product of the rows with each of these weights.
    """
    return _linear(apply_gate(*(_linear(rows.values, weights, rows) for weights in gate_up)), down, rows)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows sorted by expert.

    Args:
        values: [rows, width].
        counts: The number of rows of each expert, on the host.
        numbers: The expert of each row, on the device.
    """

    values: torch.Tensor
    counts: list[int]
    numbers: torch.Tensor

    @property
    def is_padded(self) -> bool:
        return len(self.counts) * max(self.counts) <= _MOST_PADDING * len(self.values)

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        experts = torch.arange(len(self.counts), device=self.numbers.device)
        return torch.searchsorted(self.numbers, experts, right=True, out_int32=True)

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """The index of each row in the padded layout, which has an equal number of rows for each expert."""
        starts = F.pad(self.ends, (1, 0))[:-1]
        return torch.arange(len(self.numbers), device=self.numbers.device) + (
            self.numbers * max(self.counts) - starts[self.numbers]
        )

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Pad each expert's rows to the maximum: [rows, width] to [experts, maximum number of rows, width]."""
        size = len(self.counts), max(self.counts)
        flat = values.new_zeros(size[0] * size[1], values.shape[1])
        return flat.index_copy_(0, self.places, values).view(*size, values.shape[1])


def _linear(values: torch.Tensor, weights: Weights, rows: Rows) -> torch.Tensor:
    """``F.linear``, including its behaviour under autocast."""
    kind, dtype = values.device.type, values.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    each = (weights,) if isinstance(weights, torch.Tensor) else weights
    out: torch.Tensor = _Linear.apply(values.to(dtype), rows, *each)
    return out


class _Linear(torch.autograd.Function):
    """A linear layer with one weight per expert, as an autograd function.

    Saves the original weights for backward: ``fully_shard`` frees them after the forward and all-gathers them again. A
    stack of the weights, or the tensors that autograd would save, would stay allocated from forward to backward.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: Rows, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        ctx.save_for_backward(values, *weights)
        with torch.autocast(values.device.type, enabled=False):
            return _times(values, weights, rows, transpose=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, *weights = ctx.saved_tensors
        needs_values, _, *needs_weights = ctx.needs_input_grad
        of_weights: Sequence[torch.Tensor | None] = [None] * len(weights)
        with torch.autocast(values.device.type, enabled=False):
            of_values = _times(grad, weights, ctx.rows, transpose=False) if needs_values else None
            if any(needs_weights):
                outer = _outer(grad, values, ctx.rows).to(weights[0].dtype)
                of_weights = [outer] if weights[0].dim() == 3 else outer.unbind()
        return of_values, None, *of_weights


def _times(values: torch.Tensor, weights: Sequence[torch.Tensor], rows: Rows, *, transpose: bool) -> torch.Tensor:
    """The product of each row with the weight of its expert: [in, out], or [out, in] with ``transpose``."""
    weights = [each.to(values.dtype) for each in weights]
    turned = [each.mT if transpose else each for each in weights]
    is_grouped = _is_grouped(values, turned[0].shape[-1])
    if not (is_grouped or rows.is_padded):
        each = turned[0].unbind() if turned[0].dim() == 3 else turned
        return torch.cat([part @ weight for part, weight in zip(values.split(rows.counts), each, strict=True)])
    stacked = weights[0] if weights[0].dim() == 3 else torch.stack(weights)
    stacked = stacked.mT if transpose else stacked
    if is_grouped:
        return grouped_product(values, stacked, rows.ends)
    return (rows.padded(values) @ stacked).flatten(0, 1)[rows.places]


def _outer(left: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
    """For each expert, the sum of its rows' outer products, [experts, width of left, width of right]."""
    if _is_grouped(left, right.shape[1]):
        return grouped_product(left.mT, right, rows.ends)
    if rows.is_padded:
        return rows.padded(left).mT @ rows.padded(right)
    parts = zip(left.split(rows.counts), right.split(rows.counts), strict=True)
    return torch.stack([one.mT @ other for one, other in parts])


def _is_grouped(values: torch.Tensor, width: int) -> bool:
    """Whether one kernel can compute the product. Each row must start at a multiple of 16 bytes."""
    is_aligned = all(size * values.element_size() % 16 == 0 for size in (values.shape[1], width))
    return is_aligned and len(values) > 0 and has_grouped_product(values.device, values.dtype)
