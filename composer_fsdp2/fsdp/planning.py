"""Plan one call of FSDP1's constructor: each FSDP instance that the call creates is a unit."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.config.choices import ModelChoices, UnitOverrides
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.fsdp.arguments import outermost
from composer_fsdp2.fsdp.optimizers import sharded_name
from composer_fsdp2.parallel.order import refuse_illegal
from composer_fsdp2.sharding.decide import plan_selected, refuse_cast_gradients
from composer_fsdp2.sharding.materialize import MetaInitializer
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan
from composer_fsdp2.sharding.select import Selection
from composer_fsdp2.sharding.ties import parameter_uses
from composer_fsdp2.sharding.units import UnitDraft, UnitTree

# The configuration fields that a single unit may override.
_OF_UNITS = [each.name for each in fields(UnitOverrides) if each.name in {f.name for f in fields(ShardingConfig)}]


def plan_instances(
    root: nn.Module,
    configs: Mapping[nn.Module, ShardingConfig],
    *,
    sharded: set[nn.Module],
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> ShardingPlan:
    """Plan the units of ``root``, an FSDP instance that is not sharded yet, without modifying it.

    Args:
        root: The outermost of the new instances.
        configs: The configuration of each new instance, including ``root``.
        sharded: Instances of earlier calls below ``root``; they remain units.
        ignored_modules, ignored_parameters: Neither sharded nor reduced.
    Raises:
        PlanError: a parameter is shared between two units, or cannot be sharded.
        UnsupportedError: ``keep_low_precision_grads`` with parameters of another dtype, or parameters that are
            TP-sharded.

    Every rank must call this with the same model; it does not communicate.
    """
    paths = {module: path for path, module in root.named_modules()}
    config = configs[root]
    overrides = {paths[each]: _overrides(config, own) for each, own in configs.items()}
    before = outermost(root, sharded)
    plan = plan_selected(
        root,
        replace(config, ignored_modules=outermost(root, ignored_modules - sharded)),
        ModelChoices(roots=()),
        _select(root, overrides, sharded, ignored_parameters),
    )
    plan = replace(plan, sharded_before=tuple(paths[each] for each in before))
    refuse_illegal(plan)
    refuse_cast_gradients(root, plan)
    return plan


def _overrides(config: ShardingConfig, own: ShardingConfig) -> UnitOverrides:
    changed = {name: getattr(own, name) for name in _OF_UNITS if getattr(own, name) != getattr(config, name)}
    return UnitOverrides(**changed)


def _select(
    root: nn.Module, overrides: Mapping[str, UnitOverrides], sharded: set[nn.Module], ignored: set[nn.Parameter]
) -> Selection:
    """Select exactly the FSDP instances as units.

    An instance without parameters is a unit too, because its class has the methods of a unit.
    """
    before = {each for module in sharded for each in module.parameters() if isinstance(each, DTensor)}
    uses = [use for use in parameter_uses(root) if use.parameter not in before]
    if parallelized := [use.name for use in uses if isinstance(use.parameter, DTensor)]:
        raise UnsupportedError(
            f"{and_more(parallelized)}: parallelized before by parallelize_module; composer_fsdp2.prepare_fully_shard "
            "shards such a model"
        )
    tree = UnitTree(root, [use for use in uses if use.parameter not in ignored], ())
    for path, own in sorted(overrides.items()):  # the root first
        tree.add(UnitDraft((path,), "an FSDP instance", is_root=not path, overrides=own))
    units = tree.bottom_up()
    members: dict[UnitDraft | None, list[int]] = {unit: [] for unit in units}
    for index, use in enumerate(tree.uses):
        owners = tree.owners(use)
        others = [unit.paths[0] or "the outermost instance" for unit in owners if unit is not None]
        if earlier := sharded_name(use.parameter):
            others = [*others, f"the instance that was created before and contains {earlier}"]
        if len(others) > 1:
            raise PlanError(
                f"{' = '.join(use.names)} is shared between {' and '.join(others)}: one FSDP instance only can shard a "
                "parameter; wrap the module that contains both, and neither of the two"
            )
        members[owners[0]].append(index)
    return Selection(
        units=tuple(units),
        uses=tree.uses,
        members=tuple(tuple(members[unit]) for unit in units),
        ignored=tuple(use for use in uses if use.parameter in ignored),
        left_out=(),
        notes=(),
    )


def initializers_of(
    root: nn.Module, param_init_fns: Mapping[nn.Module, Callable[[nn.Module], object] | None]
) -> Callable[[nn.Module, str], Callable[[], object] | None]:
    """Return a function that maps a module on the meta device and its path to its initialisation function.

    This is ``param_init_fn`` of the innermost enclosing instance, else the module's ``reset_parameters``, else None.
    """
    paths = {module: path for path, module in root.named_modules()}
    by_path = {paths[instance]: function for instance, function in param_init_fns.items()}

    def initializer(module: nn.Module, path: str) -> Callable[[], object] | None:
        function = next(by_path[each] for each in ancestors_or_self(path) if each in by_path)
        if function is not None:
            return MetaInitializer(partial(function, module))
        own: Callable[[], object] | None = getattr(module, "reset_parameters", None)
        return own

    return initializer
