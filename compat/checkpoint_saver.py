"""Make Composer's CheckpointSaver replace the link to the latest checkpoint atomically, and support ``async_save``.

[Note: a saver's work in two parts] Composer's ``CheckpointSaver._save_checkpoint`` writes a checkpoint; it then links,
uploads, and removes old checkpoints. This package replaces the first part. The second is still Composer's, called with
a ``SavedState``, whose checkpoint is already written: directly after writing, or with ``async_save`` at the end of a
later batch.
"""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import checkpoint

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.atomic import replacing
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.long_work import long_work
from composer_fsdp2.sharding.sharded import is_sharded

from .async_saving import SavedState, finish_pending, start
from .seams import seam

log = logging.getLogger(__name__)


@seam(
    "composer.callbacks.checkpoint_saver",
    "CheckpointSaver._save_checkpoint",
    why="a run killed while the latest link was replaced started from scratch; async_save",
)
def _save_checkpoint(original: Callable[..., Any], self: CheckpointSaver, state: State, logger: Any) -> None:
    """Replaces ``CheckpointSaver._save_checkpoint``; see [Note: a saver's work in two parts]."""
    if not is_sharded(state.model):
        original(self, state, logger)
        return
    finish_pending()  # one at a time: the next copy reuses this one's memory
    placeholders = self.filename.format(state, keep_placeholders=True)
    filename = checkpoint.get_save_filename(state, placeholders)
    self.last_checkpoint_batch = state.timestamp.batch
    # As in Composer, the saved state lists this checkpoint, too.
    self.all_saved_checkpoints_to_timestamp[filename] = state.timestamp
    if _is_async(self, state):
        start(self, state, filename, functools.partial(_finish_save, self, logger, original))
        return
    path = checkpoint.save_checkpoint(state, placeholders, weights_only=self.weights_only, ignore_keys=self.ignore_keys)
    _finish_save(self, logger, original, SavedState(state, path))


def _is_async(saver: CheckpointSaver, state: State) -> bool:
    if not getattr(state.fsdp_config, "async_save", False):
        return False
    if callable(saver.ignore_keys) and not state.fsdp_sharded_state_dict_enabled:
        _warn_not_async()
        return False
    return True


@functools.cache
def _warn_not_async() -> None:
    log.warning(
        "async_save has no effect: save_ignore_keys is a function, which gets full tensors of a full checkpoint; "
        "give it as a list of names, or save with state_dict_type 'sharded'"
    )


def _finish_save(saver: CheckpointSaver, logger: Any, original: Callable[..., Any], written: SavedState) -> None:
    """Run the second part of Composer's save: link, upload, record the checkpoint, and remove old ones.

    Called on all ranks.
    """
    if saver.latest_filename is not None and saver.num_checkpoints_to_keep != 0:
        _link(Path(saver.latest_filename.format(written)), written)
    if not written.fsdp_sharded_state_dict_enabled or saver.num_checkpoints_to_keep != 0:
        with replaced(saver, "latest_filename", None):
            original(saver, written, logger)
        return
    # If no local checkpoint is retained, Composer's rank 0 removes a folder of shards that other ranks still upload.
    # Here all ranks wait for all uploads, and raise if one failed.
    with replaced(saver, "latest_filename", None), replaced(saver, "num_checkpoints_to_keep", -1):
        long_work(lambda: original(saver, written, logger), "uploading a checkpoint", error_type=CheckpointError)
    saver._rotate_checkpoints(sharding_enabled=True)


def _link(link: Path, written: SavedState) -> None:
    """Replace ``link`` atomically by a link to the checkpoint.

    Only the rank that wrote the file, or rank 0 for a folder, does so.

    Composer removes the old link first. A run that is killed before the new link exists would restart from scratch.
    """
    is_folder = written.fsdp_sharded_state_dict_enabled
    if written.path is None or (is_folder and dist.get_rank() > 0):
        return
    target = os.path.dirname(written.path) if is_folder else written.path
    link.parent.mkdir(parents=True, exist_ok=True)
    with replacing(link) as new:
        new.symlink_to(os.path.relpath(target, link.parent))
