"""Split the modules of a unit over the ranks of a tensor axis, just before the unit is sharded.

[Note: split parameters] torch's styles put new parameters where the old ones stood. What was noted on the old ones is
carried over: whether they are trained (torch 2.7 trains what was frozen), attributes, and ties, of which each side
gets a parameter of its own, without an error.
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
    """Carry out the styles of a unit's modules, whose values are full.

    Args:
        unit: As planned.
        modules: Those of the whole model, by every path.
        styles: Of the modules that the unit holds.
        mesh: The tensor axis, if there is one.
        same: Those of the modules whose values are known to be equal on all ranks that split them.

    Called on all ranks; rank 0 of each group along the tensor axis sends the others their parts of all but ``same``.
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
    """Carry out one style, and keep what was noted on the parameters ([Note: split parameters]).

    Args:
        source: The rank along ``mesh`` that sends the values; None where every rank has them.
    """
    before = own_parameters(module)
    parallelize_module(module, mesh, style, src_data_rank=source)
    for name, old in before:
        new: nn.Parameter = getattr(module, name)
        if new is not old:
            new.requires_grad_(old.requires_grad)
            vars(new).update(vars(old))


def retie_parameters(modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> None:
    """Have one parameter under all of its names, the first one's ([Note: split parameters]).

    The plan knows that all of its sides are placed alike.
    """
    (first, attribute), *others = ((modules[path], name) for path, _, name in (each.rpartition(".") for each in names))
    for module, name in others:
        setattr(module, name, getattr(first, attribute))
