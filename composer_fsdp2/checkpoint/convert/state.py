"""The state dict that a conversion writes: the selected entries of a checkpoint, their new names and dtypes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.archive.writer import Slot
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    OptimizerContents,
    TensorRecord,
    tree_of,
)
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.pickles.stand_ins import contains_inert
from composer_fsdp2.checkpoint.same_bytes import SameBytes, storage_key
from composer_fsdp2.checkpoint.trees import EntryPath, dotted, mapped
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionState:
    """The state dict to write.

    Args:
        state: ``{'state': {...}, 'rng': [...]}`` with a ``Slot`` for each tensor, whose source is the ``TensorRecord``.
        renamed: The new names of parameters by their names in the source.
        dropped: Keys of the source that are not converted (``state.optimizers.Adam`` includes all keys below it).
    """

    state: dict[str, Any]
    renamed: dict[str, str]
    dropped: tuple[str, ...]


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
    """Select and rename the entries.

    Args:
        optimizer: Whether to convert the optimizers' states and hyperparameters.
        dtype: The dtype of the model's floating-point tensors. Optimizer states keep their dtypes, whose precision they
            need.
        include: Shell patterns for names in the model. Other parameters and their optimizer state are not converted.
        named_optimizer: Replace the positions by which optimizer states are keyed by the parameters' names.
        model: Distinguishes parameters from buffers if positions are replaced by names.
        prefix: A prefix for every name in the model.
    Raises:
        CheckpointError: a pattern matches no name, names clash, or positions cannot be replaced by names.

    Does not communicate.
    """
    names = _names(inventory, prefix)
    _check_patterns(inventory, names, include)
    kept = {name: new for name, new in names.items() if include is None or any(fnmatchcase(new, p) for p in include)}
    dropped = [dotted((*MODEL, name)) for name in names if name not in kept]
    rest = {path: record for path, record in inventory.entries.items() if path[:2] not in (MODEL, OPTIMIZERS)}
    state = _with_slots(tree_of(rest) or {}, inventory)
    below = state.setdefault("state", {})
    below["model"] = _model(inventory, kept, dtype)
    for contents in inventory.optimizers:
        if not optimizer:
            dropped.append(dotted((*OPTIMIZERS, contents.name)))
            continue
        needs_names = contents.keyed_by == "id" and (named_optimizer or include is not None)
        positions = names_of_positions(inventory, contents, model) if needs_names else {}
        found, dropped_keys = _optimizer(inventory, contents.name, _renaming(names, kept, positions))
        below.setdefault("optimizers", {})[contents.name] = found
        dropped += dropped_keys
    renamed = {name: new for name, new in kept.items() if new != name}
    return ConversionState(state=state, renamed=renamed, dropped=tuple(dropped))


def _names(inventory: CheckpointInventory, prefix: str) -> dict[str, str]:
    """The new name of each entry of the model: without wrappers' prefixes, and with ``prefix``."""
    paths = inventory.entries
    names = {str(path[2]): prefix + canonical(str(path[2])) for path in paths if path[:2] == MODEL and len(path) > 2}
    first: dict[str, str] = {}
    for name, new in names.items():
        if first.setdefault(new, name) != name:
            raise CheckpointError(f"{inventory.path}: {first[new]} and {name} would both become {new}")
    return names


def _check_patterns(inventory: CheckpointInventory, names: Mapping[str, str], include: Sequence[str] | None) -> None:
    unmatched = [pattern for pattern in include or () if not any(fnmatchcase(name, pattern) for name in names.values())]
    if unmatched:
        raise CheckpointError(
            f"{inventory.path}: no tensor of the model matches {', '.join(unmatched)}; its names are like "
            f"{and_more(list(names.values()), 5)}"
        )
    if include is not None and not include:
        raise CheckpointError("include is an empty list; leave it out to keep everything")


def _model(inventory: CheckpointInventory, kept: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, Any]:
    """The model's entries to write, under their new names."""
    shared: dict[Hashable, Slot] = {}
    return {
        kept[str(name)]: _with_slots(tree_of(entries), inventory, dtype=dtype, shared=shared)
        for name, entries in _by_key(inventory, MODEL).items()
        if str(name) in kept
    }


def _by_key(inventory: CheckpointInventory, prefix: EntryPath) -> dict[str | int, dict[EntryPath, Any]]:
    """Group the entries below a path by the next key."""
    length = len(prefix)
    found: dict[str | int, dict[EntryPath, Any]] = {}
    for path, record in inventory.entries.items():
        if path[:length] == prefix and len(path) > length:
            found.setdefault(path[length], {})[path[length + 1 :]] = record
    return found


def _with_slots(
    value: Any,
    inventory: CheckpointInventory,
    *,
    dtype: torch.dtype | None = None,
    shared: dict[Hashable, Slot] | None = None,
) -> Any:
    """Replace the ``TensorRecord``s in a value by slots. With ``shared``, tied weights share a slot."""

    def leaf(part: Any, path: EntryPath) -> Any:
        if not isinstance(part, TensorRecord):
            if contains_inert(part):
                raise CheckpointError(
                    f"{inventory.path}: holds {part}, which is not plain data, so it cannot be written"
                )
            return part
        written = dtype if dtype is not None and part.dtype.is_floating_point else part.dtype
        slot = Slot(part.shape, written, part)
        return slot if shared is None else shared.setdefault(storage_key(part), slot)

    return mapped(value, leaf)


_Rename = Callable[[str | int], str | int | None]


def _renaming(names: Mapping[str, str], kept: Mapping[str, str], positions: Mapping[int, str]) -> _Rename:
    """Make a function from a parameter's name or position in an optimizer to its new name; None if it is dropped."""

    def rename(key: str | int) -> str | int | None:
        name = positions.get(key, key) if isinstance(key, int) else key
        if not isinstance(name, str):  # keys in a pickle may have any type
            return name
        return kept.get(name) if name in names else canonical(name)

    return rename


def _optimizer(inventory: CheckpointInventory, name: str, rename: _Rename) -> tuple[Any, list[str]]:
    """The state and hyperparameters of one optimizer, and the keys that are not converted."""
    path = (*OPTIMIZERS, name)
    parameter_states = _by_key(inventory, (*path, "state"))
    names = {key: rename(key) for key in parameter_states}
    state = {new: tree_of(parameter_states[key]) for key, new in names.items() if new is not None}
    others = {key: tree_of(below) for key, below in _by_key(inventory, path).items() if key != "state"}
    if isinstance(groups := others.get("param_groups"), list):
        others["param_groups"] = [_group(group, rename) for group in groups]
    dropped = [dotted((*path, "state", key)) for key, new in names.items() if new is None]
    return _with_slots({"state": state, **others}, inventory), dropped


def _group(group: Any, rename: _Rename) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return group
    return {**group, "params": [name for key in group["params"] if (name := rename(key)) is not None]}


Shape = tuple[int, ...]


def names_of_positions(
    inventory: CheckpointInventory, contents: OptimizerContents, model: nn.Module | None = None
) -> Mapping[int, str]:
    """The name in the file's model for each position in an optimizer.

    The optimizer was built from ``model.parameters()``, which has the order of the state dict. The positions are
    therefore the names in order, without buffers and without second names of tied weights. The shapes must determine
    the match.

    Raises:
        CheckpointError: several parameter groups, which may have been built in any order, or no match, or several
            matches; names an alternative.
    """
    where = f"{inventory.path}: the state of {contents.name} is keyed by position"
    groups = inventory.groups(contents.name)
    positions = [key for group in groups for key in group.get("params", ())] or sorted(map(int, contents.state))
    if len(groups) > 1 and len(set(positions)) > 1:
        raise CheckpointError(
            f"{where} in {len(groups)} groups, so the model's order does not tell whose it is; leave it out "
            "(optimizer=False, --no-optimizer), or load the checkpoint in place into that optimizer (load_checkpoint)"
        )
    candidates = _candidates(inventory, model)
    shapes = [_shape(contents, position) for position in positions]
    found = _unique_matching(shapes, [shape for _, shape in candidates])
    if isinstance(found, str):
        raise CheckpointError(
            f"{where}; {found} to give its {len(positions)} parameters the names of the model's {len(candidates)} "
            f"tensors in their order{'' if model else '; give the model (model=, --model), which tells its buffers'}, "
            "or leave the optimizer out (optimizer=False, --no-optimizer)"
        )
    return {position: candidates[place][0] for position, place in zip(positions, found, strict=True)}


def _candidates(inventory: CheckpointInventory, model: nn.Module | None) -> list[tuple[str, Shape]]:
    """The names that may be parameters of the model, in order."""
    parameters = None if model is None else {canonical(name) for name, _ in model.named_parameters()}
    candidates: list[tuple[str, Shape]] = []
    known = SameBytes[str]()
    for name, record in inventory.model.items():
        if not isinstance(record, TensorRecord) or (parameters is not None and canonical(name) not in parameters):
            continue
        may_be_tied = parameters is None and len(record.shape) > 1
        if not may_be_tied or known.first(record, copies=True) is None:
            candidates.append((name, record.shape))
            known.add(name, record)
    return candidates


def _shape(contents: OptimizerContents, position: int) -> Shape | None:
    """The parameter's shape, from its moments; None without state, or if the state has only step counts."""
    entries = contents.state.get(position, {})
    shapes = [record.shape for record in entries.values() if isinstance(record, TensorRecord) and record.shape]
    if shapes:
        return shapes[0]
    return None


def _unique_matching(shapes: Sequence[Shape | None], candidates: Sequence[Shape]) -> list[int] | str:
    """Match shapes to candidates in order.

    The match is unique if matching each shape to its first possible candidate and to its last gives the same result.

    Returns:
        The indices of the candidates; or a message that there is no match, or more than one.
    """
    first = _first_matching(shapes, candidates)
    if first is None:
        return "there is no way"
    backwards = _first_matching(shapes[::-1], candidates[::-1])
    assert backwards is not None
    is_unique = first == [len(candidates) - 1 - place for place in reversed(backwards)]
    return first if is_unique else "there are several ways"


def _first_matching(shapes: Sequence[Shape | None], candidates: Sequence[Shape]) -> list[int] | None:
    """For each shape, the first candidate of that shape after the previous one; None if not found."""
    places: list[int] = []
    for place, candidate in enumerate(candidates):
        if len(places) < len(shapes) and shapes[len(places)] in (None, candidate):
            places.append(place)
    return places if len(places) == len(shapes) else None
