"""Support for a class that wraps a module and is itself the FSDP2 unit, as FSDP1's class was its own unit."""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.groups import groups_of, state_of
from composer_fsdp2._torch.local_tensors import local_tensor, with_local_tensor
from composer_fsdp2.errors import CallError

auto_wrap: Any = _auto_wrap  # FSDP1's traversal of a module tree by an ``auto_wrap_policy``


_DATA: Any = torch.Tensor.data


@functools.cache
def write_assigned_data() -> None:
    """Make ``dtensor.data = values`` write the values, for parameters and for gradients.

    torch (2.7 to 2.13) does not change the local tensor, without an error. FSDP1's parameters were plain tensors, and
    its next forward wrote such values back.
    """

    def assign(self: DTensor, value: torch.Tensor) -> None:
        if isinstance(value, DTensor) and value.dtype == self.dtype and value._spec == self._spec:
            with torch.no_grad():
                self._local_tensor.copy_(value._local_tensor)
        elif getattr(self, "_fsdp_flattened", False):
            raise CallError(
                f"a parameter's data was set to a {type(value).__name__} of shape {tuple(value.shape)} in "
                f"{value.dtype}; it is a DTensor of shape {tuple(self.shape)} in {self.dtype}, and stays one. Write "
                "full values within FSDP.summon_full_params(model)"
            )
        else:
            _DATA.__set__(self, value)

    DTensor.data = property(_DATA.__get__, assign)  # type: ignore[assignment]


def register_unit_class(cls: type) -> None:
    """Make ``fully_shard`` preserve a wrapper's class, which already is a subclass of ``FSDPModule``."""
    cls_to_fsdp_cls.setdefault(cls, cls)


def reset_root(unit: FSDPModule) -> None:
    """Make torch determine the unit's root again in the next forward."""
    state_of(unit)._is_root = None


def nest_unit(unit: FSDPModule, *, reshard_after_forward: bool | int, cast_forward_inputs: bool) -> None:
    """Turn a root unit into a nested unit. Call it between two steps; does not communicate."""
    state: Any = state_of(unit)
    for group in groups_of(state):
        group.post_forward_mesh_info = _get_post_forward_mesh_info(reshard_after_forward, group.mesh_info)
    state.own_policy = replace(state.own_policy, cast_forward_inputs=cast_forward_inputs)


def group_of_unit(unit: FSDPModule, *, replicas: bool) -> dist.ProcessGroup | None:
    """The process group over which the unit's parameters are sharded, or with ``replicas`` replicated.

    None without such a group.
    """
    name = "replicate_process_group" if replicas else "shard_process_group"
    found = (getattr(group.mesh_info, name, None) for group in groups_of(state_of(unit)))
    return next(found, None)


def shards_of(unit: FSDPModule) -> list[DTensor]:
    """The sharded parameters of a unit, excluding those of nested units."""
    return [parameter.sharded_param for group in groups_of(state_of(unit)) for parameter in group.fsdp_params]


def cast_shards(unit: FSDPModule, dtype: torch.dtype) -> None:
    """Cast a unit's parameters in place. Optimizers and hooks keep the same parameter objects.

    Raises:
        CallError: after the first forward, when ``fully_shard`` already depends on the dtype.

    Does not communicate.
    """
    state: Any = state_of(unit)
    if state._is_root is not None:
        raise CallError("parameters are cast before the first forward; call accelerator.prepare before it")
    for parameter in (each for group in groups_of(state) for each in group.fsdp_params):
        shard = parameter.sharded_param
        cast = with_local_tensor(shard, local_tensor(shard).detach().to(dtype))
        _DATA.__set__(shard, cast)
        shard._local_tensor, shard._spec = cast._local_tensor, cast._spec
        parameter.reset_sharded_param()
