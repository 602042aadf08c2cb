"""Probes for undocumented differences between versions of ``fully_shard``. Each reads torch's code objects."""

import inspect
from functools import cache

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@cache
def skips_single_rank_groups() -> bool:
    """Whether a unit on a single rank skips its all-gather and reduce-scatter, by checking its world size."""
    return "world_size" in inspect.unwrap(FSDPParamGroup.unshard).__code__.co_varnames


@cache
def keeps_unsharded_in_recompute() -> bool:
    """Whether a forward that runs inside a backward (recomputation) leaves its unit unsharded."""
    return "is_bw" in inspect.unwrap(FSDPParamGroup.post_forward).__code__.co_names


@cache
def needs_even_shards() -> bool:
    """Whether the rows of a TP-sharded parameter must be a multiple of the total number of shards.

    torch 2.7 raises "FSDP+TP sharding does not support uneven ..." when it shards such a parameter. torch 2.13 pads
    instead.
    """
    code = inspect.unwrap(FSDPParam._init_sharded_param).__code__  # unwraps torch.no_grad()
    return any(isinstance(text, str) and "FSDP+TP sharding does not support uneven" in text for text in code.co_consts)


def keeps_all_reduce_buffer() -> bool:
    """Whether torch keeps the output of a unit's all-reduce alive until the unit's backward has finished.

    With CPU offload on a GPU, the copy to the host reads that output. If its memory is reused for the next unit's
    reduction before the copy, gradients are silently wrong (pytorch#180665). torch 2.7, 2.13 and 2.15 keep the output
    in this attribute.
    """
    return "_all_reduce_state" in FSDPParamGroup.__init__.__code__.co_names
