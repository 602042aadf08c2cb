"""TorchTitan's selective activation checkpointing (``torchtitan/distributed/activation_checkpoint.py``, v0.2.2)."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Attention, sums over tensor-parallel ranks, and the scales of float8.
_SAVED = ("scaled_dot_product", "reduce_scatter_tensor", "aten.max.default")


def recompute_every(nth: int, layers: Iterable[nn.Module]) -> None:
    """Mark every ``nth`` layer for recomputation, and no other."""
    for number, layer in enumerate(layers, 1):
        layer._activation_checkpointing = number % nth == 0  # type: ignore[assignment]


def recompute_by_operator(layers: Iterable[nn.Module]) -> None:
    """Make the layers save the results of expensive operators, and recompute all others in backward.

    Replaces each layer's ``forward``. A wrapper module would change the paths and classes on which a tensor parallel
    plan depends.
    """
    for layer in layers:
        forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_saving_products)
        layer.forward = forward


def _saving_products() -> Any:
    """Return a policy that saves the operators in ``_SAVED``, and every second matrix product, starting with the
    first."""
    num_products = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.aten.mm.default:
            num_products[context.is_recompute] += 1
            is_saved = num_products[context.is_recompute] % 2 == 1
        else:
            is_saved = any(name in str(func) for name in _SAVED)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
