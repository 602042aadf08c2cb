"""Reset a sharded model after an error in its forward or backward."""

import gc
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composer_fsdp2._torch.groups import drop_gradient, groups_of, state_of
from composer_fsdp2._torch.unit import UnitState


def reset_after_error(unit: FSDPModule) -> None:
    """Reset the root of an interrupted forward or backward, and all units below it, to their state between steps.

    Discards unreduced gradients, and waits for the device and for pending collectives. ``.grad`` of the sharded
    parameters is not cleared; the caller or the optimizer does that. Does nothing if ``unit`` is not a root. torch 2.13
    has ``reset_iter_state``, which does not discard the unreduced gradients of microbatches.
    """
    root, state = unit, state_of(unit)
    if not state._is_root:
        return
    # A reduction may still run on its own stream (for fp16 it divides there before the launch). It must finish before
    # its memory is reused.
    state._device_handle.synchronize()
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(state)
    for each in state._state_ctx.all_states:
        if isinstance(each, UnitState):
            each.restore_autocast_cache()
        for group in groups_of(each):
            group.lazy_init()  # idempotent; the error may have interrupted the first call
            for parameter in group.fsdp_params:
                drop_gradient(parameter)
                if hasattr(parameter, "_unsharded_param"):
                    parameter.free_unsharded_param()


def reset_mask_buffers() -> None:
    """Clear the masks that TP-sharded embeddings store between their lookup and the reduction of its output.

    An error may occur between the two. torch stores the mask in placements that its caches share between forwards, so
    the next forward, whose tokens differ, would raise. Iterates over all objects of the process; call it after an error
    only.
    """
    for kept in gc.get_objects():
        if type(kept).__name__ == "MaskBuffer" and type(kept).__module__.startswith("torch.distributed.tensor"):
            kept.data, kept.refcount = None, 0


def _reset_iteration(root: Any) -> None:
    stream, shared = root._device_handle.current_stream(), root._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        if (held := getattr(shared, name)) is not None:
            _wait(stream, held.event)
            setattr(shared, name, None)
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in groups_of(state):
            if group._all_gather_result is not None:
                _wait(stream, group._all_gather_result.all_gather_event)
                if isinstance(work := group._all_gather_result.all_gather_work, dist.distributed_c10d.Work):
                    work.wait()
            for event in (group._post_reduce_event, group._reshard_after_forward_event):
                _wait(stream, event)
            if group._all_reduce_state is not None:
                _wait(stream, group._all_reduce_state.event)
            group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
            group._all_reduce_state = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group.num_running_forwards = 0  # attribute of UnitGroup
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
