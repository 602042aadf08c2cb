"""Ratios of rounds, and what they say: medians, quartiles and bars; values from every rank."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from report import Bar

__all__ = ["Result", "gather", "loss_difference", "median_interval", "quartiles", "ratios", "time_bar"]

# By the variant's name: lists of numbers, one for each round, by what they are.
Result = dict[str, dict[str, Any]]


def gather(value: Any) -> list[Any]:
    """From every rank, in rank order. Called on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def ratios(result: Result, name: str, clock: str = "seconds", *, to: str) -> list[float]:
    """Of each round, to another variant's."""
    return [own / other for own, other in zip(result[name][clock], result[to][clock], strict=True)]


def loss_difference(result: Result, name: str, to: str, *, first: int | None = None) -> float:
    """The largest, relative to the other variant's.

    Args:
        first: Of so many batches. Where sums are taken in another order, last bits differ, and grow from step to step.
    """
    pairs = zip(result[name]["losses"][:first], result[to]["losses"][:first], strict=True)
    return max(abs(own - other) / abs(other) for own, other in pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, whatever the distribution: two order statistics (a sign test)."""
    half_width = 0.98 * math.sqrt(len(values))
    first = max(0, math.floor(len(values) / 2 - half_width))
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]


def time_bar(what: str, values: Sequence[float], limit: float) -> Bar:
    """That the median ratio is at most ``limit``, and how sure that is."""
    ratio, (low, high) = statistics.median(values), median_interval(values)
    measured = f"{ratio:.3f} ({low:.3f} to {high:.3f} with 95 % confidence)"
    if low <= limit < ratio:
        measured += ", too noisy to tell: take more --steps, or a machine with nothing else to do"
    return Bar(f"{what}, times {limit} at most", measured, ratio <= limit)
