"""Compare two checkpoints of any layouts, entry by entry.

Layouts divide a state dict differently: torch 2.4 makes an entry of every leaf, torch 2.3 one of ``state.callbacks``,
and a monolithic file has one pickle. Both sides are therefore flattened to their leaves first, which drops empty dicts
and lists.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
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
# Sections in the order of a report.
_TRAINED = (tuple(map(str, MODEL)), tuple(map(str, OPTIMIZERS)))


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Compares ``found`` with ``expected``. ``run`` executes it.

    Tensors are read a few MiB at a time and compared bit for bit, or within ``atol + rtol * abs(expected)``.

    Args:
        advance: Called with the number of bytes read since the previous call.
    Attributes:
        faults: The differences, those of weights and optimizers first.
        bookkeeping: Differences that two equal runs have: times, paths and names of runs.
        notes: Entries that were not compared, as text.
    """

    found: CheckpointInventory
    expected: CheckpointInventory
    rtol: float = 0.0
    atol: float = 0.0
    advance: Callable[[int], None] = lambda num_bytes: None
    faults: list[Fault] = field(default_factory=list)
    bookkeeping: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _buffers: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def run(self) -> None:
        """Execute the comparison. Raises CheckpointError if an entry that is not a tensor requires trust."""
        mine, other = map(self._leaves, self._comparable())
        sections = dict.fromkeys(map(_section, (*mine, *other)))
        for section in sorted(sections, key=lambda each: _TRAINED.index(each) if each in _TRAINED else len(_TRAINED)):
            sides = [{key: value for key, value in side.items() if _section(key) == section} for side in (mine, other)]
            if all(sides):
                self._compare(*sides)
            else:
                counts = [f"{len(side)} entries" if side else "nothing" for side in sides]
                self._differ(section, counts[1], counts[0])

    def _differ(self, key: _Key, expected: str, found: str) -> None:
        name = ".".join(key)
        (self.bookkeeping if _is_bookkeeping(key) else self.faults).append(
            Fault(kind=FaultKind.DIFFERENCE, file=self.found.path, name=name, expected=expected, found=found)
        )

    def _comparable(self) -> list[CheckpointInventory]:
        """Both, without what cannot be matched."""
        pair = [self.found, self.expected]
        parts = {each.holds_only: each.layout for each in pair if each.holds_only is not None}
        for part, layout in parts.items():
            self.notes.append(f"everything but the tensors of {dotted(part)}: {layout} has no place for anything else")
            pair = [_filtered(each, part, keeps=True).replaced(objects={}) for each in pair]
        # Optimizer state keyed by position and by FQN cannot be matched without the model.
        kinds = [{o.name: o.keyed_by for o in inventory.optimizers if o.state} for inventory in pair]
        for name in kinds[0].keys() & kinds[1].keys():
            if kinds[0][name] != kinds[1][name]:
                expected, found = f"state by {kinds[1][name]}", f"state by {kinds[0][name]}"
                self._differ((*map(str, OPTIMIZERS), name), expected, f"{found}, not comparable without the model")
                pair = [_filtered(each, (*OPTIMIZERS, name), keeps=False) for each in pair]
        # A layout's names may be those of a submodule of Composer's model.
        prefix = pair[0].name_prefix or pair[1].name_prefix
        if prefix and not pair[0].model.keys() & pair[1].model.keys():
            pair = [_without_prefix(prefix, each) for each in pair]
        return pair

    def _leaves(self, inventory: CheckpointInventory) -> dict[_Key, Any]:
        """All leaves. Tensors are TensorRecords. List indices and parameter positions are text, as in DCP's keys."""
        found: dict[_Key, Any] = {}

        def add(key: _Key, value: Any) -> None:
            if key in found:
                self._differ(key, "one entry", f"two in {inventory.path}, whose names differ by wrappers alone")
            found[key] = value

        for path, record in inventory.tensors.items():
            add(_key(path), record)
        for path, entry in inventory.objects.items():
            for below, value in leaves(entry.value(), parts=_children):
                key = (*_key(path), *map(str, below))
                is_name = key[:2] == OPTIMIZERS and key[3:4] == ("param_groups",) and isinstance(value, str)
                add(key, canonical(value) if is_name else value)
        return found

    def _compare(self, mine: Mapping[_Key, Any], other: Mapping[_Key, Any]) -> None:
        """One section that both have."""
        with Reader() as left, Reader() as right:
            for key in dict.fromkeys((*mine, *other)):
                if key not in other or key not in mine:
                    texts = [_described(side[key]) if key in side else "nothing" for side in (other, mine)]
                    self._differ(key, *texts)
                elif isinstance(mine[key], TensorRecord) and isinstance(other[key], TensorRecord):
                    self._compare_tensors(key, mine[key], left, other[key], right)
                elif not self._are_equal(mine[key], other[key]):
                    self._differ(key, _described(other[key]), _described(mine[key]))

    def _compare_tensors(self, key: _Key, mine: TensorRecord, left: Reader, other: TensorRecord, right: Reader) -> None:
        if mine.dtype != other.dtype or mine.shape != other.shape:
            self._differ(key, _described(other), _described(mine))
        if mine.shape != other.shape:
            return
        num_different, largest = 0, -1.0
        try:
            for box in mine.box.pieces(_BLOCK_BYTES // mine.dtype.itemsize):
                a, b = self._buffer(0, mine.dtype, box.sizes), self._buffer(1, other.dtype, box.sizes)
                left.read(mine, box, a)
                right.read(other, box, b)
                distances = _distances(a, b, self.rtol, self.atol)
                if distances.numel():
                    num_different, largest = num_different + distances.numel(), max(largest, float(distances.max()))
                self.advance(a.nbytes + b.nbytes)
        except CheckpointError as error:
            self._differ(key, "a readable tensor in both", str(error))
            return
        finally:
            left.parts.clear()  # ranges that were read, which are not needed
            right.parts.clear()
        if num_different:
            farthest = f"; the largest absolute difference is {largest:.6g}" if largest >= 0 else ""
            self._differ(key, "equal values", f"{num_different} of {mine.numel} elements differ{farthest}")

    def _buffer(self, side: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor of this shape in reused memory."""
        numel = math.prod(sizes)
        buffer = self._buffers.get((side, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[side, dtype] = torch.empty(numel, dtype=dtype)
        return buffer[:numel].view(sizes)

    def _are_equal(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, float | int) and isinstance(other, float | int):
            if mine == other or (mine != mine and other != other):
                return True
            with contextlib.suppress(OverflowError):  # an int that a float cannot represent
                return bool(abs(mine - other) <= self.atol + self.rtol * abs(other))
            return False
        if hasattr(mine, "dtype") and hasattr(other, "dtype"):  # NumPy's
            return _are_equal_arrays(mine, other, self.rtol, self.atol)
        return type(mine) is type(other) and bool(mine == other)


def _children(value: Any) -> Parts:
    """The children of a value, including those of an object that a pickle would create."""
    if isinstance(value, InertObject):
        return {"class": str(value.kind), "args": value.args, "state": value.state}.items()
    return enumerate(value) if isinstance(value, collections.deque) else parts_of(value)


def _key(path: Iterable[str | int]) -> _Key:
    """A path with the canonical names of parameters, without wrappers' prefixes."""
    parts = tuple(map(str, path))
    if parts[:2] == MODEL and len(parts) > 2:
        return (*parts[:2], canonical(".".join(parts[2:])))
    if parts[:2] == OPTIMIZERS and parts[3:4] == ("state",) and len(parts) > 4:
        return (*parts[:4], canonical(parts[4]), *parts[5:])
    return parts


def _is_bookkeeping(key: _Key) -> bool:
    """Whether equal runs have different values here: wall-clock times, paths, names of runs, the machine."""
    return (
        key[:2] in (("state", "run_name"), ("state", "metadata"))
        or key[-1].endswith("_wct")
        or key[:3] == ("state", "callbacks", "CheckpointSaver")
    )


def _section(key: _Key) -> _Key:
    """``('state', 'model')``, ``('rng',)`` and so on."""
    return key[:2] if key[0] == "state" else key[:1]


def _distances(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """The absolute differences of the elements that differ; -1 for a dtype without subtraction."""
    a, b = a.reshape(-1), b.reshape(-1)
    is_exact = a.dtype == b.dtype and not rtol and not atol
    if a.dtype == b.dtype:
        # As integers: comparing and indexing is not implemented for every dtype.
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.element_size(), torch.int64)
        rows = [side.view(bits).view(-1, max(1, a.element_size() // 8)) for side in (a, b)]
        differs = (rows[0] != rows[1]).any(dim=1)
        a, b = (side[differs].reshape(-1).view(a.dtype) for side in rows)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    try:
        a, b = a.to(wide), b.to(wide)
    except (RuntimeError, NotImplementedError):
        return torch.full((a.numel(),), -1.0)
    distances = (a - b).abs()
    if not is_exact:
        distances = distances[~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)]
    # The distance between infinities, or from NaN, is NaN. It counts as the largest.
    return distances.nan_to_num(nan=math.inf, posinf=math.inf)


def _are_equal_arrays(mine: Any, other: Any, rtol: float, atol: float) -> bool:
    import numpy

    if mine.dtype != other.dtype or numpy.shape(mine) != numpy.shape(other):
        return False
    is_close = (rtol or atol) and mine.dtype.kind in "biufc"
    return bool(
        mine.tobytes() == other.tobytes()
        or (is_close and numpy.allclose(mine, other, rtol=rtol, atol=atol, equal_nan=True))
    )


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, TensorRecord) else short(value)


def _filtered(inventory: CheckpointInventory, prefix: EntryPath, *, keeps: bool) -> CheckpointInventory:
    """Return the inventory with only the entries below a path, or only the others."""

    def filtered(entries: Mapping[EntryPath, Any]) -> dict[EntryPath, Any]:
        return {path: entry for path, entry in entries.items() if (path[: len(prefix)] == prefix) == keeps}

    return inventory.replaced(tensors=filtered(inventory.tensors), objects=filtered(inventory.objects))


def _without_prefix(prefix: str, inventory: CheckpointInventory) -> CheckpointInventory:
    def renamed(path: EntryPath) -> EntryPath:
        return (*MODEL, str(path[2]).removeprefix(prefix), *path[3:]) if path[:2] == MODEL and len(path) > 2 else path

    return inventory.replaced(tensors={renamed(path): record for path, record in inventory.tensors.items()})
