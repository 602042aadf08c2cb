"""Queries on a sharded model, and resharding of its parameters."""

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch.unit_parameters import distinct_units


class Unit(FSDPModule, nn.Module):
    """An ``FSDPModule`` that is also an ``nn.Module``, as ``fully_shard`` makes it. For type checkers only."""


def sharded_roots(model: nn.Module) -> list[tuple[str, Unit]]:
    """The outermost sharded modules with their paths. The path of the model itself is ''."""
    if isinstance(model, FSDPModule):
        return [("", cast(Unit, model))]
    found: list[tuple[str, Unit]] = []
    for name, child in model.named_children():
        found.extend((f"{name}.{path}".rstrip("."), root) for path, root in sharded_roots(child))
    return found


def units(model: nn.Module) -> dict[str, Unit]:
    """The modules that are units by path; for a unit of several modules, the first one."""
    paths = {module: path for path, module in model.named_modules()}
    return {paths[unit]: unit for unit in cast(list[Unit], distinct_units(paths))}


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to any module of ``model``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Reshard all units: free the unsharded parameters.

    After a forward without gradients a root stays unsharded for the next forward, although its modules register the
    shards. Call this before you write to shards by means other than an optimizer or a tensor's own operators; the next
    forward then all-gathers the new values. Call it between forwards only. Does not communicate.

    Args:
        model: Any module; modules that are not units are skipped.
    Raises:
        PlanError: gradients of unsharded parameters were never reduced.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> reshard(model)
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def resharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Reshard all units and return every parameter once, in the order of ``module.parameters()``."""
    modules = list(module.modules())
    for each in modules:
        if isinstance(each, FSDPModule):
            each.reshard()
    # By id, which is what their hash computes, but without a Python call per parameter.
    found = {id(parameter): parameter for each in modules for parameter in each._parameters.values()}
    return [parameter for parameter in found.values() if parameter is not None]
