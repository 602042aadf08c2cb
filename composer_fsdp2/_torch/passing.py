"""Nodes in autograd's graph that compute nothing, and calls when a backward ends."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, as ``fully_shard`` looks for them."""
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nested value, its floating point tensors in ``dtype``."""
    leaves, form = tree_flatten(value)
    cast = [each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in leaves]
    return tree_unflatten(cast, form)


def after_gradients_of(value: Any, then: Callable[[], None]) -> Any:
    """The same nested value; ``then`` is called where the gradients of all its tensors are there."""
    leaves, form = tree_flatten(value)
    places = [i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.requires_grad]
    if places and torch.is_grad_enabled():
        passed = _Passed.apply(then, *(leaves[i] for i in places))
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    return tree_unflatten(leaves, form)


def after_backward(then: Callable[[], None]) -> None:
    """Call ``then`` where the backward that is running ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(then)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.then()
        return (None, *gradients)
