"""What ``fully_shard`` leaves undone where the backward of a unit, or of the model, ends."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from composer_fsdp2._torch.collectives import all_reduce
from composer_fsdp2._torch.groups import groups_of, has_gradient


def average_after_backward(
    units: Sequence[FSDPModule], replicated: Mapping[DeviceMesh, Sequence[nn.Parameter]]
) -> None:
    """Average the gradients of parameters that lie unsharded on every rank of a mesh, where a backward ends.

    A gradient that has been averaged stays the same when it is averaged again, so gradients may accumulate. The ranks
    of a mesh all-reduce one buffer of these gradients in each backward that reduces the others.

    Args:
        units: A root and all units below it: torch ends a backward in the unit where it began.
        replicated: Those parameters, by the mesh of their units.
    """
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._root_post_backward_final_callback = _FinishThenAverage(state, replicated)


class _FinishThenAverage:
    """Takes the place of the bound method on one state, and averages replicated gradients after it."""

    def __init__(self, state: Any, replicated: Mapping[DeviceMesh, Sequence[nn.Parameter]]) -> None:
        self.state = state
        self.replicated = replicated

    def __call__(self) -> None:
        type(self.state)._root_post_backward_final_callback(self.state)
        if not self.state._state_ctx.is_last_backward or not _reduces_gradients(self.state._state_ctx.all_states):
            return
        for mesh, parameters in self.replicated.items():
            if trainable := [parameter for parameter in parameters if parameter.requires_grad]:
                _average_gradients(trainable, mesh)


def _reduces_gradients(states: Sequence[Any]) -> bool:
    """Whether ``set_requires_gradient_sync`` and ``set_requires_all_reduce`` are on."""
    return all(group.reduce_grads and group.all_reduce_grads for state in states for group in groups_of(state))


def _average_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients in place, in one buffer. A missing one counts as zero, and stays missing if no rank has it."""
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    is_there = torch.ones(len(parameters), dtype=dtype, device=parameters[0].device)  # a list would be copied there
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            is_there[number].zero_()
    buffer = torch.cat([*(gradient.detach().flatten().to(dtype) for gradient in gradients), is_there])
    for axis in range(mesh.ndim):
        all_reduce(buffer, mesh.get_group(axis))
    # Read only where something is missing: on a GPU it waits for the reduction.
    num_there = buffer[-len(parameters) :].tolist() if any(p.grad is None for p in parameters) else None
    averaged = (buffer[: -len(parameters)] / mesh.size()).split([p.numel() for p in parameters])
    for number, (parameter, gradient, average) in enumerate(zip(parameters, gradients, averaged, strict=True)):
        if num_there is None or num_there[number]:
            parameter.grad = gradient
            gradient.copy_(average.view_as(gradient))


def repair_unit_backward(module: FSDPModule) -> None:
    """Have ``module`` do, where its backward ends, what ``fully_shard`` leaves undone.

    Parameters that the backward did not reach get gradients of zero, once any of the unit has one, in this microbatch
    or, where their reduction over replicas was put off, in one before. FSDP1's flat parameter had one gradient for all.
    ``fully_shard`` reduces those that are there: ranks whose batches read different parameters (experts, branches)
    would then add up the gradients of different ones, without an error; and a unit that the last microbatch does not
    run would keep what was put off until then to itself. torch 2.13 has a switch for it, off by default, that fills
    units without any gradient as well, on which FSDP1 left the optimizer nothing to decay.

    And the unit is no longer in its backward. Left so until the model's backward ends, a recomputation that runs the
    unit once more (it lies inside a checkpointed module that runs twice) would neither gather (2.7 raises) nor reduce
    its parameters (2.13 loses a gradient, without an error).

    On a GPU with gradients offloaded, torch 2.7 waits for the wrong copies, or for none: the gradients that the
    optimizer, or a hook, reads in the host's memory may be those of the batch before, without an error. With replicas
    the copies run on the all-reduce's stream, but what is waited for was recorded on the reduce-scatter's
    (pytorch#160291); and a hook after accumulation runs while its gradient is on its way (pytorch#180666).
    """
    state: Any = module._get_fsdp_state()
    for group in groups_of(state):
        group.post_backward = _EndUnitBackward(group, state)


class _EndUnitBackward:
    """Takes the place of the bound method on one group, which torch calls wherever a unit's backward ends."""

    def __init__(self, group: Any, state: Any) -> None:
        self.group = group
        self.state = state

    def __call__(self, *unused: Any) -> None:
        parameters = self.group.fsdp_params
        trainable = [
            parameter
            for parameter in parameters
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad
        ]
        missing = [parameter for parameter in trainable if not has_gradient(parameter)]
        if len(missing) < len(trainable) or self._is_reduction_due():
            for parameter in missing:
                unsharded = parameter._unsharded_param
                unsharded.grad = torch.zeros_like(unsharded)
        is_offloaded = bool(parameters) and parameters[0].offload_to_cpu  # a policy is all of the unit's
        with _copied_before_hooks(parameters) if is_offloaded else contextlib.nullcontext():
            type(self.group).post_backward(self.group, *unused)
        if is_offloaded:
            _wait_for_the_copies(self.group)
        self.state._training_state = TrainingState.IDLE

    def _is_reduction_due(self) -> bool:
        """Whether earlier microbatches left gradients that wait for this one's all-reduce over replicas."""
        group = self.group
        return group.reduce_grads and group.all_reduce_grads and group._partial_reduce_output is not None


@contextlib.contextmanager
def _copied_before_hooks(parameters: Sequence[Any]) -> Iterator[None]:
    """Gradients that a hook reads where they are accumulated are copied to the host at once, without overlap."""
    hooked = [
        parameter
        for parameter in parameters
        if parameter.offload_to_cpu
        and parameter.pin_memory
        and getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
    ]
    for parameter in hooked:
        parameter.pin_memory = False
    try:
        yield
    finally:
        for parameter in hooked:
            parameter.pin_memory = True


def keeps_what_copies_read() -> bool:
    """Whether this torch keeps what a unit reduced over replicas until that unit's backward is finished.

    On a GPU with gradients offloaded the copy to the host reads it; memory that the next unit's reduction gets in the
    meantime makes silently wrong gradients (pytorch#180665). 2.7, 2.13 and 2.15 keep it in this attribute.
    """
    return "_all_reduce_state" in FSDPParamGroup.__init__.__code__.co_names


def _wait_for_the_copies(group: Any) -> None:
    """The optimizer waits for what was recorded after the copies to the host, on the stream that they run on."""
    for parameter in group.fsdp_params:
        if parameter.grad_offload_event is not None and group._post_reduce_event is not None:
            parameter.grad_offload_event = group._post_reduce_event
