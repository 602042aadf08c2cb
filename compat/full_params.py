"""``FullyShardedDataParallel.summon_full_params`` for models that ``fully_shard`` sharded."""

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_fsdp2.fsdp1.attributes import say_what_replaces
from composer_fsdp2.full_params import summon_full_params
from composer_fsdp2.sharded import is_sharded

__all__ = ["replacement_for_summon_full_params"]


def replacement_for_summon_full_params(original: Any) -> Any:
    """FSDP1's for a model that it wraps; else ours, which does nothing where nothing is sharded."""
    fsdp1 = original.__func__

    @functools.wraps(fsdp1)
    def summon(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
            under_fsdp1: AbstractContextManager[None] = fsdp1(module, *args, **kwargs)
            return under_fsdp1
        if is_sharded(module):
            say_what_replaces(
                "FullyShardedDataParallel.summon_full_params",
                "write `with composer_fsdp2.summon_full_params(module):`",
            )
        return summon_full_params(module, *args, **kwargs)

    return staticmethod(summon)
