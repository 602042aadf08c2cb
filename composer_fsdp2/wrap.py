"""Which modules become units: FSDP1's hooks read as Composer read them, then ties moved into one unit.

[Note: roots] Composer wrapped every direct child of the model, never the model itself, so that methods of the
ComposerModel may call into its children freely (composer/distributed/dist_strategy.py, 0.32.1). A direct child is
therefore a root of its own; the model becomes the root only when its children share a parameter.

[Note: tied parameters] ``fully_shard`` gathers a parameter for one unit. Two units that hold the same parameter would
each shard a copy: torch 2.7 unties them in silence, later versions raise. So units that share a parameter become one:
the outer one if one contains the other; else one group of both modules, if that gathers less than their lowest common
ancestor would; else that ancestor.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from composer_fsdp2._torch import BatchNorm
from composer_fsdp2.errors import PlanError
from composer_fsdp2.tying import ParameterUse, join, parameter_uses

__all__ = [
    "LeftOut",
    "Selection",
    "WrapUnit",
    "bound_hook",
    "is_at_or_under",
    "is_metric",
    "select_units",
    "wrapped_children",
]


@dataclass(slots=True, eq=False)
class WrapUnit:
    """One unit in the making: the modules that one ``fully_shard`` call takes, and why."""

    paths: tuple[str, ...]
    reason: str
    is_root: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    full_precision: bool = False


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
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def select_units(model: nn.Module, *, low_precision: bool = False) -> Selection:
    """Choose the units of ``model``, bottom-up, without touching it.

    Args:
        model: Any module tree; parameters may be on the meta device.
        low_precision: Whether parameters are gathered in a lower dtype, so that batch norms get units of their own.
    Raises:
        PlanError: a wrap function raised or returned something else than a bool or a dict; names the module.

    Calls the model's ``fsdp_wrap_fn``; does not communicate.
    """
    return _Selector(model, low_precision).run()


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


def bound_hook(owner: nn.Module, name: str) -> Callable[..., Any] | None:
    """A hook method of ``owner`` such as ``fsdp_wrap_fn``, or None; FSDP1 ignored what cannot be called."""
    hook = getattr(owner, name, None)
    return hook if callable(hook) else None


class _Selector:
    def __init__(self, model: nn.Module, low_precision: bool) -> None:
        self.model = model
        self.low_precision = low_precision
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.order = {path: i for i, path in enumerate(_post_order(self.modules))}
        self.paths_of: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            self.paths_of.setdefault(module, []).append(path)
        self.uses = parameter_uses(model)
        self.excluded: dict[str, str] = {}  # path of a direct child that FSDP1 skipped -> why
        self.notes: list[str] = []
        self.units: list[WrapUnit] = []
        self.unit_of: dict[nn.Module, WrapUnit] = {}
        self.no_groups = False

    def run(self) -> Selection:
        self._collect_candidates()
        candidates = [(u.paths, u.reason, u.is_root, u.settings, u.full_precision) for u in self.units]
        notes = list(self.notes)
        self._join_ties()
        ordered = self._bottom_up()
        if ordered is None:  # two groups each inside the other's module: fall back to common ancestors
            self.no_groups, self.units, self.unit_of, self.notes = True, [], {}, notes
            for paths, reason, is_root, settings, full_precision in candidates:
                self._add(WrapUnit(paths, reason, is_root, settings, full_precision))
            self._join_ties()
            ordered = self._bottom_up()
            assert ordered is not None, "units without groups form a tree"
        members: dict[WrapUnit, list[int]] = {unit: [] for unit in ordered}
        outside: dict[str, list[str]] = {}
        for index, use in enumerate(self.uses):
            unit = self._sole_owner(use)
            if unit is None:
                outside.setdefault(self._why_outside(use), []).append(use.name)
            else:
                members[unit].append(index)
        # A root without parameters still casts its inputs, as FSDP1's root did; anything else without is no unit.
        kept = [unit for unit in ordered if members[unit] or (unit.is_root and self.low_precision)]
        return Selection(
            units=tuple(kept),
            uses=tuple(self.uses),
            members=tuple(tuple(members[unit]) for unit in kept),
            left_out=tuple(LeftOut(names=tuple(names), reason=reason) for reason, names in outside.items()),
            notes=tuple(self.notes),
        )

    # What FSDP1 chose

    def _collect_candidates(self) -> None:
        wrapped = wrapped_children(self.model)
        for name, child in self.model.named_children():
            if name not in wrapped:
                self.excluded[name] = "a metric" if is_metric(child) else "_fsdp_wrap is False on it"
                continue
            self._add_root(name, child, child)

    def _add_root(self, path: str, module: nn.Module, child: nn.Module) -> None:
        if module in self.unit_of:
            return  # a module under two direct children belongs to the first
        if _has_forward(module):
            self._add(
                WrapUnit((path,), "direct child of the model" if module is child else "member of a container", True)
            )
            self._add_descendants(path, module, child)
            return
        if next(module.parameters(recurse=False), None) is not None:
            self._need_model_unit(f"{path} has parameters and no forward to gather them in")
        self.notes.append(f"{path} ({type(module).__name__}) has no forward: its members are the roots")
        for name, member in module.named_children():
            self._add_root(join(path, name), member, child)

    def _add_descendants(self, root_path: str, root: nn.Module, child: nn.Module) -> None:
        for path, module in root.named_modules(prefix=root_path):
            if module is root or module in self.unit_of:
                continue
            settings = self._wrap_decision(path, module, child)
            if self.low_precision and isinstance(module, BatchNorm):
                self._add(WrapUnit((path,), "batch norm, kept in its own precision", full_precision=True))
            elif settings is None:
                continue
            elif not _has_forward(module):
                kind = type(module).__name__
                self.notes.append(
                    f"{path} ({kind}) was chosen, but has no forward: the unit above holds its parameters"
                )
            else:
                why = "_fsdp_wrap" if hasattr(module, "_fsdp_wrap") else "fsdp_wrap_fn"
                self._add(WrapUnit((path,), why, settings=settings))

    def _wrap_decision(self, path: str, module: nn.Module, child: nn.Module) -> Mapping[str, Any] | None:
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

    # Ties

    def _join_ties(self) -> None:
        """Until every parameter lies in one unit; each step removes a unit, or adds the one that takes two over."""
        tied = [use for use in self.uses if len(use.owners) > 1]
        while conflict := next(((o, use) for use in tied if len(o := self._owners(use)) > 1), None):
            self._join(*conflict)

    def _owners(self, use: ParameterUse) -> list[WrapUnit | None]:
        """The innermost unit at each place that registers the parameter, without repetition."""
        if all(self._is_excluded(path) for path, _ in use.owners):
            return [None]
        owners: list[WrapUnit | None] = []
        for path, _ in use.owners:
            unit = self._innermost(path)
            if unit not in owners:
                owners.append(unit)
        return owners

    def _sole_owner(self, use: ParameterUse) -> WrapUnit | None:
        (owner,) = self._owners(use)
        return owner

    def _is_excluded(self, path: str) -> bool:
        return path == "" or path.split(".")[0] in self.excluded

    def _innermost(self, path: str) -> WrapUnit | None:
        for ancestor in _ancestors_or_self(path):
            unit = self.unit_of.get(self.modules[ancestor])
            if unit is not None:
                return unit
        return None

    def _join(self, owners: list[WrapUnit | None], use: ParameterUse) -> None:
        first, second = owners[:2]
        if first is None or second is None:
            self._need_model_unit(f"{use.name} is shared with a part of the model that FSDP1 left out")
            return
        if self._contains(first, second):
            self._dissolve(second, first, use)
        elif self._contains(second, first):
            self._dissolve(first, second, use)
        else:
            self._join_disjoint(first, second, use)

    def _join_disjoint(self, first: WrapUnit, second: WrapUnit, use: ParameterUse) -> None:
        ancestor = _common_ancestor(first.paths + second.paths)
        while ancestor and not _has_forward(self.modules[ancestor]):
            ancestor = ancestor.rpartition(".")[0]
        if not ancestor:
            target = self._need_model_unit(f"{use.name} is shared across direct children of the model")
            self._dissolve(first, target, use)
            self._dissolve(second, target, use)
            return
        is_group_tighter = self._gathers_more(ancestor, first, second)
        if is_group_tighter and not (self.no_groups or first.is_root or second.is_root):
            self._group(first, second, use)
            return
        target = self.unit_of.get(self.modules[ancestor]) or self._add(
            WrapUnit((ancestor,), f"lowest common ancestor of modules that share {use.name}")
        )
        self._dissolve(first, target, use)
        self._dissolve(second, target, use)

    def _group(self, first: WrapUnit, second: WrapUnit, use: ParameterUse) -> None:
        self._remove(first)
        self._remove(second)
        paths = tuple(sorted(first.paths + second.paths, key=self.order.__getitem__))
        settings = first.settings if first.settings == second.settings else {}
        if first.settings != second.settings:
            self.notes.append(f"{', '.join(paths)} share {use.name}: their own settings differ, the model's hold")
        self._add(WrapUnit(paths, f"one group, because they share {use.name}", settings=settings))

    def _dissolve(self, unit: WrapUnit, into: WrapUnit, use: ParameterUse) -> None:
        self._remove(unit)
        where = into.paths[0] or "the model itself"
        self.notes.append(
            f"{', '.join(unit.paths)} is no unit of its own: it shares {use.name}, so {where} gathers both"
        )

    def _gathers_more(self, ancestor: str, first: WrapUnit, second: WrapUnit) -> bool:
        """Whether the ancestor, as their unit, would hold parameters beside those of the two."""
        for use in self.uses:
            for path, _ in use.owners:
                if not is_at_or_under(path, ancestor):
                    continue
                owner = self._innermost(path)
                is_nested = owner is not None and any(
                    p != ancestor and is_at_or_under(p, ancestor) for p in owner.paths
                )
                if not is_nested:
                    return True
        return False

    def _contains(self, outer: WrapUnit, inner: WrapUnit) -> bool:
        """Whether some module of ``inner`` lies below a module of ``outer``, under any of its paths."""
        return any(container is outer for container in self._containers(inner))

    def _containers(self, unit: WrapUnit) -> Iterator[WrapUnit]:
        """The units above ``unit``, nearest first, under any of its modules' paths."""
        for module_path in unit.paths:
            for path in self.paths_of[self.modules[module_path]]:
                for ancestor in _ancestors_or_self(path)[1:]:
                    container = self.unit_of.get(self.modules[ancestor])
                    if container is not None and container is not unit:
                        yield container

    # The working set

    def _add(self, unit: WrapUnit) -> WrapUnit:
        if self.model in self.unit_of:
            unit.is_root = False
        self.units.append(unit)
        for path in unit.paths:
            self.unit_of[self.modules[path]] = unit
        return unit

    def _remove(self, unit: WrapUnit) -> None:
        self.units.remove(unit)
        for path in unit.paths:
            del self.unit_of[self.modules[path]]

    def _need_model_unit(self, reason: str) -> WrapUnit:
        unit = self.unit_of.get(self.model)
        if unit is None:
            unit = self._add(WrapUnit(("",), reason, is_root=True))
        for other in self.units:
            if other is not unit:
                other.is_root = False
        return unit

    def _bottom_up(self) -> list[WrapUnit] | None:
        """Units in an order in which every one comes before those that contain it; None if there is no such order."""
        containers = {unit: set(self._containers(unit)) for unit in self.units}
        num_inside = dict.fromkeys(self.units, 0)
        for above in containers.values():
            for unit in above:
                num_inside[unit] += 1
        position = {unit: (self._position(unit), i) for i, unit in enumerate(self.units)}
        ready = [(*position[unit], unit) for unit in self.units if not num_inside[unit]]
        heapq.heapify(ready)
        ordered: list[WrapUnit] = []
        while ready:
            unit = heapq.heappop(ready)[-1]
            ordered.append(unit)
            for above_unit in containers[unit]:
                num_inside[above_unit] -= 1
                if not num_inside[above_unit]:
                    heapq.heappush(ready, (*position[above_unit], above_unit))
        return ordered if len(ordered) == len(self.units) else None

    def _position(self, unit: WrapUnit) -> int:
        """Where the unit's last module comes in post-order (a module's first place counts, if it has several)."""
        return max(min(self.order[p] for p in self.paths_of[self.modules[path]]) for path in unit.paths)

    def _why_outside(self, use: ParameterUse) -> str:
        path = use.owners[0][0]
        if path == "":
            return "the model's own parameter: FSDP1 wrapped its children only"
        top = path.split(".")[0]
        return f"{top}: {self.excluded[top]}" if top in self.excluded else f"{path}: in no unit"


def _has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: containers such as ModuleList have no forward, and so no hooks to gather in."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _post_order(pre_order: Iterable[str]) -> list[str]:
    """The same paths with children before their parents."""
    paths: list[str] = []
    open_paths: list[str] = []
    for path in pre_order:
        while open_paths and not is_at_or_under(path, open_paths[-1]):
            paths.append(open_paths.pop())
        open_paths.append(path)
    return [*paths, *reversed(open_paths)]


def _ancestors_or_self(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def is_at_or_under(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _common_ancestor(paths: tuple[str, ...]) -> str:
    split = [path.split(".") for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
