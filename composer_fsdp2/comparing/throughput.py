"""Seconds of a batch as a median with its interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.config.value import Value

_WARMING_UP = 2  # batches in which memory and kernels are still being chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Value):
    """Of one run.

    Args:
        batches: How many were timed: neither the first ones, where there are others, nor the one that was counted.
        low: With ``high`` the interval in which the median lies with 95 % confidence, or the range where that takes
            more batches.
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
    """Where the median lies with 95 % confidence, whatever the distribution: two order statistics (a sign test)."""
    half_width = 0.98 * math.sqrt(len(values))
    first = max(0, math.floor(len(values) / 2 - half_width))
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]
