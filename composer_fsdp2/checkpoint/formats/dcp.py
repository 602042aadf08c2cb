"""A folder that torch.distributed.checkpoint wrote: ``.metadata`` and ``__{rank}_{n}.distcp`` files.

Composer's ``state_dict_type: sharded`` since 0.16 on torch 2, and ``local`` from 0.16 to 0.18. ShardedTensor, DTensor
and FSDP2 leave the same files: boxes of plain tensors. What differs is how far the state dict was flattened, which
``planner_data`` says for every key: torch <= 2.2 had ``optimizers`` at the root; until 2.3 ``param_groups`` and the
like were one entry each; from 2.4 on every leaf of every dict is an entry.
"""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.formats._composer import missing_parts, with_records, writer_of
from composer_fsdp2.checkpoint.inside import inside
from composer_fsdp2.checkpoint.inventory import (
    CheckpointInventory,
    Chunk,
    Entry,
    EntryPath,
    ObjectRecord,
    TensorRecord,
    dotted,
)
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.pickles.values import Built
from composer_fsdp2.checkpoint.storage.archive import Archive, read_at
from composer_fsdp2.errors import CheckpointError

NAME = "DCP directory"
ORDER = 10
METADATA = ".metadata"
# Our own entry: the paths of empty dicts, which torch's flattening forgets.
EMPTY_DICTS: EntryPath = ("composer_fsdp2", "empty_dicts")

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


def incomplete(path: Path) -> str | None:
    metadata = path / METADATA
    return None if metadata.is_file() and metadata.stat().st_size else f"no {METADATA}, which is written last"


def read(path: Path, *, trust: bool, prefix: EntryPath = (), partial: bool = False) -> CheckpointInventory:
    """A folder with Composer's whole state dict; with a prefix, one with the part that belongs there.

    Args:
        partial: Files beside ``.metadata`` may not be there yet (a remote checkpoint); those that are get checked.
    """
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
        return _Directory(path, metadata, trust, prefix, partial).inventory()
    except CheckpointError:
        raise
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path / METADATA}: not what torch.distributed.checkpoint writes ({error!r})") from error


class _Directory:
    """One ``.metadata``, read into an inventory."""

    def __init__(self, path: Path, metadata: Any, trust: bool, prefix: EntryPath, partial: bool) -> None:
        if not isinstance(metadata, Built) or metadata.kind.name != "Metadata":
            raise CheckpointError(f"{path / METADATA}: holds no torch.distributed.checkpoint Metadata")
        self.path, self.trust, self.prefix, self.partial = path, trust, prefix, partial
        self.declared: Mapping[str, Built] = metadata.field("state_dict_metadata")
        self.paths: Mapping[str, EntryPath] = metadata.field("planner_data") or {}
        self.storage_meta = metadata.field("storage_meta")
        self.problems: list[str] = []
        self.file_sizes: dict[str, int | None] = {}  # by the path in the metadata; None for one that cannot be used
        self.entries: dict[str, dict[tuple[int, ...] | None, Entry]] = {}
        for index, info in metadata.field("storage_data").items():
            if info.field("transform_descriptors"):
                raise CheckpointError(f"{path}: {index.field('fqn')} is compressed by a DCP extension; not supported")
            name, offset = index.field("fqn"), index.field("offset")
            entry = self.entry(name, info.field("relative_path"), info.field("offset"), info.field("length"))
            if entry is None:
                continue
            box = None if offset is None else tuple(offset)
            if box in self.entries.setdefault(name, {}):
                self.problems.append(f"{path / METADATA}: says two places for {name} at {box}")
            self.entries[name][box] = entry
        self.check_overlaps()

    def entry(self, name: str, relative_path: Any, offset: Any, num_bytes: Any) -> Entry | None:
        """Where an entry lies; None (and a problem) where that cannot be."""
        if relative_path not in self.file_sizes:
            self.file_sizes[relative_path] = self.file_size(relative_path)
        size = self.file_sizes[relative_path]
        if size is None:
            return None
        file = self.path / relative_path
        if not all(isinstance(n, int) and n >= 0 for n in (offset, num_bytes)) or offset + num_bytes > size:
            self.problems.append(
                f"{file}: {name} should lie in {num_bytes} bytes at byte {offset}; the file has {size} bytes "
                "(truncated, or another run's)"
            )
            return None
        return Entry(file, offset, num_bytes, self.partial)

    def file_size(self, relative_path: Any) -> int | None:
        """The size of a file that the metadata names; it must lie in the folder."""
        try:
            file = inside(self.path, relative_path, said_by=self.path / METADATA)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None
        if file.is_file():
            return file.stat().st_size
        if self.partial:
            return sys.maxsize
        self.problems.append(f"{file}: missing; {METADATA} names it")
        return None

    def check_overlaps(self) -> None:
        """No two entries share a byte: one of them would be read as the other."""
        placed = sorted(
            (str(entry.path), entry.offset, entry.num_bytes, name)
            for name, boxes in self.entries.items()
            for entry in boxes.values()
        )
        for (path, offset, num_bytes, name), (other_path, other_offset, _, other) in itertools.pairwise(placed):
            if path == other_path and offset + num_bytes > other_offset:
                self.problems.append(f"{path}: {METADATA} says overlapping bytes for {name} and {other}")

    def inventory(self) -> CheckpointInventory:
        tensors: dict[EntryPath, TensorRecord] = {}
        objects: dict[EntryPath, ObjectRecord] = {}
        for name, declared in self.declared.items():
            path = self.composers_path(name)
            if declared.kind.name == "TensorStorageMetadata":
                if (record := self.tensor(name, declared)) is not None:
                    tensors[path] = record
            elif (entry := self.entries.get(name, {}).get(None)) is not None:
                objects[path] = self.object(name, entry)
            else:
                self.problems.append(f"{self.path / METADATA}: says no usable place for {name}")
        for name in self.entries.keys() - self.declared.keys():
            self.problems.append(f"{self.path / METADATA}: says where {name} lies, and not what it is")
        if self.problems:
            more = [f"... and {len(self.problems) - 50} more"] if len(self.problems) > 50 else []
            raise CheckpointError("\n".join(self.problems[:50] + more))
        listed = objects.get(EMPTY_DICTS)
        if listed is not None and listed.source is not None and listed.source.path.is_file():
            del objects[EMPTY_DICTS]
            objects.update(self.empty_dicts(listed))
        first_parts = {path[0] for path in self.paths.values() if path} or {
            name.split(".")[0] for name in self.declared
        }
        if "state" not in first_parts and not self.prefix:
            found = ", ".join(sorted(map(str, first_parts))[:8])
            raise CheckpointError(
                f"{self.path}: written by torch.distributed.checkpoint, but not by Composer, whose entries lie under "
                f"'state'; its top-level keys are {found}"
            )
        is_flat = any(str(path[-1]).endswith("_flat_param") for path in tensors if path[:2] == ("state", "model"))
        # What has come already of a remote checkpoint differs between machines, and their ranks compare inventories.
        present = [self.path / METADATA] if self.partial else sorted(self.path.iterdir())
        files = tuple((file, file.stat().st_size) for file in present if file.is_file())
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
        said = None if self.partial else inventory.tree(("state", "metadata"))
        writer = writer_of(said, self.sharding(tensors, is_flat), torch_version=self.torch_version())
        return inventory.replaced(writer=writer)

    def composers_path(self, name: str) -> EntryPath:
        """The entry's path in Composer's state dict, with the optimizers where they are since torch 2.3."""
        # A name says not which of its parts are numbers, so it is no path where the others have one.
        path: EntryPath = tuple(self.paths.get(name, ()) if self.paths else name.split("."))
        if not _is_path(path) or dotted(path) != name:
            raise CheckpointError(f"{self.path / METADATA}: the path of {name} is another's, or none")
        if self.prefix:
            return (*self.prefix, *path)
        return ("state", *path) if path[0] == "optimizers" else path

    def tensor(self, name: str, declared: Built) -> TensorRecord | None:
        """What the metadata says of a tensor; None (and a problem) where that cannot be."""
        dtype = _dtype(declared.field("properties"))
        shape = _sizes(declared.field("size"))
        entries = self.entries.get(name, {})
        chunks, missing = [], []
        for box in declared.field("chunks"):
            offsets, sizes = _sizes(box.field("offsets")), _sizes(box.field("sizes"))
            entry = entries.get(offsets) or (entries.get(None) if not any(offsets) else None)
            if 0 in sizes and (entry is None or shape != sizes):
                continue  # DTensor notes the empty part of a rank beyond the last row
            if entry is None:
                missing.append(offsets)
                continue
            chunk = Chunk(offsets, sizes, entry)
            if chunk.numel * dtype.itemsize > entry.num_bytes:
                self.problems.append(
                    f"{entry.path}: {name} at {offsets} needs {chunk.numel * dtype.itemsize} bytes ({dtype} of shape "
                    f"{sizes}), {METADATA} gives it {entry.num_bytes}"
                )
            chunks.append(chunk)
        if missing:
            self.problems.append(
                f"{self.path / METADATA}: says no usable place for {name} at {', '.join(map(str, missing[:8]))}"
            )
            return None
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
        record = TensorRecord(name=name, shape=shape, dtype=dtype, chunks=ordered)
        if (why := record.untiled()) is not None:
            self.problems.append(f"{self.path / METADATA}: {name} of shape {shape} is not whole: {why}")
        return record

    def object(self, name: str, entry: Entry) -> ObjectRecord:
        def load() -> Any:
            archive = Archive.open(entry.path, entry.offset, entry.num_bytes)
            return with_records(archive.unpickle(trust=self.trust), archive)

        return ObjectRecord(name, load, entry.num_bytes, entry)

    def empty_dicts(self, listed: ObjectRecord) -> dict[EntryPath, ObjectRecord]:
        paths = listed.value()
        if not isinstance(paths, list) or not all(isinstance(path, tuple) and _is_path(path) for path in paths):
            raise CheckpointError(f"{self.path}: {dotted(EMPTY_DICTS)} is no list of paths")
        # All lie where the list lies, so that whoever accounts for the file's bytes finds an owner for these.
        return {path: ObjectRecord(dotted(path), dict, source=listed.source) for path in paths}

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


def _is_path(path: EntryPath) -> bool:
    """Whether it can be an entry's; what reads a tree recurses."""
    return 0 < len(path) <= 100 and all(isinstance(part, str | int) for part in path)


def _sizes(said: Any) -> tuple[int, ...]:
    """A shape or an offset."""
    sizes = tuple(said)
    if len(sizes) > 64 or not all(isinstance(size, int) and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("sizes or offsets that no tensor has")
    return sizes


def _dtype(properties: Built) -> torch.dtype:
    """TensorProperties are pickled as (dtype, layout, requires_grad, memory format, pin_memory)."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else properties.field("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of dtype {type(dtype).__name__}")
    return dtype


def key_of(path: EntryPath) -> str:
    """The key that ``flatten_state_dict`` gives to a path."""
    return dotted(path)
