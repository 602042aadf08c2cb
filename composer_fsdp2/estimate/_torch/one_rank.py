"""Run ``torch.distributed`` as one rank of a world without other processes."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  registers collectives of fake tensors
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.sharding import meshes

_c10d: Any = distributed_c10d
# Group names are running numbers, registered in C++ too: these must not collide with those of a real world.
_FIRST_NUMBER = 10**6

_propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagate_unseen(*args: Any) -> Any:
    """Run DTensor's shape propagation without other dispatch modes, which would count its full fake tensors."""
    with _disable_current_modes():
        return _propagate(*args)


@contextlib.contextmanager
def one_rank_of(num_ranks: int) -> Iterator[None]:
    """In the block, make this process rank 0 of ``num_ranks``. Collectives do not communicate or wait.

    An existing default process group is not modified, and is restored after the block.
    """
    with contextlib.ExitStack() as stack:
        for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"):
            stack.enter_context(replaced(_c10d, name, {}))
        stack.enter_context(replaced(_c10d, "_group_count", _FIRST_NUMBER))
        stack.enter_context(replaced(_c10d, "_world", _c10d._World()))
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))
        stack.enter_context(replaced(meshes, "_groups", {}))
        stack.enter_context(replaced(meshes, "_world", None))
        stack.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate_unseen))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        try:
            yield
        finally:
            for name in _c10d._world.pg_names.values():
                _c10d._unregister_process_group(name)
