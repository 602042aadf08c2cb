"""The folder that torch.distributed.checkpoint writes: ``.metadata`` and ``__{rank}_{n}.distcp`` files.

Composer's ``state_dict_type: sharded`` since 0.16 on torch 2, and ``local`` from 0.16 to 0.18. ShardedTensor, DTensor
and FSDP2 write the same files: boxes of plain tensors. Versions differ in how far the state dict was flattened, which
``planner_data`` shows for every key: torch <= 2.2 had ``optimizers`` at the root; until 2.3 ``param_groups`` and
similar values were one entry each; since 2.4 every leaf of every dict is an entry.
"""

import functools
import itertools
import math
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2._torch.private_names import storage_info
from composer_fsdp2.checkpoint.archive.disk import Folder, damage_in, inside, read_at
from composer_fsdp2.checkpoint.archive.writer import Slot, plan_archive
from composer_fsdp2.checkpoint.boxes import Box
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    Chunk,
    NestedArchive,
    ObjectRecord,
    TensorRecord,
)
from composer_fsdp2.checkpoint.layouts._composer import missing_parts, with_records, writer_of
from composer_fsdp2.checkpoint.layouts._layout import (
    Layout,
    LayoutWriter,
    Output,
    OutputFile,
    TensorWrite,
    WriteRequest,
    num_files_for,
)
from composer_fsdp2.checkpoint.names import is_flat_parameter
from composer_fsdp2.checkpoint.pickles.stand_ins import InertObject
from composer_fsdp2.checkpoint.pickles.trust import read_pickle
from composer_fsdp2.checkpoint.trees import EntryPath, Parts, dotted, leaves
from composer_fsdp2.config.text import and_more, lines_and_more
from composer_fsdp2.errors import CheckpointError

_NAME = "DCP directory"
METADATA = ".metadata"
# Our own entry: the paths of empty dicts, which torch's flattening drops.
_EMPTY_DICTS: EntryPath = ("composer_fsdp2", "empty_dicts")

_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_NEW = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = frozenset(
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


def _recognize(path: Path) -> bool:
    return path.is_dir() and ((path / METADATA).is_file() or any(path.glob("*.distcp")))


def contains_entries(file: Path) -> bool:
    """Whether a file of a DCP folder contains entries, from its suffix."""
    return file.suffix == ".distcp"


def _incomplete(path: Path) -> str | None:
    metadata = path / METADATA
    return None if metadata.is_file() and metadata.stat().st_size else f"no {METADATA}, which is written last"


def read(folder: Folder, trust: bool, *, prefix: EntryPath = ()) -> CheckpointInventory:
    """Read the metadata of a DCP folder. Does not communicate.

    Args:
        prefix: The path in Composer's state dict of the folder's entries; () if it contains the full state dict.
    """
    path = folder.path
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"{path}: has .distcp files and no {METADATA}, which is written last: the save was cut short, or the "
            "file was not copied"
        )
    data = read_at(path / METADATA, 0, (path / METADATA).stat().st_size)
    metadata = read_pickle(
        data,
        where=str(path / METADATA),
        trust=False,  # only torch's own classes are expected
        inert=_METADATA_NAMES,
        # The files of a remote folder are not local yet: allow 300 bytes of objects for each byte of metadata.
        disk_bytes=2400 * len(data) if folder.fetch else sum(file.stat().st_size for file in path.iterdir()),
    )
    with damage_in(path / METADATA, "what torch.distributed.checkpoint writes"):
        return _Directory(folder, metadata, trust, prefix).inventory().replaced(metadata_crc32=zlib.crc32(data))


class _Directory:
    """One ``.metadata``, read into an inventory."""

    def __init__(self, folder: Folder, metadata: Any, trust: bool, prefix: EntryPath) -> None:
        self.folder, self.path, self.trust = folder, folder.path, trust
        self.where = self.path / METADATA
        if not isinstance(metadata, InertObject) or metadata.kind.name != "Metadata":
            raise CheckpointError(f"{self.where}: holds no torch.distributed.checkpoint Metadata")
        self.declared: Mapping[str, InertObject] = metadata.field("state_dict_metadata")
        self.tensors = {name: d for name, d in self.declared.items() if d.kind.name == "TensorStorageMetadata"}
        self.paths: Mapping[str, EntryPath] = metadata.field("planner_data") or {}
        model_prefix = () if prefix else self.prefix_of_model()
        self.prefix, self.is_model = prefix or model_prefix, bool(model_prefix)
        self.storage_meta = metadata.field("storage_meta")
        self.problems: list[str] = []
        self.beyond: dict[str, list[str]] = {}  # by file, the names of entries that exceed its size
        self.lost: set[str] = set()  # names with an invalid entry, for which a problem is already recorded
        self.file_sizes: dict[str, int | None] = {}  # by the path in the metadata; None for an invalid path
        self.entries: dict[str, dict[tuple[int, ...] | None, NestedArchive]] = {}
        for index, info in metadata.field("storage_data").items():
            name, offset = index.field("fqn"), index.field("offset")
            if info.field("transform_descriptors"):
                raise CheckpointError(f"{self.path}: {name} is compressed by a DCP extension; not supported")
            entry = self.entry(name, info.field("relative_path"), info.field("offset"), info.field("length"))
            box = None if offset is None else tuple(offset)
            if entry is None:
                self.lost.add(name)
            elif self.entries.setdefault(name, {}).setdefault(box, entry) is not entry:
                self.problems.append(f"{self.where}: lists two locations for {name} at {box}")

    def prefix_of_model(self) -> EntryPath:
        """The path of a bare model state dict in Composer's; () if the folder is not one."""
        if not self.paths:
            return ()
        if {path[:1] for path in self.paths.values()} == {("model",)}:  # accelerate's pytorch_model_fsdp_0
            return MODEL[:1]
        is_flat = all(len(path) == 1 for path in self.paths.values())  # torch.distributed.checkpoint.save(state_dict)
        return MODEL if is_flat and self.tensors.keys() == self.declared.keys() else ()

    def entry(self, name: str, relative_path: Any, offset: Any, num_bytes: Any) -> NestedArchive | None:
        """The location of an entry. If the metadata is invalid, None, and a problem is recorded."""
        if relative_path not in self.file_sizes:
            self.file_sizes[relative_path] = self.file_size(relative_path)
        size = self.file_sizes[relative_path]
        if size is None:
            return None
        if not all(isinstance(n, int) and n >= 0 for n in (offset, num_bytes)) or offset + num_bytes > size:
            self.beyond.setdefault(relative_path, []).append(f"{name} in {num_bytes} bytes at byte {offset}")
            return None
        return NestedArchive(self.folder, relative_path, offset, num_bytes)

    def file_size(self, relative_path: Any) -> int | None:
        """The size of a file that the metadata lists. If it is not in the folder, None, and a problem is recorded."""
        try:
            file = inside(self.path, relative_path, named_by=self.where)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None
        if self.folder.fetch is not None:
            return sys.maxsize  # checked after the download
        if file.is_file():
            return file.stat().st_size
        self.problems.append(f"{file}: missing; {METADATA} names it")
        return None

    def inventory(self) -> CheckpointInventory:
        tensors, objects = self.records()
        self.check_overlaps()
        for name in self.entries.keys() - self.declared.keys():
            self.problems.append(f"{self.where}: gives a location for {name} but no description")
        for file, names in self.beyond.items():  # one line, because a truncated file has hundreds
            self.problems.append(
                f"{self.path / file}: has {self.file_sizes[file]} bytes (truncated, or another run's), and should hold "
                f"{and_more(names, 3)}"
            )
        if self.problems:
            raise CheckpointError(lines_and_more(self.problems, 50))
        self.name_empty_dicts(objects)
        roots = {path[0] for path in self.paths.values() if path} or {name.split(".")[0] for name in self.declared}
        if "state" not in roots and not self.prefix:
            raise CheckpointError(
                f"{self.path}: written by torch.distributed.checkpoint, but not by Composer, whose entries lie under "
                f"'state'; its top-level keys are {and_more(sorted(map(str, roots)), 8)}"
            )
        # Machines may have downloaded different files of a remote checkpoint, but their ranks compare inventories.
        present = [self.where] if self.folder.fetch else sorted(self.path.iterdir())
        files = tuple((file, file.stat().st_size) for file in present if file.is_file())
        unnamed = [file.name for file, _ in files if contains_entries(file) and file.name not in self.file_sizes]
        remark = [f"{METADATA} does not name {', '.join(unnamed)} (another save's?)"] if unnamed else []
        inventory = CheckpointInventory(
            path=self.path,
            layout=_NAME,
            tensors=tensors,
            objects=objects,
            files=files,
            remarks=(*missing_parts(tensors, objects), *remark),
            holds_only=MODEL if self.is_model else None,
            optimizer_at_root="optimizers" in roots,
            flat=any(is_flat_parameter(path[-1]) for path in tensors if path[:2] == MODEL),
        )
        metadata = None if self.folder.fetch else inventory.tree(("state", "metadata"))
        return inventory.replaced(
            writer=writer_of(metadata, self.sharding(inventory), torch_version=self.torch_version())
        )

    def records(self) -> tuple[dict[EntryPath, TensorRecord], dict[EntryPath, ObjectRecord]]:
        """The records of all entries in the metadata. Records a problem for each entry without a valid location."""
        tensors: dict[EntryPath, TensorRecord] = {}
        objects: dict[EntryPath, ObjectRecord] = {}
        for name, declared in self.declared.items():
            path = self.composer_path(name)
            if name in self.tensors:
                if (record := self.tensor(name, declared)) is not None:
                    tensors[path] = record
            elif (entry := self.entries.get(name, {}).get(None)) is not None:
                load = functools.partial(_unpickled, entry, self.trust)
                objects[path] = ObjectRecord(name, load, entry.num_bytes, entry)
            elif name not in self.lost:
                self.problems.append(f"{self.where}: gives no usable location for {name}")
        return tensors, objects

    def check_overlaps(self) -> None:
        """Record a problem if two entries share a byte, because one of them would be read as the other."""
        placed = sorted(
            (entry.name, entry.offset, entry.num_bytes, name)
            for name, boxes in self.entries.items()
            for entry in boxes.values()
        )
        for (file, offset, num_bytes, name), (next_file, next_offset, _, other) in itertools.pairwise(placed):
            if file == next_file and offset + num_bytes > next_offset:
                text = f"{self.path / file}: {METADATA} lists overlapping bytes for {name} and {other}"
                self.problems.append(text)

    def composer_path(self, name: str) -> EntryPath:
        """The entry's path in Composer's state dict, with ``optimizers`` at its path since torch 2.3."""
        # A name does not show which of its parts are numbers. It is not parsed as a path if other entries have one.
        path: EntryPath = tuple(self.paths.get(name, ()) if self.paths else name.split("."))
        if not _is_path(path) or dotted(path) != name:
            raise CheckpointError(f"{self.where}: the path of {name} is that of another entry, or missing")
        if self.prefix:
            return (*self.prefix, *path)
        return ("state", *path) if path[0] == "optimizers" else path

    def tensor(self, name: str, declared: InertObject) -> TensorRecord | None:
        """The record of a tensor. If the metadata is invalid, None, and a problem is recorded."""
        properties = declared.field("properties")  # pickled as (dtype, layout, requires_grad, memory format, ...)
        dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.field("dtype")
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor of dtype {type(dtype).__name__}")
        shape, entries = _sizes(declared.field("size")), self.entries.get(name, {})
        chunks, missing = [], []
        for box in declared.field("chunks"):
            offsets, sizes = _sizes(box.field("offsets")), _sizes(box.field("sizes"))
            entry = entries.get(offsets) or (entries.get(None) if not any(offsets) else None)
            if 0 in sizes and (entry is None or shape != sizes):
                continue  # DTensor records the empty shard of a rank beyond the last row
            if entry is None:
                missing.append(str(offsets))
                continue
            chunks.append(Chunk(offsets, sizes, entry))
            if (needed := chunks[-1].numel * dtype.itemsize) > entry.num_bytes:
                self.problems.append(
                    f"{entry.path}: {name} at {offsets} needs {needed} bytes ({dtype} of shape {sizes}), {METADATA} "
                    f"gives it {entry.num_bytes}"
                )
        if missing:
            if name not in self.lost:
                self.problems.append(f"{self.where}: gives no usable location for {name} at {and_more(missing, 8)}")
            return None
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
        record = TensorRecord(name=name, shape=shape, dtype=dtype, chunks=ordered)
        if (why := record.untiled()) is not None:
            self.problems.append(f"{self.where}: {name} of shape {shape} is not complete: {why}")
        return record

    def name_empty_dicts(self, objects: dict[EntryPath, ObjectRecord]) -> None:
        """Replace the entry that lists empty dicts by these empty dicts."""
        if (listed := objects.pop(_EMPTY_DICTS, None)) is not None:
            paths = listed.value()
            if not isinstance(paths, list) or not all(isinstance(path, tuple) and _is_path(path) for path in paths):
                raise CheckpointError(f"{self.path}: {dotted(_EMPTY_DICTS)} should be a list of paths")
            # All have the list's source: ``verify`` needs an owner for these bytes.
            objects |= {path: ObjectRecord(dotted(path), dict, source=listed.source) for path in paths}

    def torch_version(self) -> str:
        """Infer the writer's torch version from the metadata's classes, if ``state.metadata`` has none."""
        if any(declared.field("properties").kind.module == _OLD for declared in self.tensors.values()):
            return "2.0 to 2.2"
        is_flattened = any(path[-2:-1] == ("param_groups",) for path in self.paths.values())
        return "2.4 or later" if self.storage_meta is not None or is_flattened else "2.3 or later"

    def sharding(self, inventory: CheckpointInventory) -> str:
        if inventory.flat:
            return "FSDP1, flat parameters"
        widest = max((len(record.chunks) for record in inventory.tensors.values()), default=1)
        # ShardedTensor does not record empty shards. A DTensor does, but only small tensors have any.
        split = (declared for declared in self.tensors.values() if 0 not in declared.field("size"))
        has_empty = any(0 in box.field("sizes") for declared in split for box in declared.field("chunks"))
        return f"{'DTensor' if has_empty else 'ShardedTensor or DTensor'}, split into {widest}"


def _unpickled(entry: NestedArchive, trust: bool) -> Any:
    archive = entry.open()
    return with_records(archive.unpickle(trust=trust), archive)


def _is_path(path: EntryPath) -> bool:
    """Whether this is a valid path of an entry. Its length is limited, because trees are read by recursion."""
    return 0 < len(path) <= 100 and all(isinstance(part, str | int) for part in path)


def _sizes(value: Any) -> tuple[int, ...]:
    """A shape or an offset."""
    sizes = tuple(value)
    if len(sizes) > 64 or not all(isinstance(size, int) and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("sizes or offsets that no tensor has")
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True, slots=True)
class _Item:
    """One archive in a file: an object, or the box of a tensor at ``offsets``."""

    key: str
    value: Any
    num_bytes: int
    at: int
    offsets: tuple[int, ...] | None = None


def _lay_out(request: WriteRequest) -> Output:
    """Compute the folder that ``num_files`` ranks would write.

    Every leaf of every dict is an entry, and each entry a separate ``torch.save`` archive, as Composer writes them on
    torch 2.4 and later. Tensors of the model and of optimizer states are split by rows over the files, as
    ``torch.chunk`` splits them over ranks; all other entries are in the first file.

    Raises:
        CheckpointError: two entries would get the same key.
    """
    entries = flattened(request.state)
    num_files = request.num_files
    tensors = {key: leaf for key, (_, leaf) in entries.items() if isinstance(leaf, Slot)}
    objects = {key: leaf for key, (_, leaf) in entries.items() if key not in tensors}
    if num_files is None:
        num_files = num_files_for(sum(slot.num_bytes for slot in tensors.values()))
    files: list[list[_Item]] = [[] for _ in range(num_files)]

    def add(number: int, key: str, value: Any, offsets: tuple[int, ...] | None = None) -> None:
        at = files[number][-1].at + files[number][-1].num_bytes if files[number] else 0
        files[number].append(_Item(key, value, plan_archive(value).num_bytes, at, offsets))

    for key, value in objects.items():  # first, as in torch
        add(0, key, value)
    for key, slot in tensors.items():
        is_split = entries[key][0][:2] == MODEL or entries[key][0][:2] == OPTIMIZERS
        for number, box in enumerate(_split(slot.shape, num_files if is_split else 1)):
            add(number, key, Slot(box.sizes, slot.dtype, slot), box.offsets)
    paths = {key: path for key, (path, _) in entries.items()}
    output = [_output(_file_name(number), items) for number, items in enumerate(files) if items]
    metadata = OutputFile.of_bytes(METADATA, _pickled_metadata(tensors, objects, files, paths))
    return Output(files=(*output, metadata), renamed=request.renamed)


def flattened(state: Mapping[str, Any]) -> dict[str, tuple[EntryPath, Any]]:
    """Flatten a state dict as torch's ``flatten_state_dict`` since 2.4: leaves by key, with their paths.

    torch drops empty dicts. An additional entry lists them, under a key that no state dict has. Under their own keys,
    torch would treat the folder as one of 2.3 (``DefaultLoadPlanner.create_local_plan``).
    """
    entries: dict[str, tuple[EntryPath, Any]] = {}
    empty: list[EntryPath] = []
    for path, leaf in leaves(state, parts=_flattened_children):
        key = dotted(path)
        if isinstance(leaf, Mapping):
            empty.append(path)
        elif key in entries:
            raise CheckpointError(f"the entries at {entries[key][0]} and {path} would both be {key} in a folder")
        else:
            entries[key] = (path, leaf)
    if empty:
        entries[dotted(_EMPTY_DICTS)] = (_EMPTY_DICTS, empty)
    return entries


def _flattened_children(value: Any) -> Parts:
    """The children of a value that torch would flatten. An empty dict is a leaf here."""
    if isinstance(value, Mapping) and value:
        return ((str(key), part) for key, part in value.items())
    return enumerate(value) if isinstance(value, list) and _is_nested(value) else None


def _is_nested(values: list[Any]) -> bool:
    """Whether torch would flatten a list: some element, at any depth, is a tensor or a dict."""
    return any(isinstance(part, Slot | Mapping) or (isinstance(part, list) and _is_nested(part)) for part in values)


def _split(shape: tuple[int, ...], num_files: int) -> Iterator[Box]:
    """Split a shape by rows into at most ``num_files`` boxes."""
    full = Box.full(shape)
    if not shape or num_files == 1 or not full.numel:
        yield full
        return
    rows = -(-shape[0] // num_files)
    yield from full.pieces(rows * math.prod(shape[1:]))


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"


def _output(name: str, items: Sequence[_Item]) -> OutputFile:
    writes: list[TensorWrite] = []
    for item in items:
        archive = plan_archive(item.value)
        for part in archive.slots:
            at = item.at + archive.offset_of(part)
            full = part.source
            if isinstance(full, Slot):  # a box of it
                assert item.offsets is not None
                writes.append(TensorWrite(full, Box(item.offsets, part.shape), at))
            else:
                writes.append(TensorWrite.full(part, at))

    def rest(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        left = iter(crcs)
        for item in items:
            # Planned again: thousands of plans would fill the memory.
            archive = plan_archive(item.value)
            for offset, data in archive.frame({part: next(left) for part in archive.slots}):
                yield item.at + offset, data

    return OutputFile(name, items[-1].at + items[-1].num_bytes, tuple(writes), rest)


def _pickled_metadata(
    tensors: Mapping[str, Slot],
    objects: Mapping[str, Any],
    files: Sequence[Sequence[_Item]],
    paths: Mapping[str, EntryPath],
) -> bytes:
    """The pickled ``.metadata``."""
    # Imported here, because reading does not need torch.distributed.
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[MetadataIndex, Any] = {}
    for number, items in enumerate(files):
        for item in items:
            index = MetadataIndex(item.key)
            if item.offsets is not None:
                index = MetadataIndex(item.key, torch.Size(item.offsets), len(chunks[item.key]))
                chunks[item.key].append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.value.shape)))
            storage[index] = storage_info(_file_name(number), item.at, item.num_bytes)
    declared: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: BytesStorageMetadata() for key in objects
    } | {
        key: TensorStorageMetadata(TensorProperties(dtype=slot.dtype), torch.Size(slot.shape), chunks[key])
        for key, slot in tensors.items()
    }
    metadata = Metadata(
        state_dict_metadata=declared, planner_data=dict(paths), storage_data=storage, storage_meta=StorageMeta()
    )
    return pickle.dumps(metadata)


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,
    incomplete=_incomplete,
    read=lambda path, trust: read(Folder(path), trust),
    contains_entries=contains_entries,
    metadata=(METADATA, read),
    written=LayoutWriter(name="dcp", lay_out=_lay_out, by_name=True),
)
