"""What ``fully_shard`` leaves undone where the backward of a model ends."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch.collectives import all_reduce
from composer_fsdp2._torch.groups import groups_of


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
