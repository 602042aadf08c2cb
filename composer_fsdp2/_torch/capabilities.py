"""What differs between versions of ``fully_shard`` without a word, as their code shows."""

import inspect
from functools import cache

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@cache
def skips_groups_of_one() -> bool:
    """Whether nothing is gathered or reduced over one rank: the unit looks at the size of its group."""
    return "world_size" in inspect.unwrap(FSDPParamGroup.unshard).__code__.co_varnames


@cache
def recomputation_is_no_forward() -> bool:
    """Whether a forward that runs inside of a backward leaves its unit gathered."""
    return "is_bw" in inspect.unwrap(FSDPParamGroup.post_forward).__code__.co_names
