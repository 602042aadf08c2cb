"""Seconds of a batch as a median with its interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.config.value import Value

_WARMING_UP = 2  # batches in which the allocator and the choice of kernels settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Value):
    """Of one run.

    Args:
        batches: How many were timed: neither the first ones of several, nor the counted one.
        low: With ``high`` the 95 % confidence interval of the median, or the range where that takes more batches.
    """

    batches: int
    median_s: float
    low: float
    high: float
    samples_per_s: float


def throughput(run: RunRecord) -> Throughput:
    timed = [each for each in run.batches[_WARMING_UP:] if not each.is_counted] or list(run.batches)
    seconds = [each.seconds for each in timed]
    median, (low, high) = statistics.median(seconds), median_interval(seconds)
    samples = statistics.median(each.samples for each in timed)
    return Throughput(batches=len(timed), median_s=median, low=low, high=high, samples_per_s=samples / median)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The median's 95 % confidence interval for any distribution: two order statistics (a sign test)."""
    first = max(0, math.floor(len(values) / 2 - 0.98 * math.sqrt(len(values))))
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]
