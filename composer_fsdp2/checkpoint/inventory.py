"""What lies in a checkpoint, as values: every tensor with the bytes that hold it, every other entry, who wrote it.

An inventory has one shape for all layouts, the one of Composer's monolithic file: ``('state', 'model', FQN)``,
``('state', 'optimizers', class, 'state', FQN, key)``, ``('state', 'timestamp')``, ``('rng',)``.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

from composer_fsdp2.checkpoint.pickles.values import StoredTensor
from composer_fsdp2.checkpoint.storage.archive import Archive, Blob
from composer_fsdp2.errors import CheckpointError

__all__ = [
    "CheckpointInventory",
    "Chunk",
    "Entry",
    "EntryPath",
    "ModelFit",
    "ObjectRecord",
    "OptimizerContents",
    "Packed",
    "Strided",
    "TensorRecord",
    "Writer",
    "as_tree",
    "dotted",
    "of_stored_tensor",
]

EntryPath: TypeAlias = tuple[str | int, ...]

MODEL: EntryPath = ("state", "model")
OPTIMIZERS: EntryPath = ("state", "optimizers")


def dotted(path: EntryPath) -> str:
    """``('state', 'model', 'wte.weight')`` as ``state.model.wte.weight``, the key that DCP gives it."""
    return ".".join(map(str, path))


# ---------------------------------------------------------------------------------------------------------------------
# Where the bytes of a tensor lie


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a run of bytes: offset and strides in elements of ``dtype``."""

    blob: Blob
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> "Strided":
        return self


@dataclass(frozen=True, slots=True)
class Entry:
    """An archive of its own inside a file of a DCP directory, which holds one tensor or one object.

    Args:
        is_remote: The file comes to this machine when it is asked for, and perhaps never.
    """

    path: Path
    offset: int
    num_bytes: int
    is_remote: bool = False

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> Strided:
        """Open the archive and find the tensor, which must be what the metadata said.

        Raises:
            CheckpointError: it is of another shape or dtype, or no tensor.
        """
        archive = Archive.open(self.path, self.offset, self.num_bytes)
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
class Packed:
    """Bytes in a compressed file: they lie nowhere until it is unpacked (``formats.compressed.unpacked``)."""

    path: Path

    def locate(self, chunk: "Chunk", dtype: torch.dtype) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: compressed, so its tensors cannot be read in place; unpack it first "
            "(composer_fsdp2.checkpoint.formats.compressed.unpacked)"
        )


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that a caller put into a checkpoint after it was read."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor (offsets and sizes per dimension, in elements) and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Strided | Entry | Packed | InMemory

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


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
        chunks: Boxes that tile it; one for a tensor that was saved whole.
        flat: Where it is part of a flat parameter; then there are no chunks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    flat: FlatRange | None = None

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, name: str) -> "TensorRecord":
        """A record that is read from memory."""
        shape = tuple(tensor.shape)
        chunk = Chunk((0,) * tensor.dim(), shape, InMemory(tensor.detach()))
        return cls(name=name, shape=shape, dtype=tensor.dtype, chunks=(chunk,))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def untiled(self) -> str | None:
        """How the chunks fail to tile the tensor exactly; None if they do."""
        whole = (0,) * len(self.shape)
        boxes = [(chunk.offsets, chunk.sizes) for chunk in self.chunks if chunk.numel]
        for offsets, sizes in boxes:
            if len(offsets) != len(self.shape) or any(
                o < 0 or o + s > n for o, s, n in zip(offsets, sizes, self.shape, strict=True)
            ):
                return f"a chunk at {offsets} of shape {sizes} lies outside of shape {self.shape}"
        covered = sum(math.prod(sizes) for _, sizes in boxes)
        if boxes != [(whole, self.shape)] and (overlap := _overlap(boxes)) is not None:
            return f"chunks at {overlap[0]} and {overlap[1]} overlap"
        if covered != self.numel:
            return f"its chunks hold {covered} of {self.numel} elements"
        return None


_Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
_MOST_PAIRWISE = 256


def _overlap(boxes: _Boxes) -> tuple[Any, Any] | None:
    """Two boxes that share an element, or that no sharding lays out so, as far as it can be told in a short time.

    Boxes of a sharding lie in a grid: along some dimension they fall apart into groups that do not meet, and each group
    does so again. A few that do not are compared with each other; of many the first two are named.
    """
    work_left = 1_000_000 + 64 * len(boxes)
    waiting = [boxes]
    while waiting:
        group = waiting.pop()
        if len(group) < 2:
            continue
        if work_left < 0:
            return group[0][0], group[1][0]
        for dim in range(len(group[0][0])):
            work_left -= len(group)
            if len(parts := _apart(group, dim)) > 1:
                waiting.extend(parts)
                break
        else:
            if len(group) > _MOST_PAIRWISE:
                return group[0][0], group[1][0]
            for (offsets, sizes), (other, extent) in itertools.combinations(group, 2):
                if all(a < b + t and b < a + s for a, s, b, t in zip(offsets, sizes, other, extent, strict=True)):
                    return offsets, other
    return None


def _apart(boxes: _Boxes, dim: int) -> list[_Boxes]:
    """The groups of boxes that do not meet along a dimension."""
    groups: list[_Boxes] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        start, size = box[0][dim], box[1][dim]
        if start >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, start + size)
    return groups


def of_stored_tensor(stored: StoredTensor, archive: Archive, name: str) -> TensorRecord:
    """A tensor that was saved whole."""
    source = Strided(archive.storage(stored.storage.key), stored.dtype, stored.offset, stored.stride)
    chunk = Chunk((0,) * len(stored.shape), stored.shape, source)
    return TensorRecord(name=name, shape=stored.shape, dtype=stored.dtype, chunks=(chunk,))


# ---------------------------------------------------------------------------------------------------------------------
# Everything else


@dataclass(slots=True)
class ObjectRecord:
    """One entry that is no tensor. Its value is plain data, in which tensors are ``TensorRecord``s.

    Args:
        load: Reads the value; called once, when it is asked for.
        num_bytes: On disk, where it lies apart; 0 where it is part of a pickle that was read anyway.
        source: Where it lies apart.
    """

    name: str
    load: Callable[[], Any] = field(repr=False)
    num_bytes: int = 0
    source: Entry | None = None
    _value: Any = field(default=..., repr=False)

    def value(self) -> Any:
        """Raises CheckpointError: damaged, or more than plain data and not trusted."""
        if self._value is ...:
            self._value = self.load()
        return self._value


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who wrote a checkpoint, as far as it shows; None where it does not."""

    composer_version: str | None = None
    torch_version: str | None = None
    world_size: int | None = None
    sharding: str | None = None  # 'FSDP1 (flat parameters)', 'DTensor', 'not sharded', ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """Whether the weights load into a model as they are, and how, in words."""

    fits: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerContents:
    """One optimizer's entries.

    Args:
        name: The class's qualified name, the key that Composer gives it; '' where the layout says none.
        keyed_by: 'name' (FQNs), 'id' (position in the writer's param_groups) or 'flat parameter'.
        state: By parameter, then by key; None where the file has no state.
        group_paths: param_groups are read through ``CheckpointInventory.tree``.
    """

    name: str
    keyed_by: str
    state: dict[str | int, dict[str, TensorRecord | ObjectRecord]]


@dataclass(frozen=True, kw_only=True)
class CheckpointInventory:
    """What is on disk, from metadata alone.

    Args:
        path: The checkpoint that was found: behind links, and the newest in a folder of several.
        layout: The name of the layout, as in ``checkpoint/formats/``.
        tensors: Every tensor, by its path in the state.
        objects: Every other entry, by its path.
        nested: Tensors inside of other entries' values, where those were read anyway.
        files: All files that belong to it, with their sizes in bytes.
        remarks: What is missing or odd; the user should know, and nothing fails.
        optimizer_at_root: torch < 2.3 wrote ``optimizers`` beside ``state``.
        flat: The model is in FSDP1's flat parameters, without the parameters' names.
        compressed: Tensors can be read only after ``formats.compressed.unpacked``.
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
    compressed: bool = False
    fit: "ModelFit | None" = None

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    @cached_property
    def model(self) -> dict[str, TensorRecord | ObjectRecord]:
        """The model's entries, by the names in the file; extra state may be an object."""
        entries: Iterable[tuple[EntryPath, TensorRecord | ObjectRecord]] = (
            *self.tensors.items(),
            *self.objects.items(),
        )
        found: dict[str, TensorRecord | ObjectRecord] = {}
        for path, record in entries:
            if path[:2] == MODEL and len(path) > 2:
                whole = _extra_state(path)
                if whole == path:
                    found[dotted(path[2:])] = record
                else:
                    found[dotted(whole[2:])] = ObjectRecord(dotted(whole), functools.partial(self.tree, whole))
        return found

    @cached_property
    def optimizers(self) -> tuple[OptimizerContents, ...]:
        """The optimizers in the file, in its order."""
        names = dict.fromkeys(
            str(path[2]) for path in (*self.tensors, *self.objects) if path[:2] == OPTIMIZERS and len(path) > 2
        )
        return tuple(self._optimizer(name) for name in names)

    def _optimizer(self, name: str) -> OptimizerContents:
        state: dict[str | int, dict[str, TensorRecord | ObjectRecord]] = {}
        prefix = (*OPTIMIZERS, name, "state")
        for records in (self.tensors, self.objects):
            for path, record in records.items():
                if path[:4] == prefix and len(path) > 5:
                    state.setdefault(path[4], {})[dotted(path[5:])] = record
        if self.flat and any(str(parameter).endswith("_flat_param") for parameter in state):
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
            raise CheckpointError(f"{self.path}: param_groups of {optimizer} is no list of dicts with their 'params'")
        return groups

    def tree(self, prefix: EntryPath) -> Any:
        """The value below a path with its containers, tensors as ``TensorRecord``s; None where there is nothing."""
        length = len(prefix)
        below: dict[EntryPath, Any] = {}
        for path, record in self.tensors.items():
            if path[:length] == prefix:
                below[path[length:]] = record
        for path, entry in self.objects.items():
            if path[:length] == prefix:
                below[path[length:]] = entry.value()
        return as_tree(below) if below else None

    @cached_property
    def timestamp(self) -> dict[str, Any]:
        """Epoch, batch, sample, token and so on, as numbers, where the checkpoint has them."""
        found = self.tree(("state", "timestamp"))
        if not isinstance(found, Mapping):
            return {}
        inner = found.get("Timestamp", found)
        return dict(inner) if isinstance(inner, Mapping) else {}

    def replaced(self, **changes: Any) -> "CheckpointInventory":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


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


def as_tree(leaves: Mapping[EntryPath, Any]) -> Any:
    """Nested dicts and lists from paths: a number is a position in a list, text a key (``optimizers.*.state`` aside).

    A leaf that is a dict itself, beside others below the same path, takes them in.
    """
    if set(leaves) == {()}:
        return leaves[()]
    by_first: dict[str | int, dict[EntryPath, Any]] = {}
    for path, value in leaves.items():
        if path:
            by_first.setdefault(path[0], {})[path[1:]] = value
    inner = {key: as_tree(below) for key, below in by_first.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    own = leaves.get(())
    return {**own, **inner} if isinstance(own, dict) else inner


def walk_tensors(value: Any, path: EntryPath = ()) -> Iterator[tuple[EntryPath, TensorRecord]]:
    """Every ``TensorRecord`` in a nested value, with where it lies."""
    if isinstance(value, TensorRecord):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from walk_tensors(part, (*path, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from walk_tensors(part, (*path, number))
