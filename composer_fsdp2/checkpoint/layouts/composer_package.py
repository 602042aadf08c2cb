"""The folder of Composer's newer ``composer.checkpoint`` package (0.23.5 and later), with the state in several files.

``model/`` and ``optim/`` contain one ``.pt`` or a DCP folder, ``resumption.pkl`` the other entries, and
``composer_metadata.json`` the writer's versions. Its state dicts are not nested under ``state``; the inventory nests
them as in a monolithic file. The optimizer's class is not stored, so its name is ''.
"""

import zlib
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import Folder, damage_in, read_at, read_json
from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    ObjectRecord,
    TensorRecord,
)
from composer_fsdp2.checkpoint.layouts import dcp
from composer_fsdp2.checkpoint.layouts._composer import (
    missing_parts,
    nested_tensors,
    split_state,
    with_records,
    writer_of,
)
from composer_fsdp2.checkpoint.layouts._layout import Layout
from composer_fsdp2.checkpoint.pickles.stand_ins import StoredTensor, contains_inert
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.trees import EntryPath, dotted, mapped
from composer_fsdp2.errors import CheckpointError

_NAME = "composer.checkpoint folder"
_RESUMPTION = "resumption.pkl"
_WRITTEN_LAST = "composer_metadata.json"

# The folder and file of each part, and its path in the state dict.
_PARTS: dict[tuple[str, str], EntryPath] = {
    ("model", "model.pt"): MODEL,
    ("optim", "optim.pt"): (*OPTIMIZERS, ""),
}


def _recognize(path: Path) -> bool:
    parts = [path / folder / name for folder, file in _PARTS for name in (file, dcp.METADATA)]
    return path.is_dir() and any(file.is_file() for file in (path / _RESUMPTION, path / _WRITTEN_LAST, *parts))


def _incomplete(path: Path) -> str | None:
    return None if (path / _WRITTEN_LAST).is_file() else f"no {_WRITTEN_LAST}, which is written last"


def _read(path: Path, trust: bool) -> CheckpointInventory:
    tensors: dict[EntryPath, TensorRecord] = {}
    objects: dict[EntryPath, ObjectRecord] = {}
    writers = []
    crc32 = 0
    for (folder, name), prefix in _PARTS.items():
        part = _read_part(path / folder, name, prefix, trust=trust)
        if part is not None:
            tensors |= part.tensors
            objects |= part.objects
            writers.append(part.writer)
            crc32 = zlib.crc32(part.metadata_crc32.to_bytes(4, "little"), crc32)
    metadata = _metadata(path / _WRITTEN_LAST)
    objects |= _resumption(path / _RESUMPTION, trust=trust)
    if metadata:
        objects["state", "metadata"] = ObjectRecord.of_value("state.metadata", metadata)
    remarks = [*missing_parts(tensors, objects)]
    if not any(entry[:2] == MODEL for entry in tensors):
        remarks.append("no model")
    if not metadata:
        remarks.append(f"no {_WRITTEN_LAST}, which is written last: the save may have been cut short")
    sharding = next((writer.sharding for writer in writers if writer.sharding), None)
    return CheckpointInventory(
        path=path,
        layout=_NAME,
        tensors=tensors,
        objects=objects,
        nested=dict(nested_tensors({key: entry for key, entry in objects.items() if not entry.num_bytes})),
        files=tuple((file, file.stat().st_size) for file in sorted(path.rglob("*")) if file.is_file()),
        writer=writer_of(metadata, sharding or "not sharded"),
        remarks=tuple(remarks),
        metadata_crc32=crc32,
    )


def _read_part(folder: Path, name: str, prefix: EntryPath, *, trust: bool) -> CheckpointInventory | None:
    """Read the model or the optimizer; None if it was not saved."""
    if not (folder / name).is_file():
        return dcp.read(Folder(folder), trust, prefix=prefix) if folder.is_dir() else None
    archive = Archive.open(folder / name)
    value = with_records(archive.unpickle(trust=trust), archive, prefix)
    if contains_inert(value) or not isinstance(value, dict):
        raise CheckpointError(f"{folder / name}: holds no state dict of plain data")
    root = {"model": value} if prefix == MODEL else {"optimizers": {"": value}}
    tensors, objects = split_state({"state": root}, str(folder / name))
    return CheckpointInventory(path=folder / name, layout=_NAME, tensors=tensors, objects=objects, files=())


def _metadata(path: Path) -> dict[str, Any]:
    """``composer_metadata.json``, in the form of ``state.metadata``."""
    if not path.is_file():
        return {}
    entries = read_json(path)
    with damage_in(path, "what Composer writes"):
        return {**entries, "composer_env_info": dict(entries), "world_size": entries.get("num_gpus")}


def _resumption(path: Path, *, trust: bool) -> dict[EntryPath, ObjectRecord]:
    """Read ``resumption.pkl``: a plain pickle, which contains the tensors of the RNG states."""
    if not path.is_file():
        return {}
    data = read_at(path, 0, path.stat().st_size)
    value = read_pickle(data, where=str(path), trust=trust)
    if contains_inert(value) or not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no dict of plain data")
    value = mapped(value, lambda part, entry: _tensor_in(part, dotted(entry)))
    if "timestamp" in value:
        value["timestamp"] = {"Timestamp": value["timestamp"]}
    objects: dict[EntryPath, ObjectRecord] = {}
    for key, part in value.items():
        entry = (key,) if key == "rng" else ("state", key)
        objects[entry] = ObjectRecord.of_value(dotted(entry), part)
    return objects


def _tensor_in(value: Any, name: str) -> Any:
    """A tensor whose bytes are in the pickle."""
    if not isinstance(value, StoredTensor):
        return value
    data = value.storage.data
    storage = torch.frombuffer(bytearray(data), dtype=value.dtype) if data else torch.empty(0, dtype=value.dtype)
    return TensorRecord.of_tensor(storage.as_strided(value.shape, value.stride, value.offset), name)


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,
    incomplete=_incomplete,
    read=_read,
    contains_entries=dcp.contains_entries,
    has_names=lambda names: _WRITTEN_LAST in names,
)
