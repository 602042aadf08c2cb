"""The batch whose collectives and memory are counted, to be compared with a prediction."""

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
    """Rank 0's view of it.

    Args:
        plan: The ranks' own, resolved for ``num_ranks``.
        model: The model before it was sharded, without values; None where it cannot be copied.
        microbatch: The first one, on the meta device.
        is_uniform: Whether all microbatches have the same shapes.
        is_auto: Whether the file leaves the microbatch size to Composer, and the comparison set 1.
        precision: Composer's name for it.
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
    """Calls of each operator and dtype; barriers and the like are left out."""
    return collective_counts((each.op, each.dtype, each.num_bytes) for each in calls if each.op and each.dtype)


def collective_counts(calls: Iterable[tuple[str, str, int]]) -> tuple[CollectiveCount, ...]:
    """Calls, each an operator, a dtype and bytes, summed by operator and dtype."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for op, dtype, num_bytes in calls:
        sizes.setdefault((op, dtype), []).append(num_bytes)
    return tuple(
        CollectiveCount(op=op, dtype=dtype, calls=len(each), num_bytes=sum(each))
        for (op, dtype), each in sorted(sizes.items())
    )
