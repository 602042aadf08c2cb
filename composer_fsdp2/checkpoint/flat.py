"""Split FSDP1's flat parameters (``state_dict_type: local``) into the parameters of a model.

Such a file has one vector for each wrapped module, without names and shapes of its parameters. The vectors' own names
show which modules were wrapped. FSDP1 concatenated a module's parameters in registration order (torch
``_init_flat_param``), without those of nested wrapped modules. A shared parameter is in the vector of each wrapped
module that registers it.
"""

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    FlatRange,
    ObjectRecord,
    TensorRecord,
)
from composer_fsdp2.checkpoint.names import FLAT_PARAMETER, canonical, is_flat_parameter
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.ties import parameter_uses


@dataclass(frozen=True, slots=True)
class _Slice:
    """One parameter in a vector: its first element, and all names under which the wrapped module registers it."""

    start: int
    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its optimizer state."""
        return self.names[0]


_Layout = dict[str, list[_Slice]]  # by the wrapped module's path


def unflattened(inventory: CheckpointInventory, model: nn.Module) -> CheckpointInventory:
    """Return the inventory with the parameters' own names and shapes instead of flat parameters.

    Args:
        model: The model that was saved, sharded or not, on any device. Only names and shapes are read.
    Raises:
        CheckpointError: a wrapped module is not in the model, or does not have as many elements as its vector.

    Does not communicate.
    """
    if not inventory.flat:
        return inventory
    vectors = {name: record for name, record in inventory.model.items() if is_flat_parameter(name)}
    units = {_wrapped_path(name): name for name in vectors}
    layout = _layout(model, units, inventory)
    tensors: dict[EntryPath, TensorRecord] = {}
    for path, record in inventory.tensors.items():
        flat_name = _flat_name(path)
        if flat_name is None:
            tensors[path] = record
            continue
        parts = layout[_wrapped_path(flat_name)]
        is_model = path[:2] == MODEL
        if is_model or record.shape:
            if record.numel != (total := sum(math.prod(part.shape) for part in parts)):
                raise CheckpointError(_differs(inventory, flat_name, record.numel, total))
            own = [_cut(record, part) for part in parts]
        else:  # a step count of the whole vector
            own = [record] * len(parts)
        for part, part_record in zip(parts, own, strict=True):
            if is_model:
                tensors.update({(*MODEL, name): part_record for name in part.names})
            else:
                tensors[(*path[:4], part.name, *path[5:])] = part_record
    return inventory.replaced(tensors=tensors, objects=_objects(inventory, layout), flat=False)


def _wrapped_path(name: str) -> str:
    """The path of the module that FSDP1 wrapped, from its flat parameter's name."""
    return canonical(name.removesuffix(FLAT_PARAMETER)).rstrip(".")


def _cut(vector: TensorRecord, part: _Slice) -> TensorRecord:
    return TensorRecord(
        name=f"{part.name} in {vector.name}", shape=part.shape, dtype=vector.dtype, flat=FlatRange(vector, part.start)
    )


def _objects(inventory: CheckpointInventory, layout: _Layout) -> dict[EntryPath, ObjectRecord]:
    """Replace a vector by its parameters in optimizer entries that are not tensors, and in parameter groups."""
    objects: dict[EntryPath, ObjectRecord] = {}
    for path, record in inventory.objects.items():
        flat_name = _flat_name(path)
        if path[:2] == OPTIMIZERS and path[3:] == ("param_groups",):
            objects[path] = ObjectRecord(
                record.name, functools.partial(_with_names, record, layout), record.num_bytes, record.source
            )
            continue
        if flat_name is None:
            objects[path] = record
            continue
        for part in layout[_wrapped_path(flat_name)]:
            objects[(*path[:4], part.name, *path[5:])] = record
    return objects


def _with_names(record: ObjectRecord, layout: _Layout) -> list[dict[str, Any]]:
    """``param_groups`` with the names of the parameters instead of those of the vectors."""

    def names(key: Any) -> list[Any]:
        path = _wrapped_path(str(key))
        return [part.name for part in layout[path]] if is_flat_parameter(key) and path in layout else [key]

    return [{**group, "params": [n for key in group["params"] for n in names(key)]} for group in record.value()]


def _flat_name(path: EntryPath) -> str | None:
    """The vector to which an entry of the model or of an optimizer's state belongs."""
    if path[:2] == MODEL and len(path) == 3:
        name = str(path[2])
    elif path[:2] == OPTIMIZERS and len(path) > 5 and path[3] == "state":
        name = str(path[4])
    else:
        return None
    return name if is_flat_parameter(name) else None


def _layout(model: nn.Module, units: dict[str, str], inventory: CheckpointInventory) -> _Layout:
    """The location of each parameter in the vectors. ``units`` maps wrapped modules' paths to vectors' names."""
    modules = {
        canonical(f"{path}.").rstrip("."): module for path, module in model.named_modules(remove_duplicate=False)
    }
    unknown = [path for path in units if path not in modules]
    if unknown:
        raise CheckpointError(
            f"{inventory.path}: was saved from flat parameters of {and_more(list(map(repr, unknown)), 8)}, which this "
            f"model does not have; its modules are {and_more(list(modules)[1:], 8) or 'none'}. Build the model that "
            "was saved"
        )
    nested = {modules[path] for path in units}
    all_names = {use.parameter: tuple(map(canonical, use.names)) for use in parameter_uses(model)}
    layout: _Layout = {}
    for path in units:
        start, parts = 0, list[_Slice]()
        seen: set[nn.Parameter] = set()  # in this unit; FSDP1 flattened a shared parameter into each unit
        for name, parameter in _parameters(modules[path], path, nested):
            if parameter not in seen:
                seen.add(parameter)
                others = (other for other in all_names[parameter] if other != name and _unit_of(other, units) == path)
                parts.append(_Slice(start, (name, *others), tuple(parameter.shape)))
                start += parameter.numel()
        record = inventory.model[units[path]]
        assert isinstance(record, TensorRecord)
        if start != record.numel:
            raise CheckpointError(_differs(inventory, units[path], record.numel, start))
        layout[path] = parts
    return layout


def _parameters(module: nn.Module, path: str, nested: set[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that FSDP1 flattened for a wrapped module, in order, without those of nested wrapped modules."""
    for name, parameter in own_parameters(module):
        yield canonical(f"{path}.{name}" if path else name), parameter
    for name, child in module.named_children():
        if child not in nested:
            yield from _parameters(child, f"{path}.{name}" if path else name, nested)


def _unit_of(name: str, units: Collection[str]) -> str | None:
    """The innermost wrapped module around a parameter."""
    within = [path for path in units if not path or name.startswith(f"{path}.")]
    return max(within, key=len, default=None)


def _differs(inventory: CheckpointInventory, name: str, found: int, expected: int) -> str:
    return (
        f"{inventory.path}: {name} holds {found} elements, this model's parameters there {expected}. Build the model "
        "that was saved, with the same fsdp wrapping; a vector that was padded for alignment (use_orig_params=True) "
        "cannot be taken apart"
    )
