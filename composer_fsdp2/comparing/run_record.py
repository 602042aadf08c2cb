"""The record of one run, which rank 0 writes as JSON and the process that judges reads."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.config.value import Value

_WARMING_UP = 2  # batches in which the allocator and the choice of kernels settle
# Kinds of tensors; any other kind is the optimizer's name for its state.
PARAMETER, BUFFER = "parameter", "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord(Value):
    """One batch.

    Args:
        digests: Hashes of each rank's data, by rank.
        loss: Averaged over ranks.
        gradient_norm: The norm of all gradients together, before clipping.
        seconds: The slowest rank's, without the time of the comparison's own measurements.
        memory_bytes: The largest of any rank.
        samples: The sum over ranks.
        is_counted: Whether its collectives were counted, which takes time.
    """

    batch: int
    digests: tuple[str, ...]
    loss: float
    gradient_norm: float
    seconds: float
    memory_bytes: int
    samples: int
    is_counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount(Value):
    """Collectives of one operator and dtype in one batch, up to the gradients, as rank 0 issues them.

    Args:
        num_bytes: Of the full buffers: the output of an all-gather, the input of a reduce-scatter or an all-reduce.
    """

    op: str
    dtype: str
    calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance(Value):
    """The distance of a tensor from the first run's.

    Args:
        distance: The 2-norm of the difference over that of the first run's tensor; infinite if one run lacks it.
        largest: The largest absolute difference of an element.
        size: The number of elements; of a buffer, those of all ranks together.
        num_rounding: Elements that differ by no more than rounding explains where a gradient is nothing else; they are
            not in ``distance`` and ``largest``.
        largest_rounding: The largest absolute difference of one of those.
        only_in: ``first`` or ``this``, if the other run has no such tensor.
    """

    kind: str
    name: str
    distance: float
    largest: float
    size: int = 0
    num_rounding: int = 0
    largest_rounding: float = 0.0
    only_in: str = ""

    @property
    def title(self) -> str:
        """``exp_avg of model.weight``."""
        return f"{self.kind} of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Value):
    """One parameter group of an optimizer: its numbers (``lr``, ``betas.0``) and the names of its parameters."""

    values: Mapping[str, float]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Value):
    """A setting of the file that the comparison replaced."""

    name: str
    given: str
    used: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Value):
    """The counted batch on rank 0 as a replay of the plan predicts it; ``reason`` is why nothing is predicted.

    Args:
        state_bytes: The peak of parameters, gradients, optimizer state, buffers and communication buffers, without
            activations.
        peak_bytes: The peak with activations; 0 if no microbatch was traced.
        rests_on: What was traced; "" for nothing.
    """

    collectives: tuple[CollectiveCount, ...] = ()
    state_bytes: int = 0
    peak_bytes: int = 0
    rests_on: str = ""
    notes: tuple[str, ...] = ()
    reason: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Value):
    """One run.

    Args:
        num_units: The number of modules that all-gather their parameters.
        memory_is: What ``memory_bytes`` of a batch measures.
        state_bytes: The counterpart of ``Prediction.state_bytes``, counted in storages; 0 where it was not counted: on
            FSDP1, in a first batch, whose optimizer has no state yet, and with offloaded parameters.
        peak_bytes: The same with all other storages that were allocated meanwhile, activations among them.
        start: Distances from the first run before the first batch, and ``end`` after the last; the first run has none.
        settings: The optimizers' before the first batch, and ``last_settings`` after the last.
        translation: The outcome of each key, as text; "" on FSDP1.
    """

    title: str
    engine: str
    device: str
    num_ranks: int
    precision: str
    num_units: int
    memory_is: str
    first_batch: int
    batches: tuple[BatchRecord, ...]
    collectives: tuple[CollectiveCount, ...]
    state_bytes: int = 0
    peak_bytes: int = 0
    start: tuple[TensorDistance, ...] = ()
    end: tuple[TensorDistance, ...] = ()
    settings: tuple[Settings, ...] = ()
    last_settings: tuple[Settings, ...] = ()
    overrides: tuple[Override, ...] = ()
    translation: str = ""
    findings: tuple[Mapping[str, Any], ...] = ()
    prediction: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    @property
    def throughput(self) -> Throughput:
        timed = [each for each in self.batches[_WARMING_UP:] if not each.is_counted] or list(self.batches)
        median = statistics.median(each.seconds for each in timed)
        low, high = _median_interval(sorted(each.seconds for each in timed))
        samples = statistics.median(each.samples for each in timed)
        return Throughput(batches=len(timed), median_s=median, low=low, high=high, samples_per_s=samples / median)


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The median's 95 % confidence interval for any distribution: two order statistics (a sign test)."""
    first = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[first], ordered[-1 - first]
