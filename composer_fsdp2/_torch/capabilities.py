"""What differs between versions of ``fully_shard`` without a word, as their code shows."""

import inspect
from functools import cache

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@cache
def skips_single_rank_groups() -> bool:
    """Whether nothing is gathered or reduced over one rank: the unit looks at the size of its group."""
    return "world_size" in inspect.unwrap(FSDPParamGroup.unshard).__code__.co_varnames


@cache
def keeps_unsharded_in_recompute() -> bool:
    """Whether a forward that runs inside of a backward leaves its unit gathered."""
    return "is_bw" in inspect.unwrap(FSDPParamGroup.post_forward).__code__.co_names


@cache
def needs_even_shards() -> bool:
    """Whether a parameter whose rows tensor parallelism splits must have a multiple of all ranks' number of rows.

    torch 2.7 says so where it shards such a parameter; 2.13 has no such words, and pads.
    """
    code = inspect.unwrap(FSDPParam._init_sharded_param).__code__  # under torch.no_grad()
    return any(isinstance(text, str) and "FSDP+TP sharding does not support uneven" in text for text in code.co_consts)


def keeps_all_reduce_buffer() -> bool:
    """Whether this torch keeps a unit's gradients, reduced over replicas, until that unit's backward is finished.

    On a GPU with gradients offloaded the copy to the host reads it; memory that the next unit's reduction gets in the
    meantime makes silently wrong gradients (pytorch#180665). 2.7, 2.13 and 2.15 keep it in this attribute.
    """
    return "_all_reduce_state" in FSDPParamGroup.__init__.__code__.co_names
