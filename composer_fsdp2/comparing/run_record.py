"""What one run leaves behind, as values that are written and read as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_fsdp2.config.value import Value, json_text


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord(Value):
    """One batch.

    Args:
        digests: Of what each rank trained on, by rank.
        loss: Averaged over ranks.
        gradient_norm: Of all gradients together, before they are clipped.
        seconds: Of the slowest rank, without what the comparison itself takes.
        memory_bytes: The largest of any rank.
        samples: Of all ranks.
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
    """Collectives of one operator and dtype in one batch, up to the gradients, as rank 0 sends them.

    Args:
        num_bytes: Of the full buffers: the output of an all-gather, the input of a reduce-scatter or an all-reduce.
    """

    op: str
    dtype: str
    calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint(Value):
    """What tells a tensor's values from others without a copy of them.

    Args:
        kind: ``parameter``, or the optimizer's name for its tensor.
    """

    kind: str
    name: str
    total: float
    squares: float
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance(Value):
    """How far a tensor is from the first run's, after the last batch.

    Args:
        distance: The 2-norm of the difference over that of the first run's tensor.
        largest: The largest absolute difference of an element.
        size: Its elements.
        num_rounding: Elements that differ, but by no more than rounding alone explains where a gradient is nothing
            else; they are not in ``distance`` and ``largest``.
        largest_rounding: The largest absolute difference of one of those.
    """

    kind: str
    name: str
    distance: float
    largest: float
    size: int = 0
    num_rounding: int = 0
    largest_rounding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Value):
    """One of an optimizer's groups: what it says (``lr``, ``weight_decay``, ``betas.0``), and of which parameters."""

    values: Mapping[str, float]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Value):
    """Something that the comparison set in place of what the file says."""

    name: str
    given: str
    used: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Value):
    """What a replay of the plan says of the counted batch on rank 0; ``reason`` is why it says nothing.

    Args:
        state_bytes: The peak of parameters, gradients, optimizer state, buffers and what collectives need, without
            activations.
        peak_bytes: With them; 0 where no microbatch was traced.
        rests_on: What was traced, in words; "" of nothing.
    """

    collectives: tuple[CollectiveCount, ...] = ()
    state_bytes: int = 0
    peak_bytes: int = 0
    rests_on: str = ""
    notes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Value):
    """One run.

    Args:
        num_units: Modules that all-gather their parameters.
        memory_is: What ``memory_bytes`` of a batch measures.
        state_bytes: In the counted batch on rank 0, the peak of what ``Prediction.state_bytes`` is of, in storages; 0
            where it was not counted: on FSDP1, in a first batch, before there is an optimizer's state, and where
            parameters are offloaded.
        peak_bytes: With all other storages that were made meanwhile, activations among them.
        start: Before the first batch.
        settings: The optimizers' before the first batch; ``last_settings`` after the last.
        distances: From the first run, whose own are empty.
        missing: Tensors of the first run that this one has not; ``added`` are those that only this one has.
        translation: What became of each key, as text; "" on FSDP1.
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
    start: tuple[Fingerprint, ...]
    settings: tuple[Settings, ...] = ()
    last_settings: tuple[Settings, ...] = ()
    distances: tuple[TensorDistance, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    translation: str = ""
    findings: tuple[Mapping[str, Any], ...] = ()
    prediction: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json_text(self))

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        given = json.loads(path.read_text())
        given |= {name: tuple(kind(**each) for each in given[name]) for name, kind in _LISTS.items()}
        given["batches"] = tuple(
            BatchRecord(**{**each, "digests": tuple(each["digests"])}) for each in given["batches"]
        )
        for name in ("settings", "last_settings"):
            given[name] = tuple(Settings(**{**each, "names": tuple(each["names"])}) for each in given[name])
        predicted = given["prediction"]
        predicted["collectives"] = tuple(CollectiveCount(**each) for each in predicted["collectives"])
        given["prediction"] = Prediction(**{**predicted, "notes": tuple(predicted["notes"])})
        return cls(**{**given, **{name: tuple(given[name]) for name in ("missing", "added", "findings", "notes")}})


_LISTS: Mapping[str, Any] = {
    "collectives": CollectiveCount,
    "start": Fingerprint,
    "distances": TensorDistance,
    "overrides": Override,
}
