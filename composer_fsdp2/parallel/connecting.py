"""Autograd nodes that make backward run through modules whose outputs do not contribute to the loss."""

from collections.abc import Sequence
from typing import Any

import torch

from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in

# Positional and keyword arguments of a forward.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def connect(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``tensor``, with an autograd edge to each of ``others``, which are empty tensors.

    Its backward returns an empty gradient for each of them, so their modules run backward too.
    """
    connected: torch.Tensor = _Connect.apply(tensor, *others)
    return connected


def connect_first(output: Any, others: Sequence[torch.Tensor]) -> Any:
    """Apply ``connect`` to the first floating point tensor of a module's output."""
    first = next((each for each in tensors_in(output) if each.is_floating_point()), None)
    if first is None:
        return output
    return map_tensors(output, lambda each: connect(each, others) if each is first else each)


def with_zero_rows(arguments: Arguments) -> Arguments:
    """Slice ``[:0]`` of each tensor that has as many rows as the first tensor. The slices stay in autograd's graph.

    The backward of a slice adds no gradient to its tensor. Other operators must compute the gradients of these tensors.
    """
    num_rows = next((tensor.shape[0] for tensor in tensors_in(arguments) if tensor.dim()), 0)

    changed: Arguments = map_tensors(
        arguments, lambda each: _ZeroRows.apply(each) if num_rows and each.dim() and len(each) == num_rows else each
    )
    return changed


def detached_with_zero_rows(arguments: Arguments) -> Arguments:
    """As ``with_zero_rows``, but detached and copied, so that the slices do not keep activations alive."""
    kept: Arguments = map_tensors(
        with_zero_rows(arguments), lambda each: each.detach() if each.numel() else torch.empty_like(each)
    )
    return kept


class _Connect(torch.autograd.Function):
    """An identity function with edges to empty tensors.

    Adding their sums to the tensor would read the whole tensor in forward and in backward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.empty = [(other.shape, other.dtype, other.device) for other in others]
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.detach()  # the tensor itself would be returned as a view, which a module cannot write to in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Under activation checkpointing this recomputes the forward, before a hook of ``others`` all-gathers anything.
        _ = ctx.saved_tensors
        nothing = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.empty)
        return gradient, *nothing


class _ZeroRows(torch.autograd.Function):
    """``tensor[:0]``, without a backward that adds zeros to the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[:0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None
