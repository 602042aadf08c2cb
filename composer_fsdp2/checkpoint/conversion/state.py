"""The state dict that a conversion writes: which entries of a checkpoint, under which names, of which dtype."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.conversion.optimizer_order import names_of_positions
from composer_fsdp2.checkpoint.formats._composer import mapped
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    EntryPath,
    ObjectRecord,
    OptimizerContents,
    TensorRecord,
    as_tree,
    dotted,
)
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.pickles.values import contains_built
from composer_fsdp2.checkpoint.same_bytes import are_one_storage
from composer_fsdp2.checkpoint.storage.archive_writer import Slot
from composer_fsdp2.errors import CheckpointError

__all__ = ["ConversionState", "state_to_write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionState:
    """What is to be written.

    Args:
        state: ``{'state': {...}, 'rng': [...]}`` with a ``Slot`` for each tensor, its ``TensorRecord`` as the source.
        renamed: Parameters: from the name in the file.
        dropped: What the source has and the destination will not, as keys (``state.optimizers.Adam`` for all below).
    """

    state: dict[str, Any]
    renamed: dict[str, str]
    dropped: tuple[str, ...]

    @property
    def model(self) -> dict[str, Any]:
        """The model's entries; Slots but for extra state."""
        found: dict[str, Any] = self.state.get("state", {}).get("model", {})
        return found


def state_to_write(
    inventory: CheckpointInventory,
    *,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
    include: Sequence[str] | None = None,
    named_optimizer: bool = False,
    model: nn.Module | None = None,
    prefix: str = "",
) -> ConversionState:
    """Choose and name the entries.

    Args:
        optimizer: Keep the optimizers' states and hyperparameters.
        dtype: For the model's floating-point tensors; optimizer states keep theirs, which their precision is for.
        include: Patterns (as a shell's) for names in the model; the optimizer state of the others goes, too.
        named_optimizer: Optimizer states that are keyed by position get their parameters' names.
        model: To tell parameters from buffers where positions become names.
        prefix: Before every name in the model.
    Raises:
        CheckpointError: a pattern matches nothing, names clash, or positions cannot become names.
    """
    names = _names(inventory, prefix)
    kept = {name for name in names if include is None or any(fnmatchcase(names[name], p) for p in include)}
    _check_patterns(inventory, names, include)
    dropped = [dotted((*MODEL, name)) for name in names if name not in kept]
    leaves: dict[EntryPath, Any] = {}
    weights: dict[str, dict[EntryPath, Any]] = {}
    for path, record in _entries(inventory):
        if path[:2] == OPTIMIZERS:
            continue
        if path[:2] == MODEL and len(path) > 2:
            if str(path[2]) in kept:
                weights.setdefault(names[str(path[2])], {})[path[3:]] = _value(record)
        else:
            leaves[path] = _value(record)
    shared: dict[Any, list[Slot]] = {}
    state = _with_slots(as_tree(leaves) if leaves else {}, inventory)
    below = state.setdefault("state", {})
    below["model"] = {
        name: _with_slots(as_tree(parts), inventory, dtype=dtype, shared=shared) for name, parts in weights.items()
    }
    optimizers: dict[str, Any] = {}
    for contents in inventory.optimizers:
        if not optimizer:
            dropped.append(dotted((*OPTIMIZERS, contents.name)))
            continue
        renaming = _Renaming(inventory, contents, names, kept, dropped, named_optimizer or include is not None, model)
        optimizers[contents.name] = _with_slots(renaming.optimizer(), inventory)
    if optimizers:
        below["optimizers"] = optimizers
    renamed = {name: new for name, new in names.items() if new != name and name in kept}
    return ConversionState(state=state, renamed=renamed, dropped=tuple(dropped))


def _names(inventory: CheckpointInventory, prefix: str) -> dict[str, str]:
    """From each name in the model to the one to write: without what wrappers put into it."""
    paths = (*inventory.tensors, *inventory.objects)
    names = {str(path[2]): prefix + canonical(str(path[2])) for path in paths if path[:2] == MODEL and len(path) > 2}
    first: dict[str, str] = {}
    for name, new in names.items():
        if first.setdefault(new, name) != name:
            raise CheckpointError(f"{inventory.path}: {first[new]} and {name} would both become {new}")
    return names


def _check_patterns(inventory: CheckpointInventory, names: Mapping[str, str], include: Sequence[str] | None) -> None:
    idle = [pattern for pattern in include or () if not any(fnmatchcase(name, pattern) for name in names.values())]
    if idle:
        raise CheckpointError(
            f"{inventory.path}: no tensor of the model matches {', '.join(idle)}; its names are like "
            f"{', '.join(list(names.values())[:5])}"
        )
    if include is not None and not include:
        raise CheckpointError("include is an empty list; leave it out to keep everything")


def _entries(inventory: CheckpointInventory) -> Iterator[tuple[EntryPath, TensorRecord | ObjectRecord]]:
    yield from inventory.tensors.items()
    yield from inventory.objects.items()


def _value(record: TensorRecord | ObjectRecord) -> Any:
    return record if isinstance(record, TensorRecord) else record.value()


def _with_slots(
    value: Any,
    inventory: CheckpointInventory,
    *,
    dtype: torch.dtype | None = None,
    shared: dict[Any, list[Slot]] | None = None,
) -> Any:
    """Slots in place of ``TensorRecord``s; with ``shared``, one for those that are the same bytes (tied weights)."""

    def leaf(part: Any, path: EntryPath) -> Any:
        if not isinstance(part, TensorRecord):
            if contains_built(part):
                raise CheckpointError(
                    f"{inventory.path}: holds {part}, which is no plain data, so it cannot be written"
                )
            return part
        written = dtype if dtype is not None and part.dtype.is_floating_point else part.dtype
        slot = Slot(part.shape, written, part)
        if shared is None:
            return slot
        alike = shared.setdefault((part.shape, part.dtype), [])
        one = next((other for other in alike if are_one_storage(part, other.source)), None)
        if one is None:
            alike.append(slot)
        return one or slot

    return mapped(value, leaf)


class _Renaming:
    """One optimizer's entries under the names to write, without the parameters that are left out."""

    def __init__(
        self,
        inventory: CheckpointInventory,
        contents: OptimizerContents,
        names: Mapping[str, str],
        kept: set[str],
        dropped: list[str],
        needs_names: bool,
        model: nn.Module | None,
    ) -> None:
        self.inventory, self.contents, self.names, self.kept, self.dropped = inventory, contents, names, kept, dropped
        self.positions: Mapping[int, str] | None = None
        if needs_names and contents.keyed_by == "id":
            self.positions = names_of_positions(inventory, contents, model)

    def optimizer(self) -> dict[str, Any]:
        path = (*OPTIMIZERS, self.contents.name)
        state: dict[str | int, dict[EntryPath, Any]] = {}
        rest: dict[EntryPath, Any] = {}
        for where, record in _entries(self.inventory):
            if where[:3] != path:
                continue
            if where[3:4] == ("state",):
                if len(where) > 4:
                    state.setdefault(where[4], {})[where[5:]] = _value(record)
            else:
                rest[where[3:]] = _value(record)
        whole: dict[str, Any] = {"state": self.of_parameters(state)}
        others = as_tree(rest) if rest else {}
        if isinstance(groups := others.get("param_groups"), list):
            others["param_groups"] = [self.group(group) for group in groups]
        return {**whole, **others}

    def of_parameters(self, state: Mapping[str | int, dict[EntryPath, Any]]) -> dict[str | int, Any]:
        found: dict[str | int, Any] = {}
        for key, parts in state.items():
            name = self.name(key)
            if name is None:
                self.dropped.append(dotted((*OPTIMIZERS, self.contents.name, "state", key)))
            else:
                found[name] = as_tree(parts)
        return found

    def group(self, group: Any) -> Any:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return group
        names = (self.name(key) for key in group["params"])
        return {**group, "params": [name for name in names if name is not None]}

    def name(self, key: str | int) -> str | int | None:
        """The parameter's name (its position, where positions stay); None if it is left out."""
        name = self.positions[key] if self.positions is not None and isinstance(key, int) else key
        if not isinstance(name, str):
            return name
        if name in self.names:
            return self.names[name] if name in self.kept else None
        return canonical(name)
