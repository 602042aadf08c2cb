"""How a checkpoint goes into a model: every tensor matched by name, everything that does not fit named."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.checkpoint.differences import Difference, DifferenceKind, listed, names_by
from composer_fsdp2.checkpoint.inventory import (
    OPTIMIZERS,
    CheckpointInventory,
    ObjectRecord,
    OptimizerContents,
    Strided,
    TensorRecord,
)
from composer_fsdp2.checkpoint.load.optimizer_state import OptimizerPlan, plan_optimizer
from composer_fsdp2.checkpoint.matching import ModelMatching, PlannedTensor, explained
from composer_fsdp2.checkpoint.trees import EntryPath
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will read, rename and leave out, and what does not fit.

    Args:
        extra: Extra state by its name: the module that takes it, and the entry.
        custom: Where ``model.load_state_dict`` runs more than torch's own code; it is called then.
        renamed: From the file's names to the model's, where they differ by more than wrappers' prefixes.
        left_out: Entries of the file that nothing takes, in words.
        kept: What the model or optimizer keeps of its own, in words.
        differences: Everything that ``strict`` would refuse, and what is refused anyway.
        contents: A number that differs where the files are of another save, as far as metadata shows.
    """

    inventory: CheckpointInventory
    tensors: tuple[PlannedTensor, ...]
    extra: dict[str, tuple[nn.Module, TensorRecord | ObjectRecord]]
    custom: "CustomLoading | None"
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
        hint = self.custom.hint if self.custom is not None else ""
        hint += (
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
        num_states = None if self.optimizer is None else len(self.optimizer.states)
        return explained(self.tensors, self.renamed, self.left_out, self.kept, self.differences, num_states=num_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoading:
    """Loading code of the user's, and what it is called with.

    Args:
        code: Hooks and overrides by the path of their module.
        others: Entries that are no parameter, buffer or extra state.
        keys: From canonical names to those of the state dict.
        versions: Of the modules, as their state dict has them.
    """

    model: nn.Module
    code: dict[str, str]
    others: dict[str, TensorRecord | ObjectRecord]
    keys: dict[str, str]
    versions: Any

    @property
    def hint(self) -> str:
        """What to know where entries do not fit."""
        return (
            f"\nLoading hooks and overrides of {self} run on this rank's shards, once names and shapes fit. Those that "
            "rename or reshape entries of older files must run on the file before: load it with torch.load, call "
            "load_state_dict of a model that is not sharded, and save that"
        )

    def __str__(self) -> str:
        return and_more([f"{path or 'the model'} ({names})" for path, names in self.code.items()], 4)


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
    of_model = ModelMatching(inventory, model, ignored)
    state, differences, left_out = None, of_model.differences, of_model.inventory.optimizers
    if optimizer is not None and not weights_only:
        state, of_optimizer, left_out = _matched_optimizer(of_model, optimizer, ignored)
        differences = [*differences, *of_optimizer]
    kept = (*names_by(DifferenceKind.MISSING, differences), *of_model.kept, *(state.kept if state else ()))
    return LoadPlan(
        inventory=of_model.inventory,
        tensors=tuple(of_model.tensors),
        extra=of_model.extra,
        custom=_custom_loading(of_model),
        optimizer=state,
        renamed=of_model.renamed,
        left_out=(*names_by(DifferenceKind.SURPLUS, differences), *(f"optimizer {each.name}" for each in left_out)),
        kept=kept,
        differences=tuple(differences),
        contents=_contents(of_model.inventory),
    )


def _matched_optimizer(
    of_model: ModelMatching, optimizer: torch.optim.Optimizer, ignored: frozenset[EntryPath]
) -> tuple[OptimizerPlan | None, list[Difference], tuple[OptimizerContents, ...]]:
    """The plan for the optimizer's state, what does not fit, and the file's optimizers that nothing takes."""
    optimizers, name = of_model.inventory.optimizers, type(optimizer).__qualname__
    by_name = {contents.name: contents for contents in optimizers}
    contents = by_name.get(name, by_name.get(""))  # a file that says no class has one
    if contents is None:
        found = ", ".join(each or "one without a name" for each in by_name) or "none"
        return None, [Difference(DifferenceKind.OPTIMIZER, "optimizers", found, name)], ()
    rename, target = of_model.rename, of_model.target
    without_state = frozenset(rename(str(path[4])) for path in ignored if path[:2] == OPTIMIZERS)
    plan, differences = plan_optimizer(of_model.inventory, contents, optimizer, target, rename, without_state)
    return plan, differences, tuple(each for each in optimizers if each is not contents)


def _custom_loading(of_model: ModelMatching) -> CustomLoading | None:
    target = of_model.target
    if not target.custom_loading:
        return None
    return CustomLoading(
        model=of_model.model,
        code=target.custom_loading,
        others=of_model.others,
        keys=target.keys,
        versions=target.versions,
    )


def _contents(inventory: CheckpointInventory) -> int:
    """A CRC32 of the CRC32s that were read with the inventory."""
    found = inventory.metadata_crc32
    for record in inventory.tensors.values():
        found = zlib.crc32(len(record.chunks).to_bytes(4, "little"), found)
        for chunk in record.chunks:
            if isinstance(chunk.source, Strided) and chunk.source.blob.crc32 is not None:
                found = zlib.crc32(chunk.source.blob.crc32.to_bytes(4, "little"), found)
    return found
