"""The contents of a checkpoint, as values: every tensor with its place on disk, every other entry, its writer.

An inventory has one shape for all layouts, the one of Composer's monolithic file: ``('state', 'model', FQN)``,
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
# Where the bytes of a tensor are


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a run of bytes: offset and strides in elements of ``dtype``."""

    blob: Blob
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the first byte: the same for two views of one record."""
        return self.blob.path, self.blob.offset

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> "Strided":
        return self


@dataclass(frozen=True, slots=True)
class NestedArchive:
    """An archive inside a file of a DCP directory, with one tensor or one object."""

    folder: Folder
    name: str
    offset: int
    num_bytes: int

    @property
    def path(self) -> Path:
        return self.folder.path / self.name

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the archive's first byte, known before the archive is opened."""
        return self.path, self.offset

    def open(self) -> Archive:
        """Raises CheckpointError: damaged, or its file could not be fetched."""
        return Archive.open(self.folder.file(self.name), self.offset, self.num_bytes)

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> Strided:
        """Open the archive and find the tensor, which must be as the metadata describes it.

        Raises:
            CheckpointError: it is of another shape or dtype, or no tensor.
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
    """A tensor that a caller put into a checkpoint after it was read."""

    tensor: torch.Tensor
    place = None


@dataclass(frozen=True, slots=True)
class Chunk(Box):
    """A part of a tensor, and the source of its bytes."""

    source: Strided | NestedArchive | InMemory


@dataclass(frozen=True, slots=True)
class FlatRange:
    """The elements of a tensor as a run of a flat parameter: FSDP1 laid parameters end to end."""

    flat: "TensorRecord"
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor in a checkpoint.

    Args:
        name: As in the file.
        chunks: Boxes that tile it; one for a tensor that was saved unsharded.
        flat: The place in a flat parameter, for a tensor without chunks.

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
        """A tensor that is stored in one chunk, unsplit."""
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
        """How the chunks fail to tile the tensor exactly; None if they do."""
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
    """One entry that is not a tensor. Its value is plain data, in which tensors are ``TensorRecord``s.

    Args:
        load: Reads the value; called once, when it is first needed.
        num_bytes: On disk, if it is stored separately; 0 if it is part of a pickle that was read anyway.
        source: Its archive, if it is stored separately.
        is_flattened: Whether the file stores only its leaves; its containers are inferred until it is ``fitted``.
    """

    name: str
    load: Callable[[], Any] = field(repr=False)
    num_bytes: int = 0
    source: NestedArchive | None = None
    is_flattened: bool = False
    _value: Any = field(default=..., repr=False)

    @classmethod
    def of_value(cls, name: str, value: Any, *, is_flattened: bool = False) -> "ObjectRecord":
        """A record of a value that was read already."""
        return cls(name, _unread, is_flattened=is_flattened, _value=value)

    def value(self) -> Any:
        """Raises CheckpointError: damaged, or more than plain data and not trusted."""
        if self._value is ...:
            self._value = self.load()
        return self._value


def _unread() -> Any:
    raise AssertionError("a record of a value that was read already")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who wrote a checkpoint, as far as it shows; None where it does not."""

    composer_version: str | None = None
    torch_version: str | None = None
    world_size: int | None = None
    sharding: str | None = None  # 'FSDP1 (flat parameters)', 'DTensor', 'not sharded', ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """Whether the weights load into a model as they are, and how, as text."""

    fits: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerContents:
    """One optimizer's entries.

    Args:
        name: The class's qualified name, Composer's key; '' if the layout has none.
        keyed_by: 'name' (FQNs), 'id' (position in the writer's param_groups) or 'flat parameter'.
        state: By parameter, then by key; empty where the file has none. ``param_groups`` are no part of it:
            ``CheckpointInventory.groups`` reads them.
    """

    name: str
    keyed_by: str
    state: dict[str | int, dict[str, TensorRecord | ObjectRecord]]


@dataclass(frozen=True, kw_only=True)
class CheckpointInventory:
    """The contents of a checkpoint, from metadata alone.

    Args:
        path: The checkpoint that was found: behind links, and the newest in a folder of several.
        layout: The name of the layout, as in ``checkpoint/layouts/``.
        tensors: Every tensor, by its path in the state.
        objects: Every other entry, by its path.
        nested: Tensors inside of other entries' values, where those were read anyway.
        files: All files that belong to it, with their sizes in bytes.
        remarks: Missing or odd parts that the user should know, and that are no error.
        optimizer_at_root: torch < 2.3 wrote ``optimizers`` beside ``state``.
        flat: The model is in FSDP1's flat parameters, without the parameters' names; only in layouts that
            ranks wrote.
        holds_only: The only entries that the layout can store, all tensors: those below this path; None for all.
        name_prefix: What Composer's models put before the model's names; '' where these are Composer's.
        hugging_face: The folder of a Hugging Face model, whose configuration is beside these weights.
        metadata_crc32: Of metadata that every save writes anew, where records' own CRC32s are not read with it.
        compressed: Of a tar or compressed file, whose tensors can be read only from an unpacked copy.

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
        """The model's entries, by the names in the file; extra state may be an object."""
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
        """``param_groups`` of one optimizer: hyperparameters, and ``params`` as the file names them."""
        groups = self.tree((*OPTIMIZERS, optimizer, "param_groups"))
        if groups is None:
            return []
        if not isinstance(groups, list) or not all(map(_is_group, groups)):
            raise CheckpointError(
                f"{self.path}: param_groups of {optimizer} is not a list of dicts with their 'params'"
            )
        return groups

    def tree(self, prefix: EntryPath) -> Any:
        """The value below a path with its containers, tensors as ``TensorRecord``s; None without entries."""
        length = len(prefix)
        below = {path[length:]: record for path, record in self.entries.items() if path[:length] == prefix}
        return tree_of(below, prefix)

    @cached_property
    def timestamp(self) -> dict[str, Any]:
        """Epoch, batch, sample, token and so on, as numbers, where the checkpoint has them."""
        found = self.tree(("state", "timestamp"))
        inner = value_at(found, ("Timestamp",)) or found
        return dict(inner) if isinstance(inner, Mapping) else {}

    def replaced(self, **changes: Any) -> "CheckpointInventory":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def tree_of(entries: Mapping[EntryPath, TensorRecord | ObjectRecord], path: EntryPath = ()) -> Any:
    """The value at a path that the entries below it make up, tensors as ``TensorRecord``s; None for none."""
    values = {path: each if isinstance(each, TensorRecord) else each.value() for path, each in entries.items()}
    return as_tree(values, path) if values else None


def _extra_state(path: EntryPath) -> EntryPath:
    """The path up to a module's extra state, which DCP takes apart where it is a dict."""
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
