"""Several backwards for one optimizer step: what is communicated, and kept, between them."""

from weakref import WeakKeyDictionary

from torch import nn

from composer_fsdp2.config import Accumulation, GradientSync
from composer_fsdp2.sharded import sharded_roots

__all__ = ["begin_microbatch", "note_accumulation"]

# By root, as its plan said; only of those that put something off.
_ACCUMULATIONS: WeakKeyDictionary[nn.Module, Accumulation] = WeakKeyDictionary()


def note_accumulation(model: nn.Module, accumulation: Accumulation) -> None:
    """Keep what ``begin_microbatch`` will do with a model that was just sharded."""
    if accumulation != Accumulation():
        _ACCUMULATIONS.update((root, accumulation) for _, root in sharded_roots(model))


def begin_microbatch(model: nn.Module, *, is_last: bool) -> None:
    """Prepare for the forward and backward of one microbatch, as ``gradient_sync`` and ``reshard_after_backward`` say.

    A Trainer calls it under the shim. A loop of one's own calls it before each forward, and divides each loss by the
    number of microbatches::

        for number, microbatch in enumerate(microbatches):
            begin_microbatch(model, is_last=number == len(microbatches) - 1)
            (model(microbatch).loss / len(microbatches)).backward()
        optimizer.step()

    Without those keys it does nothing. Called on all ranks alike; does not communicate.

    Args:
        model: After ``prepare_fully_shard`` or ``apply_plan``.
        is_last: Whether the optimizer steps after this one. Gradients are whole, and averaged, only then.
    """
    if not _ACCUMULATIONS:
        return
    for _, root in sharded_roots(model):
        accumulation = _ACCUMULATIONS.get(root)
        if accumulation is None:
            continue
        match accumulation.gradient_sync:
            case GradientSync.LAST:
                root.set_requires_gradient_sync(is_last)
            case GradientSync.DEFER_REPLICA:
                root.set_requires_all_reduce(is_last)
        if not accumulation.reshard_after_backward:
            root.set_reshard_after_backward(is_last)
