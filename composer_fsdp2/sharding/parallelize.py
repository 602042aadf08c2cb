"""TP-shard the modules of a unit, immediately before the unit is sharded.

[Note: TP-sharded parameters] torch's styles replace a module's parameters. We copy over ``requires_grad`` (torch 2.7
sets it for frozen parameters), attributes, and ties, which torch breaks without an error.
"""

from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.sharding.plan import ShardUnit


def parallelize_unit(
    unit: ShardUnit,
    modules: Mapping[str, nn.Module],
    styles: Mapping[nn.Module, ParallelStyle | None],
    mesh: DeviceMesh | None,
    same: Collection[nn.Module],
) -> None:
    """Apply the styles of a unit's modules, whose parameters are full tensors.

    Args:
        unit: The planned unit.
        modules: All modules of the model, by every path.
        styles: The styles of the unit's modules.
        mesh: The tensor axis, or None.
        same: The modules whose values are known to be equal on all TP ranks.

    Called on all ranks. The first rank along the tensor axis sends the others their shards, except for modules in
    ``same``.
    """
    if mesh is None:
        return
    for module, style in styles.items():
        if style is not None:
            parallelize(module, style, mesh, source=None if module in same else 0)
    for spec in unit.parameters:
        if len(spec.names) > 1 and spec.tensor_placement is not None:
            retie_parameters(modules, spec.names)


def parallelize(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh, *, source: int | None = 0) -> None:
    """Apply one style, and preserve the parameters' attributes ([Note: TP-sharded parameters]).

    Args:
        source: The rank along ``mesh`` that sends the values; None if all ranks have them.
    """
    before = own_parameters(module)
    parallelize_module(module, mesh, style, src_data_rank=source)
    for name, old in before:
        new: nn.Parameter = getattr(module, name)
        if new is not old:
            new.requires_grad_(old.requires_grad)
            vars(new).update(vars(old))


def retie_parameters(modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> None:
    """Register the first name's parameter under all ``names`` ([Note: TP-sharded parameters]).

    The plan guarantees that all of them have equal placements.
    """
    (first, attribute), *others = ((modules[path], name) for path, _, name in (each.rpartition(".") for each in names))
    for module, name in others:
        setattr(module, name, getattr(first, attribute))
