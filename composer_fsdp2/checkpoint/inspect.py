"""What a checkpoint is, from its metadata."""

from pathlib import Path

from torch import nn

from composer_fsdp2.checkpoint.foreign import looks_like
from composer_fsdp2.checkpoint.formats import Format, formats
from composer_fsdp2.checkpoint.inventory import CheckpointInventory, ModelFit
from composer_fsdp2.checkpoint.loading.plan import plan_load
from composer_fsdp2.checkpoint.locate import NotACheckpointError, find
from composer_fsdp2.errors import CheckpointError

__all__ = ["inspect_checkpoint"]


def inspect_checkpoint(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> CheckpointInventory:
    """What lies in a checkpoint of any layout, without reading tensor data or running a pickle.

    Tensor data of compressed files is decompressed in passing, and not kept. Does not communicate; any one rank can
    call it.

    Args:
        path: A file, a folder, a link or pointer to one, or a run folder, in which the newest is found.
        model: Say in ``fit`` whether and how the weights load into it; it is looked at, not changed.
        trust: Let pickles import and run what they name; each name is told in a warning.
    Raises:
        NotACheckpointError: there is nothing, or something else; says what it looks like.
        CheckpointError: a checkpoint, but damaged, incomplete, or with more than plain data and not trusted.
    """
    located = find(path)
    for layout in formats():
        if layout.recognise(located.path):
            inventory = _read(layout, located.path, trust=trust)
            _refuse_repeats(inventory)
            inventory = inventory.replaced(remarks=(*located.remarks, *inventory.remarks))
            return inventory if model is None else inventory.replaced(fit=_fit(inventory, model))
    raise NotACheckpointError(f"{located.path}: {looks_like(located.path)}")


# A tensor may be a view that repeats what it is a view of (as the limit for one in ``pickles`` says), and several may
# be views of the same; but the whole of a checkpoint is hardly more than its files.
_MAX_REPEATED_BYTES, _MAX_REPEATS = 256 << 20, 8


def _refuse_repeats(inventory: CheckpointInventory) -> None:
    """Raise where tensors would take far more memory than the files have bytes; packed ones show once unpacked."""
    num_bytes = sum(record.num_bytes for record in (*inventory.tensors.values(), *inventory.nested.values()))
    most = _MAX_REPEATED_BYTES + _MAX_REPEATS * inventory.num_bytes
    if num_bytes > most and not inventory.compressed:
        raise CheckpointError(
            f"{inventory.path}: its tensors, views of the same few bytes, would be {num_bytes} bytes, the files have "
            f"{inventory.num_bytes}"
        )


def _fit(inventory: CheckpointInventory, model: nn.Module) -> ModelFit:
    try:
        plan = plan_load(inventory, model, weights_only=True)
    except CheckpointError as error:
        return ModelFit(fits=False, text=str(error))
    return ModelFit(fits=not plan.differences, text=plan.explain())


def _read(layout: Format, path: Path, *, trust: bool) -> CheckpointInventory:
    try:
        return layout.read(path, trust=trust)
    except CheckpointError:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RecursionError) as error:
        # A pickle may hold anything anywhere: a list where Composer has a dict, or itself.
        raise CheckpointError(f"{path}: {layout.NAME}, but not as Composer writes it ({error!r})") from error
