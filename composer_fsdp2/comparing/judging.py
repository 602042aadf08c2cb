"""The verdict: the distance of FSDP2 from FSDP1 in each quantity, that of FSDP1 from itself, and likely causes."""

import enum
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from composer_fsdp2.comparing.job import TOLERANCE
from composer_fsdp2.comparing.run_record import BUFFER, PARAMETER, BatchRecord, RunRecord
from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.value import Value

BATCHES_OF_TOLERANCE = 10


class Verdict(enum.Enum):
    """The result of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    INTERRUPTED = "interrupted"
    UNUSABLE = "unusable"

    @property
    def exit_code(self) -> int:
        return {Verdict.SAME: 0, Verdict.DIFFERENT: 1}.get(self, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Value):
    """One compared quantity, with the batch or tensor that exceeds its limit by most, or comes closest to it.

    [Note: longer comparisons] A difference in the last bit grows from batch to batch, with Adam by up to 1e-7 in each.
    The tolerance therefore applies to the first ten batches, and grows in proportion for later ones.

    Args:
        distance: The relative distance of FSDP2 from FSDP1; infinite if only one of the two numbers is finite or
            exists.
        floor: The largest distance of FSDP1 from itself over its repetitions; see [Note: noise floors].
        limit: The largest ``distance`` that counts as equal; infinite if the distance of FSDP1 from itself is infinite.
        worst: The batch or tensor; "" if all are equal.
    """

    name: str
    distance: float
    floor: float
    limit: float
    worst: str

    @property
    def is_same(self) -> bool:
        # If a run on FSDP1 is not finite, no distance is meaningful.
        return self.distance <= self.limit < math.inf

    @property
    def excess(self) -> tuple[float, float]:
        """The sort key of ``judge``, which reports the largest. An infinite limit has the largest."""
        if self.limit == math.inf:
            return (math.inf, math.inf)
        ratio = self.distance / self.limit if self.limit else math.inf
        return (ratio if self.distance else 0.0, self.distance)


def judge(runs: Sequence[RunRecord], *, tolerance: float = TOLERANCE) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """Compare the runs.

    Args:
        runs: FSDP1, FSDP2, and every repetition of FSDP1.
    Returns:
        The quantities, and sentences about the recognized causes of a difference.
    """
    all_quantities = {name: _quantities(name, runs, tolerance) for name in _MEASURES}
    worst = {name: max(each, key=lambda quantity: quantity.excess) for name, each in all_quantities.items()}
    quantities = {
        name: replace(each, worst="") if each.is_same and not each.distance else each for name, each in worst.items()
    }
    causes = tuple(_causes(runs, quantities, all_quantities))
    is_same = all(quantity.is_same for quantity in quantities.values())
    unknown = () if is_same else ("no cause was recognized: see where each quantity is worst",)
    return tuple(quantities.values()), causes or unknown


def relative(value: float, of: float) -> float:
    """The absolute difference of ``value`` and ``of``, divided by the absolute value of ``of``.

    Infinite if the two are not equal and one is not finite. NaN equals no value, including another NaN.
    """
    if value == of:
        return 0.0
    if not (math.isfinite(value) and math.isfinite(of)):
        return math.inf
    return abs(value - of) / abs(of) if of else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Distances


@dataclass(frozen=True, slots=True)
class _Distance:
    """The distance of two runs in one batch or tensor.

    Args:
        place: The batch or tensor.
        num_batches: The number of batches trained until then.
        detail: The values, as text.
    """

    distance: float
    place: str = ""
    num_batches: int = 0
    detail: str = ""


def _quantities(name: str, runs: Sequence[RunRecord], tolerance: float) -> list[Quantity]:
    """Compare one quantity. Each batch or tensor has its own limit.

    [Note: noise floors] The noise floor is the distance between runs on FSDP1. Each tensor has its own floor, so that
    the noise of a bias does not hide a difference in a weight. The floor of a batch is the largest distance up to that
    batch: two noisy runs need not differ in the same batch, and noise in later batches must not hide a difference in an
    earlier one.
    """
    first, fsdp2, *repetitions = runs
    measure = _MEASURES[name]
    floors: dict[str, float] = {}
    for run in repetitions:
        largest = 0.0
        for each in measure(first, run):
            largest = max(largest, each.distance) if name in (LOSSES, NORMS) else each.distance
            floors[each.place] = max(floors.get(each.place, 0.0), largest)
    found = measure(first, fsdp2)
    # If the distance between runs on FSDP1 is infinite, FSDP2 cannot be judged.
    unbounded = floors.keys() - {each.place for each in found}
    found += [_Distance(0.0, place) for place in floors if place in unbounded and floors[place] == math.inf]
    quantities = []
    for each in found:
        floor = floors.get(each.place, 0.0)
        # See [Note: longer comparisons].
        limit = max(tolerance * max(1.0, each.num_batches / BATCHES_OF_TOLERANCE), 2 * floor)
        quantities.append(
            Quantity(
                name=name,
                distance=each.distance,
                floor=floor,
                limit=0.0 if name == DATA else limit,
                worst=each.place + each.detail,
            )
        )
    return quantities


def _data_distance(first: RunRecord, other: RunRecord) -> list[_Distance]:
    """The share of batches that differ."""
    if len(first.batches) != len(other.batches):
        return [_Distance(math.inf, detail=f"{len(other.batches)} batches, {len(first.batches)} on {first.title}")]
    places = [
        f"batch {ours.batch} of rank {rank}"
        for theirs, ours in _pairs(first, other)
        for rank, digests in enumerate(zip(theirs.digests, ours.digests, strict=True))
        if digests[0] != digests[1]
    ]
    share = len(places) / max(1, len(first.batches) * first.num_ranks)
    return [_Distance(share, detail=and_more(places))] if places else [_Distance(0.0)]


def _setting_distances(first: RunRecord, other: RunRecord) -> list[_Distance]:
    """Compare the numeric options of the optimizers for each parameter, before the first batch and after the last."""
    found = [_Distance(0.0)]
    for when, title in (("settings", ""), ("last_settings", " after the last batch")):
        theirs, ours = (
            {
                (what, name): value
                for each in getattr(run, when)
                for name in each.names
                for what, value in each.values.items()
            }
            for run in (first, other)
        )
        for key in dict.fromkeys((*theirs, *ours)):
            values = (theirs.get(key, math.nan), ours.get(key, math.nan))
            if distance := relative(values[1], values[0]):
                shown = ["none" if math.isnan(value) else f"{value:g}" for value in values]
                detail = f": {shown[1]}, {shown[0]} on {first.title}"
                found.append(_Distance(distance, f"{key[0]} of {key[1]}{title}", detail=detail))
    return found


def _batch_distances(what: str, first: RunRecord, other: RunRecord) -> list[_Distance]:
    found = []
    for number, (batch, ours) in enumerate(_pairs(first, other), 1):
        expected, value = getattr(batch, what), getattr(ours, what)
        # The first gradient norms in fp16 are NaN, until the scaler has found its scale.
        is_scaling = first.precision == "amp_fp16" and math.isnan(expected) and math.isnan(value)
        distance = 0.0 if is_scaling else relative(value, expected)
        found.append(_Distance(distance, f"batch {ours.batch}", number))
    return found or [_Distance(math.inf)]


def _tensor_distances(when: str, matches: Callable[[str], bool], first: RunRecord, other: RunRecord) -> list[_Distance]:
    found = [_Distance(0.0)]
    for each in getattr(other, when):
        if matches(each.kind):
            owner = {"first": first.title, "this": other.title}.get(each.only_in)
            detail = f", which {owner} alone has" if owner else ""
            found.append(_Distance(each.distance, each.title, len(other.batches) if when == "end" else 0, detail))
    return found


DATA, START, SETTINGS = "data", "state before the first batch", "optimizer settings"
LOSSES, NORMS = "losses", "gradient norms before clipping"
PARAMETERS, OPTIMIZER = "parameters after the last batch", "optimizer state after the last batch"
BUFFERS = "buffers after the last batch"
_MEASURES: Mapping[str, Callable[[RunRecord, RunRecord], list[_Distance]]] = {
    DATA: _data_distance,
    START: partial(_tensor_distances, "start", lambda kind: True),
    SETTINGS: _setting_distances,
    LOSSES: partial(_batch_distances, "loss"),
    NORMS: partial(_batch_distances, "gradient_norm"),
    PARAMETERS: partial(_tensor_distances, "end", lambda kind: kind == PARAMETER),
    OPTIMIZER: partial(_tensor_distances, "end", lambda kind: kind not in (PARAMETER, BUFFER)),
    BUFFERS: partial(_tensor_distances, "end", lambda kind: kind == BUFFER),
}


def _pairs(first: RunRecord, other: RunRecord) -> Iterable[tuple[BatchRecord, BatchRecord]]:
    return zip(first.batches, other.batches, strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# Causes


def _causes(
    runs: Sequence[RunRecord], found: Mapping[str, Quantity], all_quantities: Mapping[str, Sequence[Quantity]]
) -> Iterator[str]:
    first, fsdp2, *repetitions = runs
    for each in repetitions:
        if (difference := _data_distance(first, each)[0]).distance:
            where = f"{each.title} trained on other data than {first.title} ({difference.detail})"
            yield f"{where}: the file draws others each time"
    if not found[DATA].is_same:
        yield f"the two did not train on the same data: {found[DATA].worst}"
        return
    if not found[START].is_same:
        yield _start_cause(first, fsdp2, found[START])
    if not found[SETTINGS].is_same:
        yield f"FSDP2's optimizer was set otherwise: {found[SETTINGS].worst}"
    for op, what in {"all_gather": "parameters are gathered", "reduce_scatter": "gradients are reduced"}.items():
        theirs, ours = (sorted({each.dtype for each in run.collectives if each.op == op}) for run in (first, fsdp2))
        if theirs and ours and theirs != ours:
            yield f"{what} in {' and '.join(theirs)} on FSDP1, in {' and '.join(ours)} on FSDP2 ({op}'s dtype)"
    if not found[START].is_same:
        return
    if not found[NORMS].is_same and (scale := _scale(first, fsdp2)):
        yield f"FSDP2's gradients are {scale:.6g} times FSDP1's in every batch: the gradient scale differs"
    if not (found[LOSSES].is_same and found[NORMS].is_same):
        yield _first_batch_cause(runs, all_quantities)


def _start_cause(first: RunRecord, fsdp2: RunRecord, start: Quantity) -> str:
    state = [each for each in fsdp2.start if each.kind != PARAMETER]
    if state and all(each.only_in == "first" for each in state):
        return (
            f"the optimizer state is lost: before the first batch {first.title} has "
            f"{', '.join(sorted({each.kind for each in state}))}, {fsdp2.title} has none"
        )
    return f"the two did not begin alike: {start.worst}"


def _scale(first: RunRecord, fsdp2: RunRecord) -> float:
    """The ratio of FSDP2's gradient norm to FSDP1's, if it is about equal in all batches and not 1; otherwise 0."""
    pairs = [(ours.gradient_norm, theirs.gradient_norm) for theirs, ours in _pairs(first, fsdp2)]
    ratios = [ours / theirs for ours, theirs in pairs if theirs and math.isfinite(ours) and math.isfinite(theirs)]
    if len(ratios) < len(pairs) or not ratios or abs(ratios[0] - 1) < 1e-3:
        return 0.0
    # Only in the first batch the weights are equal; later norms drift with the weights.
    return ratios[0] if abs(ratios[0] / statistics.median(ratios) - 1) < 0.1 else 0.0


_BATCH_MEASURES = {
    LOSSES: ("loss", "the loss", "forward"),
    NORMS: ("gradient_norm", "the gradient norm", "backward, or the reduction of gradients"),
}


def _first_batch_cause(runs: Sequence[RunRecord], all_quantities: Mapping[str, Sequence[Quantity]]) -> str:
    first, fsdp2, *repetitions = runs
    for number, (theirs, ours) in enumerate(_pairs(first, fsdp2)):
        for name, (what, title, where) in _BATCH_MEASURES.items():
            expected, quantity = getattr(theirs, what), all_quantities[name][number]
            if quantity.limit == math.inf:
                values = (
                    (getattr(run.batches[number], what), run.title) for run in repetitions if number < len(run.batches)
                )
                value, run_title = next(each for each in values if relative(each[0], expected) == math.inf)
                return (
                    f"FSDP1 does not repeat: {title} of batch {theirs.batch} is {value:.9g} on {run_title}, "
                    f"{expected:.9g} on FSDP1; nothing can be compared"
                )
            if not quantity.is_same:
                before = ", or the step before it" if number else ""
                if number >= BATCHES_OF_TOLERANCE:
                    before += (
                        f"; or it is rounding that built up over the {number} batches before it, which are the same"
                    )
                return (
                    f"{title} of batch {ours.batch} is the first number that differs ({getattr(ours, what):.9g}, FSDP1 "
                    f"{expected:.9g}): look at the {where}{before}"
                )
    return "a run trained no batch"
