"""What a checkpoint is, from its metadata."""

from pathlib import Path

from torch import nn

from composer_fsdp2.checkpoint.archive.torch_archive import Archive
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, ModelFit
from composer_fsdp2.checkpoint.open import Located, find, inventory_of, unpacked
from composer_fsdp2.checkpoint.records import damage_of
from composer_fsdp2.errors import CheckpointError


def inspect_checkpoint(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> CheckpointInventory:
    """Read the metadata of a checkpoint of any layout, without reading tensor data or executing a pickle.

    A tar file or a compressed file is unpacked to the folder for temporary files (``TMPDIR``), and removed afterwards.

    Args:
        path: A file, a folder, a link or pointer to one, or a run folder with checkpoints; the newest is read.
        model: If given, ``fit`` shows whether this model can load the weights. The model is not modified.
        trust: Allow pickles to import and call any name; a warning lists each name.
    Raises:
        NotACheckpointError: the path does not exist, or is not a checkpoint of a known layout.
        CheckpointError: the checkpoint is damaged, incomplete, or contains more than plain data and is not trusted.

    Does not communicate; any single rank can call it.

    Example:
        >>> torch.save({"state": {"model": nn.Linear(4, 2).state_dict()}}, "ep1.pt")
        >>> inspect_checkpoint("ep1.pt").layout
        'monolithic'
    """
    with unpacked(find(path)) as located:
        inventory = inventory_of(located, trust=trust)
        if inventory.compressed:
            _check_content(located)
    return inventory if model is None else inventory.replaced(fit=_fit(inventory, model))


def _check_content(located: Located) -> None:
    """Check the CRC32 of each record of an unpacked file.

    A later read would find damage only after unpacking the file again.
    """
    for name, blob in Archive.open(located.path).blobs.items():
        if blob.crc32 is not None and (damage := damage_of(blob, ())) is not None:
            raise CheckpointError(f"{located.unpacked_from}: record {name} is damaged ({damage})")


def _fit(inventory: CheckpointInventory, model: nn.Module) -> ModelFit:
    from composer_fsdp2.checkpoint.load.load_plan import (
        plan_load,
    )  # imported only with a model, to keep the start of the command fast

    try:
        plan = plan_load(inventory, model)
    except CheckpointError as error:
        return ModelFit(fits=False, text=str(error))
    return ModelFit(fits=not plan.differences, text=plan.explain())
