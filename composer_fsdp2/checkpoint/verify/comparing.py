"""Two checkpoints of any layouts, entry by entry: what one has and the other has not, and what differs.

Layouts cut a state dict up differently: torch 2.4 makes an entry of every leaf, torch 2.3 of ``state.callbacks``, a
monolithic file has one pickle. So both sides are flattened to their leaves first, which drops empty dicts and lists.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from composer_fsdp2.checkpoint.differences import Fault, FaultKind
from composer_fsdp2.checkpoint.inventory import MODEL, OPTIMIZERS, CheckpointInventory, TensorRecord
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.pickles.stand_ins import InertObject
from composer_fsdp2.checkpoint.read import Reader
from composer_fsdp2.checkpoint.trees import EntryPath, Parts, dotted, leaves, parts_of
from composer_fsdp2.config.text import short
from composer_fsdp2.errors import CheckpointError

_BLOCK_BYTES = 8 << 20

_Key: TypeAlias = tuple[str, ...]


def compare(
    found: CheckpointInventory,
    expected: CheckpointInventory,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[tuple[Fault, ...], list[str]]:
    """Every difference of ``found`` from ``expected``, and what was not compared, in words.

    Tensors are read a few MiB at a time and compared bit for bit, or within ``atol + rtol * abs(expected)``.

    Args:
        advance: Called with the number of bytes read since.
    Raises:
        CheckpointError: an entry that holds no tensor needs trust.
    """
    return _Comparison(found, expected, rtol, atol, advance).run()


@dataclass(slots=True)
class _Leaves:
    """A checkpoint, flattened; numbers of lists and of parameters are text here, as in DCP's keys."""

    inventory: CheckpointInventory
    values: dict[_Key, Any] = field(default_factory=dict)  # a TensorRecord for a tensor
    twice: list[_Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path, record in self.inventory.tensors.items():
            self.add(_key(path), record)
        for path, entry in self.inventory.objects.items():
            for below, value in leaves(entry.value(), parts=_parts):
                key = (*_key(path), *map(str, below))
                is_name = key[:2] == OPTIMIZERS and key[3:4] == ("param_groups",) and isinstance(value, str)
                self.add(key, canonical(value) if is_name else value)

    def add(self, key: _Key, value: Any) -> None:
        if key in self.values:
            self.twice.append(key)
        self.values[key] = value

    def sections(self) -> dict[_Key, dict[_Key, Any]]:
        """The entries of each section: ``('state', 'model')``, ``('rng',)`` and so on."""
        sections: dict[_Key, dict[_Key, Any]] = {}
        for key, value in self.values.items():
            sections.setdefault(key[:2] if key[0] == "state" else key[:1], {})[key] = value
        return sections


def _parts(value: Any) -> Parts:
    """Also those of an object that a pickle would have built."""
    if isinstance(value, InertObject):
        return {"class": str(value.kind), "args": value.args, "state": value.state}.items()
    return parts_of(value)


def _key(path: Iterable[str | int]) -> _Key:
    """A path with the names of parameters as the model has them without wrappers."""
    parts = tuple(map(str, path))
    if parts[:2] == MODEL and len(parts) > 2:
        return (*parts[:2], canonical(".".join(parts[2:])))
    if parts[:2] == OPTIMIZERS and parts[3:4] == ("state",) and len(parts) > 4:
        return (*parts[:4], canonical(parts[4]), *parts[5:])
    return parts


@dataclass(slots=True)
class _Comparison:
    found: CheckpointInventory
    expected: CheckpointInventory
    rtol: float
    atol: float
    advance: Callable[[int], None]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _buffers: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def run(self) -> tuple[tuple[Fault, ...], list[str]]:
        ours, theirs = self._leaves()
        for side in (ours, theirs):
            for key in side.twice:
                self.fault(key, "one entry", f"two in {side.inventory.path}, whose names differ by wrappers alone")
        mine, other = ours.sections(), theirs.sections()
        for section in [*mine, *(name for name in other if name not in mine)]:
            self._section(section, mine.get(section, {}), other.get(section, {}))
        return tuple(self.faults), self.notes

    def fault(self, key: _Key, expected: str, found: str) -> None:
        fault = Fault(
            kind=FaultKind.DIFFERENCE, file=self.found.path, name=".".join(key), expected=expected, found=found
        )
        self.faults.append(fault)

    def _leaves(self) -> tuple[_Leaves, _Leaves]:
        pair = self.found, self.expected
        parts = {each.holds_only: each.layout for each in pair if each.holds_only is not None}
        for part, layout in parts.items():
            self.notes.append(f"everything but the tensors of {dotted(part)}: {layout} has no place for anything else")
            pair = _tensors_below(part, pair[0]), _tensors_below(part, pair[1])
        if not parts:
            pair = self._without_unmatchable(pair)
        # A layout's own names may be those within Composer's model, an attribute of which holds it.
        prefix = pair[0].name_prefix or pair[1].name_prefix
        if prefix and not pair[0].model.keys() & pair[1].model.keys():
            pair = _without_prefix(prefix, pair[0]), _without_prefix(prefix, pair[1])
        return _Leaves(pair[0]), _Leaves(pair[1])

    def _without_unmatchable(
        self, pair: tuple[CheckpointInventory, CheckpointInventory]
    ) -> tuple[CheckpointInventory, CheckpointInventory]:
        """Optimizer state by position and by name cannot be matched without the model."""
        kinds = [{o.name: o.keyed_by for o in inventory.optimizers if o.state} for inventory in pair]
        for name in kinds[0].keys() & kinds[1].keys():
            if kinds[0][name] != kinds[1][name]:
                key = (*OPTIMIZERS, name)
                self.fault(
                    tuple(map(str, key)),
                    f"state by {kinds[1][name]}",
                    f"state by {kinds[0][name]}, so that it cannot be compared without the model",
                )
                pair = tuple(_without(inventory, key) for inventory in pair)  # type: ignore[assignment]
        return pair

    def _section(self, section: _Key, mine: dict[_Key, Any], other: dict[_Key, Any]) -> None:
        if not mine or not other:
            what = f"{len(mine or other)} entries"
            self.fault(section, *(("nothing", what) if mine else (what, "nothing")))
            return
        with Reader() as left, Reader() as right:
            for key in [*mine, *(key for key in other if key not in mine)]:
                if key not in other:
                    self.fault(key, "nothing", _described(mine[key]))
                elif key not in mine:
                    self.fault(key, _described(other[key]), "nothing")
                elif isinstance(mine[key], TensorRecord) and isinstance(other[key], TensorRecord):
                    self._tensors(key, mine[key], left, other[key], right)
                    left.parts.clear()  # notes of what was read, which nobody asks for
                    right.parts.clear()
                elif not self._are_equal(mine[key], other[key]):
                    self.fault(key, _described(other[key]), _described(mine[key]))

    def _tensors(self, key: _Key, mine: TensorRecord, left: Reader, other: TensorRecord, right: Reader) -> None:
        if mine.dtype != other.dtype or mine.shape != other.shape:
            self.fault(key, _described(other), _described(mine))
        if mine.shape != other.shape:
            return
        total = _Distance()
        try:
            for box in mine.box.pieces(max(1, _BLOCK_BYTES // max(mine.dtype.itemsize, 1))):
                a, b = self._buffer(0, mine.dtype, box.sizes), self._buffer(1, other.dtype, box.sizes)
                left.read(mine, box, a)
                right.read(other, box, b)
                total.add(a, b, self.rtol, self.atol)
                self.advance(a.nbytes + b.nbytes)
        except CheckpointError as error:
            self.fault(key, "a readable tensor in both", str(error))
            return
        if total.num_different:
            largest = "" if total.largest is None else f"; the largest absolute difference is {total.largest:.6g}"
            self.fault(key, "equal values", f"{total.num_different} of {mine.numel} elements differ{largest}")

    def _buffer(self, side: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor of this shape, in memory that is used again and again."""
        numel = math.prod(sizes)
        buffer = self._buffers.get((side, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[side, dtype] = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(sizes)

    def _are_equal(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, float | int) and isinstance(other, float | int):
            if mine == other or (mine != mine and other != other):
                return True
            return bool(abs(mine - other) <= self.atol + self.rtol * abs(other))
        if hasattr(mine, "dtype") and hasattr(other, "dtype"):  # NumPy's
            return _are_equal_arrays(mine, other, self.rtol, self.atol)
        return type(mine) is type(other) and bool(mine == other)


@dataclass(slots=True)
class _Distance:
    """How far two tensors are apart, block by block.

    Attributes:
        largest: Absolute difference of the elements that differ; None where there is none, or no number says it.
    """

    num_different: int = 0
    largest: float | None = None

    def add(self, a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
        a, b = _differing(a, b)
        if not a.numel():
            return
        wide_a, wide_b = _widened(a), _widened(b)
        if wide_a is None or wide_b is None:
            self.num_different += a.numel()
            return
        distance = (wide_a - wide_b).abs()
        if rtol or atol or a.dtype != b.dtype:
            distance = distance[~torch.isclose(wide_a, wide_b, rtol=rtol, atol=atol, equal_nan=True)]
        self.num_different += distance.numel()
        if distance.numel():
            # Between infinities, and from a NaN, the distance is not a number; it counts as the largest.
            largest = float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())
            self.largest = largest if self.largest is None else max(self.largest, largest)


def _differing(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements that differ in their bits; all of them where the dtypes differ."""
    if a.dtype != b.dtype:
        return a.reshape(-1), b.reshape(-1)
    # As integers: comparing and indexing is not implemented for every dtype.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.element_size(), torch.int64)
    width = max(1, a.element_size() // 8)
    rows = [side.reshape(-1).view(bits).view(-1, width) for side in (a, b)]
    differs = (rows[0] != rows[1]).any(dim=1)
    first, second = (side[differs].reshape(-1).view(a.dtype) for side in rows)
    return first, second


def _widened(values: torch.Tensor) -> torch.Tensor | None:
    """In double precision; None for a dtype that holds no numbers."""
    try:
        return values.to(torch.complex128 if values.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _are_equal_arrays(mine: Any, other: Any, rtol: float, atol: float) -> bool:
    import numpy

    if mine.dtype != other.dtype or numpy.shape(mine) != numpy.shape(other):
        return False
    if mine.tobytes() == other.tobytes():
        return True
    is_number = mine.dtype.kind in "biufc"
    return (
        bool(is_number and numpy.allclose(mine, other, rtol=rtol, atol=atol, equal_nan=True)) if rtol or atol else False
    )


def _described(value: Any) -> str:
    if isinstance(value, TensorRecord):
        return f"{value.dtype} of shape {value.shape}"
    return short(value)


def _tensors_below(part: EntryPath, inventory: CheckpointInventory) -> CheckpointInventory:
    tensors = {path: record for path, record in inventory.tensors.items() if path[: len(part)] == part}
    return inventory.replaced(tensors=tensors, objects={})


def _without_prefix(prefix: str, inventory: CheckpointInventory) -> CheckpointInventory:
    def renamed(path: EntryPath) -> EntryPath:
        return (*MODEL, str(path[2]).removeprefix(prefix), *path[3:]) if path[:2] == MODEL and len(path) > 2 else path

    return inventory.replaced(tensors={renamed(path): record for path, record in inventory.tensors.items()})


def _without(inventory: CheckpointInventory, prefix: tuple[str | int, ...]) -> CheckpointInventory:
    length = len(prefix)
    return inventory.replaced(
        tensors={path: record for path, record in inventory.tensors.items() if path[:length] != prefix},
        objects={path: entry for path, entry in inventory.objects.items() if path[:length] != prefix},
    )
