"""A unit's private state and its parameter groups. torch 2.7 has one group per unit, torch 2.13 several."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def state_of(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a unit; empty if the unit has no parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def new_group_of(
    groups: Iterable[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Create the process groups of a partition; return this rank's group, or None. Called on all ranks.

    Creating the groups of other ranks sends nothing. But if the default group uses NCCL and was created with
    ``device_id``, torch (``_new_process_group_helper``) makes the ranks outside of each new group join a split of
    NCCL's communicator. That is one collective of the world per group, and it hangs for gloo, whose members do not
    split. We therefore unset the default group's device during creation; each group's communicator is created at its
    first use.

    Args:
        groups: The ranks of each group, in the same order on all ranks.
        backend, timeout: None means those of the default group.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    rank, own = dist.get_rank(), None
    try:
        for ranks in groups:
            # Also for groups without this rank: torch names groups by a counter, which must agree between ranks. This
            # does not block (unless TORCH_DIST_INIT_BARRIER is set), so use_local_synchronization would save nothing.
            group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            own = group if rank in ranks else own
    finally:
        world.bound_device_id = device
    return own


def has_gradient(parameter: Any) -> bool:
    """Whether the parameter has an unreduced gradient.

    torch < 2.15 stores the gradient of earlier microbatches in a separate attribute.
    """
    accumulated = getattr(parameter, _ACCUMULATED, None)
    return accumulated is not None or parameter._unsharded_param.grad is not None


def drop_gradient(parameter: Any) -> None:
    """Discard the unreduced gradient."""
    if _ACCUMULATED in vars(parameter):  # From torch 2.15 on it is a property that reads the gradient below.
        setattr(parameter, _ACCUMULATED, None)
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


_ACCUMULATED = "unsharded_accumulated_grad"
