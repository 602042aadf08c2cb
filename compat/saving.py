"""Composer's checkpoint saving, for a model sharded by ``fully_shard``.

What an FSDPConfig saved under FSDP1 is saved here under the same names: sharded ones by Composer's own code, full ones
without gathering the model on rank 0. With ``async_save`` training goes on while a copy of the state is written.

[Note: a saver's work in two parts] Composer's ``CheckpointSaver._save_checkpoint`` writes, and then links, uploads and
removes old checkpoints. The second part is still Composer's: it is called with a state whose checkpoint "is written
already" (``_Written``), right after the writing or, with ``async_save``, at the end of a later batch.
"""

import contextlib
import copy
import functools
import logging
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import checkpoint, reproducibility
from composer.utils.compression import get_compressor, is_compressed_pt
from composer.utils.file_helpers import is_tar
from composer.utils.misc import ParallelismType
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_directory
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch import new_gloo_group
from composer_fsdp2.agreement import agree, gather, told_by_rank_0
from composer_fsdp2.checkpoint.save import save_monolithic
from composer_fsdp2.compat.staging import PinnedCopies, is_on_device, left_on_device
from composer_fsdp2.control import Control, Question, control
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharded import is_sharded, reshard

__all__ = [
    "replacement_for_batch_end",
    "replacement_for_fit_end",
    "replacement_for_save_checkpoint",
    "replacement_for_save_to_folder",
    "replacement_for_saver",
    "replacement_for_state_dict",
    "replacement_for_state_dict_context",
    "replacement_for_write",
]

log = logging.getLogger(__name__)

IgnoreKeys = list[str] | Callable[[dict[str, Any]], None] | None


# ---------------------------------------------------------------------------------------------------------------------
# The state


def _sharded_state_dict(state: State, weights_only: bool, ignore_keys: IgnoreKeys) -> dict[str, Any]:
    """What Composer would save, with DTensors in place of whole tensors. Called on all ranks."""
    with _shards_kept(not state.fsdp_sharded_state_dict_enabled), _as_sharded(state):
        if weights_only:
            parts = {
                "model": state.get_model_state_dict(),
                "integrations": state._get_integrations_state_dict(),
                "metadata": state._get_state_metadata(),
            }
            state_dict: dict[str, Any] = {"state": parts}
        else:
            state_dict = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
    if ignore_keys:
        ignore = ignore_keys if callable(ignore_keys) else checkpoint.glob_filter(ignore_keys)
        ignore(state_dict)
        state_dict.setdefault("state", {})
    return state_dict


@contextlib.contextmanager
def _as_sharded(state: State) -> Iterator[None]:
    """The state's own configuration, asked for shards."""
    config = state.fsdp_config
    assert config is not None
    before = config.state_dict_type
    config.state_dict_type = "sharded"
    try:
        yield
    finally:
        config.state_dict_type = before


# Whether algorithms' shards go into a state dict as they are.
_keeps_shards = False


@contextlib.contextmanager
def _shards_kept(keeps: bool) -> Iterator[None]:
    """A full file is written shard by shard, algorithms' shards too; elsewhere they are pickled, and must be whole."""
    global _keeps_shards
    before, _keeps_shards = _keeps_shards, keeps
    try:
        yield
    finally:
        _keeps_shards = before


def replacement_for_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``State.state_dict``: what algorithms and callbacks hold of the parameters is whole, in host memory, on rank 0.

    As under FSDP1, where each rank had it whole; a file of either loads into the other.
    """

    @functools.wraps(original)
    def state_dict(self: State) -> dict[str, Any]:
        saved: dict[str, Any] = original(self)
        if is_sharded(self.model) and not _keeps_shards:
            # A planner that the user gave may have any rank write an object that all of them have.
            keeps = dist.get_rank() == 0 or getattr(self.fsdp_config, "save_planner", None) is not None
            saved.update((name, _whole(saved[name], keeps)) for name in _HOLDERS if name in saved)
        return saved

    return state_dict


_HOLDERS = ("algorithms", "callbacks")


def _whole(value: Any, keeps: bool) -> Any:
    """The same with whole tensors for DTensors, or None in their place; the very same where there are none.

    Called on all ranks.
    """
    if next(_shards(value), None) is None:
        return value
    if isinstance(value, DTensor):
        value = value.to(value.device_mesh.device_type)  # where its group communicates
        assert isinstance(value, DTensor)
        whole = value.full_tensor()
        return whole.cpu() if keeps else None
    if isinstance(value, dict):
        whole_dict = copy.copy(value)  # of the same class, in the same order
        whole_dict.update((key, _whole(part, keeps)) for key, part in value.items())
        return whole_dict
    if type(value) in (list, tuple):
        return type(value)(_whole(part, keeps) for part in value)
    return value


def _copied(state: State, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same values in host memory of their own, which training does not change; DTensors stay DTensors.

    What lies on a device is copied to pinned memory, which every save of this process uses again.
    """
    pinned = _pinned.of(tensor for tensor in _tensors(state_dict) if is_on_device(tensor))
    live = {_address(tensor) for tensor in _trained(state)}
    for name in _HOLDERS:
        live |= {_address(shard) for shard in _shards(state_dict["state"].get(name))}

    def copied(value: Any) -> Any:
        if id(value) in pinned:
            return pinned[id(value)]
        if isinstance(value, DTensor) and _address(value) not in live and value.to_local().device.type == "cpu":
            return value  # Composer copied it from the device; a second copy would need the memory twice
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            copied_dict = copy.copy(value)  # of the same class, in the same order
            copied_dict.update((key, copied(part)) for key, part in value.items())
            return copied_dict
        if type(value) in (list, tuple):
            return type(value)(copied(part) for part in value)
        return copy.deepcopy(value)

    return {key: copied(value) for key, value in state_dict.items()}


def _trained(state: State) -> Iterator[torch.Tensor]:
    """Everything sharded that a step changes."""
    yield from state.model.parameters()
    yield from state.model.buffers()
    for optimizer in state.optimizers:
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _shards(value: Any) -> Iterator[DTensor]:
    """Every DTensor in a nested value."""
    return (tensor for tensor in _tensors(value) if isinstance(tensor, DTensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def replacement_for_write(original: Callable[..., Any]) -> Callable[..., Any]:
    """``composer.utils.checkpoint._save_checkpoint``: full checkpoints go to the file shard by shard."""

    @functools.wraps(original)
    def save(
        state: State, save_filename: str, *, weights_only: bool = False, ignore_keys: IgnoreKeys = None
    ) -> str | None:
        # A function may look at, and change, whole tensors: it gets them, on rank 0, as before.
        if not is_sharded(state.model) or state.fsdp_sharded_state_dict_enabled or callable(ignore_keys):
            path: str | None = original(state, save_filename, weights_only=weights_only, ignore_keys=ignore_keys)
            return path
        _write_full(_sharded_state_dict(state, weights_only, ignore_keys), save_filename)
        return save_filename if dist.get_rank() == 0 else None

    return save


def _write_full(state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None = None) -> None:
    """A monolithic checkpoint, packed as its name says. Called on all ranks."""
    if not (is_tar(filename) or is_compressed_pt(filename)):
        save_monolithic(state_dict, filename, group=group)
        return
    path = Path(filename)
    unpacked = path.with_name(f".{path.name}.unpacked")
    save_monolithic(state_dict, unpacked, group=group)
    error = told_by_rank_0(lambda: _pack_beside(unpacked, path))
    if error:
        raise CheckpointError(f"{filename}: cannot be packed: {error}; a file of that name is as it was")


def _pack_beside(unpacked: Path, path: Path) -> str:
    """What went wrong; empty if nothing did."""
    packed = path.with_name(f".saving-{path.name}")  # keeps the suffix, which decides
    try:
        _pack(unpacked, packed)
        os.replace(packed, path)
    except Exception as error:  # a compressor that failed, a full disk
        return f"{type(error).__name__}: {error}"
    finally:
        for left in (unpacked, packed):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
    return ""


def _pack(source: Path, packed: Path) -> None:
    if is_tar(str(packed)):
        mode: Any = checkpoint._get_write_mode(str(packed))
        with tarfile.open(packed, mode) as tar:
            tar.add(source, arcname=checkpoint._COMPOSER_STATES_FILENAME)
    else:
        with open(source, "rb") as file, get_compressor(str(packed)).compress(str(packed)) as compressed:
            shutil.copyfileobj(file, compressed)


def _write_sharded(state: State, state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None) -> None:
    """A DCP directory, as Composer writes it: one replica writes, rank 0 alone the random states."""
    assert state.fsdp_config is not None
    if dist.get_rank() > 0:
        state_dict.pop("rng", None)
    if not _writes_shards(state):
        return
    planner = state.fsdp_config.save_planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(os.path.dirname(filename))
    save_directory(state_dict, storage_writer=writer, planner=planner, process_group=group)


def _writes_shards(state: State) -> bool:
    """Whether this rank is of the first replica."""
    mesh, name = state.device_mesh, ParallelismType.DATA_PARALLEL_REPLICATE.value
    if mesh is None or mesh.mesh_dim_names is None or name not in mesh.mesh_dim_names:
        return True
    return mesh.get_local_rank(mesh_dim=mesh.mesh_dim_names.index(name)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Callbacks that ask FSDP1 for whole state (LLM Foundry's MonolithicCheckpointSaver)


def replacement_for_state_dict_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """``composer.core.state.fsdp_state_dict_type_context``: with 'full', state is whole, in host memory, on rank 0."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def context(module: torch.nn.Module, state_dict_type: str = "full") -> Iterator[None]:
        if not is_sharded(module):
            with original(module, state_dict_type):
                yield
            return
        reshard(module)
        if state_dict_type != "full":
            yield
            return
        hook = module.register_state_dict_post_hook(_made_whole)
        try:
            with _optimizer_state_made_whole():
                yield
        finally:
            hook.remove()

    return context


def _made_whole(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Called on all ranks; gathers one tensor after the other."""
    for name, value in list(state_dict.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            state_dict[name] = whole.cpu() if isinstance(whole, torch.Tensor) else whole
        else:
            del state_dict[name]


@contextlib.contextmanager
def _optimizer_state_made_whole() -> Iterator[None]:
    """In the block, ``FullyShardedDataParallel.optim_state_dict(model, optimizer)`` answers for ``fully_shard``."""

    def optim_state_dict(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        return get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    before = vars(FullyShardedDataParallel)["optim_state_dict"]
    FullyShardedDataParallel.optim_state_dict = staticmethod(optim_state_dict)  # type: ignore[assignment]
    try:
        yield
    finally:
        FullyShardedDataParallel.optim_state_dict = before  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------------
# A saver's checkpoints


class _Written:
    """A State as it was when its checkpoint was taken, with the file that is there by now (None: another rank's)."""

    def __init__(self, state: State, path: str | None) -> None:
        self._state, self.path = state, path
        self.timestamp = state.timestamp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def replacement_for_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``composer.utils.checkpoint.save_checkpoint``: for what is written already, the file's name."""

    @functools.wraps(original)
    def save_checkpoint(state: State | _Written, *args: Any, **kwargs: Any) -> str | None:
        if isinstance(state, _Written):
            return state.path
        if _pending is not None:
            _pending.thread.join()  # a planner that the user gave may serve one save at a time
        path: str | None = original(state, *args, **kwargs)
        return path

    return save_checkpoint


def replacement_for_saver(original: Callable[..., Any]) -> Callable[..., Any]:
    """``CheckpointSaver._save_checkpoint``: the new link takes the old one's place at once; and ``async_save``.

    See [Note: a saver's work in two parts].
    """

    @functools.wraps(original)
    def _save_checkpoint(self: CheckpointSaver, state: State, logger: Any) -> None:
        if not is_sharded(state.model):
            original(self, state, logger)
            return
        _finish_pending()  # one at a time: the next one waits for this one's memory
        placeholders = self.filename.format(state, keep_placeholders=True)
        filename = checkpoint.get_save_filename(state, placeholders)
        self.last_checkpoint_batch = state.timestamp.batch
        # The checkpoint names itself among those that were saved, as Composer's do.
        self.all_saved_checkpoints_to_timestamp[filename] = state.timestamp
        if _is_async(self, state):
            _start(self, state, filename, functools.partial(_account_for, self, logger, original))
            return
        path = checkpoint.save_checkpoint(
            state, placeholders, weights_only=self.weights_only, ignore_keys=self.ignore_keys
        )
        _account_for(self, logger, original, _Written(state, path))

    return _save_checkpoint


def _is_async(saver: CheckpointSaver, state: State) -> bool:
    if not getattr(state.fsdp_config, "async_save", False):
        return False
    if callable(saver.ignore_keys) and not state.fsdp_sharded_state_dict_enabled:
        _say_not_async()
        return False
    return True


@functools.cache
def _say_not_async() -> None:
    log.warning(
        "async_save has no effect: save_ignore_keys is a function, which gets whole tensors of a full checkpoint; "
        "give it as a list of names, or save with state_dict_type 'sharded'"
    )


def _account_for(saver: CheckpointSaver, logger: Any, original: Callable[..., Any], written: _Written) -> None:
    """Composer's second part: the link, uploads, the list of saved checkpoints, the removal of old ones."""
    latest = saver.latest_filename
    is_sharded_type = written.fsdp_sharded_state_dict_enabled
    links = written.path is not None and (dist.get_rank() == 0 or not is_sharded_type)
    if links and latest is not None and saver.num_checkpoints_to_keep != 0:
        assert written.path is not None
        _link(Path(latest.format(written)), os.path.dirname(written.path) if is_sharded_type else written.path)
    # Composer removes the link and makes it anew; a run that died in between began from nothing. And its rank 0 removes
    # a folder of shards that other ranks still upload, where none is kept.
    keep, is_race = saver.num_checkpoints_to_keep, is_sharded_type and saver.num_checkpoints_to_keep == 0
    saver.latest_filename = None
    saver.num_checkpoints_to_keep = -1 if is_race else keep
    try:
        if is_race:  # all wait for the others' uploads, and hear of one that failed
            agree(lambda: original(saver, written, logger), lambda _: "", CheckpointError)
        else:
            original(saver, written, logger)
    finally:
        saver.latest_filename, saver.num_checkpoints_to_keep = latest, keep
    if is_race:
        saver._rotate_checkpoints(sharding_enabled=True)


def _link(link: Path, target: str) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    os.symlink(os.path.relpath(target, link.parent), new)
    os.replace(new, link)


# ---------------------------------------------------------------------------------------------------------------------
# async_save


# A rank whose shards are written waits in torch's writer for those with more, for as long as the disk takes.
_LONGEST_WRITE = timedelta(days=1)


def _writing_group(state: State) -> dist.ProcessGroup | None:
    """Of the ranks that write, so that what the background thread sends never meets what training sends.

    Made once for each run; None on a rank that does not write. Called on all ranks.
    """
    writes = not state.fsdp_sharded_state_dict_enabled or _writes_shards(state)
    return _gloo_group(dist.group.WORLD, tuple(rank for rank, of_rank in enumerate(gather(writes)) if of_rank))


@functools.lru_cache(maxsize=1)  # ranks of one job have one world
def _gloo_group(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    return new_gloo_group(ranks, _LONGEST_WRITE)


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written.

    Args:
        write: Called in a thread of its own.
        publish: Gives it its name; called once this rank has written.
        account_for: Composer's second part; called once all ranks have published.
    """

    saver: CheckpointSaver
    control: Control
    write: Callable[[], None]
    publish: Callable[[], None]
    account_for: Callable[[], None]
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
        except BaseException as error:  # torch's CheckpointException is no Exception
            self.error = _words(error)

    def is_done_everywhere(self) -> bool:
        """Called on all ranks, after each batch."""
        [is_one_alive] = self.control.largest(_QUESTION, "the end of a batch", [int(self.thread.is_alive())])
        return not is_one_alive

    def finish(self) -> None:
        """Wait for it, give it its name, and do what Composer does after a save. Called on all ranks.

        Raises:
            CheckpointError: on all of them, if one failed.
        """
        self.thread.join()
        if self.error is None:
            self._attempt(self.publish)
        failed = dict.fromkeys(error for error in gather(self.error) if error is not None)  # most know of all of them
        if failed:
            raise CheckpointError(
                "async_save could not write a checkpoint; the one before it is still the latest:\n  "
                + "\n  ".join(failed)
            )
        self.account_for()


_QUESTION = Question(
    "async_save",
    "Ranks ask each other at the end of each batch whether the checkpoint is written: look for a different number of "
    "batches, or for a rank that has ended",
)


def _words(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own words are the stacks of all ranks
        return "\n  ".join(f"rank {rank}: {_words(cause)}" for rank, (cause, _) in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# Of this process: one writer at a time, because its groups and its memory are one.
_pending: _Pending | None = None
_pinned = PinnedCopies()


def _start(saver: CheckpointSaver, state: State, filename: str, account_for: Callable[[_Written], None]) -> None:
    """Take a copy of the state and begin to write it. Called on all ranks."""
    global _pending
    connected = control()  # while all are here
    group = _writing_group(state)
    with left_on_device(state.model):
        state_dict = _sharded_state_dict(state, saver.weights_only, saver.ignore_keys)
    if (weights := state_dict["state"].get("model")) is not None:
        state_dict["state"]["model"] = dict(weights)  # as Composer's own copy to the host would leave it
    state_dict = _copied(state, state_dict)
    if state.fsdp_sharded_state_dict_enabled:
        written = _Written(state, filename if _writes_shards(state) else None)

        def write() -> None:
            _write_sharded(state, state_dict, filename, group)

        def publish() -> None:
            pass  # the link makes it known
    else:
        written = _Written(state, filename if dist.get_rank() == 0 else None)
        # Until it is linked, a run that starts again must not take its name for a conflict.
        unpublished = os.path.join(os.path.dirname(filename), f".unpublished-{os.path.basename(filename)}")

        def write() -> None:
            _write_full(state_dict, unpublished, group)

        def publish() -> None:
            if dist.get_rank() == 0:
                os.replace(unpublished, filename)

    _pending = _Pending(saver, connected, write, publish, functools.partial(account_for, written))
    _pending.start()


def _finish_pending() -> None:
    """Wait for the checkpoint that is being written, if there is one. Called on all ranks."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.finish()


def replacement_for_batch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """``CheckpointSaver.batch_end``: links and retention once all ranks have written; the writer's errors."""

    @functools.wraps(original)
    def batch_end(self: CheckpointSaver, state: State, logger: Any) -> None:
        if _pending is not None and _pending.saver is self and _pending.is_done_everywhere():
            _finish_pending()
        original(self, state, logger)

    return batch_end


def replacement_for_fit_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """``CheckpointSaver.fit_end``: the last checkpoint is whole when ``fit`` returns."""

    @functools.wraps(original)
    def fit_end(self: CheckpointSaver, state: State, logger: Any) -> None:
        _finish_pending()
        original(self, state, logger)

    return fit_end


def replacement_for_save_to_folder(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.save_checkpoint_to_save_folder``: who asks for a checkpoint has it when the call returns."""

    @functools.wraps(original)
    def save_checkpoint_to_save_folder(self: Any) -> None:
        original(self)
        _finish_pending()

    return save_checkpoint_to_save_folder
