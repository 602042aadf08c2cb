"""The plan of a load: every tensor matched by its FQN, and all differences."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from composer_fsdp2.checkpoint.differences import Difference, DifferenceKind, can_cast, listed, names_by
from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    ObjectRecord,
    OptimizerContents,
    Strided,
    TensorRecord,
)
from composer_fsdp2.checkpoint.load.optimizer_state import OptimizerPlan, plan_optimizer
from composer_fsdp2.checkpoint.names import PREFIXES, canonical
from composer_fsdp2.checkpoint.same_bytes import same_content
from composer_fsdp2.checkpoint.target import ModelTarget, TensorTarget, model_target
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the model, and the record that is read into it.

    Args:
        duplicates: Further records of a shared parameter, if only reading them can show that they are equal.
    """

    target: TensorTarget
    record: TensorRecord
    duplicates: tuple[TensorRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will read and rename, what it will not load, and all differences.

    Args:
        inventory: The checkpoint, with flat parameters split.
        extra: By the name of a module's extra state: the module, and the entry.
        others: Entries that a ``state_dict`` hook added, for the modules' own loading code.
        renamed: The model's names by those in the file, if they differ by more than wrappers' prefixes.
        left_out: Entries of the file that are not loaded, as text.
        kept: Values of model and optimizer that stay unchanged, as text.
        differences: The differences for which ``strict`` raises, and fatal ones.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> from composer_fsdp2.checkpoint.load.load_plan import plan_load
        >>> plan = plan_load(inspect_checkpoint("ep1.pt"), nn.Linear(4, 2))
        >>> len(plan.tensors), plan.left_out, plan.differences
        (2, (), ())
    """

    inventory: CheckpointInventory
    model: nn.Module
    target: ModelTarget
    tensors: tuple[PlannedTensor, ...]
    extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]]
    others: dict[str, TensorRecord | ObjectRecord]
    optimizer: OptimizerPlan | None
    renamed: dict[str, str]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def fingerprint(self) -> str:
        """A text that is equal on ranks that would load the same."""
        tensors = [(p.target.name, p.record.name, p.record.shape, str(p.record.dtype)) for p in self.tensors]
        states = [(s.name, list(s.entries)) for s in self.optimizer.states] if self.optimizer else []
        sizes = [(path.name, size) for path, size in self.inventory.files]
        return repr((self.inventory.layout, sizes, _contents(self.inventory), tensors, states, self.left_out))

    @property
    def own_loading(self) -> str:
        """The modules whose hooks and overrides ``model.load_state_dict`` runs; '' if it runs only torch's own code."""
        code = self.target.custom_loading.items()
        return and_more([f"{path or 'the model'} ({names})" for path, names in code], 4)

    def refuse(self, *, strict: bool) -> None:
        """Raise CheckpointError with all fatal differences; with ``strict``, with all differences."""
        refused = [d for d in self.differences if strict or d.kind.is_fatal]
        if not refused:
            return
        hint = ""
        if self.own_loading:
            hint += (
                f"\nLoading hooks and overrides of {self.own_loading} run on this rank's shards, once names and shapes "
                "fit. Those that rename or reshape entries of older files must run on the file before: load it with "
                "torch.load, call load_state_dict of a model that is not sharded, and save that"
            )
        if not any(d.kind.is_fatal for d in refused):
            hint += (
                "\nstrict=False (load_strict_model_weights: false in a Trainer) loads the rest, casts dtypes, and says "
                "what it left out"
            )
        raise CheckpointError(
            f"{self.inventory.path} does not fit this model{' and optimizer' if self.optimizer else ''}; nothing was "
            f"changed:\n{listed(refused)}{hint}"
        )

    def explain(self) -> str:
        """Whether and how it loads, as text."""
        lines = [f"{len(self.tensors)} tensors of the model" + f", {len(self.renamed)} renamed" * bool(self.renamed)]
        if self.optimizer is not None:
            lines.append(f"optimizer state of {len(self.optimizer.states)} parameters")
        lines += [f"left out: {name}" for name in self.left_out]
        lines += [f"kept: {name}" for name in self.kept]
        if self.differences:
            lines.append(f"does not fit:\n{listed(self.differences)}")
        return "\n".join(lines)


def plan_load(
    inventory: CheckpointInventory,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    weights_only: bool = False,
    ignored: frozenset[EntryPath] = frozenset(),
) -> LoadPlan:
    """Match a checkpoint to a model and an optimizer without modifying either.

    Args:
        model: Sharded by any plan, or not at all; call ``reshard`` before.
        optimizer: The optimizer of the model's current parameters. With None or ``weights_only``, optimizer state is
            not loaded.
        ignored: Weights, and parameters with optimizer states, that were removed from the inventory. Model and
            optimizer keep their own values, which is not a difference.
    Raises:
        CheckpointError: the checkpoint has no weights, is damaged, or has flat parameters of another model. Every rank
    must call this with the same arguments; it does not communicate.
    """
    of_model = _ModelMatching(inventory, model, ignored)
    state, differences, left_out = None, of_model.differences, of_model.inventory.optimizers
    if optimizer is not None and not weights_only:
        state, of_optimizer, left_out = _matched_optimizer(of_model, optimizer, ignored)
        differences = [*differences, *of_optimizer]
    return LoadPlan(
        inventory=of_model.inventory,
        model=model,
        target=of_model.target,
        tensors=tuple(of_model.tensors),
        extra=of_model.extra,
        others=of_model.others,
        optimizer=state,
        renamed=of_model.renamed,
        left_out=(*names_by(DifferenceKind.SURPLUS, differences), *(f"optimizer {each.name}" for each in left_out)),
        kept=(*names_by(DifferenceKind.MISSING, differences), *of_model.kept, *(state.kept if state else ())),
        differences=tuple(differences),
    )


def _matched_optimizer(
    of_model: "_ModelMatching", optimizer: torch.optim.Optimizer, ignored: frozenset[EntryPath]
) -> tuple[OptimizerPlan | None, list[Difference], tuple[OptimizerContents, ...]]:
    """The plan for the optimizer's state, its differences, and the file's optimizers that are not loaded."""
    optimizers, name = of_model.inventory.optimizers, type(optimizer).__qualname__
    by_name = {contents.name: contents for contents in optimizers}
    contents = by_name.get(name, by_name.get(""))  # a file without classes has one
    if contents is None:
        found = ", ".join(each or "one without a name" for each in by_name) or "none"
        return None, [Difference(DifferenceKind.OPTIMIZER, "optimizers", found, name)], ()
    rename, target = of_model.rename, of_model.target
    without_state = frozenset(rename(str(path[4])) for path in ignored if path[:2] == OPTIMIZERS)
    plan, differences = plan_optimizer(of_model.inventory, contents, optimizer, target, rename, without_state)
    return plan, differences, tuple(each for each in optimizers if each is not contents)


def _contents(inventory: CheckpointInventory) -> int:
    """A CRC32 of the CRC32s in the inventory. It differs between two saves."""
    found = inventory.metadata_crc32
    for record in inventory.tensors.values():
        found = zlib.crc32(len(record.chunks).to_bytes(4, "little"), found)
        for chunk in record.chunks:
            if isinstance(chunk.source, Strided) and chunk.source.blob.crc32 is not None:
                found = zlib.crc32(chunk.source.blob.crc32.to_bytes(4, "little"), found)
    return found


class _ModelMatching:
    """Matches the model's tensors to those of the file; see ``LoadPlan``.

    Attributes:
        rename: Maps a name in the file to the model's.
    """

    def __init__(self, inventory: CheckpointInventory, model: nn.Module, ignored: frozenset[EntryPath]) -> None:
        self.inventory = unflattened(inventory, model)
        if not self.inventory.model and not ignored:
            raise CheckpointError(f"{inventory.path}: holds no model weights")
        self.target = model_target(model)
        self.rename = _renaming(map(canonical, self.inventory.model), frozenset(self.target.names()))
        self.tensors: list[PlannedTensor] = []
        self.extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]] = {}
        self.others: dict[str, TensorRecord | ObjectRecord] = {}
        self.renamed: dict[str, str] = {}
        self.kept: list[str] = []
        self.differences: list[Difference] = []
        self.file: dict[str, TensorRecord | ObjectRecord] = {}
        for name, record in self.inventory.model.items():
            new = self.rename(name)
            if new in self.file:
                self._differ(DifferenceKind.SURPLUS, name, "a second entry under that name", "one")
            self.file[new] = record
            if new != canonical(name):
                self.renamed[name] = new
        self._match({self.rename(str(path[2])) for path in ignored if path[:2] == MODEL})

    def _differ(self, kind: DifferenceKind, name: str, found: object, expected: object) -> None:
        self.differences.append(Difference(kind, name, str(found), str(expected)))

    def _match(self, ignored: set[str]) -> None:
        target, used = self.target, set[str]()
        for tensor in target.tensors:
            present = [name for name in tensor.names if name in self.file]
            used.update(present)
            if present:
                self._match_tensor(tensor, present)
            elif ignored.intersection(tensor.names):
                self.kept.append(f"{tensor.name} (ignored)")
            else:
                self._differ(DifferenceKind.MISSING, " = ".join(tensor.names), "nothing", tensor)
        for name, module in target.extra.items():
            if name in self.file:
                self.extra[name] = (module, self.file[name])
            elif name in target.leafless:
                self.extra[name] = (module, ObjectRecord.of_value(name, {}, is_flattened=True))
            else:
                self._differ(DifferenceKind.MISSING, name, "nothing", "extra state")
        for name in self.file:
            if name in used or name in target.extra:
                continue
            if name in target.others and target.is_loadable(name):
                self.others[name] = self.file[name]
            elif name in target.others:
                self._differ(
                    DifferenceKind.SURPLUS,
                    name,
                    "an entry",
                    "a parameter, a buffer or extra state: a state_dict hook or override added it, and no loading hook "
                    "or override of a module takes it",
                )
            else:
                self._differ(DifferenceKind.SURPLUS, name, "an entry", "nothing of that name in this model")

    def _match_tensor(self, tensor: TensorTarget, present: list[str]) -> None:
        """Match one tensor of the model to the entries of the file with its names."""
        duplicates = self._check_ties(present)
        name, record = present[0], self.file[present[0]]
        if not isinstance(record, TensorRecord):
            self._differ(DifferenceKind.TYPE, name, "no tensor", tensor)
            return
        if record.shape != tensor.shape:
            self._differ(DifferenceKind.SHAPE, name, record.shape, tensor.shape)
            return
        if record.dtype != tensor.value.dtype:
            kind = DifferenceKind.DTYPE if can_cast(record.dtype, tensor.value.dtype) else DifferenceKind.TYPE
            self._differ(kind, name, record.dtype, tensor.value.dtype)
        self.tensors.append(PlannedTensor(target=tensor, record=record, duplicates=duplicates))

    def _check_ties(self, names: list[str]) -> tuple[TensorRecord, ...]:
        """Check that the file's entries of a shared parameter are equal. It may have one for each name, or fewer."""
        duplicates = []
        for name in names[1:]:
            copy = self.file[name]
            is_equal = same_content(self.file[names[0]], copy)
            if is_equal is False:
                pair = f"{names[0]} = {name}"
                self._differ(DifferenceKind.TIED, pair, "different values", "one parameter, which the model shares")
            elif is_equal is None and isinstance(copy, TensorRecord):
                duplicates.append(copy)
        return tuple(duplicates)


def _renaming(file_names: Iterable[str], target_names: frozenset[str]) -> Callable[[str], str]:
    """Choose the change of prefix for which most names of the file equal a name of the model.

    Returns:
        A function from a name in the file to the name in the model.
    """
    names = list(file_names)
    changes: list[Callable[[str], str]] = []
    for prefix in PREFIXES:
        changes.append(lambda name, prefix=prefix: f"{prefix}{canonical(name)}")  # type: ignore[misc]
        changes.append(lambda name, prefix=prefix: canonical(name).removeprefix(prefix))  # type: ignore[misc]
    return max(changes, key=lambda change: sum(change(name) in target_names for name in names))  # the first of the best
