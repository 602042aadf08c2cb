"""Ranks that run out of memory together: a vote before each collective, and the way back to before the batch.

[Note: votes] A rank that is out of memory raises where it stands, while the others wait for it in a collective, for
ever. So each rank votes before it launches one: between the allocation of a unit's buffers, which may fail, and the
launch. A rank that failed votes once more from where the error is caught, which is the vote that the others are
waiting in, or the next that they come to; then all know, and all go back. Every rank votes the same number of times,
as long as the ranks run the same units in the same order. What fails inside a collective that others have entered
cannot be voted on: there the process group's time-out ends all of them.
"""

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_fsdp2._torch import InFlight, own_buffers, reset_after_error, watch_collectives
from composer_fsdp2.control import ANSWER_WITHIN, control
from composer_fsdp2.microbatching import begin_microbatch
from composer_fsdp2.sharded import units

__all__ = ["BatchSnapshot", "OutOfMemoryVote", "PeerOutOfMemoryError", "is_out_of_memory", "reset"]


class PeerOutOfMemoryError(RuntimeError):
    """Another rank is out of memory. The text begins as CUDA's own error, by which Composer knows it."""


class OutOfMemoryVote:
    """The votes of one model's ranks, over the control group, so that no vote stands between collectives.

    Made on all ranks together: the first one makes that group.

    Args:
        timeout: How long a rank waits for the others' votes.
    """

    def __init__(self, model: nn.Module, timeout: timedelta = ANSWER_WITHIN) -> None:
        self._model = model
        self._timeout = timeout
        self._control = control()
        self._stop: Callable[[], None] | None = None
        self._where: InFlight | str = "the first forward"

    @property
    def is_on(self) -> bool:
        """Whether each collective is voted on."""
        return self._stop is not None

    def start(self) -> None:
        """From here on each collective of the model is voted on. Call it on all ranks; it communicates nothing."""
        if self._stop is None:
            # Ahead of a guard, at which a rank that is out of memory would be missed.
            self._stop = watch_collectives(units(self._model), self.check, first=True)

    def stop(self) -> None:
        """No more votes, and nothing left of them in a step."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def check(self, where: InFlight | str) -> None:
        """Vote that all is well here.

        Raises:
            PeerOutOfMemoryError: a rank voted otherwise.
        """
        self._where = where
        if self._cast(False):
            raise PeerOutOfMemoryError(f"CUDA out of memory on another rank, seen before {where}")

    def report(self) -> None:
        """Tell the others that this rank is out of memory: the vote that they are waiting in, or come to next."""
        self._cast(True)

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
            if not is_out_of_memory(error):
                raise
            if not isinstance(error, PeerOutOfMemoryError):
                self.report()
            # The frames of the error hold the activations.
            traceback.clear_frames(error.__traceback__)
        else:
            return True
        reset(self._model)
        return False

    def _cast(self, is_out: bool) -> bool:
        try:
            [anybody_is_out] = self._control.largest([int(is_out)], self._timeout)
        except RuntimeError as error:
            said = "ran out of memory after" if is_out else "waits for the others' votes before"
            raise RuntimeError(
                f"rank {dist.get_rank()} {said} {self._where}, and not all ranks voted within the time-out: they are "
                "inside a collective that this rank never entered, or have ended. Set the microbatch size to a number"
            ) from error
        return bool(anybody_is_out)


# The last is what batch norms of large batches get of cuDNN (composer/trainer/trainer.py, 0.32.1, _is_cuda_oom).
_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device of this rank, or another rank, was out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS)


def reset(model: nn.Module) -> None:
    """Bring a sharded model from wherever an error ended its forward or backward to where it stands between batches.

    Gradients of the sharded parameters stay; those of microbatches that were not communicated go. Call it on all ranks
    that raised; does not communicate.
    """
    for unit in units(model).values():
        reset_after_error(unit)
    begin_microbatch(model, is_last=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """What a batch changes beside gradients, as it was before: random states of this rank, and the model's buffers.

    Args:
        buffers: By the module that registers it and its name: the tensor, and a copy of what it held.
    """

    cpu: torch.Tensor
    device: torch.Tensor | None
    python: Any
    numpy: Any
    buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]

    @classmethod
    def take(cls, model: nn.Module) -> "BatchSnapshot":
        """Copies; does not communicate."""
        import numpy

        return cls(
            cpu=torch.get_rng_state(),
            device=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            python=random.getstate(),
            numpy=numpy.random.get_state(),
            buffers=[
                (module, name, buffer, buffer.detach().clone())
                for module in model.modules()
                for name, buffer in own_buffers(module)
            ],
        )

    @torch.no_grad()
    def restore(self) -> None:
        import numpy

        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        for module, name, buffer, before in self.buffers:
            module._buffers[name] = buffer.copy_(before)  # the forward may have registered another one, of another size
