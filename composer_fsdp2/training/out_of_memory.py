"""Ranks that run out of memory together: a vote before each collective, and the way back to before the batch.

[Note: votes] A rank that is out of memory raises where it stands, while the others wait for it in a collective, for
ever. So each rank votes before it launches one: between the allocation of a unit's buffers, which may fail, and the
launch. A rank that failed votes once more from where the error is caught, which is the vote that the others are
waiting in, or the next that they come to; then all know, and all go back. Every rank votes the same number of times,
as long as the ranks run the same units in the same order. What fails inside a collective that others have entered
cannot be voted on: there the process group's time-out ends all of them.
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
    """Another rank is out of memory. The text begins as CUDA's own error, by which Composer knows it."""


class OutOfMemoryVote:
    """The votes of one model's ranks, over the control group, so that no vote stands between collectives.

    Made on all ranks together, as the control is, and sends a few small collectives over the model's axes. NCCL takes
    memory of its own, outside of torch's allocator, when an axis is first used; where that is not there in the midst of
    a batch, it fails inside a collective, about which nobody can vote.

    Args:
        timeout: How long a rank waits for the others' votes.
    """

    def __init__(self, model: nn.Module, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._model = weakref.ref(model)  # votes are kept with the model, which would live for ever
        self._timeout = timeout
        self._control = control_group()
        _warm_up(model)
        self._stop: Callable[[], None] | None = None
        self._where: PendingCollective | str = "the first forward"
        run_of(model).latest_vote = weakref.ref(self)  # while it is on, it reaches the units, by which the run is kept

    def _voting_model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "votes about a model that is gone"
        return model

    @property
    def is_on(self) -> bool:
        """Whether each collective is voted on."""
        return self._stop is not None

    def start(self) -> None:
        """From here on each collective of the model is voted on. Call it on all ranks; it communicates nothing."""
        if self._stop is None:
            # Ahead of a guard, at which a rank that is out of memory would be missed.
            self._stop = watch_collectives(units(self._voting_model()), self.check, first=True, between_units=True)

    def stop(self) -> None:
        """No more votes, and nothing left of them in a step."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def check(self, where: PendingCollective | str) -> None:
        """Vote that all is well here.

        Raises:
            PeerOutOfMemoryError: a rank voted otherwise.
            RanksDivergedError: not all ranks voted; says where each stands.
        """
        self._where = where
        if self._cast(where, False):
            raise PeerOutOfMemoryError(f"CUDA out of memory on another rank, seen before {where}")

    def report(self) -> None:
        """Tell the others that this rank is out of memory: the vote that they are waiting in, or come to next.

        Raises:
            RanksDivergedError: as in ``check``.
        """
        self._cast(f"its vote that it ran out of memory after {self._where}", True)

    def succeeded(self, run: Callable[[], object]) -> bool:
        """Whether ``run`` ended on all ranks; False on all of them, and the model is reset, if one is out of memory.

        Called on all ranks; votes once more after ``run``, if votes are on. Gradients, buffers and random states are
        the caller's.

        Raises:
            Whatever else ``run`` raised.
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
            # The frames of the error hold the activations.
            traceback.clear_frames(error.__traceback__)
        else:
            return True
        reset(self._voting_model())
        return False

    def _cast(self, where: object, is_out: bool) -> bool:
        [anybody_is_out] = self._control.all_reduce_max(_OPERATION, where, [int(is_out)], self._timeout)
        return bool(anybody_is_out)


# From where this rank is and its numbers to the largest of all ranks'. Called on all ranks together.
AllReduceMax = Callable[[str, Sequence[int]], list[int]]


def forward_all_reduce_max(model: nn.Module, operation: Operation, limit_s: float | None) -> AllReduceMax:
    """How ranks compare numbers in the midst of a forward, before they run parts of the model that may differ.

    They vote before, if votes are on. Called on all ranks.

    Args:
        model: The module inside which they ask.
        limit_s: For how many seconds they wait for each other's answers; None: for as long as for other votes.
    """
    limit = DEFAULT_TIMEOUT if limit_s is None else timedelta(seconds=limit_s)
    all_reduce_max, this = control_group().all_reduce_max, weakref.ref(model)  # its hooks hold what is returned

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


# NCCL uses other algorithms for large tensors than for small ones, with other buffers.
_WARM_UP_ELEMENTS = (1, 1 << 20)


def _warm_up(model: nn.Module) -> None:
    """Use each axis of the model once, with all kinds of collectives that it sends. Called on all ranks."""
    meshes = dict.fromkeys(each.device_mesh for each in resharded_parameters(model) if isinstance(each, DTensor))
    of_all = [group for mesh in meshes for group in mesh.get_all_groups()]  # of the axes that split layers, too
    run = run_of(model)
    exchanging = [*run.exchanging, *(of_all if run.exchanging else ())]  # shards of experts travel, too
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
    # What batch norms of large batches get of cuDNN (composer/trainer/trainer.py, 0.32.1, _is_cuda_oom).
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    # A matrix product's workspace, or a kernel of torch.compile, outside of torch's allocator.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device of this rank, or another rank, was out of memory, where a smaller microbatch may help."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS)


def _is_inside_a_collective(error: BaseException) -> bool:
    """Whether it was NCCL that got no memory for itself."""
    return isinstance(error, dist.DistBackendError) and "out of memory" in str(error)


_NO_VOTE = (
    "NCCL got no memory for its own buffers, inside a collective that other ranks have entered: the batch cannot be "
    "repeated, and the others wait in it until the time-out. Set device_train_microbatch_size to a number, or leave "
    "NCCL more of the device's memory (torch.cuda.set_per_process_memory_fraction keeps torch from taking all of it; "
    "NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS have it take less)"
)


def reset(model: nn.Module) -> None:
    """Bring a sharded model from wherever an error ended its forward or backward to where it stands between batches.

    Gradients of the sharded parameters stay; those of microbatches that were not communicated go. Call it on all ranks
    that raised; does not communicate.
    """
    for unit in units(model).values():
        reset_after_error(unit)
    reset_mask_buffers()
    begin_microbatch(model, is_last=True)


def batch_snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that restores what a batch changes beside gradients: the random states of this rank and the buffers.

    Copies; neither it nor the function communicates.
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
            module._buffers[name] = buffer.copy_(before)  # the forward may have registered another one, of another size

    return restore
