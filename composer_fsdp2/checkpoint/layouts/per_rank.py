"""One ``.pt`` per rank, of pickled ShardedTensors: ``sharded`` and ``local`` of Composer 0.13 to 0.15.

Also of Composer up to 0.18 on torch 1.13. torch itself can read such a file only in a process group of the same size.
Here all files are read in one process: each contains the offsets of its shards. Values that are not ShardedTensors
(step counts, buffers) are in every rank's file; the first rank's are used, as in FSDP1's gathered files.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import damage_in
from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    Chunk,
    ObjectRecord,
    Strided,
    TensorRecord,
    of_stored_tensor,
)
from composer_fsdp2.checkpoint.layouts._composer import (
    file_sizes,
    missing_parts,
    nested_tensors,
    split_state,
    writer_of,
)
from composer_fsdp2.checkpoint.layouts._layout import Layout
from composer_fsdp2.checkpoint.names import FLAT_PARAMETER, is_flat_parameter
from composer_fsdp2.checkpoint.pickles.stand_ins import InertObject, StoredTensor, contains_inert
from composer_fsdp2.checkpoint.trees import EntryPath, dotted, leaves, mapped, value_at
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError

_NAME = "one file per rank"

_SHARD = "torch.distributed._shard"
_SHARDED_TENSOR = f"{_SHARD}.sharded_tensor.api.ShardedTensor"
_NAMES = frozenset(
    {
        _SHARDED_TENSOR,
        f"{_SHARDED_TENSOR}.ProcessGroupState",
        f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
        f"{_SHARD}.sharded_tensor.metadata.TensorProperties",
        f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        f"{_SHARD}.sharded_tensor.shard.Shard",
        f"{_SHARD}.metadata.ShardMetadata",
        f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec",
        "torch.distributed.remote_device._remote_device",
        "torch.serialization._get_layout",
    }
)
_RANK = re.compile(r"(.*rank)(\d+)(.*)", re.DOTALL)  # the last one in a name
_OLD_FLAT = "flat_param"  # torch 1.13's name


@dataclass(frozen=True, slots=True)
class _Shards:
    """One rank's shards of a ShardedTensor. No chunks if the tensor has fewer rows than there were ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One rank's file: the unpickled value, and every ShardedTensor in it by its path."""

    path: Path
    root: Mapping[Any, Any]
    shards: dict[EntryPath, _Shards]


def _recognize(path: Path) -> bool:
    """A torch archive whose pickle names ShardedTensor."""
    try:
        return path.is_file() and f"{_SHARD}.sharded_tensor.api".encode() in Archive.open(path).read("data.pkl")
    except CheckpointError:
        return False


def _files_of_all_ranks(path: Path) -> list[Path]:
    """The paths of all ranks' files, including missing ones, from the path of one of them."""
    return _all_files(_read_file(path, trust=False))


def _incomplete(path: Path) -> str | None:
    try:
        missing = [file.name for file in _files_of_all_ranks(path) if not file.is_file()]
    except CheckpointError as error:
        return str(error)
    return f"files of {len(missing)} ranks are missing, {missing[0]} among them" if missing else None


def _read(path: Path, trust: bool) -> CheckpointInventory:
    """Any rank's file leads to all of them."""
    paths = _all_files(_read_file(path, trust=trust))
    if missing := [file.name for file in paths if not file.is_file()]:
        raise CheckpointError(
            f"{path}: written by {len(paths)} ranks, one file each; missing beside it: {and_more(missing, 8)}"
        )
    files = [_read_file(file, trust=trust) for file in paths]
    _check_same_save(files)
    full = {entry: _merged(entry, files) for entry in files[0].shards}
    root = mapped(files[0].root, lambda value, entry: full.get(entry, value))
    tensors, objects = split_state(root, str(files[0].path))
    if stray := [dotted(entry) for entry in full if entry not in tensors]:
        raise CheckpointError(f"{files[0].path}: {stray[0]} is a ShardedTensor, where Composer keeps none")
    is_flat = any(map(_is_flat, full))
    if is_flat:
        _refuse_original_parameters(files)
        _join_optimizer_state(tensors, files)
    # Composer gathers all ranks' RNG states into each file. Otherwise the list is made of each file's own states.
    each = [file.root.get("rng") for file in files]
    if len(files) > 1 and all(isinstance(states, list) and len(states) == 1 for states in each):
        objects["rng",] = ObjectRecord.of_value("rng", [states[0] for states in each if states])
    inventory = CheckpointInventory(
        path=paths[0],
        layout=_NAME,
        tensors=tensors,
        objects=objects,
        files=file_sizes(*paths),
        nested=dict(nested_tensors(objects)),
        remarks=missing_parts(tensors, objects),
        flat=is_flat,
    )
    sharding = f"FSDP1, {'flat parameters' if is_flat else 'ShardedTensor'}, split into {len(files)}"
    writer = writer_of(inventory.tree(("state", "metadata")), sharding)
    return inventory.replaced(writer=dataclasses.replace(writer, world_size=len(files)))


# ---------------------------------------------------------------------------------------------------------------------
# One file


def _read_file(path: Path, *, trust: bool) -> _RankFile:
    archive = Archive.open(path)

    def leaf(value: Any, entry: EntryPath) -> Any:
        if isinstance(value, StoredTensor):
            return of_stored_tensor(value, archive, dotted(entry))
        if _is_sharded(value):
            return _shards(value, archive, dotted(entry))
        return value

    with damage_in(path, "one rank's file as Composer and torch pickle it"):
        root = archive.unpickle(trust=trust, inert=_NAMES)
        if not isinstance(root, Mapping) or not isinstance(root.get("state"), Mapping):
            raise CheckpointError(f"{path}: holds ShardedTensors, but not Composer's {{'state': ..., 'rng': ...}}")
        _use_torch_2s_names(root["state"], path)
        root = mapped(root, leaf)
        shards = {entry: part for entry, part in leaves(root) if isinstance(part, _Shards)}
        if not shards or contains_inert(root):
            raise CheckpointError(f"{path}: holds objects that are not plain data")
        return _RankFile(path, root, shards)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, InertObject) and str(value.kind) == _SHARDED_TENSOR


def _shards(value: InertObject, archive: Archive, name: str) -> _Shards:
    """Read a ShardedTensor.

    Args:
        value: Its pickled state: (local shards, metadata, process group, sharding spec, remote references).
    """
    local, metadata, group, *_ = value.state
    shape = tuple(metadata.field("size"))
    dtype = metadata.field("tensor_properties").state[0]
    chunks = []
    for shard in local:
        stored, box = shard.field("tensor"), shard.field("metadata")
        offsets, sizes = tuple(box.field("shard_offsets")), tuple(box.field("shard_sizes"))
        if not isinstance(stored, StoredTensor) or stored.shape != sizes or stored.dtype != dtype:
            raise ValueError(f"a shard at {offsets} of shape {sizes}, {dtype} holds {stored}")
        (chunk,) = of_stored_tensor(stored, archive, name).chunks
        chunks.append(dataclasses.replace(chunk, offsets=offsets))
    rank, world_size = group.field("global_rank"), group.field("global_world_size")
    numbers = (*shape, *(n for chunk in chunks for n in chunk.offsets), rank, world_size)
    are_counts = all(isinstance(n, int) and n >= 0 for n in numbers)
    if not are_counts or not rank < world_size or not isinstance(dtype, torch.dtype):
        raise ValueError(f"shape {shape}, {dtype}, rank {rank} of {world_size}")
    return _Shards(shape, dtype, tuple(chunks), rank, world_size)


def _all_files(one: _RankFile) -> list[Path]:
    """The paths of all ranks' files, from one of them. Raises CheckpointError if its name has no rank."""
    found = _RANK.fullmatch(one.path.name)
    if found is None:
        raise CheckpointError(
            f"{one.path}: holds one rank's part of a checkpoint; its name must say which rank, as in ep0-ba1-rank0.pt"
        )
    world_size = next(iter(one.shards.values())).world_size
    Budget.of(one.path).spend(f"the files of {world_size} ranks", num_objects=10 * world_size)
    return [one.path.with_name(f"{found[1]}{rank}{found[3]}") for rank in range(world_size)]


# ---------------------------------------------------------------------------------------------------------------------
# All files together


def _check_same_save(files: list[_RankFile]) -> None:
    """Check that each file is that of its own rank, and that all are of the same run and step."""
    expected = files[0]
    for rank, file in enumerate(files):
        for entry, part in file.shards.items():
            if (part.rank, part.world_size) != (rank, len(files)):
                raise CheckpointError(
                    f"{file.path}: {dotted(entry)} is of rank {part.rank} of {part.world_size}, where the name and "
                    f"the other files say rank {rank} of {len(files)} (files of several saves mixed?)"
                )
        if file.shards.keys() != expected.shards.keys():
            differing = sorted(map(dotted, file.shards.keys() ^ expected.shards.keys()))
            raise CheckpointError(f"{file.path} and {expected.path} differ in {and_more(differing, 8)}")
        if _step(file) != _step(expected):
            raise CheckpointError(
                f"{file.path}: saved at {_step(file)}, {expected.path.name} at {_step(expected)} (another save's?)"
            )


def _step(file: _RankFile) -> dict[str, Any]:
    timestamp = file.root["state"].get("timestamp")
    timestamp = timestamp.get("Timestamp", timestamp) if isinstance(timestamp, Mapping) else {}
    return {unit: timestamp[unit] for unit in ("epoch", "batch", "sample") if unit in timestamp}


def _merged(entry: EntryPath, files: list[_RankFile]) -> TensorRecord:
    """Combine the shards of all files into one tensor. Replicas (HSDP) have the same shards; the first is used."""
    parts = [file.shards[entry] for file in files]
    for file, part in zip(files, parts, strict=True):
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise CheckpointError(
                f"{file.path}: {dotted(entry)} is {part.dtype} of shape {part.shape}, in {files[0].path.name} "
                f"{parts[0].dtype} of shape {parts[0].shape}"
            )
    boxes: dict[Any, Chunk] = {}
    for chunk in (chunk for part in parts for chunk in part.chunks if chunk.numel):
        boxes.setdefault((chunk.offsets, chunk.sizes), chunk)
    record = TensorRecord(
        name=dotted(entry),
        shape=parts[0].shape,
        dtype=parts[0].dtype,
        chunks=tuple(boxes[box] for box in sorted(boxes)),
    )
    if (problem := record.untiled()) is not None:
        raise CheckpointError(f"{files[0].path} and the other ranks' files: {record.name}: {problem}")
    return record


# ---------------------------------------------------------------------------------------------------------------------
# Flat parameters


def _is_flat(entry: EntryPath) -> bool:
    return entry[:2] == MODEL and is_flat_parameter(entry[-1])


def _use_torch_2s_names(state: Any, path: Path) -> None:
    """Rename flat parameters as in torch 2, and key their optimizer state by these names instead of positions.

    Flat parameters are in the order of ``parameters()``, and so are the positions.
    """

    def named(name: str, part: Any) -> str:
        is_old = _is_sharded(part) and name.split(".")[-1] == _OLD_FLAT
        return name.removesuffix(_OLD_FLAT) + FLAT_PARAMETER if is_old else name

    state["model"] = {named(name, part): part for name, part in state["model"].items()}
    flats = [name for name, part in state["model"].items() if _is_sharded(part) and is_flat_parameter(name)]
    for name, optimizer in (state.get("optimizers") or {}).items() if flats else ():
        positions = sorted(key for key in optimizer.get("state", {}) if isinstance(key, int))
        if positions and len(flats) != len(positions):
            raise CheckpointError(
                f"{path}: {name} has state for {len(positions)} parameters by position, the model has {len(flats)} "
                "flat parameters: which is whose cannot be told; load the weights alone"
            )
        names = dict(zip(positions, flats, strict=False))
        optimizer["state"] = {names.get(key, key): entries for key, entries in optimizer.get("state", {}).items()}
        for group in optimizer.get("param_groups", ()):
            group["params"] = [names.get(key, key) for key in group["params"]]


def _blob(chunk: Chunk) -> Any:
    assert isinstance(chunk.source, Strided)  # made by of_stored_tensor
    return chunk.source.blob


def _refuse_original_parameters(files: list[_RankFile]) -> None:
    """Raise if the checkpoint was saved with ``use_orig_params=True``.

    A local file then contains fragments of parameters without their offsets.
    """
    for file in files:
        flat = {_blob(chunk) for entry in filter(_is_flat, file.shards) for chunk in file.shards[entry].chunks}
        for name, value in file.root["state"]["model"].items():
            if isinstance(value, TensorRecord) and value.numel and _blob(value.chunks[0]) in flat:
                raise CheckpointError(
                    f"{file.path}: state_dict_type local with use_orig_params=True: {name} is a piece of a flat "
                    "parameter, with padding that the file does not describe; Composer refused to load such files "
                    "too. Save again with state_dict_type sharded or full"
                )


def _join_optimizer_state(tensors: dict[EntryPath, TensorRecord], files: list[_RankFile]) -> None:
    """Join the optimizer state of flat parameters that torch 1.13 saved as plain tensors.

    Each rank saved its own shard, including padding.
    """
    for entry, record in list(tensors.items()):
        flat = (*MODEL, entry[4]) if entry[:2] == OPTIMIZERS and len(entry) == 6 else ()
        if _is_flat(flat) and entry not in files[0].shards and len(record.shape) == 1:
            tensors[entry] = _joined_pieces(files, flat, entry)


def _joined_pieces(files: list[_RankFile], flat: EntryPath, entry: EntryPath) -> TensorRecord:
    """Combine each rank's vector, without its padding, at the offset of its shard of the flat parameter."""
    boxes: dict[Any, Chunk] = {}
    dtype = None
    for file in files:
        piece = value_at(file.root, entry)
        for chunk in file.shards[flat].chunks:
            if not isinstance(piece, TensorRecord) or len(piece.shape) != 1 or piece.numel < chunk.numel:
                raise CheckpointError(
                    f"{file.path}: {dotted(entry)} should be a vector of {chunk.numel} elements, as the piece of "
                    f"{flat[-1]} in the same file"
                )
            dtype = dtype or piece.dtype
            boxes.setdefault(chunk.offsets, dataclasses.replace(chunk, source=piece.chunks[0].source))
    assert dtype is not None  # a flat parameter has an element
    name, shape = dotted(entry), files[0].shards[flat].shape
    return TensorRecord(name=name, shape=shape, dtype=dtype, chunks=tuple(boxes[box] for box in sorted(boxes)))


LAYOUT = Layout(
    name=_NAME,
    recognize=_recognize,
    incomplete=_incomplete,
    read=_read,
    checkpoint_files=_files_of_all_ranks,
)
