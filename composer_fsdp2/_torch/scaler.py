"""A gradient scaler for sharded and unsharded gradients together."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.replaced import replaced


class ShardedGradScaler(FSDP1GradScaler):
    """A gradient scaler for a model in which some gradients are sharded and some are unsharded, on one mesh or several.

    torch's scalers unscale all gradients of an optimizer in one call, which raises for a mix of DTensors and plain
    tensors. Use it as ``torch.amp.GradScaler``, whose arguments it takes; the shim gives it to Composer's State.

    ``unscale_`` and ``step`` are called on all ranks: they all-reduce one number, so that a step is skipped by all.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        shards = [
            _shard_with_gradient(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        stand_in: Any = types.SimpleNamespace(param_groups=[{"params": shards}])
        by_device = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)
        # One number: which devices gradients lie on may differ between ranks, and each entry is one all-reduce.
        return {found_inf.device: torch.stack([each.to(found_inf.device) for each in by_device.values()]).sum(dim=0)}


def _shard_with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is this rank's part of ``gradient``."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    holder = local.detach()
    holder.grad = local
    return holder


def after_unscaling(scaler: Any, then: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within the block, ``unscale_`` calls ``then`` once it has all its tensors.

    It communicates after that, and notes that it was called: an error of ``then`` leaves it to be called again.
    """
    unscale = scaler._unscale_grads_

    def unscale_grads(*args: Any, **kwargs: Any) -> Any:
        found = unscale(*args, **kwargs)
        then()
        return found

    return replaced(scaler, "_unscale_grads_", unscale_grads)
