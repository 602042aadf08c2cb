"""Build the units of a module tree: nesting, ownership of parameters, and merging of units that share parameters.

[Note: tied parameters] ``fully_shard`` all-gathers a parameter for one unit. Two units with the same parameter would
each shard a copy: torch 2.7 unties them silently, later versions raise. Units that share a parameter are therefore
merged: into the outer one if one contains the other; else into one group of both modules, if that all-gathers less than
their lowest common ancestor; else into that ancestor.

[Note: one root] torch makes the first unit that runs forward the root of all units below it, and a unit has one
root. If a module is registered below two roots, the model itself becomes the only root.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from composer_fsdp2.config.choices import UnitOverrides
from composer_fsdp2.sharding.modules import ancestors_or_self, has_forward, is_at_or_under
from composer_fsdp2.sharding.ties import ParameterUse


@dataclass(slots=True, eq=False)
class UnitDraft:
    """A unit under construction: the modules of one ``fully_shard`` call, and why they are a unit."""

    paths: tuple[str, ...]
    reason: str
    is_root: bool = False
    overrides: UnitOverrides = field(default_factory=UnitOverrides)
    full_precision: bool = False
    of_other_dtype: bool = False


class UnitTree:
    """The units of one model by their modules. Does not modify the model.

    Args:
        model: Any module tree; a module may be registered several times.
        uses: Its parameters with their owners.
        excluded: The names of direct children that are left out.
    """

    def __init__(self, model: nn.Module, uses: Iterable[ParameterUse], excluded: Iterable[str]) -> None:
        self.model = model
        self.uses = tuple(uses)
        self.excluded = frozenset(excluded)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.units: list[UnitDraft] = []
        self.notes: list[str] = []
        self._unit_of: dict[nn.Module, UnitDraft] = {}
        self._position = {path: i for i, path in enumerate(_post_order(self.modules))}
        self._paths_of: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            self._paths_of.setdefault(module, []).append(path)

    # Queries

    def unit_at(self, module: nn.Module) -> UnitDraft | None:
        """The unit of exactly this module."""
        return self._unit_of.get(module)

    def owners(self, use: ParameterUse) -> list[UnitDraft | None]:
        """The innermost unit around each registration of the parameter, without duplicates. None stands for no unit."""
        if all(self._is_outside(path) for path, _ in use.owners):
            return [None]
        return list(dict.fromkeys(self._innermost(path) for path, _ in use.owners))

    def is_direct_child(self, unit: UnitDraft) -> bool:
        """Whether this is a direct child of the model."""
        return any(child is self.modules[path] for path in unit.paths for child in self.model.children())

    def has_inside(self, unit: UnitDraft) -> bool:
        """Whether other units are nested in this one."""
        return any(unit in self._containers(other) for other in self.units)

    def bottom_up(self) -> list[UnitDraft]:
        """The units ordered bottom-up: each before the units that contain it, otherwise in post-order."""
        containers = {unit: set(self._containers(unit)) for unit in self.units}
        num_inside = dict.fromkeys(self.units, 0)
        for above in containers.values():
            for unit in above:
                num_inside[unit] += 1
        rank = {unit: (self._last_position(unit), i) for i, unit in enumerate(self.units)}
        ready = [(*rank[unit], unit) for unit in self.units if not num_inside[unit]]
        heapq.heapify(ready)
        ordered: list[UnitDraft] = []
        while ready:
            unit = heapq.heappop(ready)[-1]
            ordered.append(unit)
            for container in containers[unit]:
                num_inside[container] -= 1
                if not num_inside[container]:
                    heapq.heappush(ready, (*rank[container], container))
        assert len(ordered) == len(self.units), "no group is made that would lie inside itself"
        return ordered

    # Changes

    def add(self, unit: UnitDraft) -> UnitDraft:
        """Add a unit. It is not a root if the model itself is a unit."""
        if self.model in self._unit_of:
            unit.is_root = False
        self.units.append(unit)
        for path in unit.paths:
            self._unit_of[self.modules[path]] = unit
        return unit

    def make_model_root(self, reason: str) -> UnitDraft:
        """Make the model itself a unit for the remaining parameters, and the only root."""
        unit = self._unit_of.get(self.model) or self.add(UnitDraft(("",), reason, is_root=True))
        for other in self.units:
            other.is_root = other is unit
        return unit

    def merge_tied_units(self) -> None:
        """Merge units until every parameter belongs to one unit and every unit has one root.

        Each step removes a unit, or replaces two units by one, so it terminates.
        """
        tied = [use for use in self.uses if len(use.owners) > 1]
        is_done = False
        while not is_done:  # merging for one tie may separate another
            is_done = True
            for use in tied:
                while len(owners := self.owners(use)) > 1:
                    self._merge(owners, use)
                    is_done = False
        for unit in self.units:
            roots = {above for above in (unit, *self._containers(unit)) if above.is_root}
            if len(roots) > 1:
                self.make_model_root(f"{unit.paths[0]} is registered below more than one direct child")
                return
            places = [place for path in unit.paths for place in self._paths_of[self.modules[path]]]
            rootless = next((place for place in places if not self._has_root_above(place)), None)
            if rootless is not None:
                self.make_model_root(f"{unit.paths[0]} is registered outside of its root as well, as {rootless}")
                return

    def _merge(self, owners: list[UnitDraft | None], use: ParameterUse) -> None:
        first, second = owners[:2]
        if first is None or second is None:
            self.make_model_root(f"{use.name} is shared with a part of the model that FSDP1 left out")
        elif first in self._containers(second):
            self._merge_into(second, first, use)
        elif second in self._containers(first):
            self._merge_into(first, second, use)
        else:
            self._merge_disjoint(first, second, use)

    def _merge_disjoint(self, first: UnitDraft, second: UnitDraft, use: ParameterUse) -> None:
        ancestor = _common_ancestor(first.paths + second.paths)
        while ancestor and not has_forward(self.modules[ancestor]):
            ancestor = ancestor.rpartition(".")[0]
        if ancestor and self._can_group(first, second) and self._gathers_more(ancestor):
            self._group(first, second, use)
            return
        if ancestor:
            reason = f"lowest common ancestor of modules that share {use.name}"
            target = self._unit_of.get(self.modules[ancestor]) or self.add(UnitDraft((ancestor,), reason))
        else:
            target = self.make_model_root(f"{use.name} is shared across direct children of the model")
        self._merge_into(first, target, use)
        self._merge_into(second, target, use)

    def _group(self, first: UnitDraft, second: UnitDraft, use: ParameterUse) -> None:
        self._remove(first)
        self._remove(second)
        paths = tuple(sorted(first.paths + second.paths, key=self._position.__getitem__))
        are_same = first.overrides.given == second.overrides.given
        overrides = first.overrides if are_same else UnitOverrides()
        if not are_same:
            self.notes.append(f"{', '.join(paths)} share {use.name}: their own settings differ, the model's hold")
        reason = f"one group, because they share {use.name}"
        is_other = first.of_other_dtype and second.of_other_dtype
        self.add(UnitDraft(paths, reason, overrides=overrides, of_other_dtype=is_other))

    def _merge_into(self, unit: UnitDraft, into: UnitDraft, use: ParameterUse) -> None:
        self._remove(unit)
        where = into.paths[0] or "the model itself"
        given = unit.overrides.given
        lost = f"; its own settings ({', '.join(map(str, given))}) have no effect" if given else ""
        self.notes.append(
            f"{', '.join(unit.paths)} is not a unit of its own: it shares {use.name}, so {where} gathers both{lost}"
        )

    def _remove(self, unit: UnitDraft) -> None:
        self.units.remove(unit)
        for path in unit.paths:
            del self._unit_of[self.modules[path]]

    def _can_group(self, first: UnitDraft, second: UnitDraft) -> bool:
        """Whether the two units can be grouped.

        Neither may be a root, which torch requires to be one module, and no group may contain itself.
        """
        if first.is_root or second.is_root:
            return False
        above = {first, second}
        waiting = [container for unit in (first, second) for container in self._containers(unit)]
        while waiting:
            unit = waiting.pop()
            if unit in (first, second):
                return False
            if unit not in above:
                above.add(unit)
                waiting.extend(self._containers(unit))
        return True

    def _gathers_more(self, ancestor: str) -> bool:
        """Whether the ancestor, as a unit, would own parameters in addition to those of the units below it."""
        for use in self.uses:
            for path, _ in use.owners:
                if is_at_or_under(path, ancestor):
                    owner = self._innermost(path)
                    is_nested = owner is not None and any(
                        p != ancestor and is_at_or_under(p, ancestor) for p in owner.paths
                    )
                    if not is_nested:
                        return True
        return False

    # Locations

    def _is_outside(self, path: str) -> bool:
        """Whether the path is the model itself or in an excluded child."""
        return path == "" or path.split(".")[0] in self.excluded

    def _innermost(self, path: str) -> UnitDraft | None:
        for ancestor in ancestors_or_self(path):
            unit = self._unit_of.get(self.modules[ancestor])
            if unit is not None:
                return unit
        return None

    def _has_root_above(self, path: str) -> bool:
        units = (self._unit_of.get(self.modules[above]) for above in ancestors_or_self(path))
        return any(unit is not None and unit.is_root for unit in units)

    def _containers(self, unit: UnitDraft) -> Iterator[UnitDraft]:
        """The units above ``unit``, nearest first, for all paths of its modules."""
        for module_path in unit.paths:
            for path in self._paths_of[self.modules[module_path]]:
                for ancestor in ancestors_or_self(path)[1:]:
                    container = self._unit_of.get(self.modules[ancestor])
                    if container is not None and container is not unit:
                        yield container

    def _last_position(self, unit: UnitDraft) -> int:
        """The post-order position of the unit's last module. A module with several paths counts at its first path."""
        return max(min(self._position[p] for p in self._paths_of[self.modules[path]]) for path in unit.paths)


def _post_order(pre_order: Iterable[str]) -> list[str]:
    """The paths sorted with children before their parents."""
    paths: list[str] = []
    open_paths: list[str] = []
    for path in pre_order:
        while open_paths and not is_at_or_under(path, open_paths[-1]):
            paths.append(open_paths.pop())
        open_paths.append(path)
    return [*paths, *reversed(open_paths)]


def _common_ancestor(paths: tuple[str, ...]) -> str:
    split = [path.split(".") for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
