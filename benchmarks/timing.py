"""Rounds in which variants alternate, and statistics of their ratios: medians, quartiles, bars; values of every
rank."""

import gc
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from report import Bar

T = TypeVar("T")

HAND = "hand"  # the reference: sharded by a hand-written loop
MAX_RATIO = 1.02
MAX_NORM = 0.1
# Relative, between losses.
MAX_LOSS_DIFFERENCE = 1e-6
# For the first steps. Clipping sums the norm in another order, so scaled gradients differ in their last bits, and these
# differences grow.
MAX_CLIPPED_LOSS_DIFFERENCE = 1e-5
FIRST = 10

# By the variant's name: lists of one number for each round, by quantity.
Result = dict[str, dict[str, Any]]


@contextmanager
def deterministic() -> Iterator[None]:
    """In the block a GPU's kernels add in the same order each time, so that losses can be compared; nothing is timed.

    By default they do not, and two runs of the same loop diverge.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gather(value: Any) -> list[Any]:
    """From every rank, in rank order. Called on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def over_ranks(seconds: Sequence[float], processor_seconds: Sequence[float]) -> dict[str, list[float]]:
    """For each round, the slowest rank's time and the processor time of all ranks. Called on all ranks."""
    return {
        "seconds": [max(each) for each in zip(*gather(seconds), strict=True)],
        "processor_seconds": [sum(each) for each in zip(*gather(processor_seconds), strict=True)],
    }


def turns(names: Sequence[T], rounds: int, *, warmup: int) -> Iterator[tuple[T, bool]]:
    """The variant to run, and whether its time counts: each once a round, in random order, equal on all ranks.

    Garbage is collected between turns, and objects built before them are frozen.
    """
    order, shuffle = list(names), random.Random(0).shuffle
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(warmup + rounds):
        shuffle(order)
        for name in order:
            gc.collect()
            yield name, number >= warmup
    gc.enable()


def ratios(result: Result, name: str, clock: str = "seconds", *, to: str) -> list[float]:
    """The ratio to another variant, for each round."""
    return [own / other for own, other in zip(result[name][clock], result[to][clock], strict=True)]


def loss_difference(result: Result, name: str, *, first: int | None = None) -> float:
    """The largest difference, relative to the hand-written loop's loss.

    Args:
        first: Only so many batches. Sums in another order differ in their last bits, and the difference grows by step.
    """
    pairs = zip(result[name]["losses"][:first], result[HAND]["losses"][:first], strict=True)
    return max(abs(own - other) / abs(other) for own, other in pairs)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=4, method="inclusive")
    return first, third


def ratio_cells(result: Result, name: str, clocks: tuple[str, str], *, to: str) -> list[str]:
    """For a table: median and quartiles of the ratios by the first clock, and the median by the second."""
    by_first, by_second = (ratios(result, name, clock, to=to) for clock in clocks)
    first, third = quartiles(by_first)
    return [f"{statistics.median(by_first):.3f}", f"{first:.3f} to {third:.3f}", f"{statistics.median(by_second):.3f}"]


def time_bar(what: str, values: Sequence[float], limit: float) -> Bar:
    """The bar that the median ratio is at most ``limit``, with the median's distribution-free 95 % confidence interval
    between two order statistics (a sign test)."""
    ordered, ratio = sorted(values), statistics.median(values)
    place = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    low, high = ordered[place], ordered[-1 - place]
    measured = f"{ratio:.3f} ({low:.3f} to {high:.3f} with 95 % confidence)"
    if low <= limit < ratio:
        measured += ", too noisy to tell: take more --steps, or a machine with nothing else to do"
    return Bar(f"{what}, times {limit} at most", measured, ratio <= limit)
