"""Tensors that carry no value into a computation, and are reached by its backward all the same."""

from collections.abc import Sequence
from typing import Any

import torch

from composer_fsdp2._torch.passing import tensors_in, with_tensors

# Of a forward: by place, and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def connect(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """``tensor``, whose backward also gives each of ``others``, which have no elements, its gradient: none."""
    connected: torch.Tensor = _Connect.apply(tensor, *others)
    return connected


def no_rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor[:0]``, whose backward takes no pass over what the tensor's gradient is added up in.

    The tensor must get a gradient from elsewhere.
    """
    rows: torch.Tensor = _NoRows.apply(tensor)
    return rows


def without_rows(arguments: Arguments) -> Arguments:
    """With no rows of each tensor that has as many as the first; still of the same graph."""
    num_rows = next((tensor.shape[0] for tensor in tensors_in(arguments) if tensor.dim()), 0)

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return no_rows_of(tensor) if num_rows and tensor.dim() and tensor.shape[0] == num_rows else tensor

    changed: Arguments = with_tensors(arguments, of)
    return changed


def kept_without_rows(arguments: Arguments) -> Arguments:
    """Without rows, and of no graph, so that no forward's activations are kept for the next."""
    kept: Arguments = with_tensors(
        without_rows(arguments), lambda each: each.detach() if each.numel() else torch.empty_like(each)
    )
    return kept


def connect_first(output: Any, others: Sequence[torch.Tensor]) -> Any:
    """The output with its first tensor of floating point numbers connected."""
    first = next((each for each in tensors_in(output) if each.is_floating_point()), None)
    if first is None:
        return output
    return with_tensors(output, lambda each: connect(each, others) if each is first else each)


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Connect(torch.autograd.Function):
    """Adding sums of nothing would take a pass over the tensor, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.empty = [(other.shape, other.dtype, other.device) for other in others]
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.detach()  # a view, as the tensor itself becomes one, could not be written to afterwards

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Whatever is recomputed around it is recomputed here, before a hook in ``others`` gathers anything.
        _ = ctx.saved_tensors
        nothing = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.empty)
        return gradient, *nothing


class _NoRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[:0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None
