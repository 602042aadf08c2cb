"""What a checkpoint is, from its metadata."""

from pathlib import Path

from torch import nn

from composer_fsdp2.checkpoint.differences import DifferenceKind, names_by
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, ModelFit
from composer_fsdp2.checkpoint.locate import find
from composer_fsdp2.checkpoint.matching import ModelMatching, explained
from composer_fsdp2.checkpoint.open import inventory_of
from composer_fsdp2.errors import CheckpointError


def inspect_checkpoint(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint of any layout, without reading tensor data or running a pickle.

    A tar file or a compressed one is unpacked to the folder for temporary files (``TMPDIR``) for that, and removed
    again. Does not communicate; any one rank can call it.

    Args:
        path: A file, a folder, a link or pointer to one, or a run folder, in which the newest is found.
        model: Say in ``fit`` whether and how the weights load into it; it is looked at, not changed.
        trust: Let pickles import and run what they name; each name is told in a warning.
    Raises:
        NotACheckpointError: there is nothing, or no checkpoint of a known layout.
        CheckpointError: a checkpoint, but damaged, incomplete, or with more than plain data and not trusted.
    """
    inventory = inventory_of(find(path), trust=trust)
    return inventory if model is None else inventory.replaced(fit=_fit(inventory, model))


def _fit(inventory: CheckpointInventory, model: nn.Module) -> ModelFit:
    try:
        found = ModelMatching(inventory, model)
        optimizers = [f"optimizer {each.name}" for each in found.inventory.optimizers]
    except CheckpointError as error:
        return ModelFit(fits=False, text=str(error))
    left_out = [*names_by(DifferenceKind.SURPLUS, found.differences), *optimizers]
    kept = [*names_by(DifferenceKind.MISSING, found.differences), *found.kept]
    return ModelFit(
        fits=not found.differences,
        text=explained(found.tensors, found.renamed, left_out, kept, found.differences),
    )
