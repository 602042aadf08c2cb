"""A unit's private state, and its groups of parameters: torch 2.7 has one group to a unit, 2.13 several."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def state_of(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a unit; none without parameters of its own."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def new_group_of(
    groups: Iterable[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """The process group of this rank, of several that no two share; None if it is in none. Called on all ranks.

    A rank sends nothing for the others' groups. Where the default group is NCCL's and was made with ``device_id``,
    torch (``_new_process_group_helper``) has the ranks outside of any new group take part in splitting NCCL's
    communicator: one collective of the world for each group, and one that never ends for gloo, for which those inside
    split nothing. So for that moment the default group has no device, and a group's communicator is made when it is
    first used.

    Args:
        groups: The ranks of each, in one order on all ranks.
        backend, timeout: Those of the default group where they are None.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    rank, own = dist.get_rank(), None
    try:
        for ranks in groups:
            # Also those of others: torch counts groups to name them, and ranks must count alike. It waits for nobody
            # (unless TORCH_DIST_INIT_BARRIER is set), so that use_local_synchronization would spare nothing.
            group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            own = group if rank in ranks else own
    finally:
        world.bound_device_id = device
    return own


def has_gradient(parameter: Any) -> bool:
    """Whether there is an unreduced gradient; that of earlier microbatches torch < 2.15 keeps in an own attribute."""
    accumulated = getattr(parameter, _ACCUMULATED, None)
    return accumulated is not None or parameter._unsharded_param.grad is not None


def drop_gradient(parameter: Any) -> None:
    """Discard the unreduced gradient."""
    if _ACCUMULATED in vars(parameter):  # from torch 2.15 on a property, of the gradient below
        setattr(parameter, _ACCUMULATED, None)
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


_ACCUMULATED = "unsharded_accumulated_grad"
