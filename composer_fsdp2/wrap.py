"""Which modules become units: FSDP1's hooks, read as Composer read them.

[Note: roots] Composer wrapped every direct child of the model, never the model itself, so that methods of the
ComposerModel may call into its children freely (composer/distributed/dist_strategy.py, 0.32.1). A direct child is
therefore a root of its own; the model becomes the root only when its children share something ([Note: tied parameters]
and [Note: one root] in ``units.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch import BatchNorm, is_compiled
from composer_fsdp2.errors import PlanError
from composer_fsdp2.fsdp1.unit_settings import decides_dtypes, decides_mesh
from composer_fsdp2.tying import ParameterUse, join, parameter_uses
from composer_fsdp2.units import UnitTree, WrapUnit, ancestors_or_self, has_forward, is_at_or_under

__all__ = [
    "LeftOut",
    "Selection",
    "bound_hook",
    "is_metric",
    "main_dtype",
    "outside_compilation",
    "select_units",
    "wrapped_children",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Parameters that no unit holds: they stay whole on every rank, and nobody averages their gradients."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The units bottom-up, the parameters of each by index into ``uses``, and what stays outside."""

    units: tuple[WrapUnit, ...]
    uses: tuple[ParameterUse, ...]
    members: tuple[tuple[int, ...], ...]
    ignored: tuple[ParameterUse, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def select_units(
    model: nn.Module,
    *,
    low_precision: bool = False,
    ignored_modules: Iterable[nn.Module] = (),
    shard_below_unwrapped: bool = False,
) -> Selection:
    """Choose the units of ``model``, bottom-up, without touching it.

    Args:
        model: Any module tree; parameters may be on the meta device.
        ignored_modules: Modules that stay as they are with all below them, and with every parameter that they share.
        low_precision: Whether parameters, gradients or buffers are in a lower dtype, so that batch norms get units of
            their own; those in a module whose settings decide on dtypes or ranks do anyway.
        shard_below_unwrapped: A direct child with ``_fsdp_wrap = False`` is no unit, and modules below it that are
            chosen are roots: the rule of Composer's FSDP2. FSDP1 left such a child out with all below it.
    Raises:
        PlanError: a wrap function raised or returned something else than a bool or a dict; names the module.

    Calls the model's ``fsdp_wrap_fn``; does not communicate.
    """
    wrapped = wrapped_children(model)
    unwrapped = {name: child for name, child in model.named_children() if name not in wrapped}
    excluded = {
        name: "a metric" if is_metric(child) else "_fsdp_wrap is False on it" for name, child in unwrapped.items()
    }
    searched = [name for name in unwrapped if shard_below_unwrapped and not is_metric(unwrapped[name])]
    ignored = {below for module in ignored_modules for below in module.modules()}
    ignored_parameters = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    uses = parameter_uses(model)
    outside = excluded.keys() - searched
    tree = UnitTree(model, [use for use in uses if use.parameter not in ignored_parameters], outside)
    hooks = _Hooks(low_precision=low_precision, ignored=frozenset(ignored))
    for name, child in model.named_children():
        if name in wrapped:
            _add_root(tree, WrapUnit((name,), "direct child of the model"), child, hooks)
        elif name in searched:
            _add_roots_below(tree, name, child, child, hooks)
    tree.join()
    if _separate_dtypes(tree):
        tree.join()
    return _selection(tree, excluded, low_precision, tuple(use for use in uses if use.parameter in ignored_parameters))


def main_dtype(uses: Iterable[ParameterUse]) -> torch.dtype | None:
    """The dtype of most of the elements, which a unit shards; None without any that can be sharded."""
    numbers: dict[torch.dtype, int] = {}
    for use in uses:
        if use.parameter.dim():
            numbers[use.parameter.dtype] = numbers.get(use.parameter.dtype, 0) + max(use.parameter.numel(), 1)
    return max(numbers, key=numbers.__getitem__, default=None)


def is_metric(module: nn.Module) -> bool:
    """Whether this is a torchmetrics Metric or MetricCollection, which FSDP1 never wrapped."""
    return any(
        cls.__name__ in ("Metric", "MetricCollection") and cls.__module__.split(".")[0] == "torchmetrics"
        for cls in type(module).__mro__
    )


def wrapped_children(model: nn.Module) -> dict[str, nn.Module]:
    """The direct children that FSDP1 wrapped, by name: no metrics, none with ``_fsdp_wrap = False``."""
    return {
        name: child
        for name, child in model.named_children()
        if not is_metric(child) and getattr(child, "_fsdp_wrap", True)
    }


def outside_compilation(modules: Mapping[str, nn.Module], path: str) -> tuple[str, nn.Module]:
    """The module at ``path``, or what ``torch.compile`` put around it: that calls the module itself, past whatever
    would be put between the two."""
    parent = path.rpartition(".")[0]
    if path and is_compiled(modules[parent]):
        return parent, modules[parent]
    return path, modules[path]


def bound_hook(owner: nn.Module, name: str) -> Callable[..., Any] | None:
    """A hook method of ``owner`` such as ``fsdp_wrap_fn``, or None; FSDP1 ignored what cannot be called."""
    hook = getattr(owner, name, None)
    return hook if callable(hook) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hooks:
    """What the walk over the modules must know beside their own hooks."""

    low_precision: bool
    ignored: frozenset[nn.Module]


def _add_root(tree: UnitTree, root: WrapUnit, child: nn.Module, hooks: _Hooks) -> None:
    """A unit as a root; of a container its members. ``child`` is the direct child of the model whose hooks hold."""
    (path,) = root.paths
    module = tree.modules[path]
    if tree.unit_at(module) is not None or module in hooks.ignored:
        return  # registered under two direct children: the first has it
    if has_forward(module):
        root.is_root = True
        tree.add(root)
        _add_descendants(tree, path, module, child, hooks)
        return
    if next(module.parameters(recurse=False), None) is not None:
        tree.need_model_unit(f"{path} has parameters and no forward to gather them in")
    tree.notes.append(f"{path} ({type(module).__name__}) has no forward: its members are the roots")
    for name, _ in module.named_children():
        member = WrapUnit((join(path, name),), "member of a container", settings=root.settings)
        _add_root(tree, member, child, hooks)


def _add_roots_below(tree: UnitTree, path: str, module: nn.Module, child: nn.Module, hooks: _Hooks) -> None:
    """The outermost chosen modules below one that is no unit."""
    for name, inner in module.named_children():
        settings = None if inner in hooks.ignored else _wrap_decision(join(path, name), inner, child)
        if settings is None:
            _add_roots_below(tree, join(path, name), inner, child, hooks)
        else:
            outer, _ = outside_compilation(tree.modules, join(path, name))
            _add_root(tree, WrapUnit((outer,), _chosen_by(inner), settings=settings), child, hooks)


def _add_descendants(tree: UnitTree, root_path: str, root: nn.Module, child: nn.Module, hooks: _Hooks) -> None:
    own_dtypes: list[str] = []
    own_meshes: list[str] = []
    for path, module in root.named_modules(prefix=root_path):
        if module is root or module in hooks.ignored or tree.unit_at(module) is not None:
            continue
        settings = _wrap_decision(path, module, child)
        path, module = outside_compilation(tree.modules, path)
        if tree.unit_at(module) is not None:
            continue
        if settings and decides_dtypes(settings):
            own_dtypes.append(path)
        if settings and decides_mesh(settings):
            own_meshes.append(path)
        is_norm = isinstance(module, BatchNorm)
        is_low = is_norm and (hooks.low_precision or any(is_at_or_under(path, above) for above in own_dtypes))
        is_elsewhere = is_norm and any(is_at_or_under(path, above) for above in own_meshes)
        if is_low or is_elsewhere:
            why = "batch norm, kept in its own precision" if is_low else "batch norm, on the model's ranks"
            tree.add(WrapUnit((path,), why, settings=settings or {}, full_precision=is_low))
        elif settings is None:
            continue
        elif not has_forward(module):
            kind = type(module).__name__
            lost = f", and its settings ({', '.join(map(str, settings))}) hold for nothing" if settings else ""
            tree.notes.append(
                f"{path} ({kind}) was chosen, but has no forward: the unit above holds its parameters{lost}"
            )
        else:
            tree.add(WrapUnit((path,), _chosen_by(module), settings=settings))


def _chosen_by(module: nn.Module) -> str:
    return "_fsdp_wrap" if hasattr(module, "_fsdp_wrap") else "fsdp_wrap_fn"


def _wrap_decision(path: str, module: nn.Module, child: nn.Module) -> Mapping[str, Any] | None:
    """The unit's own settings if ``module`` is to be a unit, else None. The attribute goes before the function."""
    if hasattr(module, "_fsdp_wrap"):
        return {} if module._fsdp_wrap else None
    wrap_fn = bound_hook(child, "fsdp_wrap_fn")
    if wrap_fn is None:
        return None
    try:
        answer = wrap_fn(module)
    except Exception as error:
        raise PlanError(
            f"fsdp_wrap_fn raised {type(error).__name__} for module {path!r} ({type(module).__name__}): {error}"
        ) from error
    if not isinstance(answer, bool | dict):
        raise PlanError(
            f"fsdp_wrap_fn returned {answer!r} ({type(answer).__name__}) for module {path!r}; "
            "it must return True, False or a dict of settings for that unit"
        )
    if isinstance(answer, dict):
        return dict(answer) if answer else None  # an empty dict was False to FSDP1
    return {} if answer else None


def _separate_dtypes(tree: UnitTree) -> bool:
    """Give parameters of another dtype than most of their unit's own units, since a unit gathers one dtype.

    FSDP1 refused such a unit. What cannot be separated, because its module holds both dtypes or has no forward, stays
    whole on every rank; see ``ShardUnit.replicated``. Returns whether there were two dtypes.
    """
    if len({use.parameter.dtype for use in tree.uses}) <= 1:
        return False
    held: dict[WrapUnit | None, list[ParameterUse]] = {}
    for use in tree.uses:
        (owner,) = tree.owners(use)
        held.setdefault(owner, []).append(use)
    for unit, mine in held.items():
        main = main_dtype(mine)
        if unit is not None and any(use.parameter.dim() and use.parameter.dtype != main for use in mine):
            for path, dtype in _modules_of_other_dtypes(tree, unit, mine, main):
                kept = " and ".join(p or "the model" for p in unit.paths)
                reason = f"its parameters are {_name(dtype)}, those of {kept} {_name(main)}"
                tree.add(WrapUnit((path,), reason, settings=unit.settings, of_other_dtype=True))
    return True


def _modules_of_other_dtypes(
    tree: UnitTree, unit: WrapUnit, uses: list[ParameterUse], main: torch.dtype | None
) -> Iterator[tuple[str, torch.dtype]]:
    """The outermost modules of ``unit`` all of whose parameters have one dtype, another than ``main``."""
    below: dict[str, list[ParameterUse]] = {}
    for use in uses:
        for path, _ in use.owners:
            for ancestor in ancestors_or_self(path):
                below.setdefault(ancestor, []).append(use)
    waiting = list(unit.paths)
    while waiting:
        path = waiting.pop(0)
        module = tree.modules[path]
        if path not in unit.paths and tree.unit_at(module) is not None:
            continue  # registered in two places
        dtypes = {use.parameter.dtype for use in below[path] if use.parameter.dim()}
        if path not in unit.paths and len(dtypes) == 1 and main not in dtypes and has_forward(module):
            yield path, dtypes.pop()
        elif dtypes != {main}:
            waiting.extend(join(path, name) for name, _ in module.named_children() if join(path, name) in below)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _selection(
    tree: UnitTree, excluded: Mapping[str, str], low_precision: bool, ignored: tuple[ParameterUse, ...]
) -> Selection:
    """What the tree holds, without empty units.

    A root without parameters of its own stays where units lie below it, which share their streams and their clipping
    through it, and where inputs are cast, which FSDP1's root did; so does a batch norm without weights, and a direct
    child above units where the model is the root: scripts ask it for its full parameters.
    """
    ordered = tree.bottom_up()
    members: dict[WrapUnit, list[int]] = {unit: [] for unit in ordered}
    outside: dict[str, list[str]] = {}
    for index, use in enumerate(tree.uses):
        (unit,) = tree.owners(use)
        if unit is None:
            outside.setdefault(_why_outside(use, excluded), []).append(use.name)
        else:
            members[unit].append(index)
    kept = [
        unit
        for unit in ordered
        if members[unit]
        or unit.full_precision
        or (unit.is_root and low_precision)
        or ((unit.is_root or tree.is_direct_child(unit)) and tree.has_inside(unit))
    ]
    return Selection(
        units=tuple(kept),
        uses=tree.uses,
        members=tuple(tuple(members[unit]) for unit in kept),
        ignored=ignored,
        left_out=tuple(LeftOut(names=tuple(names), reason=reason) for reason, names in outside.items()),
        notes=tuple(tree.notes),
    )


def _why_outside(use: ParameterUse, excluded: Mapping[str, str]) -> str:
    path = use.owners[0][0]
    if path == "":
        return "the model's own parameter: FSDP1 wrapped its children only"
    top = path.split(".")[0]
    return f"{top}: {excluded[top]}"
