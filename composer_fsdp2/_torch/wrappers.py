"""A class that wraps a module and is its FSDP2 unit, as FSDP1's class was its FSDP1 unit."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from composer_fsdp2._torch.groups import groups_of, state_of

auto_wrap: Any = _auto_wrap  # FSDP1's walk through a module tree by an ``auto_wrap_policy``


def is_own_unit(cls: type) -> None:
    """Have ``fully_shard`` keep the class of such a wrapper, which is an ``FSDPModule`` already."""
    cls_to_fsdp_cls.setdefault(cls, cls)


def forget_root(unit: FSDPModule) -> None:
    """Have the next forward find the root of the unit again, also after an earlier one found another."""
    state_of(unit)._is_root = None


def nest_unit(unit: FSDPModule, *, reshard_after_forward: bool | int, cast_forward_inputs: bool) -> None:
    """Turn a root unit into a nested one, between two steps."""
    state: Any = state_of(unit)
    for group in groups_of(state):
        group.post_forward_mesh_info = _get_post_forward_mesh_info(reshard_after_forward, group.mesh_info)
    state.own_policy = replace(state.own_policy, cast_forward_inputs=cast_forward_inputs)


def group_of_unit(unit: FSDPModule, *, replicas: bool) -> dist.ProcessGroup | None:
    """The ranks that shard the unit's parameters, or those that replicate them; None without such."""
    name = "replicate_process_group" if replicas else "shard_process_group"
    found = (getattr(group.mesh_info, name, None) for group in groups_of(state_of(unit)))
    return next(found, None)
