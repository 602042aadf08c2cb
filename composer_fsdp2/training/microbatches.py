"""Several backwards for one optimizer step: what is communicated, and kept, between them."""

from torch import nn

from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.sharding.sharded import sharded_roots
from composer_fsdp2.training.run import find_run


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
        is_last: Whether the optimizer steps after this one. Gradients are reduced, and averaged, only then.
    """
    for _, root in sharded_roots(model):
        run = find_run(root)
        if run is None or run.plan is None:
            continue
        match run.plan.config.accumulation.gradient_sync:
            case GradientSync.LAST:
                root.set_requires_gradient_sync(is_last)
            case GradientSync.DEFER_REPLICA:
                root.set_requires_all_reduce(is_last)
        if not run.plan.config.accumulation.reshard_after_backward:
            root.set_reshard_after_backward(is_last)
