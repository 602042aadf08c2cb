"""Save checkpoints of a sharded model with the same file names as FSDP1 with the same FSDPConfig.

Composer writes sharded checkpoints. This package writes full ones, without gathering the model on rank 0.
"""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.checkpoint import save as checkpoint_package
from composer.core import State
from composer.utils import checkpoint, reproducibility
from composer.utils.compression import get_compressor, is_compressed_pt
from composer.utils.file_helpers import is_tar
from composer.utils.misc import ParallelismType
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_directory
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.atomic import replacing
from composer_fsdp2.checkpoint.save.monolithic import save_monolithic
from composer_fsdp2.checkpoint.trees import EntryPath, leaves, mapped
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.long_work import long_work
from composer_fsdp2.sharding.sharded import is_sharded

from .full_state import keeping_shards, keeps_shards
from .loading import IgnoreKeys
from .seams import seam

# ---------------------------------------------------------------------------------------------------------------------
# The state


def sharded_state_dict(state: State, weights_only: bool, ignore_keys: IgnoreKeys) -> dict[str, Any]:
    """Return Composer's state dict with DTensors instead of full tensors. Called on all ranks."""
    as_sharded = replaced(state.fsdp_config, "state_dict_type", "sharded")
    with keeping_shards(not state.fsdp_sharded_state_dict_enabled), as_sharded:
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


@seam(
    "composer.core.state",
    "State.state_dict",
    why="shards of an algorithm (EMA's averages) were saved as rank 0's only, in a pickle of DTensors",
)
def state_dict(original: Callable[..., Any], self: State) -> dict[str, Any]:
    """Replaces ``State.state_dict``: DTensors of algorithms and callbacks become full tensors, in host memory of rank
    0.

    FSDP1 saved full tensors too, so either can load the other's file. Called on all ranks.
    """
    saved: dict[str, Any] = original(self)
    if is_sharded(self.model) and not keeps_shards.get():
        # With a user's planner, any rank may write an object that all ranks have.
        keeps = dist.get_rank() == 0 or getattr(self.fsdp_config, "save_planner", None) is not None
        saved.update((name, _unsharded(saved[name], keeps)) for name in ENTRIES_WITH_SHARDS if name in saved)
    return saved


ENTRIES_WITH_SHARDS = ("algorithms", "callbacks")


def _unsharded(value: Any, keeps: bool) -> Any:
    """Return ``value`` with each DTensor replaced by its full tensor, or by None if ``keeps`` is false.

    Called on all ranks; all-gathers each DTensor.
    """

    def unsharded(part: Any, path: EntryPath) -> Any:
        if not isinstance(part, DTensor):
            return part
        tensor = part.to(part.device_mesh.device_type)  # the device of its process group
        assert isinstance(tensor, DTensor)
        full = tensor.full_tensor()
        return full.cpu() if keeps else None

    return value if next(shards_in(value), None) is None else mapped(value, unsharded)


def shards_in(value: Any) -> Iterator[DTensor]:
    """Every DTensor in a nested value."""
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, DTensor))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


# ---------------------------------------------------------------------------------------------------------------------
# Files


@seam(
    "composer.utils.checkpoint",
    "_save_checkpoint",
    why="a full checkpoint gathered the full model and optimizer state in rank 0's memory",
)
def save(
    original: Callable[..., Any],
    state: State,
    save_filename: str,
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str | None:
    """Replaces ``composer.utils.checkpoint._save_checkpoint``: full checkpoints are written shard by shard."""
    # An ignore function may read and modify full tensors: it gets them on rank 0, as in Composer.
    if not is_sharded(state.model) or state.fsdp_sharded_state_dict_enabled or callable(ignore_keys):
        path: str | None = original(state, save_filename, weights_only=weights_only, ignore_keys=ignore_keys)
        return path
    write_full(sharded_state_dict(state, weights_only, ignore_keys), save_filename)
    return save_filename if dist.get_rank() == 0 else None


def write_full(state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None = None) -> None:
    """Write a monolithic checkpoint. A suffix of ``filename`` selects compression. Called on all ranks."""
    if not (is_tar(filename) or is_compressed_pt(filename)):
        save_monolithic(state_dict, filename, group=group)
        return
    path = Path(filename)
    unpacked = path.with_name(f".{path.name}.unpacked")
    save_monolithic(state_dict, unpacked, group=group)
    long_work(lambda: _pack_beside(unpacked, path), "packing a checkpoint", ranks=[0], error_type=CheckpointError)


def _pack_beside(unpacked: Path, path: Path) -> None:
    """Compress ``unpacked`` to ``path``, and remove it."""
    try:
        # The suffix selects the compression
        with replacing(path, ending="".join((".partial", *path.suffixes[-2:]))) as packed:
            _pack(unpacked, packed)
    except Exception as error:  # a compressor that failed, a full disk
        raise CheckpointError(
            f"{path}: cannot be packed: {type(error).__name__}: {error}; an existing file is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unpacked.unlink(missing_ok=True)


def _pack(source: Path, packed: Path) -> None:
    if is_tar(str(packed)):
        mode: Any = checkpoint._get_write_mode(str(packed))
        with tarfile.open(packed, mode) as tar:
            tar.add(source, arcname=checkpoint._COMPOSER_STATES_FILENAME)
    else:
        with open(source, "rb") as file, get_compressor(str(packed)).compress(str(packed)) as compressed:
            shutil.copyfileobj(file, compressed)


def write_sharded(state: State, state_dict: dict[str, Any], filename: str, group: dist.ProcessGroup | None) -> None:
    """Write a DCP checkpoint as Composer does: one replica writes, and only rank 0 writes RNG states.

    Called on all ranks.
    """
    assert state.fsdp_config is not None
    if dist.get_rank() > 0:
        state_dict.pop("rng", None)
    if not writes_shards(state):
        return
    planner = state.fsdp_config.save_planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(os.path.dirname(filename))
    save_directory(state_dict, storage_writer=writer, planner=planner, process_group=group)


def writes_shards(state: State) -> bool:
    """Whether this rank belongs to the first replica."""
    mesh, name = state.device_mesh, ParallelismType.DATA_PARALLEL_REPLICATE.value
    if mesh is None or mesh.mesh_dim_names is None or name not in mesh.mesh_dim_names:
        return True
    return mesh.get_local_rank(mesh_dim=mesh.mesh_dim_names.index(name)) == 0


@seam(
    "composer.checkpoint.save",
    "_save_sharded_state_dict_to_disk",
    why="rank 0 checked for the folder while the others were creating it: occasionally a save hung",
)
def write_shards(
    original: Callable[..., Any],
    state_dict: dict[str, Any],
    destination_file_path: str,
    overwrite: bool = False,
    save_format: str = "pt",
) -> str | None:
    """Replaces ``_save_sharded_state_dict_to_disk`` of ``composer.checkpoint``: first checks for an existing folder.

    In Composer 0.32.1, rank 0 checks while other ranks already save. torch creates the folder there, so rank 0
    sometimes finds it and raises, and the other ranks hang.

    Called on all ranks; all-gathers whether the folder exists.
    """
    if (
        not overwrite
        and all_gather_object(os.path.exists(checkpoint_package._strip_suffixes(destination_file_path)))[0]
    ):
        raise ValueError(f"Directory {destination_file_path} already exists. Set overwrite=True to overwrite it.")
    return original(state_dict, destination_file_path, True, save_format)
