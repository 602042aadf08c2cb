"""What a replay of the plan says of the batch whose collectives are counted."""

from collections.abc import Sequence

import torch

from composer_fsdp2.comparing.run_record import CollectiveCount, Prediction
from composer_fsdp2.errors import ComposerFSDP2Error
from composer_fsdp2.estimate.optimizers import optimizer_state
from composer_fsdp2.estimate.replay import estimate_step
from composer_fsdp2.sharding.plan import ShardingPlan


def predict(
    plan: ShardingPlan,
    optimizers: Sequence[torch.optim.Optimizer],
    counted: Sequence[CollectiveCount],
    *,
    num_ranks: int,
    num_microbatches: int,
) -> Prediction:
    """The step of rank 0, or the reason why there is no prediction.

    Args:
        counted: The replay gives bytes, not dtypes; these are the counted ones, where an operator has one only.
    """
    try:
        optimizer = optimizer_state(type(optimizers[0]).__name__, optimizers[0].defaults) if optimizers else None
        step = estimate_step(
            plan,
            world_size=num_ranks,
            optimizer=optimizer,
            num_microbatches=num_microbatches,
            gpus_per_node=num_ranks,
        )
    except ComposerFSDP2Error as error:
        return Prediction(reason=str(error))
    sums: dict[str, list[int]] = {}
    for call in step.calls:
        of_op = sums.setdefault(call.op, [0, 0])
        of_op[0] += 1
        of_op[1] += call.num_bytes
    dtypes = {op: {each.dtype for each in counted if each.op == op} for op in sums}
    return Prediction(
        collectives=tuple(
            CollectiveCount(op=op, dtype=dtypes[op].pop() if len(dtypes[op]) == 1 else "", calls=calls, num_bytes=size)
            for op, (calls, size) in sorted(sums.items())
        ),
        state_bytes=step.peak_bytes,
        notes=step.notes,
    )
