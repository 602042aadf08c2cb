"""How a checkpoint goes into a model: every tensor matched by name, everything that does not fit named."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.flat import unflattened
from composer_fsdp2.checkpoint.inventory import (
    MODEL,
    OPTIMIZERS,
    CheckpointInventory,
    ModelFit,
    ObjectRecord,
    Strided,
    TensorRecord,
)
from composer_fsdp2.checkpoint.load.differences import Difference, DifferenceKind, can_cast, listed
from composer_fsdp2.checkpoint.load.optimizer_state import OptimizerPlan, plan_optimizer
from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.same_bytes import same_content
from composer_fsdp2.checkpoint.target import ModelTarget, TensorTarget, model_target
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.errors import CheckpointError

# How the names in a file and a model's may differ as a whole: Composer's models hold the model as an attribute, DDP as
# another. The first one that fits most names is taken.
_PREFIXES = ("", "model.", "module.", "module.model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the model, and what is read into it.

    Args:
        copies: The file's other entries for a shared parameter, of which only reading shows that they are equal.
    """

    target: TensorTarget
    record: TensorRecord
    copies: tuple[TensorRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will read, rename and leave out, and what does not fit.

    Args:
        extra: Extra state by its name: the module that takes it, and the entry.
        renamed: From the file's names to the model's, where they differ by more than wrappers' prefixes.
        left_out: Entries of the file that nothing takes, in words.
        kept: What the model or optimizer keeps of its own, in words.
        differences: Everything that ``strict`` would refuse, and what is refused anyway.
        contents: A number that differs where the files are of another save, as far as metadata shows.
    """

    inventory: CheckpointInventory
    tensors: tuple[PlannedTensor, ...]
    extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]]
    optimizer: OptimizerPlan | None
    renamed: dict[str, str]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    differences: tuple[Difference, ...]
    contents: int

    @property
    def fingerprint(self) -> str:
        """Text that is equal on two ranks that would load the same."""
        tensors = [(p.target.name, p.record.name, p.record.shape, str(p.record.dtype)) for p in self.tensors]
        states = [(s.name, list(s.entries)) for s in self.optimizer.states] if self.optimizer else []
        sizes = [(path.name, size) for path, size in self.inventory.files]
        return repr((self.inventory.layout, sizes, self.contents, tensors, states, self.left_out))

    def refuse(self, *, strict: bool) -> None:
        """Raise CheckpointError with every difference that may not be."""
        refused = [d for d in self.differences if strict or d.kind.is_fatal]
        if not refused:
            return
        can_relax = not any(d.kind.is_fatal for d in refused)
        hint = (
            "\nstrict=False (load_strict_model_weights: false in a Trainer) loads the rest, casts dtypes, and says "
            "what it left out"
            if can_relax
            else ""
        )
        raise CheckpointError(
            f"{self.inventory.path} does not fit this model{' and optimizer' if self.optimizer else ''}; nothing was "
            f"changed:\n{listed(refused)}{hint}"
        )

    def explain(self) -> str:
        """Whether and how it loads, as text."""
        num_renamed = f", {len(self.renamed)} renamed" if self.renamed else ""
        lines = [f"{len(self.tensors)} tensors of the model{num_renamed}"]
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
    """Match a checkpoint to a model and an optimizer without touching either.

    Args:
        model: Sharded by any plan, or not at all; ``reshard`` it before.
        ignored: Weights and parameters' optimizer states that were taken out of the inventory; the model and optimizer
            keep their own, and that is not a difference.
        optimizer: Over the model's present parameters. None leaves optimizer state out, as ``weights_only`` does.
    Raises:
        CheckpointError: the checkpoint has no weights, is damaged, or holds flat parameters of another model.
    Every rank must call this with the same arguments; it does not communicate.
    """
    inventory = unflattened(inventory, model)
    if not inventory.model and not ignored:
        raise CheckpointError(f"{inventory.path}: holds no model weights")
    target = model_target(model)
    rename = _renaming(map(canonical, inventory.model), frozenset(target.names()))
    of_model = _ModelMatching(inventory, target, rename, _names_of(ignored, MODEL, rename))
    of_model.match()
    optimizer_plan: OptimizerPlan | None = None
    differences, kept = [*of_model.differences], [*of_model.kept]
    optimizers = inventory.optimizers  # those that are left out
    if optimizer is not None and not weights_only:
        contents = _contents_for(inventory, optimizer)
        optimizers = tuple(each for each in optimizers if contents is not None and each is not contents)
        if contents is None:
            differences.append(_without_state(inventory, optimizer))
        else:
            states = _names_of(ignored, OPTIMIZERS, rename)
            optimizer_plan, unlike = plan_optimizer(inventory, contents, optimizer, target, rename, states)
            differences += unlike
            kept += optimizer_plan.kept
    return LoadPlan(
        inventory=inventory,
        tensors=tuple(of_model.planned),
        extra=of_model.extra,
        optimizer=optimizer_plan,
        renamed=of_model.renamed,
        left_out=(*_names_by(DifferenceKind.SURPLUS, differences), *(f"optimizer {each.name}" for each in optimizers)),
        kept=(*_names_by(DifferenceKind.MISSING, differences), *kept),
        differences=tuple(differences),
        contents=_contents(inventory),
    )


def _names_of(ignored: frozenset[EntryPath], prefix: EntryPath, rename: Callable[[str], str]) -> frozenset[str]:
    """The model's names of the parameters whose weights, or optimizer states, were taken out."""
    place = 2 if prefix == MODEL else 4
    return frozenset(rename(str(path[place])) for path in ignored if path[:2] == prefix)


def _names_by(kind: DifferenceKind, differences: Iterable[Difference]) -> list[str]:
    return [each.name for each in differences if each.kind is kind]


def _without_state(inventory: CheckpointInventory, optimizer: torch.optim.Optimizer) -> Difference:
    found = ", ".join(each.name or "one without a name" for each in inventory.optimizers) or "none"
    return Difference(DifferenceKind.OPTIMIZER, "optimizers", found, type(optimizer).__qualname__)


def fit_of(inventory: CheckpointInventory, model: nn.Module) -> ModelFit:
    """Whether the weights load into a model, which is looked at and not changed; does not communicate."""
    try:
        plan = plan_load(inventory, model, weights_only=True)
    except CheckpointError as error:
        return ModelFit(fits=False, text=str(error))
    return ModelFit(fits=not plan.differences, text=plan.explain())


def _contents(inventory: CheckpointInventory) -> int:
    """Of the CRC32s that were read with the inventory, or of the metadata that every DCP save writes."""
    found = 0
    for record in inventory.tensors.values():
        for chunk in record.chunks:
            if isinstance(chunk.source, Strided) and chunk.source.blob.crc32 is not None:
                found = zlib.crc32(chunk.source.blob.crc32.to_bytes(4, "little"), found)
    for path, _ in inventory.files:
        if path.name == ".metadata":
            found = zlib.crc32(path.read_bytes(), found)
    return found


def _contents_for(inventory: CheckpointInventory, optimizer: torch.optim.Optimizer) -> Any:
    """The file's optimizer of this class; a file that says no class has one."""
    by_name = {contents.name: contents for contents in inventory.optimizers}
    return by_name.get(type(optimizer).__qualname__, by_name.get(""))


def _renaming(file_names: Iterable[str], target_names: frozenset[str]) -> Callable[[str], str]:
    """The change of prefix under which most names of the file are the model's."""
    names = list(file_names)
    ways: list[Callable[[str], str]] = []
    for prefix in _PREFIXES:
        ways.append(lambda name, prefix=prefix: f"{prefix}{canonical(name)}")  # type: ignore[misc]
        ways.append(lambda name, prefix=prefix: canonical(name).removeprefix(prefix))  # type: ignore[misc]
    return max(ways, key=lambda way: sum(way(name) in target_names for name in names))  # the first of the best


class _ModelMatching:
    """The model's tensors against the file's."""

    def __init__(
        self, inventory: CheckpointInventory, target: ModelTarget, rename: Callable[[str], str], ignored: frozenset[str]
    ) -> None:
        self.target, self.ignored = target, ignored
        self.planned: list[PlannedTensor] = []
        self.extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]] = {}
        self.renamed: dict[str, str] = {}
        self.kept: list[str] = []
        self.differences: list[Difference] = []
        self.file: dict[str, TensorRecord | ObjectRecord] = {}
        for name, record in inventory.model.items():
            new = rename(name)
            if new in self.file:
                self.differ(DifferenceKind.SURPLUS, name, "a second entry under that name", "one")
            self.file[new] = record
            if new != canonical(name):
                self.renamed[name] = new

    def differ(self, kind: DifferenceKind, name: str, found: object, expected: object) -> None:
        self.differences.append(Difference(kind, name, str(found), str(expected)))

    def match(self) -> None:
        used: set[str] = set()
        for tensor in self.target.tensors:
            present = [name for name in tensor.names if name in self.file]
            used.update(present)
            if present:
                self.match_tensor(tensor, present)
            elif self.ignored.intersection(tensor.names):
                self.kept.append(f"{tensor.name} (ignored)")
            else:
                self.differ(DifferenceKind.MISSING, " = ".join(tensor.names), "nothing", f"{_describe(tensor)}")
        for name, module in self.target.extra.items():
            if name in self.file:
                used.add(name)
                self.extra[name] = (module, self.file[name])
            else:
                self.differ(DifferenceKind.MISSING, name, "nothing", "extra state")
        for name in self.file:
            if name not in used:
                self.differ(DifferenceKind.SURPLUS, name, "an entry", "nothing of that name in this model")

    def match_tensor(self, tensor: TensorTarget, present: list[str]) -> None:
        """One tensor of the model, which the file has under these names."""
        copies = self.check_ties(present)
        record = self.file[present[0]]
        if not isinstance(record, TensorRecord):
            self.differ(DifferenceKind.TYPE, present[0], "no tensor", _describe(tensor))
        elif record.shape != tensor.shape:
            self.differ(DifferenceKind.SHAPE, present[0], record.shape, tensor.shape)
        else:
            if record.dtype != tensor.value.dtype:
                kind = DifferenceKind.DTYPE if can_cast(record.dtype, tensor.value.dtype) else DifferenceKind.TYPE
                self.differ(kind, present[0], record.dtype, tensor.value.dtype)
            self.planned.append(PlannedTensor(target=tensor, record=record, copies=copies))

    def check_ties(self, names: list[str]) -> tuple[TensorRecord, ...]:
        """A parameter that the model shares was stored once or several times; copies must be equal."""
        copies = []
        for name in names[1:]:
            copy = self.file[name]
            alike = same_content(self.file[names[0]], copy)
            if alike is False:
                self.differ(
                    DifferenceKind.TIED,
                    f"{names[0]} = {name}",
                    "different values",
                    "one parameter, which the model shares",
                )
            elif alike is None and isinstance(copy, TensorRecord):
                copies.append(copy)
        return tuple(copies)


def _describe(tensor: TensorTarget) -> str:
    return f"{tensor.value.dtype} {tensor.shape}"
