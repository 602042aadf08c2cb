"""What a checkpoint is, from its metadata."""

from pathlib import Path

from torch import nn

from composer_fsdp2.checkpoint.inventory import CheckpointInventory
from composer_fsdp2.checkpoint.locate import find
from composer_fsdp2.checkpoint.open import inventory_of


def inspect_checkpoint(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint of any layout, without reading tensor data or running a pickle.

    A compressed file is unpacked to the folder for temporary files for that (``TMPDIR``), and removed again. Does not
    communicate; any one rank can call it.

    Args:
        path: A file, a folder, a link or pointer to one, or a run folder, in which the newest is found.
        model: Say in ``fit`` whether and how the weights load into it; it is looked at, not changed.
        trust: Let pickles import and run what they name; each name is told in a warning.
    Raises:
        NotACheckpointError: there is nothing, or something else; says what it looks like.
        CheckpointError: a checkpoint, but damaged, incomplete, or with more than plain data and not trusted.
    """
    inventory = inventory_of(find(path), trust=trust)
    if model is None:
        return inventory
    from composer_fsdp2.checkpoint.load.load_plan import fit_of  # only who asks for it needs what loading needs

    return inventory.replaced(fit=fit_of(inventory, model))
