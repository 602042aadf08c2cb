"""What all of Composer's layouts share: the state dict's shape, and what its ``metadata`` says."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer_fsdp2.checkpoint.inventory import (
    EntryPath,
    ObjectRecord,
    TensorRecord,
    Writer,
    dotted,
    of_stored_tensor,
    walk_tensors,
)
from composer_fsdp2.checkpoint.pickles.values import StoredTensor
from composer_fsdp2.checkpoint.storage.archive import Archive
from composer_fsdp2.errors import CheckpointError

__all__ = ["file_sizes", "missing_parts", "split_state", "with_records", "writer_of"]

# What a whole Composer checkpoint has; without these a run cannot go on where it was.
_PARTS = {
    ("state", "optimizers"): "no optimizer state",
    ("state", "schedulers"): "no schedulers",
    ("state", "timestamp"): "no timestamp: a run would start at batch 0",
    ("rng",): "no random states",
}


def file_sizes(*paths: Path) -> tuple[tuple[Path, int], ...]:
    return tuple((path, path.stat().st_size) for path in paths)


def with_records(value: Any, archive: Archive, path: EntryPath = ()) -> Any:
    """A value as it was pickled, with a ``TensorRecord`` for each tensor; containers are new."""

    def record(part: Any, where: EntryPath) -> Any:
        return of_stored_tensor(part, archive, dotted(where)) if isinstance(part, StoredTensor) else part

    return mapped(value, record, path)


def mapped(value: Any, leaf: Callable[[Any, EntryPath], Any], path: EntryPath = ()) -> Any:
    """A nested value with ``leaf(part, path)`` in place of what is no dict, list or tuple; containers are new."""
    if isinstance(value, dict):
        return {key: mapped(part, leaf, (*path, key)) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(part, leaf, (*path, number)) for number, part in enumerate(value))
    return leaf(value, path)


def split_state(root: Any, where: str) -> tuple[dict[EntryPath, TensorRecord], dict[EntryPath, ObjectRecord]]:
    """The tensors and the other entries of ``{'state': {...}, 'rng': [...]}``, read from one pickle."""
    tensors: dict[EntryPath, TensorRecord] = {}
    objects: dict[EntryPath, ObjectRecord] = {}

    def add(path: EntryPath, value: Any) -> None:
        if isinstance(value, TensorRecord):
            tensors[path] = value
        else:
            objects[path] = ObjectRecord(dotted(path), lambda: value)

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
    """What a run would miss, in words."""
    there = {path[:2] for path in (*tensors, *objects)} | {path[:1] for path in (*tensors, *objects)}
    return tuple(text for part, text in _PARTS.items() if part not in there)


def writer_of(metadata: Any, sharding: str | None, *, torch_version: str | None = None) -> Writer:
    """From ``state.metadata``, which Composer writes since 0.16."""
    said = metadata if isinstance(metadata, Mapping) else {}
    environment = said.get("composer_env_info")
    composer = environment.get("composer_version") if isinstance(environment, Mapping) else None
    world_size = said.get("world_size")
    return Writer(
        composer_version=str(composer) if composer else None,
        torch_version=str(said["torch_version"]) if said.get("torch_version") else torch_version,
        world_size=world_size if isinstance(world_size, int) else None,
        sharding=sharding,
    )


def nested_tensors(objects: Mapping[EntryPath, ObjectRecord]) -> list[tuple[EntryPath, TensorRecord]]:
    """Tensors inside of entries that were read already (random states, callbacks, metrics)."""
    return [(path + below, record) for path, entry in objects.items() for below, record in walk_tensors(entry.value())]
