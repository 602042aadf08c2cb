"""``async_save``: training continues while a copy of the state is written."""

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
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.long_work import long_work
from composer_fsdp2.training.control import ControlGroup, Operation, control_group

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
    """A Trainer's State with the timestamp of its checkpoint, and the path that this rank wrote; None if it wrote no
    file."""

    def __init__(self, state: State, path: str | None) -> None:
        self._state, self.path = state, path
        self.timestamp = state.timestamp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


@seam(
    "composer.utils.checkpoint",
    "save_checkpoint",
    why="a written checkpoint is not written again, only linked, uploaded and counted",
)
def save_checkpoint(original: Callable[..., Any], state: State | SavedState, *args: Any, **kwargs: Any) -> str | None:
    """Replaces ``composer.utils.checkpoint.save_checkpoint``: for a written checkpoint, returns its file name."""
    if isinstance(state, SavedState):
        return state.path
    if _pending is not None:
        _pending.thread.join()  # a user's planner may support one save at a time only
    path: str | None = original(state, *args, **kwargs)
    return path


def start(saver: CheckpointSaver, state: State, filename: str, finish_save: Callable[[SavedState], None]) -> None:
    """Copy the state to host memory, and start a thread that writes it. Called on all ranks.

    Args:
        filename: The checkpoint's path.
        finish_save: Called once all ranks have written; links and uploads the file.
    """
    global _pending
    connected = control_group()  # while all ranks are here
    group = _writing_group(state)
    with keep_on_device(state.model):
        state_dict = sharded_state_dict(state, saver.weights_only, saver.ignore_keys)
    if (weights := state_dict["state"].get("model")) is not None:
        state_dict["state"]["model"] = dict(weights)  # the type that Composer's own copy to the host returns
    state_dict = _copy(state, state_dict)
    path, write, publish = _writer_of(state, state_dict, filename, group)
    _pending = _Pending(saver, connected, write, publish, functools.partial(finish_save, SavedState(state, path)))
    _pending.start()


def _writer_of(
    state: State, state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None
) -> tuple[str | None, Callable[[], None], Callable[[], None]]:
    """Return the path that this rank writes (or None), a function that writes it, and a function that renames it.

    The file is renamed once all ranks have written.
    """
    if state.fsdp_sharded_state_dict_enabled:  # the folder is published by a link
        write = functools.partial(write_sharded, state, state_dict, filename, group)
        return filename if writes_shards(state) else None, write, lambda: None
    # A temporary name: a restarted run must not find a file with the final name and report a conflict.
    unpublished = os.path.join(os.path.dirname(filename), f".unpublished-{os.path.basename(filename)}")
    is_first = dist.get_rank() == 0

    def publish() -> None:
        if is_first:
            os.replace(unpublished, filename)

    return filename if is_first else None, functools.partial(write_full, state_dict, unpublished, group), publish


def finish_pending() -> None:
    """Wait until the checkpoint being written is complete, if there is one. Called on all ranks."""
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
    """Replaces ``CheckpointSaver.batch_end``: if all ranks have written, first completes the save or raises its error.

    Called on all ranks. Completing a save updates links and removes old checkpoints.
    """
    if _pending is not None and _pending.saver is self and _pending.is_done_everywhere():
        finish_pending()
    original(self, state, logger)


@seam(
    "composer.callbacks.checkpoint_saver",
    "CheckpointSaver.fit_end",
    why="async_save: the last checkpoint is complete when fit returns",
)
def fit_end(original: Callable[..., Any], self: CheckpointSaver, state: State, logger: Any) -> None:
    """Replaces ``CheckpointSaver.fit_end``: the last checkpoint is complete when ``fit`` returns."""
    finish_pending()
    original(self, state, logger)


@seam(
    "composer.trainer.trainer",
    "Trainer.save_checkpoint_to_save_folder",
    why="async_save: a script that ends after it would lose the checkpoint",
)
def save_checkpoint_to_save_folder(original: Callable[..., Any], self: Any) -> None:
    """Replaces ``Trainer.save_checkpoint_to_save_folder``: the checkpoint is complete when the call returns."""
    original(self)
    finish_pending()


# ---------------------------------------------------------------------------------------------------------------------
# The copy


def _copy(state: State, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copy the state to host memory, where training does not modify it. DTensors remain DTensors.

    Tensors on a device are copied to pinned memory, which all saves of this process reuse.
    """
    pinned = _pinned.of(tensor for tensor in tensors_in(state_dict) if is_on_device(tensor))
    live = {_address(tensor) for tensor in _trained_tensors(state)}
    for name in ENTRIES_WITH_SHARDS:
        live |= {_address(shard) for shard in shards_in(state_dict["state"].get(name))}

    def copied(value: Any, path: EntryPath) -> Any:
        if id(value) in pinned:
            return pinned[id(value)]
        if isinstance(value, DTensor) and _address(value) not in live and value.to_local().device.type == "cpu":
            return value  # Composer already copied it from the device; another copy would double the memory
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        return copy.deepcopy(value)

    everything: dict[str, Any] = mapped(state_dict, copied)
    return everything


def _trained_tensors(state: State) -> Iterator[torch.Tensor]:
    """All sharded tensors that a step modifies."""
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


# A rank that has written its shards waits in torch's writer for the others, as long as the disk takes.
_WRITE_TIMEOUT = timedelta(days=1)


def _writing_group(state: State) -> dist.ProcessGroup | None:
    """Return a process group of the writing ranks, for the background thread; None on ranks that do not write.

    The group is separate from those of training, and created once per run. Called on all ranks.
    """
    writes = not state.fsdp_sharded_state_dict_enabled or writes_shards(state)
    return _gloo_group(
        dist.group.WORLD, tuple(rank for rank, of_rank in enumerate(all_gather_object(writes)) if of_rank)
    )


@functools.lru_cache(maxsize=1)  # all ranks of a job have the same world
def _gloo_group(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    return new_group_of([ranks], "gloo", _WRITE_TIMEOUT)


@dataclass(slots=True)
class _Pending:
    """A checkpoint that a background thread writes.

    Args:
        write: Writes the file; called in the thread.
        publish: Renames the file; called once this rank has written.
        finish_save: The second part of Composer's save (link, upload); called after ``publish``.
    """

    saver: CheckpointSaver
    control: ControlGroup
    write: Callable[[], None]
    publish: Callable[[], None]
    finish_save: Callable[[], None]
    thread: threading.Thread = field(init=False)
    error: str | None = None

    def start(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread uses GPU 0, on which torch's writer would open a stream
            self._attempt(self.write)

        # A daemon thread: a failed run must not wait for ranks that have exited.
        self.thread = threading.Thread(target=run, name="async_save", daemon=True)
        self.thread.start()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self.error = _error_text(error)

    def is_done_everywhere(self) -> bool:
        """Called on all ranks after each batch; one all-reduce over sockets."""
        [is_one_alive] = self.control.all_reduce_max(_OPERATION, "the end of a batch", [int(self.thread.is_alive())])
        return not is_one_alive

    def finish(self) -> None:
        """Wait for the writer, publish the file, and finish Composer's save. Called on all ranks.

        Raises:
            CheckpointError: on all ranks, if writing failed on one.
        """
        long_work(self._complete, "writing a checkpoint")
        failed = dict.fromkeys(
            error for error in all_gather_object(self.error) if error is not None
        )  # most errors name all ranks
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
    "Ranks compare at the end of each batch whether the checkpoint is written: look for a different number of "
    "batches, or for a rank that has exited",
)


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its message contains the stack traces of all ranks
        return "\n  ".join(f"rank {rank}: {_error_text(cause)}" for rank, (cause, _) in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# Per process: only one writer at a time, because its process group and its memory are shared.
_pending: _Pending | None = None
_pinned = PinnedCopies()
