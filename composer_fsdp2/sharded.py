"""A sharded model: where ``fully_shard`` was applied, and its parameters' resting state."""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2._torch import distinct_units

__all__ = [
    "Unit",
    "is_sharded",
    "reshard",
    "resting_parameters",
    "sharded_roots",
    "splitting_axes",
    "splitting_axes_of_all",
    "units",
]


class Unit(FSDPModule, nn.Module):
    """What ``fully_shard`` makes of a module, for type checkers alone."""


def sharded_roots(model: nn.Module) -> list[tuple[str, Unit]]:
    """The outermost sharded modules with their paths; the model itself has the path ''."""
    if isinstance(model, FSDPModule):
        return [("", cast(Unit, model))]
    found: list[tuple[str, Unit]] = []
    for name, child in model.named_children():
        found.extend((f"{name}.{path}".rstrip("."), root) for path, root in sharded_roots(child))
    return found


def units(model: nn.Module) -> dict[str, Unit]:
    """Every module that is one unit, or the first of one, by its path."""
    paths = {module: path for path, module in model.named_modules()}
    return {paths[unit]: unit for unit in cast(list[Unit], distinct_units(paths))}


def splitting_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks hold different parts of a tensor; one rank, or replicas, split nothing."""
    if not isinstance(tensor, DTensor):
        return ()
    sizes = tensor.device_mesh.mesh.shape
    return tuple(
        [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard) and sizes[axis] > 1]
    )


def splitting_axes_of_all(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """``splitting_axes`` of each of many, most of which lie as the one before."""
    mesh, placements, axes = None, None, tuple[int, ...]()
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield ()
            continue
        if tensor.device_mesh is not mesh or tensor.placements != placements:
            mesh, placements, axes = tensor.device_mesh, tensor.placements, splitting_axes(tensor)
        yield axes


def is_sharded(model: nn.Module) -> bool:
    """Whether some module of ``model`` was sharded by ``fully_shard``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Free gathered parameters everywhere, so that ``model.parameters()`` are the sharded ones again.

    After a forward without gradients a root keeps its parameters gathered, and ``named_parameters`` and state dicts
    would then show plain tensors. Call it between forward passes only; does not communicate.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def resting_parameters(module: nn.Module) -> list[nn.Parameter]:
    """``reshard``, and every parameter once, in ``module.parameters()``'s order, in one walk through the modules."""
    modules = list(module.modules())
    for each in modules:
        if isinstance(each, FSDPModule):
            each.reshard()
    # By their identity, which is what their hash is, without a call for each.
    found = {id(parameter): parameter for each in modules for parameter in each._parameters.values()}
    return [parameter for parameter in found.values() if parameter is not None]
