"""The way back from a forward or backward that an error ended."""

import gc
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composer_fsdp2._torch.groups import drop_gradient, groups_of, state_of
from composer_fsdp2._torch.unit import UnitState


def reset_after_error(unit: FSDPModule) -> None:
    """Return the root of an interrupted forward or backward, and all units below it, to their state between steps.

    Drops unfinished gradients, and waits for the device and for collectives that are on their way. ``.grad`` of the
    sharded parameters is the optimizer's to clear. A unit that is no root is left unchanged. torch 2.13
    has ``reset_iter_state`` for it (without the gradients of microbatches that were not communicated).
    """
    root, state = unit, state_of(unit)
    if not state._is_root:
        return
    # What a reduction was doing on its own stream when the error came (fp16 divides there, before the launch) must be
    # done before memory that it uses is given out again.
    state._device_handle.synchronize()
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(state)
    for each in state._state_ctx.all_states:
        if isinstance(each, UnitState):
            each.restore_autocast_cache()
        for group in groups_of(each):
            group.lazy_init()  # idempotent; the error may have come in the midst of the first one
            for parameter in group.fsdp_params:
                drop_gradient(parameter)
                if hasattr(parameter, "_unsharded_param"):
                    parameter.free_unsharded_param()


def reset_mask_buffers() -> None:
    """Empty what split embeddings keep from their lookup until they are reduced, in which an error may have come.

    torch keeps it in placements that its caches share between forwards; the next one would raise, as its tokens differ.
    Goes through all objects of the process, so it is for after an error only.
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
            group.num_running_forwards = 0  # UnitGroup's
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
