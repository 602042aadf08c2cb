"""The contents of a checkpoint as values: every tensor with its location on disk, every other entry, and the writer.

An inventory has the same structure for all layouts, that of Composer's monolithic file: ``('state', 'model', FQN)``,
``('state', 'optimizers', class, 'state', FQN, key)``, ``('state', 'timestamp')``, ``('rng',)``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from composer_fsdp2.checkpoint.archive.disk import Folder
from composer_fsdp2.checkpoint.archive.torch_archive import Archive, Blob
from composer_fsdp2.checkpoint.boxes import Box, untiled
from composer_fsdp2.checkpoint.names import is_flat_parameter
from composer_fsdp2.checkpoint.pickles.stand_ins import StoredTensor
from composer_fsdp2.checkpoint.trees import EntryPath, as_tree, dotted, leaves, value_at
from composer_fsdp2.errors import CheckpointError

MODEL: EntryPath = ("state", "model")
OPTIMIZERS: EntryPath = ("state", "optimizers")


# ---------------------------------------------------------------------------------------------------------------------
# Sources of a tensor's bytes


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided view of a byte range. Offset and strides are in elements of ``dtype``."""

    blob: Blob
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the offset of the record. Equal for two views of one record."""
        return self.blob.path, self.blob.offset

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> "Strided":
        return self


@dataclass(frozen=True, slots=True)
class NestedArchive:
    """An archive inside a file of a DCP folder, with one tensor or one object."""

    folder: Folder
    name: str
    offset: int
    num_bytes: int

    @property
    def path(self) -> Path:
        return self.folder.path / self.name

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the offset of the archive; does not open the archive."""
        return self.path, self.offset

    def open(self) -> Archive:
        """Open the archive. Raises CheckpointError if it is damaged, or if its file could not be downloaded."""
        return Archive.open(self.folder.file(self.name), self.offset, self.num_bytes)

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> Strided:
        """Open the archive and return the tensor's byte range, after a comparison with the metadata.

        Raises:
            CheckpointError: the tensor has another shape or dtype, or the archive contains no tensor.
        """
        archive = self.open()
        stored = archive.unpickle(trust=False)
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(f"{archive.where}: holds no tensor, where .metadata says {dtype} {chunk.sizes}")
        if stored.shape != chunk.sizes or stored.dtype != dtype:
            raise CheckpointError(
                f"{archive.where}: holds {stored.dtype} of shape {stored.shape}, where .metadata says {dtype} of shape "
                f"{chunk.sizes}"
            )
        return Strided(archive.storage(stored.storage.key), stored.dtype, stored.offset, stored.stride)


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor in memory that a caller added to an inventory."""

    tensor: torch.Tensor
    place = None


@dataclass(frozen=True, slots=True)
class Chunk(Box):
    """A part of a tensor, and the source of its bytes."""

    source: Strided | NestedArchive | InMemory


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A tensor as a range of elements of a flat parameter, in which FSDP1 concatenated parameters."""

    flat: "TensorRecord"
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor in a checkpoint.

    Args:
        name: The name in the file.
        chunks: Boxes that tile the tensor; one for a tensor that was saved unsharded.
        flat: The range in a flat parameter, for a tensor without chunks.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> record = inspect_checkpoint("ep1.pt").tensors["state", "model", "weight"]
        >>> record.shape, record.dtype
        ((2, 4), torch.float32)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    flat: FlatRange | None = None

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, name: str) -> "TensorRecord":
        """A record that is read from memory."""
        return cls.in_one_chunk(name, tuple(tensor.shape), tensor.dtype, InMemory(tensor.detach()))

    @classmethod
    def in_one_chunk(
        cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, source: "Strided | InMemory"
    ) -> "TensorRecord":
        """Create the record of a tensor that is stored unsharded."""
        return cls(name=name, shape=shape, dtype=dtype, chunks=(Chunk((0,) * len(shape), shape, source),))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """All of it."""
        return Box.full(self.shape)

    def untiled(self) -> str | None:
        """Describe how the chunks fail to tile the tensor; None if they do not fail."""
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in self.chunks if chunk.numel]
        for box in boxes:
            if len(box.offsets) != len(self.shape) or any(
                o < 0 or o + s > n for o, s, n in zip(box.offsets, box.sizes, self.shape, strict=True)
            ):
                return f"a chunk at {box.offsets} of shape {box.sizes} lies outside of shape {self.shape}"
        return None if not self.numel or boxes == [self.box] else untiled(self.shape, boxes)


def of_stored_tensor(stored: StoredTensor, archive: Archive, name: str) -> TensorRecord:
    """A tensor that was saved unsharded."""
    source = Strided(archive.storage(stored.storage.key), stored.dtype, stored.offset, stored.stride)
    return TensorRecord.in_one_chunk(name, stored.shape, stored.dtype, source)


# ---------------------------------------------------------------------------------------------------------------------
# Everything else


@dataclass(slots=True)
class ObjectRecord:
    """One entry that is not a tensor. Its value is plain data, with ``TensorRecord``s in place of tensors.

    Args:
        load: Reads the value. Called once, at first access.
        num_bytes: The size on disk if the entry is stored separately; 0 if it is part of a pickle that was already
            read.
        source: The archive of the entry, if it is stored separately.
        is_flattened: Whether the file stores only leaves. The containers are then inferred until ``fitted`` corrects
            them.
    """

    name: str
    load: Callable[[], Any] = field(repr=False)
    num_bytes: int = 0
    source: NestedArchive | None = None
    is_flattened: bool = False
    _value: Any = field(default=..., repr=False)

    @classmethod
    def of_value(cls, name: str, value: Any, *, is_flattened: bool = False) -> "ObjectRecord":
        """Create the record of a value that was already read."""
        return cls(name, _unread, is_flattened=is_flattened, _value=value)

    def value(self) -> Any:
        """Read the value. Raises CheckpointError if it is damaged, or not plain data and not trusted."""
        if self._value is ...:
            self._value = self.load()
        return self._value


def _unread() -> Any:
    raise AssertionError("a record of a value that was read already")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The software that wrote a checkpoint. A field is None if the checkpoint does not show it."""

    composer_version: str | None = None
    torch_version: str | None = None
    world_size: int | None = None
    sharding: str | None = None  # 'FSDP1 (flat parameters)', 'DTensor', 'not sharded', ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """Whether the weights can be loaded into a model unchanged, with an explanation as text."""

    fits: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerContents:
    """The entries of one optimizer.

    Args:
        name: The qualified name of the class, which is Composer's key; '' if the layout has none.
        keyed_by: 'name' (FQNs), 'id' (position in the writer's param_groups) or 'flat parameter'.
        state: The state by parameter and key; empty if the file has none. ``CheckpointInventory.groups`` reads
            ``param_groups``.
    """

    name: str
    keyed_by: str
    state: dict[str | int, dict[str, TensorRecord | ObjectRecord]]


@dataclass(frozen=True, kw_only=True)
class CheckpointInventory:
    """The contents of a checkpoint, from metadata only.

    Args:
        path: The checkpoint that was found: the target of links, or the newest in a run folder.
        layout: The name of the layout, as in ``checkpoint/layouts/``.
        tensors: Every tensor, by its path in the state dict.
        objects: Every other entry, by its path.
        nested: Tensors inside of other entries' values, if these values were already read.
        files: All files of the checkpoint, with their sizes in bytes.
        remarks: Messages about missing or unusual parts that are not errors.
        optimizer_at_root: Whether ``optimizers`` is at the root instead of below ``state``, as torch < 2.3 wrote it.
        flat: Whether the model is saved as FSDP1's flat parameters, without names. Only in sharded layouts.
        holds_only: The path below which all entries are, if the layout can store only tensors of this path; None
            otherwise.
        name_prefix: The prefix of the model's names in Composer's models; '' if the file has Composer's names.
        hugging_face: The folder of a Hugging Face model, which has the configuration of these weights.
        metadata_crc32: The CRC32 of metadata that every save writes, for layouts whose record CRC32s are not read.
        compressed: Whether this is a tar or compressed file, whose tensors can be read only from an unpacked copy.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> list(inspect_checkpoint("ep1.pt").tensors)
        [('state', 'model', 'weight'), ('state', 'model', 'bias')]
    """

    path: Path
    layout: str
    tensors: dict[EntryPath, TensorRecord]
    objects: dict[EntryPath, ObjectRecord]
    files: tuple[tuple[Path, int], ...]
    nested: dict[EntryPath, TensorRecord] = field(default_factory=dict)
    writer: Writer = Writer()
    remarks: tuple[str, ...] = ()
    optimizer_at_root: bool = False
    flat: bool = False
    holds_only: EntryPath | None = None
    name_prefix: str = ""
    hugging_face: Path | None = None
    metadata_crc32: int = 0
    compressed: bool = False
    fit: "ModelFit | None" = None

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    @cached_property
    def entries(self) -> Mapping[EntryPath, TensorRecord | ObjectRecord]:
        """All tensors, and then all others."""
        return {**self.tensors, **self.objects}

    @cached_property
    def model(self) -> dict[str, TensorRecord | ObjectRecord]:
        """The model's entries by their names in the file. A module's extra state may be an object."""
        found: dict[str, TensorRecord | ObjectRecord] = {}
        for path, record in self.entries.items():
            if path[:2] == MODEL and len(path) > 2:
                entry = _extra_state(path)
                if entry == path:
                    found[dotted(path[2:])] = record
                else:
                    load = functools.partial(self.tree, entry)
                    found[dotted(entry[2:])] = ObjectRecord(dotted(entry), load, is_flattened=True)
        return found

    @cached_property
    def optimizers(self) -> tuple[OptimizerContents, ...]:
        """The optimizers in the file, in its order."""
        names = dict.fromkeys(str(path[2]) for path in self.entries if path[:2] == OPTIMIZERS and len(path) > 2)
        return tuple(self._optimizer(name) for name in names)

    def _optimizer(self, name: str) -> OptimizerContents:
        state: dict[str | int, dict[str, TensorRecord | ObjectRecord]] = {}
        prefix = (*OPTIMIZERS, name, "state")
        for path, record in self.entries.items():
            if path[:4] == prefix and len(path) > 5:
                state.setdefault(path[4], {})[dotted(path[5:])] = record
        if self.flat and any(map(is_flat_parameter, state)):
            keyed_by = "flat parameter"
        else:
            keyed_by = "id" if state and all(isinstance(parameter, int) for parameter in state) else "name"
        return OptimizerContents(name=name, keyed_by=keyed_by, state=state)

    def groups(self, optimizer: str) -> list[dict[str, Any]]:
        """``param_groups`` of one optimizer: hyperparameters, and the names in ``params`` as in the file."""
        groups = self.tree((*OPTIMIZERS, optimizer, "param_groups"))
        if groups is None:
            return []
        if not isinstance(groups, list) or not all(map(_is_group, groups)):
            raise CheckpointError(
                f"{self.path}: param_groups of {optimizer} is not a list of dicts with their 'params'"
            )
        return groups

    def tree(self, prefix: EntryPath) -> Any:
        """The nested value below a path, with ``TensorRecord``s in place of tensors; None if there are no entries."""
        length = len(prefix)
        below = {path[length:]: record for path, record in self.entries.items() if path[:length] == prefix}
        return tree_of(below, prefix)

    @cached_property
    def timestamp(self) -> dict[str, Any]:
        """The timestamp as numbers: epoch, batch, sample, token and so on, if the checkpoint has them."""
        found = self.tree(("state", "timestamp"))
        inner = value_at(found, ("Timestamp",)) or found
        return dict(inner) if isinstance(inner, Mapping) else {}

    def replaced(self, **changes: Any) -> "CheckpointInventory":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def tree_of(entries: Mapping[EntryPath, TensorRecord | ObjectRecord], path: EntryPath = ()) -> Any:
    """The nested value of the entries below a path, with ``TensorRecord``s for tensors; None without entries."""
    values = {path: each if isinstance(each, TensorRecord) else each.value() for path, each in entries.items()}
    return as_tree(values, path) if values else None


def _extra_state(path: EntryPath) -> EntryPath:
    """The path of the module's extra state that contains ``path``. DCP flattens extra state that is a dict."""
    for end in range(3, len(path)):
        if str(path[end - 1]).rpartition(".")[2] == "_extra_state":
            return path[:end]
    return path


def _is_group(group: Any) -> bool:
    """A dict; its parameters are names or numbers."""
    return isinstance(group, dict) and (
        isinstance(group.get("params", []), list | tuple)
        and all(isinstance(parameter, str | int) for parameter in group.get("params", []))
    )


def walk_tensors(value: Any) -> Iterator[tuple[EntryPath, TensorRecord]]:
    """Every ``TensorRecord`` in a nested value, with its path."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, TensorRecord))
