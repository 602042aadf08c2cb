"""Gradient accumulation: communication, and unsharded parameters, between microbatches."""

from torch import nn

from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.sharding.sharded import sharded_roots
from composer_fsdp2.training.run import find_run


def begin_microbatch(model: nn.Module, *, is_last: bool) -> None:
    """Prepare the forward and backward of one microbatch: ``gradient_sync`` and ``reshard_after_backward``.

    A Trainer calls it under the shim. Other training loops call it before each forward, and divide each loss by the
    number of microbatches. Does nothing if the configuration sets neither key.

    Args:
        model: A model after ``prepare_fully_shard`` or ``apply_plan``.
        is_last: Whether the optimizer steps after this microbatch. With ``gradient_sync: last``, gradients are reduced
            only then.

    Called on all ranks with the same ``is_last``; does not communicate.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = prepare_fully_shard(model, optimizer, {"gradient_sync": "last"}, precision="fp32", device="cpu")
        >>> microbatches = torch.ones(6, 4).split(2)
        >>> for number, microbatch in enumerate(microbatches):
        ...     begin_microbatch(model, is_last=number == len(microbatches) - 1)
        ...     (model(microbatch).sum() / len(microbatches)).backward()
        >>> optimizer.step()
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
