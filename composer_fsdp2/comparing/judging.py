"""The verdict on a comparison: how far FSDP2 is from FSDP1 in each quantity, how far FSDP1 is from itself, and why."""

import enum
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from composer_fsdp2.comparing.run_record import (
    BatchRecord,
    CollectiveCount,
    Fingerprint,
    RunRecord,
    Settings,
    TensorDistance,
)
from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.value import Value

TOLERANCE = 1e-6  # relative
BATCHES_OF_TOLERANCE = 10
_PARAMETER = "parameter"
_SCALED = "amp_fp16"  # where the first gradient norms are no numbers, until the scaler has found its scale
_SUMMED = 1e-12  # by how much sums of parts in fp64 differ from one another, at most


class Verdict(enum.Enum):
    """What a comparison comes to."""

    SAME = "same"
    DIFFERENT = "different"
    INTERRUPTED = "interrupted"
    UNUSABLE = "unusable"

    @property
    def exit_code(self) -> int:
        return {Verdict.SAME: 0, Verdict.DIFFERENT: 1}.get(self, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Value):
    """One quantity.

    [Note: longer comparisons] What differs in the last bit grows from batch to batch, with Adam by up to 1e-7 in each.
    The tolerance is therefore for up to ten batches; at a later one it is larger by as much as that batch is later.

    Of all batches or tensors, the one that is furthest beyond its limit, or nearest to it.

    Args:
        distance: Of FSDP2 from FSDP1, relative; infinite where only one of the two numbers is finite or exists.
        floor: Of FSDP1 from itself, the largest over its repetitions; see [Note: noise floors].
        limit: The largest ``distance`` that counts as equal; infinite where FSDP1 itself differs without bound.
        worst: The batch or tensor; "" if all are equal.
    """

    name: str
    distance: float
    floor: float
    limit: float
    worst: str

    @property
    def is_same(self) -> bool:
        # Where FSDP1 is not finite in one of its own runs, no distance proves anything.
        return self.distance <= self.limit < math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(Value):
    """The verdict, what it is made of, and what is known of the causes, in whole sentences."""

    verdict: Verdict
    quantities: tuple[Quantity, ...]
    causes: tuple[str, ...]


def judge(first: RunRecord, fsdp2: RunRecord, again: Sequence[RunRecord], *, tolerance: float = TOLERANCE) -> Judgement:
    """Compare FSDP2, and every repetition of FSDP1, with the first run."""
    quantities = tuple(_quantities(first, fsdp2, again, tolerance))
    causes = tuple(_causes(first, fsdp2, again, tolerance, {each.name: each for each in quantities}))
    is_same = all(quantity.is_same for quantity in quantities)
    return Judgement(
        verdict=Verdict.SAME if is_same else Verdict.DIFFERENT,
        quantities=quantities,
        causes=causes or (() if is_same else ("no cause was recognized: see where each quantity is worst",)),
    )


def relative(value: float, of: float) -> float:
    """The difference to ``of``, relative to it; infinite where the two are not equal and one is no finite number.

    A NaN equals nothing, not even another one.
    """
    if value == of:
        return 0.0
    if not (math.isfinite(value) and math.isfinite(of)):
        return math.inf
    return abs(value - of) / abs(of) if of else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# How far apart


@dataclass(frozen=True, slots=True)
class _Apart:
    """How far apart two runs are in one batch or tensor, and after how many batches; ``detail`` shows the values."""

    distance: float
    place: str = ""
    num_batches: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Judged:
    """How far FSDP2 is from FSDP1 in one batch or tensor, FSDP1 from itself there, and the limit."""

    apart: _Apart
    floor: float
    limit: float

    @property
    def is_same(self) -> bool:
        return self.apart.distance <= self.limit < math.inf

    @property
    def excess(self) -> tuple[float, float]:
        """Largest for the worst place: one without a finite limit first."""
        if self.limit == math.inf:
            return (math.inf, math.inf)
        beyond = self.apart.distance / self.limit if self.limit else math.copysign(math.inf, self.apart.distance)
        return (beyond if self.apart.distance else 0.0, self.apart.distance)


def _quantities(first: RunRecord, fsdp2: RunRecord, again: Sequence[RunRecord], tolerance: float) -> Iterator[Quantity]:
    for name in _MEASURES:
        worst = max(_judged(name, first, fsdp2, again, tolerance), key=lambda each: each.excess)
        apart = worst.apart
        where = "" if worst.is_same and not apart.distance else apart.place + apart.detail
        yield Quantity(name=name, distance=apart.distance, floor=worst.floor, limit=worst.limit, worst=where)


def _judged(
    name: str, first: RunRecord, fsdp2: RunRecord, again: Sequence[RunRecord], tolerance: float
) -> list[_Judged]:
    """Every batch or tensor of one quantity with its own limit.

    [Note: noise floors] The floor of a tensor is that tensor's distance between runs on FSDP1: the noise of a bias
    must not excuse a weight. The floor of a batch is the largest up to that batch, because two runs of the same noise
    need not differ in the same batch, but noise that begins late must not excuse an early batch.
    """
    measure = _MEASURES[name]
    repeated = [measure(first, other) for other in again]
    floors: dict[str, float] = {}
    for run in repeated:
        largest = 0.0
        for each in run:
            largest = max(largest, each.distance) if name in _BY_BATCH else each.distance
            floors[each.place] = max(floors.get(each.place, 0.0), largest)
    found = measure(first, fsdp2)
    places = {each.place for each in found}
    # Where only the runs on FSDP1 differ without bound, FSDP2 cannot be judged.
    found += [_Apart(0.0, place) for place, floor in floors.items() if floor == math.inf and place not in places]
    judged = []
    for each in found:
        floor = floors.get(each.place, 0.0)
        limit = 0.0 if name in _EXACT else max(_tolerance_after(each.num_batches, tolerance), 2 * floor)
        judged.append(_Judged(each, floor, limit))
    return judged


def _tolerance_after(num_batches: int, tolerance: float) -> float:
    """See [Note: longer comparisons]."""
    return tolerance * max(1.0, num_batches / BATCHES_OF_TOLERANCE)


def _data(first: RunRecord, other: RunRecord) -> list[_Apart]:
    """The share of batches that are others."""
    places = [
        f"batch {ours.batch} of rank {rank}"
        for theirs, ours in _pairs(first, other)
        for rank, digests in enumerate(zip(theirs.digests, ours.digests, strict=True))
        if digests[0] != digests[1]
    ]
    if len(first.batches) != len(other.batches):
        counts = f"{len(other.batches)} batches, {len(first.batches)} on {first.title}"
        return [_Apart(math.inf, detail=counts)]
    share = len(places) / max(1, len(first.batches) * first.num_ranks)
    return [_Apart(share, detail=and_more(places) if places else "")]


def _start(first: RunRecord, other: RunRecord) -> list[_Apart]:
    theirs, ours = _by_key(first.start), _by_key(other.start)
    found = [_Apart(0.0)]
    for key in (*theirs, *(key for key in ours if key not in theirs)):
        name = f"{key[0]} of {key[1]}"
        if key not in ours or key not in theirs:
            only = (first if key not in ours else other).title
            return [_Apart(math.inf, name, detail=f", which {only} alone has")]
        if (distance := _apart(theirs[key], ours[key])) > _SUMMED:
            found.append(_Apart(distance, name))
    return found


def _apart(theirs: Fingerprint, ours: Fingerprint) -> float:
    """Of two tensors of which the sums and the sums of squares are known."""
    sums = (theirs.total, theirs.squares, ours.total, ours.squares)
    if theirs.size != ours.size or not all(map(math.isfinite, sums)):
        return math.inf
    width = math.sqrt(theirs.size * theirs.squares)  # what a sum can be at most
    of_sums = abs(ours.total - theirs.total) / width if width else (0.0 if ours.total == theirs.total else math.inf)
    return max(of_sums, relative(ours.squares, theirs.squares) / 2)


def _settings(first: RunRecord, other: RunRecord) -> list[_Apart]:
    """What the optimizers' groups say of each parameter, before the first batch and after the last."""
    found = [_Apart(0.0)]
    for when, title in (("settings", ""), ("last_settings", " after the last batch")):
        theirs, ours = (_by_name(getattr(run, when)) for run in (first, other))
        for key in (*theirs, *(key for key in ours if key not in theirs)):
            values = (theirs.get(key, math.nan), ours.get(key, math.nan))
            if distance := relative(values[1], values[0]):
                told = ["none" if math.isnan(value) else f"{value:g}" for value in values]
                detail = f": {told[1]}, {told[0]} on {first.title}"
                found.append(_Apart(distance, f"{key[0]} of {key[1]}{title}", detail=detail))
    return found


def _by_name(settings: Iterable[Settings]) -> dict[tuple[str, str], float]:
    return {(what, name): value for each in settings for name in each.names for what, value in each.values.items()}


def _losses(first: RunRecord, other: RunRecord) -> list[_Apart]:
    return _by_batch(first, other, "loss")


def _norms(first: RunRecord, other: RunRecord) -> list[_Apart]:
    return _by_batch(first, other, "gradient_norm")


def _by_batch(first: RunRecord, other: RunRecord, what: str) -> list[_Apart]:
    pairs = [(getattr(theirs, what), getattr(ours, what), ours.batch) for theirs, ours in _pairs(first, other)]
    is_scaled = first.precision == _SCALED
    return [
        _Apart(
            0.0 if is_scaled and math.isnan(theirs) and math.isnan(ours) else relative(ours, theirs),
            f"batch {batch}",
            number,
        )
        for number, (theirs, ours, batch) in enumerate(pairs, 1)
    ] or [_Apart(math.inf)]


def _parameters(first: RunRecord, other: RunRecord) -> list[_Apart]:
    return _of_tensors(other, is_parameter=True)


def _optimizer(first: RunRecord, other: RunRecord) -> list[_Apart]:
    return _of_tensors(other, is_parameter=False)


def _of_tensors(other: RunRecord, *, is_parameter: bool) -> list[_Apart]:
    """Of those after the last batch, which the run itself has compared with the first one's."""
    lonely = [name for name in (*other.missing, *other.added) if name.startswith(_PARAMETER + " ") == is_parameter]
    if lonely:
        detail = f", which {other.title} {'lacks' if lonely[0] in other.missing else 'alone has'}"
        return [_Apart(math.inf, and_more(lonely), detail=detail)]
    tensors = [each for each in other.distances if (each.kind == _PARAMETER) == is_parameter]
    num_batches = len(other.batches)
    return [_Apart(each.distance, title_of(each), num_batches) for each in tensors] or [_Apart(0.0)]


def title_of(tensor: TensorDistance | Fingerprint) -> str:
    return f"{tensor.kind} of {tensor.name}"


DATA, START, SETTINGS = "data", "state before the first batch", "optimizer settings"
LOSSES, NORMS = "losses", "gradient norms before clipping"
PARAMETERS, OPTIMIZER = "parameters after the last batch", "optimizer state after the last batch"
_MEASURES = {
    DATA: _data,
    START: _start,
    SETTINGS: _settings,
    LOSSES: _losses,
    NORMS: _norms,
    PARAMETERS: _parameters,
    OPTIMIZER: _optimizer,
}
_EXACT = (DATA,)
_BY_BATCH = (LOSSES, NORMS)


def _pairs(first: RunRecord, other: RunRecord) -> list[tuple[BatchRecord, BatchRecord]]:
    return list(zip(first.batches, other.batches, strict=False))


def _by_key(prints: Iterable[Fingerprint]) -> dict[tuple[str, str], Fingerprint]:
    return {(each.kind, each.name): each for each in prints}


# ---------------------------------------------------------------------------------------------------------------------
# Why


def _causes(
    first: RunRecord,
    fsdp2: RunRecord,
    again: Sequence[RunRecord],
    tolerance: float,
    found: Mapping[str, Quantity],
) -> Iterator[str]:
    for each in again:
        if (apart := _data(first, each)[0]).distance:
            where = f"{each.title} trained on other data than {first.title} ({apart.detail})"
            yield f"{where}: the file draws others each time"
    if not found[DATA].is_same:
        yield f"the two did not train on the same data: {found[DATA].worst}"
        return
    if not found[START].is_same:
        yield _of_start(first, fsdp2, found[START])
    if not found[SETTINGS].is_same:
        yield f"FSDP2's optimizer was set otherwise: {found[SETTINGS].worst}"
    yield from _of_dtypes(first, fsdp2)
    if not found[START].is_same:
        return
    if not found[NORMS].is_same and (scale := _scale(first, fsdp2)):
        yield f"FSDP2's gradients are {scale:.6g} times FSDP1's in every batch: the gradient scale differs"
    if not (found[LOSSES].is_same and found[NORMS].is_same):
        yield _of_first_batch(first, fsdp2, again, tolerance)


def _of_start(first: RunRecord, fsdp2: RunRecord, start: Quantity) -> str:
    kinds = {run.title: {each.kind for each in run.start if each.kind != _PARAMETER} for run in (first, fsdp2)}
    theirs, ours = kinds[first.title], kinds[fsdp2.title]
    if theirs and not ours:
        return (
            f"the optimizer state is lost: before the first batch {first.title} has {', '.join(sorted(theirs))}, "
            f"{fsdp2.title} has none"
        )
    return f"the two did not begin alike: {start.worst}"


def _scale(first: RunRecord, fsdp2: RunRecord) -> float:
    """What FSDP2's gradient norm is of FSDP1's, where that is one number in all batches; else 0."""
    pairs = [(ours.gradient_norm, theirs.gradient_norm) for theirs, ours in _pairs(first, fsdp2)]
    ratios = [ours / theirs for ours, theirs in pairs if theirs and math.isfinite(ours) and math.isfinite(theirs)]
    if len(ratios) < len(pairs) or not ratios or abs(ratios[0] - 1) < 1e-3:
        return 0.0
    # Only the first batch's are of the same weights; later ones drift apart with them.
    middle = statistics.median(ratios)
    return ratios[0] if abs(ratios[0] / middle - 1) < 0.1 else 0.0


def _of_dtypes(first: RunRecord, fsdp2: RunRecord) -> Iterator[str]:
    what = {"all_gather": "parameters are gathered", "reduce_scatter": "gradients are reduced"}
    for op, told in what.items():
        theirs, ours = (_dtypes(run.collectives, op) for run in (first, fsdp2))
        if theirs and ours and theirs != ours:
            yield f"{told} in {' and '.join(theirs)} on FSDP1, in {' and '.join(ours)} on FSDP2 ({op}'s dtype)"


def _dtypes(counts: Iterable[CollectiveCount], op: str) -> list[str]:
    return sorted({each.dtype for each in counts if each.op == op})


def _of_first_batch(first: RunRecord, fsdp2: RunRecord, again: Sequence[RunRecord], tolerance: float) -> str:
    kinds = (
        ("loss", "the loss", "forward", _judged(LOSSES, first, fsdp2, again, tolerance)),
        (
            "gradient_norm",
            "the gradient norm",
            "backward, or the reduction of gradients",
            _judged(NORMS, first, fsdp2, again, tolerance),
        ),
    )
    for number, (theirs, ours) in enumerate(_pairs(first, fsdp2)):
        for field, what, where, judged in kinds:
            if judged[number].is_same:
                continue
            expected = getattr(theirs, field)
            if judged[number].limit == math.inf:
                return _of_noise(field, f"{what} of batch {theirs.batch}", expected, again, number)
            before = ", or the step before it" if number else ""
            built_up = (
                f"; or it is rounding that built up over the {number} batches before it, which are the same"
                if number >= BATCHES_OF_TOLERANCE
                else ""
            )
            return (
                f"{what} of batch {ours.batch} is the first number that differs ({getattr(ours, field):.9g}, FSDP1 "
                f"{expected:.9g}): look at the {where}{before}{built_up}"
            )
    return "a run trained no batch"


def _of_noise(field: str, what: str, expected: float, again: Sequence[RunRecord], number: int) -> str:
    """Of the first batch in which FSDP1 differs from itself without bound."""
    values = [(getattr(run.batches[number], field), run.title) for run in again if number < len(run.batches)]
    value, title = next(each for each in values if relative(each[0], expected) == math.inf)
    return f"FSDP1 does not repeat: {what} is {value:.9g} on {title}, {expected:.9g} on FSDP1; nothing can be compared"
