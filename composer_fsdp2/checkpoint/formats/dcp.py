"""A folder that torch.distributed.checkpoint wrote: ``.metadata`` and ``__{rank}_{n}.distcp`` files.

Composer's ``state_dict_type: sharded`` since 0.16 on torch 2, and ``local`` from 0.16 to 0.18. ShardedTensor, DTensor
and FSDP2 leave the same files: boxes of plain tensors. What differs is how far the state dict was flattened, which
``planner_data`` says for every key: torch <= 2.2 had ``optimizers`` at the root; until 2.3 ``param_groups`` and the
like were one entry each; from 2.4 on every leaf of every dict is an entry.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive import Archive, read_at
from composer_fsdp2.checkpoint.formats._composer import missing_parts, with_records, writer_of
from composer_fsdp2.checkpoint.inventory import (
    CheckpointInventory,
    Chunk,
    Entry,
    EntryPath,
    ObjectRecord,
    TensorRecord,
    dotted,
)
from composer_fsdp2.checkpoint.trust import Built, read_pickle
from composer_fsdp2.errors import CheckpointError

NAME = "DCP directory"
ORDER = 10
METADATA = ".metadata"

_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_NEW = "torch.distributed.checkpoint.metadata"
METADATA_NAMES = frozenset(
    {
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        f"{_OLD}.TensorProperties",
        f"{_OLD}.MEM_FORMAT_ENCODING",
        *(
            f"{_NEW}.{name}"
            for name in (
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
    }
)


def recognise(path: Path) -> bool:
    return path.is_dir() and ((path / METADATA).is_file() or any(path.glob("*.distcp")))


def read(path: Path, *, trust: bool) -> CheckpointInventory:
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"{path}: has .distcp files and no {METADATA}, which is written last: the save was cut short, or the "
            "file was not copied"
        )
    metadata = read_pickle(
        read_at(path / METADATA, 0, (path / METADATA).stat().st_size),
        where=str(path / METADATA),
        trust=False,  # nothing but torch's own classes has any business there
        inert=METADATA_NAMES,
    )
    try:
        return _Directory(path, metadata, trust).inventory()
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path / METADATA}: not what torch.distributed.checkpoint writes ({error!r})") from error


class _Directory:
    """One ``.metadata``, read into an inventory."""

    def __init__(self, path: Path, metadata: Any, trust: bool) -> None:
        if not isinstance(metadata, Built) or metadata.kind.name != "Metadata":
            raise CheckpointError(f"{path / METADATA}: holds no torch.distributed.checkpoint Metadata")
        self.path, self.trust = path, trust
        self.declared: Mapping[str, Built] = metadata.field("state_dict_metadata")
        self.paths: Mapping[str, EntryPath] = metadata.field("planner_data") or {}
        self.storage_meta = metadata.field("storage_meta")
        self.file_sizes: dict[str, int] = {}
        self.entries: dict[str, dict[tuple[int, ...] | None, Entry]] = {}
        for index, info in metadata.field("storage_data").items():
            if info.field("transform_descriptors"):
                raise CheckpointError(f"{path}: {index.field('fqn')} is compressed by a DCP extension; not supported")
            offset = index.field("offset")
            entry = Entry(self.file(info.field("relative_path")), info.field("offset"), info.field("length"))
            self.check(entry, index.field("fqn"))
            self.entries.setdefault(index.field("fqn"), {})[None if offset is None else tuple(offset)] = entry

    def file(self, relative_path: Any) -> Path:
        """A path that the metadata names; it must lie in the folder."""
        if not isinstance(relative_path, str):
            raise CheckpointError(f"{self.path / METADATA}: names {relative_path!r} as a file")
        file = self.path / relative_path
        if relative_path not in self.file_sizes:
            if os.path.isabs(relative_path) or not file.resolve().is_relative_to(self.path.resolve()):
                raise CheckpointError(
                    f"{self.path / METADATA}: names {relative_path}, which lies outside of the folder"
                )
            if not file.is_file():
                raise CheckpointError(f"{file}: missing; {METADATA} names it")
            self.file_sizes[relative_path] = file.stat().st_size
        return file

    def check(self, entry: Entry, name: str) -> None:
        size = self.file_sizes[str(entry.path.relative_to(self.path))]
        numbers = (entry.offset, entry.num_bytes)
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or sum(numbers) > size:
            raise CheckpointError(
                f"{entry.path}: {name} should lie at bytes {entry.offset} to {sum(numbers)}; the file has {size} "
                "(truncated, or another run's)"
            )

    def inventory(self) -> CheckpointInventory:
        tensors: dict[EntryPath, TensorRecord] = {}
        objects: dict[EntryPath, ObjectRecord] = {}
        for name, declared in self.declared.items():
            path = self.composers_path(name)
            if declared.kind.name == "TensorStorageMetadata":
                tensors[path] = self.tensor(name, declared)
            else:
                objects[path] = self.object(name)
        first_parts = {path[0] for path in self.paths.values() if path} or {
            name.split(".")[0] for name in self.declared
        }
        if "state" not in first_parts:
            found = ", ".join(sorted(map(str, first_parts))[:8])
            raise CheckpointError(
                f"{self.path}: written by torch.distributed.checkpoint, but not by Composer, whose entries lie under "
                f"'state'; its top-level keys are {found}"
            )
        is_flat = any(str(path[-1]).endswith("_flat_param") for path in tensors if path[:2] == ("state", "model"))
        files = tuple((file, file.stat().st_size) for file in sorted(self.path.iterdir()) if file.is_file())
        unnamed = [file.name for file, _ in files if file.suffix == ".distcp" and file.name not in self.file_sizes]
        remarks = [*missing_parts(tensors, objects)]
        if unnamed:
            remarks.append(f"{METADATA} does not name {', '.join(unnamed)} (another save's?)")
        inventory = CheckpointInventory(
            path=self.path,
            layout=NAME,
            tensors=tensors,
            objects=objects,
            files=files,
            remarks=tuple(remarks),
            optimizer_at_root="optimizers" in first_parts,
            flat=is_flat,
        )
        writer = writer_of(
            inventory.tree(("state", "metadata")), self.sharding(tensors, is_flat), torch_version=self.torch_version()
        )
        return inventory.replaced(writer=writer)

    def composers_path(self, name: str) -> EntryPath:
        """The entry's path in Composer's state dict, with the optimizers where they are since torch 2.3."""
        path: EntryPath = tuple(self.paths.get(name) or name.split("."))
        if not all(isinstance(part, str | int) for part in path):
            raise CheckpointError(f"{self.path / METADATA}: the path of {name} is {path!r}")
        return ("state", *path) if path[0] == "optimizers" else path

    def tensor(self, name: str, declared: Built) -> TensorRecord:
        dtype = _dtype(declared.field("properties"))
        shape = tuple(declared.field("size"))
        entries = self.entries.get(name, {})
        chunks = []
        for box in declared.field("chunks"):
            offsets, sizes = tuple(box.field("offsets")), tuple(box.field("sizes"))
            entry = entries.get(offsets) or (entries.get(None) if not any(offsets) else None)
            if 0 in sizes and (entry is None or shape != sizes):
                continue  # DTensor notes the empty part of a rank beyond the last row
            if entry is None:
                raise CheckpointError(f"{self.path / METADATA}: says no file for {name} at {offsets}")
            chunks.append(Chunk(offsets, sizes, entry))
        record = TensorRecord(
            name=name, shape=shape, dtype=dtype, chunks=tuple(sorted(chunks, key=lambda c: c.offsets))
        )
        if (why := record.untiled()) is not None:
            raise CheckpointError(f"{self.path / METADATA}: {name} of shape {shape} is not whole: {why}")
        return record

    def object(self, name: str) -> ObjectRecord:
        entry = self.entries.get(name, {}).get(None)
        if entry is None:
            raise CheckpointError(f"{self.path / METADATA}: says no file for {name}")

        def load() -> Any:
            archive = Archive.open(entry.path, entry.offset, entry.num_bytes)
            return with_records(archive.unpickle(trust=self.trust), archive)

        return ObjectRecord(name, load, entry.num_bytes)

    def torch_version(self) -> str | None:
        """From the classes in the metadata, where ``state.metadata`` does not say."""
        properties = next(
            (d.field("properties") for d in self.declared.values() if d.kind.name == "TensorStorageMetadata"), None
        )
        if properties is not None and properties.kind.module == _OLD:
            return "2.0 to 2.2"
        if self.storage_meta is not None or any(path[-2:-1] == ("param_groups",) for path in self.paths.values()):
            return "2.4 or later"
        return "2.3 or later"

    def sharding(self, tensors: Mapping[EntryPath, TensorRecord], is_flat: bool) -> str:
        if is_flat:
            return "FSDP1, flat parameters"
        widest = max((len(record.chunks) for record in tensors.values()), default=1)
        # ShardedTensor leaves no trace of empty parts; a DTensor does, but only a small tensor has any.
        declared = (d for d in self.declared.values() if d.kind.name == "TensorStorageMetadata")
        has_empty = any(
            0 in box.field("sizes") for d in declared if 0 not in d.field("size") for box in d.field("chunks")
        )
        kind = "DTensor" if has_empty else "ShardedTensor or DTensor"
        return f"{kind}, split into {widest}"


def _dtype(properties: Built) -> torch.dtype:
    """TensorProperties are pickled as (dtype, layout, requires_grad, memory format, pin_memory)."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else properties.field("dtype")
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a tensor of dtype {dtype!r}")
    return dtype


def key_of(path: EntryPath) -> str:
    """The key that ``flatten_state_dict`` gives to a path."""
    return dotted(path)
