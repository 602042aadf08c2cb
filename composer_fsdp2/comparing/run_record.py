"""The measurements of one run, as JSON. Rank 0 writes them, and the launching process reads them."""

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
    """The measurements of one batch.

    Args:
        digests: Hashes of the data, by rank.
        loss: The mean over ranks.
        gradient_norm: The norm of all gradients together, before clipping.
        seconds: The duration on the slowest rank, without the time of the measurements.
        memory_bytes: The maximum over ranks.
        samples: The sum over ranks.
        is_counted: Whether its collectives were counted, which makes it slower.
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
    """The collectives of one operator and dtype that rank 0 launches in one batch, excluding the optimizer step.

    Args:
        num_bytes: The size of the full buffers: the output of an all-gather, the input of a reduce-scatter or an
            all-reduce.
    """

    op: str
    dtype: str
    calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance(Value):
    """The distance of a tensor from that of the first run.

    Args:
        distance: The 2-norm of the difference over that of the first run's tensor; infinite if one run lacks it.
        largest: The largest absolute difference of an element.
        size: The number of elements; for a buffer, summed over ranks.
        num_rounding: The number of elements whose difference is explained by gradients that are only rounding error.
            They are excluded from ``distance`` and ``largest``.
        largest_rounding: The largest absolute difference of these elements.
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
    """One parameter group of an optimizer: its numeric options (``lr``, ``betas.0``) and its parameters' names."""

    values: Mapping[str, float]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Value):
    """A setting of the training file that the comparison replaced."""

    name: str
    given: str
    used: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Value):
    """The predicted memory and collectives of the counted batch on rank 0, from a replay of the plan.

    Args:
        reason: The reason for a missing prediction; "" otherwise.
        state_bytes: The peak of parameters, gradients, optimizer state, buffers and communication buffers, without
            activations.
        peak_bytes: The peak with activations; 0 if no microbatch was traced.
        rests_on: The traced input; "" for none.
    """

    collectives: tuple[CollectiveCount, ...] = ()
    state_bytes: int = 0
    peak_bytes: int = 0
    rests_on: str = ""
    notes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Value):
    """The throughput of one run.

    Args:
        batches: The number of timed batches. The first ones of several, and the counted one, are not timed.
        low: The lower end of the 95 % confidence interval of the median; ``high`` is the upper end. The range of all
            batches if there are too few for an interval.
    """

    batches: int
    median_s: float
    low: float
    high: float
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Value):
    """The measurements of one run.

    Args:
        num_units: The number of modules that all-gather their parameters.
        memory_is: What ``memory_bytes`` of a batch measures.
        state_bytes: The measured counterpart of ``Prediction.state_bytes``, from storages. 0 if it was not measured: on
            FSDP1, in the first batch (the optimizer has no state yet), and with offloaded parameters.
        peak_bytes: The same plus all other storages allocated at that time, including activations.
        start: The distances from the first run before the first batch; empty in the first run.
        end: The distances after the last batch.
        settings: The optimizers' options before the first batch.
        last_settings: The same after the last batch.
        translation: The outcome of each configuration key, as text; "" on FSDP1.
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
