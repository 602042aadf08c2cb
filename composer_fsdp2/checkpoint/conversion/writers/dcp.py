"""Composer's ``state_dict_type: sharded`` on torch 2.4 and later: a folder of torch.distributed.checkpoint.

Every leaf of every dict is an entry, and each entry a ``torch.save`` archive of its own. Tensors of the model and of
optimizer states are split by rows over the files, as ``torch.chunk`` splits them over ranks; all else is in the first.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer_fsdp2 import _torch
from composer_fsdp2.checkpoint.conversion.writers import OutputFile, TensorWrite, num_files_for
from composer_fsdp2.checkpoint.formats.dcp import EMPTY_DICTS, METADATA
from composer_fsdp2.checkpoint.inventory import MODEL, OPTIMIZERS, EntryPath, dotted
from composer_fsdp2.checkpoint.storage.archive_writer import Slot, plan_archive
from composer_fsdp2.errors import CheckpointError

__all__ = ["flattened", "lay_out"]


@dataclass(frozen=True, slots=True)
class _Item:
    """One archive in a file: an object, or a box of a tensor (``offsets`` says which)."""

    key: str
    value: Any
    num_bytes: int
    at: int
    offsets: tuple[int, ...] | None = None


def lay_out(state: Mapping[str, Any], *, num_files: int | None) -> tuple[OutputFile, ...]:
    """The folder that ranks, as many as files, would write.

    Raises:
        CheckpointError: two entries would get the same key.
    """
    entries = flattened(state)
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
        for number, (offsets, sizes) in enumerate(_split(slot.shape, num_files if is_split else 1)):
            add(number, key, Slot(sizes, slot.dtype, slot), offsets)
    paths = {key: path for key, (path, _) in entries.items()}
    output = [_output(_file_name(number), items) for number, items in enumerate(files) if items]
    return (*output, OutputFile.of_bytes(METADATA, _metadata(tensors, objects, files, paths)))


def flattened(state: Mapping[str, Any]) -> dict[str, tuple[EntryPath, Any]]:
    """Leaves by key, with their paths: what torch's ``flatten_state_dict`` makes of a state dict since 2.4.

    It forgets empty dicts; one further entry lists them, under a key that no state dict has: under their own, torch
    would take the folder for one of 2.3 (``DefaultLoadPlanner.create_local_plan``).
    """
    entries: dict[str, tuple[EntryPath, Any]] = {}
    empty: list[EntryPath] = []

    def visit(path: EntryPath, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                visit((*path, str(key)), part)
            if not value:
                empty.append(path)
        elif isinstance(value, list) and _is_nested(value):
            for number, part in enumerate(value):
                visit((*path, number), part)
        else:
            key = dotted(path)
            if key in entries:
                raise CheckpointError(f"the entries at {entries[key][0]} and {path} would both be {key} in a folder")
            entries[key] = (path, value)

    visit((), state)
    if empty:
        entries[dotted(EMPTY_DICTS)] = (EMPTY_DICTS, empty)
    return entries


def _is_nested(values: list[Any]) -> bool:
    """Whether torch would look into a list: some part of it is a tensor or a dict."""
    return any(isinstance(part, Slot | Mapping) or (isinstance(part, list) and _is_nested(part)) for part in values)


def _split(shape: tuple[int, ...], num_files: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offsets, sizes) by rows; fewer than files where rows run out."""
    if not shape or num_files == 1 or 0 in shape:
        yield (0,) * len(shape), shape
        return
    rows = -(-shape[0] // num_files)
    for first in range(0, shape[0], rows):
        yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:])


def _file_name(number: int) -> str:
    return f"__{number}_0.distcp"


def _output(name: str, items: Sequence[_Item]) -> OutputFile:
    writes: list[TensorWrite] = []
    for item in items:
        archive = plan_archive(item.value)
        for part in archive.slots:
            at = item.at + archive.offset_of(part)
            whole = part.source
            if isinstance(whole, Slot):  # a box of it
                assert item.offsets is not None
                writes.append(TensorWrite(whole, item.offsets, part.shape, at))
            else:
                writes.append(TensorWrite.whole(part, at))

    def rest(crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        left = iter(crcs)
        for item in items:
            # Planned anew: thousands of plans would fill the memory.
            archive = plan_archive(item.value)
            for offset, data in archive.frame({part: next(left) for part in archive.slots}):
                yield item.at + offset, data

    return OutputFile(name, items[-1].at + items[-1].num_bytes, tuple(writes), rest)


def _metadata(
    tensors: Mapping[str, Slot],
    objects: Mapping[str, Any],
    files: Sequence[Sequence[_Item]],
    paths: Mapping[str, EntryPath],
) -> bytes:
    """The pickled ``.metadata``."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[MetadataIndex, Any] = {}
    for number, items in enumerate(files):
        for item in items:
            index = MetadataIndex(item.key)
            if item.offsets is not None:
                index = MetadataIndex(item.key, torch.Size(item.offsets), len(chunks[item.key]))
                chunks[item.key].append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.value.shape)))
            storage[index] = _torch.storage_info(_file_name(number), item.at, item.num_bytes)
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
