"""A sharded model: where ``fully_shard`` was applied, and its parameters' resting state."""

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch.unit_parameters import distinct_units


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


def is_sharded(model: nn.Module) -> bool:
    """Whether some module of ``model`` was sharded by ``fully_shard``."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Free gathered parameters everywhere.

    After a forward without gradients a root keeps its parameters gathered for the next one, though its modules show the
    shards. Whoever writes to shards by other means than an optimizer or a tensor's own operators calls this first; the
    next forward then gathers what was written. Call it between forward passes only; does not communicate.

    Raises:
        PlanError: gradients of gathered parameters were never reduced.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def resharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """``reshard``, and every parameter once, in ``module.parameters()``'s order, in one walk through the modules."""
    modules = list(module.modules())
    for each in modules:
        if isinstance(each, FSDPModule):
            each.reshard()
    # By their identity, which is what their hash is, without a call for each.
    found = {id(parameter): parameter for each in modules for parameter in each._parameters.values()}
    return [parameter for parameter in found.values() if parameter is not None]
