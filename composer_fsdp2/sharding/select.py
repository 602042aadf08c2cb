"""Select the modules that become units, from the choices of the model's hooks and the structure of the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composer_fsdp2._torch.private_names import BatchNorm
from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.value import Value
from composer_fsdp2.sharding.dtypes import dtype_name
from composer_fsdp2.sharding.modules import ancestors_or_self, has_forward, is_at_or_under, outside_compilation
from composer_fsdp2.sharding.ties import ParameterUse, join, parameter_uses
from composer_fsdp2.sharding.units import UnitDraft, UnitTree


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Value):
    """Parameters outside of all units. They are replicated on every rank, and their gradients are not averaged."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected units and their parameters.

    The units are bottom-up. Their parameters are indices into ``uses``. Parameters outside of all units are separate.
    """

    units: tuple[UnitDraft, ...]
    uses: tuple[ParameterUse, ...]
    members: tuple[tuple[int, ...], ...]
    ignored: tuple[ParameterUse, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def select_units(
    model: nn.Module,
    choices: ModelChoices,
    *,
    low_precision: bool = False,
    ignored_modules: Iterable[nn.Module] = (),
) -> Selection:
    """Choose the units of ``model``, bottom-up, without modifying it.

    Args:
        model: Any module tree; parameters may be on the meta device.
        choices: The choices of the model's hooks.
        low_precision: Whether parameters, gradients or buffers use a lower dtype. Batch norms are then separate units.
            Batch norms in a module whose settings change dtypes or ranks always are.
        ignored_modules: Modules that are not modified. Their descendants and the parameters that they share are not
            either.

    Does not communicate.
    """
    ignored = {below for module in ignored_modules for below in module.modules()}
    ignored_parameters = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    uses = parameter_uses(model)
    tree = UnitTree(
        model,
        [use for use in uses if use.parameter not in ignored_parameters],
        choices.excluded.keys() - choices.searched,
    )
    walk = _Walk(
        tree=tree,
        choices=choices.chosen,
        candidates=_candidates(tree, choices.chosen),
        low_precision=low_precision,
        ignored=frozenset(ignored),
    )
    for name, child in model.named_children():
        if name in choices.roots:
            walk.add_root(UnitDraft((name,), "direct child of the model"))
        elif name in choices.searched:
            walk.add_roots_below(name, child)
    tree.merge_tied_units()
    if _separate_dtypes(tree):
        tree.merge_tied_units()
    outside = tuple(use for use in uses if use.parameter in ignored_parameters)
    return _selection(tree, choices.excluded, low_precision, outside)


def main_dtype(uses: Iterable[ParameterUse]) -> torch.dtype | None:
    """The dtype of most elements, which a unit shards; None if no parameter can be sharded."""
    numbers: dict[torch.dtype, int] = {}
    for use in uses:
        if use.parameter.dim():
            numbers[use.parameter.dtype] = numbers.get(use.parameter.dtype, 0) + max(use.parameter.numel(), 1)
    return max(numbers, key=numbers.__getitem__, default=None)


def _candidates(tree: UnitTree, choices: Mapping[str, Choice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, module in tree.modules.items():
        if path in choices or isinstance(module, BatchNorm):
            for above in ancestors_or_self(path):
                found.setdefault(above, []).append(path)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """Traverses the model and adds a unit to the tree for each chosen module.

    Args:
        choices: The choices of the hooks, by path.
        candidates: For the path of any module, the paths of chosen modules and batch norms below it.
        ignored: Modules that are skipped.
    """

    tree: UnitTree
    choices: Mapping[str, Choice]
    candidates: Mapping[str, Sequence[str]]
    low_precision: bool
    ignored: frozenset[nn.Module]

    def add_root(self, root: UnitDraft) -> None:
        """Add a root and the units below it. For a container, add its members as roots."""
        tree, (path,) = self.tree, root.paths
        module = tree.modules[path]
        if tree.unit_at(module) is not None or module in self.ignored:
            return  # registered under two direct children; the first one owns it
        if has_forward(module):
            root.is_root = True
            tree.add(root)
            self._add_below(path)
            return
        if next(module.parameters(recurse=False), None) is not None:
            tree.make_model_root(f"{path} has parameters and no forward to gather them in")
        tree.notes.append(f"{path} ({type(module).__name__}) has no forward: its members are the roots")
        for name, _ in module.named_children():
            self.add_root(UnitDraft((join(path, name),), "member of a container", overrides=root.overrides))

    def add_roots_below(self, path: str, module: nn.Module) -> None:
        """Add the outermost chosen modules below a module that is not a unit."""
        for name, inner in module.named_children():
            inner_path = join(path, name)
            choice = None if inner in self.ignored else self.choices.get(inner_path)
            if choice is None:
                self.add_roots_below(inner_path, inner)
            else:
                outer, _ = outside_compilation(self.tree.modules, inner_path)
                self.add_root(UnitDraft((outer,), choice.chosen_by, overrides=choice.overrides))

    def _add_below(self, root_path: str) -> None:
        """Add the chosen modules below a root, and batch norms that need other dtypes or ranks than their unit."""
        own_dtypes: list[str] = []
        own_ranks: list[str] = []
        seen = {self.tree.modules[root_path]}
        for inner_path in self.candidates.get(root_path, ()):
            inner = self.tree.modules[inner_path]
            if inner in seen or inner in self.ignored or self.tree.unit_at(inner) is not None:
                continue
            seen.add(inner)
            choice = self.choices.get(inner_path)
            path, module = outside_compilation(self.tree.modules, inner_path)
            if self.tree.unit_at(module) is not None:
                continue
            if choice is not None and choice.overrides.mixed_precision is not None:
                own_dtypes.append(path)
            if choice is not None and choice.overrides.mesh is not None:
                own_ranks.append(path)
            if isinstance(module, BatchNorm) and self._add_batch_norm(path, choice, own_dtypes, own_ranks):
                continue
            if choice is not None:
                self._add_chosen(path, module, choice)

    def _add_batch_norm(self, path: str, choice: Choice | None, own_dtypes: list[str], own_ranks: list[str]) -> bool:
        """Add a batch norm as a unit if it needs one; return whether it does."""
        is_low = self.low_precision or any(is_at_or_under(path, above) for above in own_dtypes)
        is_elsewhere = any(is_at_or_under(path, above) for above in own_ranks)
        if not (is_low or is_elsewhere):
            return False
        reason = "batch norm, kept in its own precision" if is_low else "batch norm, on the model's ranks"
        overrides = UnitOverrides() if choice is None else choice.overrides
        self.tree.add(UnitDraft((path,), reason, overrides=overrides, full_precision=is_low))
        return True

    def _add_chosen(self, path: str, module: nn.Module, choice: Choice) -> None:
        if has_forward(module):
            self.tree.add(UnitDraft((path,), choice.chosen_by, overrides=choice.overrides))
            return
        given = choice.overrides.given
        lost = f", and its settings ({', '.join(map(str, given))}) have no effect" if given else ""
        kind = type(module).__name__
        self.tree.notes.append(
            f"{path} ({kind}) was chosen, but has no forward: the unit above holds its parameters{lost}"
        )


def _separate_dtypes(tree: UnitTree) -> bool:
    """Move parameters of another dtype than most of their unit to separate units: a unit all-gathers one dtype.

    FSDP1 rejected such a unit. Parameters that cannot be separated, because their module has both dtypes or no forward,
    are replicated on every rank; see ``ShardUnit.replicated``.

    Returns:
        Whether the model has several dtypes.
    """
    if len({use.parameter.dtype for use in tree.uses}) <= 1:
        return False
    uses_by_unit: dict[UnitDraft | None, list[ParameterUse]] = {}
    for use in tree.uses:
        (owner,) = tree.owners(use)
        uses_by_unit.setdefault(owner, []).append(use)
    for unit, mine in uses_by_unit.items():
        main = main_dtype(mine)
        dtypes = {use.parameter.dtype for use in mine if use.parameter.dim()}
        if unit is not None and main is not None and dtypes != {main}:
            for path, dtype in _modules_of_other_dtypes(tree, unit, mine, main):
                kept = " and ".join(p or "the model" for p in unit.paths)
                reason = f"its parameters are {dtype_name(dtype)}, those of {kept} {dtype_name(main)}"
                tree.add(UnitDraft((path,), reason, overrides=unit.overrides, of_other_dtype=True))
    return True


def _modules_of_other_dtypes(
    tree: UnitTree, unit: UnitDraft, uses: list[ParameterUse], main: torch.dtype | None
) -> Iterator[tuple[str, torch.dtype]]:
    """The outermost modules of ``unit`` whose parameters all have one dtype other than ``main``."""
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
            continue  # registered twice
        dtypes = {use.parameter.dtype for use in below[path] if use.parameter.dim()}
        if path not in unit.paths and len(dtypes) == 1 and main not in dtypes and has_forward(module):
            yield path, dtypes.pop()
        elif dtypes != {main}:
            waiting.extend(join(path, name) for name, _ in module.named_children() if join(path, name) in below)


def _selection(
    tree: UnitTree, excluded: Mapping[str, str], low_precision: bool, ignored: tuple[ParameterUse, ...]
) -> Selection:
    """The selection of the tree, without empty units.

    An empty root remains if it has units below it, which share streams and clipping through it, or if it casts
    inputs, as FSDP1's root did. Batch norms without weights remain too, and direct children with units below them
    when the model is the root: scripts summon their full parameters.
    """
    ordered = tree.bottom_up()
    members: dict[UnitDraft, list[int]] = {unit: [] for unit in ordered}
    outside: dict[str, list[str]] = {}
    for index, use in enumerate(tree.uses):
        (unit,) = tree.owners(use)
        if unit is None:
            outside.setdefault(_reason_left_out(use, excluded), []).append(use.name)
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


def _reason_left_out(use: ParameterUse, excluded: Mapping[str, str]) -> str:
    path = use.owners[0][0]
    if path == "":
        return "the model's own parameter: only its children are sharded, as under FSDP1"
    top = path.split(".")[0]
    return f"{top}: {excluded[top]}"
