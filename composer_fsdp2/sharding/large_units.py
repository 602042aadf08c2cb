"""A note if the largest unit of a plan contains layers that could be separate units."""

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from composer_fsdp2.sharding.classes import own_names
from composer_fsdp2.sharding.plan import ShardingPlan


def notes_on_large_units(model: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    """Yield a note if one unit has more than half of the parameters, most of them in repeated layers.

    Such a plan works, but a step all-gathers the whole unit at once. Only reads.

    Args:
        plan: The resolved plan of ``model``.
    """
    if plan.mesh.shard_degree <= 1 or not plan.units:
        return
    total = sum(unit.numel for unit in plan.units)
    largest = max(plan.units, key=lambda unit: unit.numel)
    if 2 * largest.numel <= total:
        return
    sizes = {spec.name: spec.numel for spec in largest.parameters}
    name, layers = max(
        _repeated_layers(model, sizes), key=lambda each: sum(map(sizes.__getitem__, each[1])), default=("", [])
    )
    if 2 * sum(map(sizes.__getitem__, layers)) <= total:
        return
    classes = "auto" if name in own_names(model) else f"[{name}]"
    yield (
        f"the largest of {len(plan.units)} units ({largest.name or 'the model'}) holds {largest.numel / total:.0%} of "
        f"the parameters, which are gathered all at once; make each {name} in it a unit: "
        f"wrap_policy: {{transformer_layer_cls_to_wrap: {classes}}}"
    )


def _repeated_layers(model: nn.Module, sizes: dict[str, int]) -> Iterator[tuple[str, list[str]]]:
    """Yield the class of the layers that a ModuleList repeats, and the names of their parameters in ``sizes``."""
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        by_class: dict[str, list[str]] = defaultdict(list)
        counts: dict[str, int] = defaultdict(int)
        for number, layer in layers.named_children():
            name = type(layer).__name__
            of_layer = (f"{path}.{number}.{each}" for each, _ in layer.named_parameters())
            held = [each for each in of_layer if each.removeprefix(".") in sizes]
            by_class[name] += held
            counts[name] += bool(held)
        yield from ((name, names) for name, names in by_class.items() if counts[name] > 1)
