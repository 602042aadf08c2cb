"""Coordinated out-of-memory handling: a vote before each collective, and a reset to the state before the batch.

[Note: votes] A rank that is out of memory raises while the other ranks wait for it in a collective, forever. Each rank
therefore votes before it launches a collective, after the allocation of the unit's buffers, which may fail. If the
allocation fails, the rank votes in the handler of the error. The other ranks are waiting in the same vote, or will
reach it. All ranks then get the result, and all reset. Every rank votes the same number of times, as long as all ranks
run the same units in the same order. A failure inside a collective that other ranks have entered cannot be voted on;
the process group's timeout then ends all of them.
"""

import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.collectives import PendingCollective, all_gather_single, reduce_scatter_single
from composer_fsdp2._torch.private_names import dtensor_random_states, own_buffers
from composer_fsdp2._torch.reset import reset_after_error, reset_mask_buffers
from composer_fsdp2._torch.unit import watch_collectives
from composer_fsdp2.sharding.agree import device_of_group
from composer_fsdp2.sharding.random_states import random_states, set_random_states
from composer_fsdp2.sharding.sharded import resharded_parameters, units
from composer_fsdp2.training.control import DEFAULT_TIMEOUT, Operation, control_group
from composer_fsdp2.training.microbatches import begin_microbatch
from composer_fsdp2.training.run import find_run, run_of


class PeerOutOfMemoryError(RuntimeError):
    """Another rank is out of memory. The message starts like CUDA's own error, which Composer checks for."""


class OutOfMemoryVote:
    """A vote of a model's ranks before each collective, over the control group.

    Created on all ranks together, as the control group is. Sends a few small collectives over the model's mesh axes:
    NCCL allocates memory outside of torch's allocator when an axis is first used. If that failed within a batch, it
    would fail inside a collective, which cannot be voted on.

    Args:
        timeout: How long a rank waits for the other ranks' votes.
    """

    def __init__(self, model: nn.Module, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._model = weakref.ref(model)  # weak, because the votes are attached to the model
        self._timeout = timeout
        self._control = control_group()
        _warm_up(model)
        self._stop: Callable[[], None] | None = None
        self._where: PendingCollective | str = "the first forward"
        # while voting is on, the units reference the vote, and the run is attached to them
        run_of(model).latest_vote = weakref.ref(self)

    def _voting_model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "votes about a model that is gone"
        return model

    @property
    def is_on(self) -> bool:
        """Whether each collective is voted on."""
        return self._stop is not None

    def start(self) -> None:
        """Vote before each collective of the model from now on. Called on all ranks; does not communicate."""
        if self._stop is None:
            # Before a guard, which would miss a rank that is out of memory.
            self._stop = watch_collectives(units(self._voting_model()), self.check, first=True, between_units=True)

    def stop(self) -> None:
        """Stop voting. Steps have no overhead afterwards."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def check(self, where: PendingCollective | str) -> None:
        """Vote that this rank is not out of memory.

        Raises:
            PeerOutOfMemoryError: a rank is out of memory.
            RanksDivergedError: not all ranks voted; lists the position of each.

        Called on all ranks.
        """
        self._where = where
        if self._vote(where, False):
            raise PeerOutOfMemoryError(f"CUDA out of memory on another rank, seen before {where}")

    def report(self) -> None:
        """Report that this rank is out of memory, in the current or next vote of the other ranks.

        Raises:
            RanksDivergedError: as in ``check``.
        """
        self._vote(f"its vote that it ran out of memory after {self._where}", True)

    def succeeded(self, run: Callable[[], object]) -> bool:
        """Call ``run``. Return True if it succeeded on all ranks; return False on all ranks if one is out of memory.

        In the latter case the model is reset. The caller restores gradients, buffers and RNG states. Called on all
        ranks; votes once more after ``run``, if voting is on.

        Raises:
            Any other exception of ``run``.
        """
        try:
            run()
            if self.is_on:
                self.check("the end of the batch")
        except RuntimeError as error:
            if _is_inside_a_collective(error):
                raise RuntimeError(_NO_VOTE) from error
            if not is_out_of_memory(error):
                raise
            if not isinstance(error, PeerOutOfMemoryError):
                self.report()
            # The frames of the error reference the activations.
            traceback.clear_frames(error.__traceback__)
        else:
            return True
        reset(self._voting_model())
        return False

    def _vote(self, where: object, is_out: bool) -> bool:
        [anybody_is_out] = self._control.all_reduce_max(_OPERATION, where, [int(is_out)], self._timeout)
        return bool(anybody_is_out)


# Maps (this rank's position, its numbers) to the element-wise maximum over ranks. Called on all ranks together.
AllReduceMax = Callable[[str, Sequence[int]], list[int]]


def forward_all_reduce_max(model: nn.Module, operation: Operation, limit_s: float | None) -> AllReduceMax:
    """Create an all-reduce over the control group, for ranks to call in a forward before they run different submodules.

    If out-of-memory voting is on, the ranks vote first. The returned function is called on all ranks.

    Args:
        model: The module whose forward uses it.
        limit_s: The timeout in seconds; None means that of other votes.
    """
    limit = DEFAULT_TIMEOUT if limit_s is None else timedelta(seconds=limit_s)
    # weak, because the model's hooks reference the returned function
    all_reduce_max, this = control_group().all_reduce_max, weakref.ref(model)

    def ask(where: str, numbers: Sequence[int]) -> list[int]:
        run = None if (found := this()) is None else find_run(found)
        vote = None if run is None or run.latest_vote is None else run.latest_vote()
        if vote is not None and vote.is_on:
            vote.check(f"the question of {operation.name} before {where}")
        return all_reduce_max(operation, where, numbers, limit)

    return ask


_OPERATION = Operation(
    "automatic microbatching",
    "Ranks vote before each collective: some are inside one that others never entered, or have ended. Set "
    "device_train_microbatch_size to a number",
)


# NCCL uses different algorithms and buffers for large and small tensors.
_WARM_UP_ELEMENTS = (1, 1 << 20)


def _warm_up(model: nn.Module) -> None:
    """Use each mesh axis of the model once, with every kind of collective that it will use. Called on all ranks."""
    meshes = dict.fromkeys(each.device_mesh for each in resharded_parameters(model) if isinstance(each, DTensor))
    of_all = [group for mesh in meshes for group in mesh.get_all_groups()]  # including the axes of TP-sharded layers
    run = run_of(model)
    exchanging = [*run.exchanging, *(of_all if run.exchanging else ())]  # shards of experts are exchanged too
    if (context := run.context) is not None:
        exchanging.append(context.group)
    for group in dict.fromkeys([*of_all, *exchanging]):
        size = dist.get_world_size(group)
        for numel in _WARM_UP_ELEMENTS:
            part = torch.zeros(max(1, numel // size), device=device_of_group(group))
            full = part.new_empty(len(part) * size)
            all_gather_single(full, part, group)
            reduce_scatter_single(part, full, group)
            dist.all_reduce(part, group=group)
            if group in exchanging:
                dist.all_to_all_single(torch.empty_like(full), full, group=group)


_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    # cuDNN's error for batch norms of large batches (composer/trainer/trainer.py, 0.32.1, _is_cuda_oom).
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    # The workspace of a matrix product, or a kernel of torch.compile, outside of torch's allocator.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device of this or another rank ran out of memory, in which case a smaller microbatch may fit."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS)


def _is_inside_a_collective(error: BaseException) -> bool:
    """Whether NCCL could not allocate its own memory."""
    return isinstance(error, dist.DistBackendError) and "out of memory" in str(error)


_NO_VOTE = (
    "NCCL got no memory for its own buffers, inside a collective that other ranks have entered: the batch cannot be "
    "repeated, and the others wait in it until the time-out. Set device_train_microbatch_size to a number, or leave "
    "NCCL more of the device's memory (torch.cuda.set_per_process_memory_fraction keeps torch from taking all of it; "
    "NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS have it take less)"
)


def reset(model: nn.Module) -> None:
    """Reset a sharded model after an error in its forward or backward to its state between batches.

    Gradients of the sharded parameters are kept; unreduced gradients of microbatches are discarded. Called on all
    ranks that raised; does not communicate.
    """
    for unit in units(model).values():
        reset_after_error(unit)
    reset_mask_buffers()
    begin_microbatch(model, is_last=True)


def batch_snapshot(model: nn.Module) -> Callable[[], None]:
    """Copy the state that a batch changes besides gradients: this rank's RNG states, and the buffers.

    Returns:
        A function that restores them. Neither communicates.
    """
    states = random_states()
    of_dtensors = {name: state.clone() for name, state in dtensor_random_states().items()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in own_buffers(module)
    ]

    @torch.no_grad()
    def restore() -> None:
        set_random_states(states)
        dtensor_random_states().update({name: state.clone() for name, state in of_dtensors.items()})
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer.copy_(before)  # the forward may have registered a buffer of a different size

    return restore
