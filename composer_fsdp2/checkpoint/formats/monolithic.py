"""One ``.pt`` with everything: Composer's ``state_dict_type: full``, and all of DDP's and one device's checkpoints."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.foreign import other_archive
from composer_fsdp2.checkpoint.formats._composer import (
    file_sizes,
    missing_parts,
    nested_tensors,
    split_state,
    with_records,
    writer_of,
)
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, TensorRecord, Writer
from composer_fsdp2.checkpoint.pickles.values import Built, contains_built
from composer_fsdp2.checkpoint.storage.archive import Archive, opened
from composer_fsdp2.errors import CheckpointError

NAME = "monolithic"
ORDER = 50  # after the per-rank layout, whose files look alike


def recognise(path: Path) -> bool:
    if not path.is_file():
        return False
    with opened(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return is_zip and other_archive(path) is None


def incomplete(path: Path) -> str | None:
    try:
        Archive.open(path)
    except CheckpointError:
        return "truncated: its directory, which is written last, is not there"
    return None


def read(path: Path, *, trust: bool) -> CheckpointInventory:
    archive = Archive.open(path)
    return inventory_of(with_records(archive.unpickle(trust=trust), archive), path)


def inventory_of(root: Any, path: Path) -> CheckpointInventory:
    """The inventory of an unpickled monolithic checkpoint."""
    remarks: tuple[str, ...] = ()
    if not isinstance(root, Mapping):
        raise CheckpointError(
            f"{path}: holds a {type(root).__name__}, expected Composer's {{'state': ..., 'rng': ...}}"
        )
    if not isinstance(root.get("state"), Mapping) or set(root) == {"state", "param_groups"}:
        root, remarks = _bare(root, path)
    if contains_built(root):
        raise CheckpointError(f"{path}: holds objects that are not plain data")
    tensors, objects = split_state(root, str(path))
    inventory = CheckpointInventory(
        path=path,
        layout=NAME,
        tensors=tensors,
        objects=objects,
        files=file_sizes(path),
        remarks=(*remarks, *missing_parts(tensors, objects)),
    )
    return inventory.replaced(writer=_writer(inventory), nested=dict(nested_tensors(objects)))


def _writer(inventory: CheckpointInventory) -> Writer:
    """Whether it was sharded shows in the optimizer: by position only without FSDP; by name (since 0.19) with both."""
    writer = writer_of(inventory.tree(("state", "metadata")), None)
    keyed_by = {optimizer.keyed_by for optimizer in inventory.optimizers if optimizer.state}
    if "id" in keyed_by or (keyed_by and writer.world_size == 1):
        return dataclasses.replace(writer, sharding="not sharded")
    return dataclasses.replace(writer, sharding="FSDP (gathered) or DDP" if keyed_by else None)


def _bare(root: Mapping[Any, Any], path: Path) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """A state dict that was saved alone: of a model (names and tensors), or of an optimizer."""
    if root and all(isinstance(key, str) and isinstance(value, TensorRecord | Built) for key, value in root.items()):
        return {"state": {"model": root}}, ("a bare model state dict, not Composer's",)
    if set(root) == {"state", "param_groups"}:
        return {"state": {"optimizers": {"": root}}}, ("a bare optimizer state dict, not Composer's",)
    keys = ", ".join(map(str, list(root)[:8]))
    raise CheckpointError(
        f"{path}: a torch.save file, but no checkpoint of Composer's and no state dict; its top-level keys are {keys}"
    )
