"""The batch whose collectives and memory are counted, and what is predicted of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.comparing.job import Job
from composer_fsdp2.comparing.run_record import CollectiveCount, Prediction
from composer_fsdp2.estimate.step import StepEstimate
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBatch:
    """What rank 0 knows of it.

    Args:
        plan: The one by which the ranks sharded the model, for ``num_ranks``.
        model: As it was before that, without values; None where it cannot be copied.
        microbatch: The first one, on the meta device.
        is_uniform: Whether all others are as large.
        is_auto: Whether the file leaves the microbatches' size to Composer, and the comparison has set 1.
        precision: Composer's word for it.
        counted: Of the batch.
    """

    job: Job
    plan: ShardingPlan
    model: nn.Module | None
    microbatch: Any
    is_uniform: bool
    is_auto: bool
    num_microbatches: int
    num_ranks: int
    precision: str
    optimizers: Sequence[torch.optim.Optimizer]
    counted: tuple[CollectiveCount, ...]


# Called on rank 0, after the last batch; it does not communicate.
Predict = Callable[[CountedBatch], Prediction]


def prediction_of(
    step: StepEstimate, batch: CountedBatch, *, state_bytes: int, rests_on: str, notes: Sequence[str] = ()
) -> Prediction:
    """The prediction as the report has it.

    Args:
        step: Its activations count where its microbatch was traced. It gives bytes, not dtypes: these are the counted
            ones, where an operator has one only.
        state_bytes: The peak of all but activations.
        rests_on: What was traced, in words; "" of a step without a trace.
    """
    sums: dict[str, list[int]] = {}
    for call in step.calls:
        of_op = sums.setdefault(call.op, [0, 0])
        of_op[0] += 1
        of_op[1] += call.num_bytes
    dtypes = {op: {each.dtype for each in batch.counted if each.op == op} for op in sums}
    return Prediction(
        collectives=tuple(
            CollectiveCount(op=op, dtype=dtypes[op].pop() if len(dtypes[op]) == 1 else "", calls=calls, num_bytes=size)
            for op, (calls, size) in sorted(sums.items())
        ),
        state_bytes=state_bytes,
        peak_bytes=step.peak_bytes if rests_on else 0,
        rests_on=rests_on,
        notes=(*step.notes, *notes),
    )
