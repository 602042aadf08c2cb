"""Find a model's repeated blocks, and copy the model with only the first few blocks of each kind."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composer_fsdp2.sharding.modules import ancestors_or_self, is_at_or_under
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockList:
    """A container of blocks that run in order, such as an ``nn.ModuleList`` of decoder layers.

    Args:
        path: The path of the container.
        names: The names of all blocks.
        present: The names of the blocks in the shortened copy.
        representatives: Each name in ``names`` -> the name in ``present`` of the block that is traced for it.
    """

    path: str
    names: tuple[str, ...]
    present: tuple[str, ...]
    representatives: Mapping[str, str]

    @property
    def is_short(self) -> bool:
        return len(self.present) < len(self.names)

    def block(self, name: str) -> str:
        return f"{self.path}.{name}"


def find_blocks(model: nn.Module, plan: ShardingPlan, *, num_per_kind: int | None) -> tuple[BlockList, ...]:
    """Find the containers of repeated blocks, and group equal blocks.

    Blocks are equal if they have the same class, the same names, shapes, dtypes and ``requires_grad`` of parameters,
    the same mixed precision and activation checkpointing in the plan, and equal plain attributes. The first
    ``num_per_kind`` blocks of each group represent the group. With None, every block represents itself.
    """
    settings, frozen = _settings_below(plan), frozenset(plan.frozen)
    found: list[BlockList] = []
    for path, module in _lists_of(model):
        children = [(name, child) for name, child in module.named_children()]
        switches = _switches([child for _, child in children])
        kinds: dict[object, list[str]] = {}
        for (name, child), switch in zip(children, switches, strict=True):
            kind = _kind(child, f"{path}.{name}", frozen)
            kinds.setdefault((kind, switch, settings.get(f"{path}.{name}", ())), []).append(name)
        pairs = (pair for alike in kinds.values() for pair in _representatives(alike, num_per_kind))
        names = tuple(name for name, _ in children)
        first = {name for alike in kinds.values() for name in alike[:num_per_kind]}
        present = tuple(name for name in names if name in first)
        found.append(BlockList(path=path, names=names, present=present, representatives=dict(pairs)))
    return tuple(found)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _lists_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost containers with two children of one class. Without any, return the outermost lists."""
    repeating: list[tuple[str, nn.Module]] = []
    others: list[tuple[str, nn.Module]] = []
    waiting, seen = [("", model)], set()
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        classes = [type(child) for child in module.children()]
        if path and isinstance(module, _CONTAINERS) and len(set(classes)) < len(classes):
            repeating.append((path, module))
            continue
        if path and isinstance(module, nn.ModuleList) and not any(is_at_or_under(path, each) for each, _ in others):
            others.append((path, module))
        waiting += [
            (f"{path}.{name}" if path else name, child) for name, child in reversed(list(module.named_children()))
        ]
    return repeating or others


def _representatives(alike: Sequence[str], num_per_kind: int | None) -> Iterator[tuple[str, str]]:
    """Yield each block with its representative among the first ``num_per_kind``.

    The last representative stands for the last block, and the one before it for the blocks in between, because the
    input of the first block and the output of the last one differ from those of other blocks.
    """
    present = alike[:num_per_kind]
    between = present[-2] if len(present) > 1 else present[0]
    for place, name in enumerate(alike):
        if name == alike[-1]:
            yield name, present[-1]
        else:
            yield name, present[place] if place < len(present) - 1 else between


def _kind(block: nn.Module, path: str, frozen: frozenset[str]) -> object:
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad and f"{path}.{name}" not in frozen)
        for name, parameter in block.named_parameters(remove_duplicate=False)
    )
    return type(block), parameters


def _switches(blocks: Sequence[nn.Module]) -> list[frozenset[tuple[str, str, object]]]:
    """Return the plain attributes of each block's modules, by which blocks are compared.

    These are strings, integers, and whether a float is nonzero (such as a dropout rate).

    An integer that increases by one per block is a layer index, and is ignored.
    """
    found = [dict(_plain_attributes(block)) for block in blocks]
    places = {
        key
        for key, value in (found[0].items() if len(found) > 1 else ())
        if type(value) is int and all(each.get(key) == value + number for number, each in enumerate(found))
    }
    return [frozenset((*key, value) for key, value in each.items() if key not in places) for each in found]


def _plain_attributes(block: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if name[0] != "_" and isinstance(value, bool | int | str | float):
                yield (path, name), bool(value) if isinstance(value, float) else value


def _settings_below(plan: ShardingPlan) -> dict[str, tuple[object, ...]]:
    """Map each module path to the plan's settings at and below it: mixed precision of units, and recomputed modules.

    Paths in the settings are relative to the module, so settings of equal blocks are equal.
    """
    found: dict[str, list[object]] = {}
    units = [(path, unit.mixed_precision) for unit in plan.units for path in unit.modules]
    for path, what in (*units, *((path, "recomputed") for path in plan.checkpointed)):
        for above in ancestors_or_self(path):
            found.setdefault(above, []).append((path.removeprefix(above), what))
    return {path: tuple(each) for path, each in found.items()}


def copy_with(
    model: nn.Module, lists: tuple[BlockList, ...], replacement: Callable[[str, torch.Tensor], torch.Tensor]
) -> nn.Module:
    """Copy ``model`` with only the ``present`` blocks, and replace all tensors. Tied parameters remain tied.

    ``replacement`` is called with the name and each tensor, and returns the copy's tensor. ``model`` is unchanged on
    return.
    """
    with _shortened(model, lists):
        tensors = {id(tensor): (name, tensor) for name, tensor in _tensors_in(model)}
        memo: dict[int, object] = {key: replacement(name, tensor) for key, (name, tensor) in tensors.items()}
        return copy.deepcopy(model, memo)


def _tensors_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes of modules."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


@contextlib.contextmanager
def _shortened(model: nn.Module, lists: tuple[BlockList, ...]) -> Iterator[None]:
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    for each in lists:
        module = model.get_submodule(each.path)
        before.append((module, dict(module._modules)))
        for name in set(each.names) - set(each.present):
            del module._modules[name]
    try:
        yield
    finally:
        for module, children in before:
            module._modules.clear()
            module._modules.update(children)
