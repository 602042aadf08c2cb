"""``async_save``: training goes on while a copy of the state is written."""

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from composer.callbacks import CheckpointSaver
from composer.core import State
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.groups import new_group_of
from composer_fsdp2.checkpoint.trees import EntryPath, mapped
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import gather
from composer_fsdp2.sharding.long_work import long_work
from composer_fsdp2.training.control import Control, Operation, control

from .pinned_copies import PinnedCopies, is_on_device, keep_on_device
from .saving import (
    ENTRIES_WITH_SHARDS,
    sharded_state_dict,
    shards_in,
    tensors_in,
    write_full,
    write_sharded,
    writes_shards,
)
from .seams import seam


class SavedState:
    """A State as it was when its checkpoint was taken, with the file that is there by now (None: another rank's)."""

    def __init__(self, state: State, path: str | None) -> None:
        self._state, self.path = state, path
        self.timestamp = state.timestamp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


@seam(
    "composer.utils.checkpoint",
    "save_checkpoint",
    why="a checkpoint that is written already is not written again, only linked, uploaded and counted",
)
def save_checkpoint(original: Callable[..., Any], state: State | SavedState, *args: Any, **kwargs: Any) -> str | None:
    """``composer.utils.checkpoint.save_checkpoint``: for what is written already, the file's name."""
    if isinstance(state, SavedState):
        return state.path
    if _pending is not None:
        _pending.thread.join()  # a planner that the user gave may serve one save at a time
    path: str | None = original(state, *args, **kwargs)
    return path


def start(saver: CheckpointSaver, state: State, filename: str, finish_save: Callable[[SavedState], None]) -> None:
    """Take a copy of the state and begin to write it. Called on all ranks."""
    global _pending
    connected = control()  # while all are here
    group = _writing_group(state)
    with keep_on_device(state.model):
        state_dict = sharded_state_dict(state, saver.weights_only, saver.ignore_keys)
    if (weights := state_dict["state"].get("model")) is not None:
        state_dict["state"]["model"] = dict(weights)  # as Composer's own copy to the host would leave it
    state_dict = _copy(state, state_dict)
    path, write, publish = _writer_of(state, state_dict, filename, group)
    _pending = _Pending(saver, connected, write, publish, functools.partial(finish_save, SavedState(state, path)))
    _pending.start()


def _writer_of(
    state: State, state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None
) -> tuple[str | None, Callable[[], None], Callable[[], None]]:
    """This rank's file, if it has one, how it is written, and how it is made known once all are written."""
    if state.fsdp_sharded_state_dict_enabled:  # a link makes the folder known
        write = functools.partial(write_sharded, state, state_dict, filename, group)
        return filename if writes_shards(state) else None, write, lambda: None
    # Until it is linked, a run that starts again must not take its name for a conflict.
    unpublished = os.path.join(os.path.dirname(filename), f".unpublished-{os.path.basename(filename)}")
    is_first = dist.get_rank() == 0

    def publish() -> None:
        if is_first:
            os.replace(unpublished, filename)

    return filename if is_first else None, functools.partial(write_full, state_dict, unpublished, group), publish


def finish_pending() -> None:
    """Wait for the checkpoint that is being written, if there is one. Called on all ranks."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.finish()


@seam(
    "composer.callbacks.checkpoint_saver",
    "CheckpointSaver.batch_end",
    why="async_save: links and errors follow once the checkpoint is written",
)
def batch_end(original: Callable[..., Any], self: CheckpointSaver, state: State, logger: Any) -> None:
    """``CheckpointSaver.batch_end``: links and retention once all ranks have written; the writer's errors."""
    if _pending is not None and _pending.saver is self and _pending.is_done_everywhere():
        finish_pending()
    original(self, state, logger)


@seam(
    "composer.callbacks.checkpoint_saver",
    "CheckpointSaver.fit_end",
    why="async_save: the last checkpoint is complete when fit returns",
)
def fit_end(original: Callable[..., Any], self: CheckpointSaver, state: State, logger: Any) -> None:
    """``CheckpointSaver.fit_end``: the last checkpoint is complete when ``fit`` returns."""
    finish_pending()
    original(self, state, logger)


@seam(
    "composer.trainer.trainer",
    "Trainer.save_checkpoint_to_save_folder",
    why="async_save: a script that ends after it would lose the checkpoint",
)
def save_checkpoint_to_save_folder(original: Callable[..., Any], self: Any) -> None:
    """``Trainer.save_checkpoint_to_save_folder``: who asks for a checkpoint has it when the call returns."""
    original(self)
    finish_pending()


# ---------------------------------------------------------------------------------------------------------------------
# The copy


def _copy(state: State, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the values in host memory, which training does not change; DTensors stay DTensors.

    What lies on a device is copied to pinned memory, which every save of this process uses again.
    """
    pinned = _pinned.of(tensor for tensor in tensors_in(state_dict) if is_on_device(tensor))
    live = {_address(tensor) for tensor in _trained_tensors(state)}
    for name in ENTRIES_WITH_SHARDS:
        live |= {_address(shard) for shard in shards_in(state_dict["state"].get(name))}

    def copied(value: Any, path: EntryPath) -> Any:
        if id(value) in pinned:
            return pinned[id(value)]
        if isinstance(value, DTensor) and _address(value) not in live and value.to_local().device.type == "cpu":
            return value  # Composer copied it from the device; a second copy would need the memory twice
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        return copy.deepcopy(value)

    everything: dict[str, Any] = mapped(state_dict, copied)
    return everything


def _trained_tensors(state: State) -> Iterator[torch.Tensor]:
    """Everything sharded that a step changes."""
    yield from state.model.parameters()
    yield from state.model.buffers()
    for optimizer in state.optimizers:
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# The thread


# A rank whose shards are written waits in torch's writer for those with more, for as long as the disk takes.
_WRITE_TIMEOUT = timedelta(days=1)


def _writing_group(state: State) -> dist.ProcessGroup | None:
    """A group of the ranks that write, so that what the background thread sends never meets what training sends.

    Made once for each run; None on a rank that does not write. Called on all ranks.
    """
    writes = not state.fsdp_sharded_state_dict_enabled or writes_shards(state)
    return _gloo_group(dist.group.WORLD, tuple(rank for rank, of_rank in enumerate(gather(writes)) if of_rank))


@functools.lru_cache(maxsize=1)  # ranks of one job have one world
def _gloo_group(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    return new_group_of([ranks], "gloo", _WRITE_TIMEOUT)


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written.

    Args:
        write: Called in a thread of its own.
        publish: Gives it its name; called once this rank has written.
        finish_save: Composer's second part; called once all ranks have published.
    """

    saver: CheckpointSaver
    control: Control
    write: Callable[[], None]
    publish: Callable[[], None]
    finish_save: Callable[[], None]
    thread: threading.Thread = field(init=False)
    error: str | None = None

    def start(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread is on GPU 0, where torch's writer would open a stream
            self._attempt(self.write)

        # A daemon: a run that ends in an error must not wait for ranks that are gone.
        self.thread = threading.Thread(target=run, name="async_save", daemon=True)
        self.thread.start()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self.error = _error_text(error)

    def is_done_everywhere(self) -> bool:
        """Called on all ranks, after each batch."""
        [is_one_alive] = self.control.all_reduce_max(_OPERATION, "the end of a batch", [int(self.thread.is_alive())])
        return not is_one_alive

    def finish(self) -> None:
        """Wait for it, give it its name, and do what Composer does after a save. Called on all ranks.

        Raises:
            CheckpointError: on all of them, if one failed.
        """
        long_work(self._complete, "writing a checkpoint")
        failed = dict.fromkeys(error for error in gather(self.error) if error is not None)  # most know of all of them
        if failed:
            raise CheckpointError(
                "async_save could not write a checkpoint; the one before it is still the latest:\n  "
                + "\n  ".join(failed)
            )
        self.finish_save()

    def _complete(self) -> None:
        self.thread.join()
        if self.error is None:
            self._attempt(self.publish)


_OPERATION = Operation(
    "async_save",
    "Ranks ask each other at the end of each batch whether the checkpoint is written: look for a different number of "
    "batches, or for a rank that has ended",
)


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own words are the stacks of all ranks
        return "\n  ".join(f"rank {rank}: {_error_text(cause)}" for rank, (cause, _) in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# Of this process: one writer at a time, because its groups and its memory are one.
_pending: _Pending | None = None
_pinned = PinnedCopies()
