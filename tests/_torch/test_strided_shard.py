"""Rows of a parameter that is TP-sharded and sharded along the same dimension stay in order."""

from __future__ import annotations

import torch
from support.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from composer_fsdp2._torch.strided_shard import drops_strided_shard, patch_strided_shard


@on_ranks(4, fresh=True)
def test_what_is_computed_of_a_strided_tensor_is_put_together_in_its_order(folder: str) -> None:
    """On torch 2.7 a momentum with weight decay was saved with its rows swapped, and a resumed run trained on it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    full = torch.arange(24.0).view(8, 3)
    split = distribute_tensor(full, mesh["tensor"], [Shard(0)]).to_local()
    local = distribute_tensor(split, mesh["shard"], [Shard(0)]).to_local()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False)
    torch.testing.assert_close(tensor.full_tensor(), full)

    def wrong() -> list[str]:
        found = {
            "twice": (tensor * 2, full * 2),
            "sum": (tensor.add(tensor, alpha=0.1), full * 1.1),
            "foreach": (torch._foreach_mul([tensor], 3)[0], full * 3),
            "rows": (tensor.sum(1), full.sum(1)),
            "columns": (tensor.sum(0), full.sum(0)),
            "column beside rows": (tensor * tensor.sum(1, keepdim=True), full * full.sum(1, keepdim=True)),
        }
        return [name for name, (got, wanted) in found.items() if not torch.allclose(got.full_tensor(), wanted)]

    is_needed, before = drops_strided_shard(), wrong()
    patch_strided_shard()
    patch_strided_shard()
    # torch caches its decision for an operation on such tensors; training applies the workaround before the first one.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear() if is_needed else None
    assert is_needed == torch.__version__.startswith("2.7.")
    assert bool(before) == is_needed
    assert wrong() == []
