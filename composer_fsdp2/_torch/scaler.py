"""A gradient scaler for a mix of sharded and unsharded gradients."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.replaced import replaced


class ShardedGradScaler(FSDP1GradScaler):
    """A gradient scaler for models with both sharded and unsharded gradients, on one mesh or several.

    torch's scalers unscale all gradients of an optimizer in one call, which raises for a mix of DTensors and plain
    tensors. Takes the arguments of ``torch.amp.GradScaler``. Under the shim, Composer's State uses this class.

    ``unscale_`` and ``step`` must be called on all ranks. They all-reduce one number, so all ranks skip the same steps.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = prepare_fully_shard(model, optimizer, {}, precision="fp32", device="cpu")
        >>> scaler = ShardedGradScaler(device="cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
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
        # One entry: each entry is one all-reduce, and the devices of the gradients may differ between ranks.
        return {found_inf.device: torch.stack([each.to(found_inf.device) for each in by_device.values()]).sum(dim=0)}


def _shard_with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is the local tensor of ``gradient``."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    holder = local.detach()
    holder.grad = local
    return holder


def after_unscaling(scaler: Any, then: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Within the block, ``scaler.unscale_`` calls ``then`` after its allocations and before its all-reduce.

    If ``then`` raises, ``unscale_`` is not marked as done and can be called again.
    """
    unscale = scaler._unscale_grads_

    def unscale_grads(*args: Any, **kwargs: Any) -> Any:
        found = unscale(*args, **kwargs)
        then()
        return found

    return replaced(scaler, "_unscale_grads_", unscale_grads)
