"""The batch whose collectives and memory are measured, for comparison with a prediction."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2.comparing.job import Options
from composer_fsdp2.comparing.run_record import CollectiveCount, Prediction
from composer_fsdp2.estimate._torch.sent import Sent
from composer_fsdp2.sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBatch:
    """The measured batch as rank 0 sees it.

    Args:
        plan: The plan of the run, resolved for ``num_ranks``.
        model: The model before it was sharded, on the meta device; None if it cannot be copied.
        microbatch: The first microbatch, on the meta device.
        is_uniform: Whether all microbatches have the same shapes.
        is_auto: Whether the file sets the microbatch size to ``auto``, and the comparison therefore set 1.
        precision: Composer's name of the precision.
    """

    options: Options
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


def counted(calls: Iterable[Sent]) -> tuple[CollectiveCount, ...]:
    """Count the calls of each operator and dtype. Barriers and other calls without data are excluded."""
    return collective_counts((each.op, each.dtype, each.num_bytes) for each in calls if each.op and each.dtype)


def collective_counts(calls: Iterable[tuple[str, str, int]]) -> tuple[CollectiveCount, ...]:
    """Sum the calls by operator and dtype. Each call is an operator, a dtype and a number of bytes."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for op, dtype, num_bytes in calls:
        sizes.setdefault((op, dtype), []).append(num_bytes)
    return tuple(
        CollectiveCount(op=op, dtype=dtype, calls=len(each), num_bytes=sum(each))
        for (op, dtype), each in sorted(sizes.items())
    )
