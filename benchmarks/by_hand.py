"""An expert's code to avoid DTensors in a step, for a model whose parameters are all sharded alike."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_by_hand", "local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard; without gradients, since ``to_local`` would record it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_by_hand(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    """Like ``torch.nn.utils.clip_grad_norm_``, on local tensors. Called on all ranks; an all-reduce of one number."""
    # torch's functions only read a parameter's gradient.
    own: list[Any] = [SimpleNamespace(grad=local(each.grad)) for each in parameters if each.grad is not None]
    norm = get_total_norm([each.grad for each in own], foreach=True)
    square = norm.double() ** 2  # can represent the square of any fp32 number
    dist.all_reduce(square)
    clip_grads_with_norm_(own, max_norm, square.sqrt().to(norm.dtype), foreach=True)
