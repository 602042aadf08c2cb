"""A model of ``support.models`` sharded by several implementations: ``WAYS["by hand"](model, "cuda")``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from support.models import Block, Model
from support.training import FULL

from composer_fsdp2 import prepare_fully_shard


def by_us(model: Model, device: str) -> None:
    prepare_fully_shard(model, None, FULL, device=device)


def by_hand(model: Model, device: str) -> None:
    """The loop of torch's documentation, over the units that the model's hooks choose."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.decoder, mesh=mesh, reshard_after_forward=False)


def as_fsdp1(model: Model, device: str) -> None:
    """With the default arguments of Composer's prepare_fsdp_module (0.32.1)."""
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    index = torch.cuda.current_device() if device == "cuda" else None
    model.decoder = FullyShardedDataParallel(
        model.decoder,
        auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block)),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        device_id=torch.device(device, index),
        limit_all_gathers=True,
        use_orig_params=True,
    )


WAYS: dict[str, Callable[[Model, str], None]] = {"ours": by_us, "by hand": by_hand, "FSDP1": as_fsdp1}
