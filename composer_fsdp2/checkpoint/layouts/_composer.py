"""Functions for all of Composer's layouts: the structure of the state dict, and its ``metadata``."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inventory import (
    CheckpointInventory,
    ObjectRecord,
    TensorRecord,
    Writer,
    of_stored_tensor,
    walk_tensors,
)
from composer_fsdp2.checkpoint.pickles.stand_ins import InertObject, StoredTensor, contains_inert
from composer_fsdp2.checkpoint.trees import EntryPath, dotted, mapped, value_at
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

# The parts of a complete Composer checkpoint; without these a run cannot resume.
_PARTS = {
    ("state", "optimizers"): "no optimizer state",
    ("state", "schedulers"): "no schedulers",
    ("state", "timestamp"): "no timestamp: a run would start at batch 0",
    ("rng",): "no random states",
}


def file_sizes(*paths: Path) -> tuple[tuple[Path, int], ...]:
    return tuple((path, path.stat().st_size) for path in paths)


def with_records(value: Any, archive: Archive, path: EntryPath = ()) -> Any:
    """Copy an unpickled value; each tensor is replaced by a ``TensorRecord``."""

    def record(part: Any, where: EntryPath) -> Any:
        return of_stored_tensor(part, archive, dotted(where)) if isinstance(part, StoredTensor) else part

    return mapped(value, record, path)


def split_state(root: Any, where: str) -> tuple[dict[EntryPath, TensorRecord], dict[EntryPath, ObjectRecord]]:
    """Split ``{'state': {...}, 'rng': [...]}``, read from one pickle, into tensors and other entries."""
    tensors: dict[EntryPath, TensorRecord] = {}
    objects: dict[EntryPath, ObjectRecord] = {}

    def add(path: EntryPath, value: Any) -> None:
        if isinstance(value, TensorRecord):
            tensors[path] = value
        else:
            objects[path] = ObjectRecord.of_value(dotted(path), value)

    def mapping(value: Any, path: EntryPath) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where}: {dotted(path)} is a {type(value).__name__}, expected a dict")
        return value

    for attribute, value in mapping(root["state"], ("state",)).items():
        path = ("state", attribute)
        if attribute == "model":
            for name, entry in mapping(value, path).items():
                add((*path, name), entry)
        elif attribute == "optimizers":
            for name, optimizer in mapping(value, path).items():
                _split_optimizer(mapping(optimizer, (*path, name)), (*path, name), add, mapping)
        else:
            add(path, value)
    for key in root:
        if key != "state":
            add((key,), root[key])
    return tensors, objects


def _split_optimizer(optimizer: Mapping[Any, Any], path: EntryPath, add: Any, mapping: Any) -> None:
    for part, value in optimizer.items():
        if part != "state":
            add((*path, part), value)
            continue
        for parameter, entries in mapping(value, (*path, part)).items():
            for key, entry in mapping(entries, (*path, part, parameter)).items():
                add((*path, part, parameter, key), entry)


def missing_parts(
    tensors: Mapping[EntryPath, TensorRecord], objects: Mapping[EntryPath, ObjectRecord]
) -> tuple[str, ...]:
    """The missing parts, as text."""
    there = {path[:2] for path in (*tensors, *objects)} | {path[:1] for path in (*tensors, *objects)}
    return tuple(text for part, text in _PARTS.items() if part not in there)


def writer_of(metadata: Any, sharding: str | None, *, torch_version: str | None = None) -> Writer:
    """The writer of the checkpoint, from ``state.metadata``, which Composer writes since 0.16."""
    composer, torch, world_size = (
        value_at(metadata, path)
        for path in (("composer_env_info", "composer_version"), ("torch_version",), ("world_size",))
    )
    return Writer(
        composer_version=str(composer) if composer else None,
        torch_version=str(torch) if torch else torch_version,
        world_size=world_size if isinstance(world_size, int) else None,
        sharding=sharding,
    )


def nested_tensors(objects: Mapping[EntryPath, ObjectRecord]) -> list[tuple[EntryPath, TensorRecord]]:
    """Find the tensors inside of entries that were already read (RNG states, callbacks, metrics)."""
    return [(path + below, record) for path, entry in objects.items() for below, record in walk_tensors(entry.value())]


# ---------------------------------------------------------------------------------------------------------------------
# One pickle with everything


def inventory_of(root: Any, path: Path, layout: str) -> CheckpointInventory:
    """The inventory of an unpickled monolithic checkpoint."""
    remarks: tuple[str, ...] = ()
    if not isinstance(root, Mapping):
        raise CheckpointError(
            f"{path}: holds a {type(root).__name__}, expected Composer's {{'state': ..., 'rng': ...}}"
        )
    if not isinstance(root.get("state"), Mapping) or set(root) == {"state", "param_groups"}:
        root, remarks = _bare(root, path)
    if contains_inert(root):
        raise CheckpointError(f"{path}: holds objects that are not plain data")
    tensors, objects = split_state(root, str(path))
    inventory = CheckpointInventory(
        path=path,
        layout=layout,
        tensors=tensors,
        objects=objects,
        files=file_sizes(path),
        remarks=(*remarks, *missing_parts(tensors, objects)),
    )
    return inventory.replaced(writer=_writer(inventory), nested=dict(nested_tensors(objects)))


def _writer(inventory: CheckpointInventory) -> Writer:
    """Infer the writer from the optimizer's keys: positions if it was not sharded, FQNs for FSDP (gathered) or DDP."""
    writer = writer_of(inventory.tree(("state", "metadata")), None)
    keyed_by = {optimizer.keyed_by for optimizer in inventory.optimizers if optimizer.state}
    if "id" in keyed_by or (keyed_by and writer.world_size == 1):
        return dataclasses.replace(writer, sharding="not sharded")
    return dataclasses.replace(writer, sharding="FSDP (gathered) or DDP" if keyed_by else None)


def _bare(root: Mapping[Any, Any], path: Path) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """Recognize a state dict that was saved alone: that of a model (names and tensors), or of an optimizer."""
    if root and all(
        isinstance(key, str) and isinstance(value, TensorRecord | InertObject) for key, value in root.items()
    ):
        return {"state": {"model": root}}, ("a bare model state dict, not Composer's",)
    if set(root) == {"state", "param_groups"}:
        return {"state": {"optimizers": {"": root}}}, ("a bare optimizer state dict, not Composer's",)
    raise CheckpointError(
        f"{path}: a torch.save file, but no checkpoint of Composer's and no state dict; its top-level keys are "
        f"{and_more(list(map(str, root)), 8)}"
    )
