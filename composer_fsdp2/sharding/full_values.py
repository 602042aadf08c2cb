"""Full values of sharded tensors: all-gather them, and slice this rank's shard out of them."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import local_tensor, with_local_tensor
from composer_fsdp2._torch.private_names import ShardedTensor, gather_sharded_tensor, local_box
from composer_fsdp2.sharding.placements import shard_axes


@torch.no_grad()
def gather_full_tensor(tensor: DTensor) -> torch.Tensor:
    """The full tensor on the device of its mesh. A replicated one shares memory with its local tensor.

    Called on all ranks of the mesh; one all-gather per sharded axis.
    """
    # NCCL cannot communicate a tensor that is offloaded to the CPU.
    on_mesh = local_tensor(tensor).detach().to(tensor.device_mesh.device_type)
    if not shard_axes(tensor) and not any(placement.is_partial() for placement in tensor.placements):
        return on_mesh
    moved: Any = with_local_tensor(tensor, on_mesh)
    full: torch.Tensor = moved.full_tensor()
    return full


def local_shard(like: DTensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, as a view. ``like`` defines the shape and the placements."""
    for dim, (offset, size) in enumerate(zip(*local_box(like), strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def accept_full_state_dicts(unit: FSDPModule, owners: Iterable[nn.Module]) -> None:
    """Make ``load_state_dict`` accept full tensors for a unit's parameters, as FSDP1's did.

    Called when the unit is sharded. The hook runs after the module's own load hooks. It communicates only for
    ShardedTensors, which all ranks gather one at a time.
    """
    for owner in owners:
        owner.register_load_state_dict_pre_hook(partial(_shard_full_values, unit))


def _shard_full_values(
    unit: FSDPModule,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Replace the full tensors in a state dict by this rank's shards. torch reports tensors that do not fit."""
    unit.reshard()  # a root may be unsharded, with the previous values
    for name, parameter in module._parameters.items():
        key = prefix + name
        given = state_dict.get(key)
        if isinstance(given, ShardedTensor):  # FSDP1's shards, of any layout
            state_dict[key] = given = gather_sharded_tensor(given, given._process_group)
        if (
            isinstance(parameter, DTensor)
            and torch.overrides.is_tensor_like(given)
            and not isinstance(given, DTensor)
            and given.shape == parameter.shape
        ):
            # The function, not the method: tensor-like objects, such as Lightning's lazy tensors, support it too.
            part = local_shard(parameter, torch.detach(given))
            if local_metadata.get("assign_to_params_buffers"):
                # Copy into separate memory; a view would keep the full tensor alive.
                part = part.to(local_tensor(parameter).device, copy=True)
            state_dict[key] = with_local_tensor(parameter, part)
