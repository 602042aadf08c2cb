"""The verdict on synthetic runs: which are the same and which differ, independent of the number of batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from composer_fsdp2.comparing.judging import (
    BUFFERS,
    DATA,
    LOSSES,
    NORMS,
    OPTIMIZER,
    PARAMETERS,
    SETTINGS,
    START,
    judge,
)
from composer_fsdp2.comparing.run_record import BatchRecord, RunRecord, Settings, TensorDistance

MOMENT = TensorDistance(kind="exp_avg", name="w", distance=0.0, largest=0.0, size=4)
LACKING = replace(MOMENT, distance=math.inf, largest=math.inf, only_in="first")
MOVED = replace(MOMENT, distance=1e-3, largest=1e-3)


def made_run(title: str = "FSDP1", *, losses: tuple[float, ...] = (3.0, 2.0), distance: float = 0.0) -> RunRecord:
    """A run whose gradient norms are its losses."""
    batches = tuple(
        BatchRecord(
            batch=number,
            digests=("a", "b"),
            loss=loss,
            gradient_norm=loss,
            seconds=1.0,
            memory_bytes=1,
            samples=8,
            is_counted=False,
        )
        for number, loss in enumerate(losses, 1)
    )
    return RunRecord(
        title=title,
        engine=title.split()[0],
        device="CPU",
        num_ranks=2,
        precision="fp32",
        num_units=1,
        memory_is="made up",
        first_batch=1,
        batches=batches,
        collectives=(),
        start=(replace(MOMENT, kind="parameter"), MOMENT),
        end=(TensorDistance(kind="parameter", name="w", distance=distance, largest=distance),),
    )


def different(fsdp2: RunRecord, again: RunRecord | None = None, first: RunRecord | None = None) -> set[str]:
    quantities, causes = judge([first or made_run(), fsdp2, again or made_run("FSDP1 again")])
    names = {each.name for each in quantities if not each.is_same}
    assert bool(causes) == bool(names)
    return names


def with_distances(title: str, **by_name: float) -> RunRecord:
    end = tuple(
        TensorDistance(kind="parameter", name=name, distance=each, largest=each) for name, each in by_name.items()
    )
    return replace(made_run(title), end=end)


def with_rates(title: str, first: tuple[float, float], last: tuple[float, float]) -> RunRecord:
    """Learning rate and weight decay, in the first batch and in the last one."""
    settings, last_settings = (
        (Settings(values={"lr": rate, "weight_decay": decay}, names=("w",)),) for rate, decay in (first, last)
    )
    return replace(made_run(title), settings=settings, last_settings=last_settings)


def fsdp2(**options: Any) -> RunRecord:
    return made_run("FSDP2", **options)


PLAIN, DRAWN = ((1e-3, 0.1), (1e-3, 0.1)), ((1e-3, 0.1), (2e-3, 0.1))
NOISY = made_run(losses=(3.0 * (1 + 1e-3), 2.0))
LATE = made_run(losses=(3.0, 2.0 * (1 + 1e-3)))
NOISY_BIAS = with_distances("FSDP1 again", weight=0.0, bias=0.3)
NOISY_RATE = with_rates("FSDP1 again", *DRAWN)
FIFTY = made_run(losses=(1.0,) * 50)
DRIFTING = tuple(1.0 + 9e-8 * number for number in range(1, 51))
GROUP = Settings(values={"lr": 1e-3, "weight_decay": 0.0}, names=("w", "v"))
DECAYED = replace(GROUP, names=("v",), values={"lr": 1e-3, "weight_decay": 0.1})
OF_W, OF_V = replace(GROUP, names=("w",)), replace(GROUP, names=("v",))
GROUPED = replace(made_run(), settings=(GROUP,))
OTHER_DATA = replace(fsdp2(), batches=(fsdp2().batches[0], replace(fsdp2().batches[1], digests=("a", "c"))))
BROKEN = made_run(losses=(math.nan, 2.0))
# The expected differences, the run on FSDP2, the second run on FSDP1, and the first one.
CASES: dict[str, tuple[set[str], RunRecord, *tuple[RunRecord, ...]]] = {
    # Rounding is no difference, and a difference is no rounding.
    "nothing": (set(), fsdp2()),
    "below the tolerance": (set(), fsdp2(losses=(3.0 * (1 + 9e-7), 2.0))),
    "above the tolerance": ({LOSSES, NORMS}, fsdp2(losses=(3.0 * (1 + 2e-6), 2.0))),
    "parameters": ({PARAMETERS}, fsdp2(distance=1e-3)),
    "parameters, above the tolerance": ({PARAMETERS}, fsdp2(distance=2e-6)),
    # A run that does not repeat on FSDP1 need not repeat on FSDP2.
    "twice the noise of FSDP1": (set(), fsdp2(losses=(3.0 * (1 + 1.9e-3), 2.0)), NOISY),
    "more than twice the noise": ({LOSSES, NORMS}, fsdp2(losses=(3.0 * (1 + 2.1e-3), 2.0)), NOISY),
    # A bias whose gradient is only rounding must not hide a weight that trains wrongly at a distance of 0.4.
    "noise of a tensor": (set(), with_distances("FSDP2", weight=0.0, bias=0.5), NOISY_BIAS),
    "noise of another tensor": ({PARAMETERS}, with_distances("FSDP2", weight=0.4, bias=0.5), NOISY_BIAS),
    # If FSDP1 differs from itself at the end, this must not hide a wrong first batch; but two runs with the same noise
    # need not differ in the same batch.
    "noise of a late batch": (set(), fsdp2(losses=(3.0, 2.0 * (1 + 1.9e-3))), LATE),
    "noise that comes later": (set(), fsdp2(losses=(3.0, 2.0 * (1 + 1e-3))), NOISY),
    "noise of a later batch": ({LOSSES, NORMS}, fsdp2(losses=(3.0 * (1 + 1e-4), 2.0)), LATE),
    # A random learning rate must not hide a lost weight decay, nor a last value a first one.
    "noise of a setting": (set(), with_rates("FSDP2", *DRAWN), NOISY_RATE, with_rates("FSDP1", *PLAIN)),
    "a first rate": ({SETTINGS}, with_rates("FSDP2", *DRAWN[::-1]), NOISY_RATE, with_rates("FSDP1", *PLAIN)),
    "another setting": (
        {SETTINGS},
        with_rates("FSDP2", PLAIN[0], (1e-3, 0.0)),
        NOISY_RATE,
        with_rates("FSDP1", *PLAIN),
    ),
    # Fifty batches may drift apart five times as far as ten; an early difference is still too large.
    "fifty batches": (set(), fsdp2(losses=DRIFTING, distance=4e-6), FIFTY, FIFTY),
    "fifty batches, too far": ({PARAMETERS}, fsdp2(losses=DRIFTING, distance=6e-6), FIFTY, FIFTY),
    "fifty batches, early": ({LOSSES, NORMS}, fsdp2(losses=(1.0, 1.0 + 2e-6, *DRIFTING[2:])), FIFTY, FIFTY),
    # A separate decay or learning rate of one tensor is not visible in the first losses; other groups may have equal
    # settings.
    "a decay of its own": ({SETTINGS}, replace(fsdp2(), settings=(OF_W, DECAYED)), GROUPED, GROUPED),
    "a tensor without a rate": ({SETTINGS}, replace(fsdp2(), settings=(OF_W,)), GROUPED, GROUPED),
    "other groups": (set(), replace(fsdp2(), settings=(OF_V, OF_W)), GROUPED, GROUPED),
    # A run that diverges on FSDP2 alone, or on both, does not pass.
    "no number": ({LOSSES, NORMS}, fsdp2(losses=(math.nan, 2.0))),
    "an infinite distance": ({PARAMETERS}, fsdp2(distance=math.inf)),
    "two infinite distances": ({PARAMETERS}, fsdp2(distance=math.inf), made_run(distance=math.inf)),
    "no numbers on all": ({LOSSES, NORMS}, fsdp2(losses=(math.nan, 2.0)), BROKEN, BROKEN),
    # The first batches of fp16, in which a scaler searches its scale.
    "infinite on all": (set(), *[made_run(losses=(math.inf, 2.0))] * 3),
    "no numbers on all in fp16": (set(), *[replace(BROKEN, precision="amp_fp16")] * 3),
    # Missing tensors have no distance, so a report of the others alone would look good.
    "a start of fewer tensors": ({START}, replace(fsdp2(), start=(LACKING,))),
    "another start": ({START}, replace(fsdp2(), start=(MOVED,))),
    "a tensor that is missing": ({PARAMETERS}, replace(fsdp2(), end=(replace(LACKING, kind="parameter"),))),
    "optimizer state": ({OPTIMIZER}, replace(fsdp2(), end=(MOVED,))),
    # Used in evaluations, and not read by a training forward.
    "a buffer": ({BUFFERS}, replace(fsdp2(), end=(replace(MOVED, kind="buffer"),))),
    "a buffer that is added": ({BUFFERS}, replace(fsdp2(), end=(replace(LACKING, kind="buffer", only_in="this"),))),
    # Also if FSDP1 reads different data each time.
    "other data on both": ({DATA}, OTHER_DATA, replace(OTHER_DATA, title="FSDP1 again")),
}


@pytest.mark.parametrize("what", CASES)
def test_what_counts_as_a_difference(what: str):
    """Otherwise a verdict would pass a wrong run, or fail a correct one."""
    expected, *runs = CASES[what]
    assert different(*runs) == expected


def test_a_verdict_says_what_differs_first():
    """A user who reads only the first cause looks in the right place."""

    def causes(ours: RunRecord, again: RunRecord, first: RunRecord | None = None) -> tuple[str, ...]:
        return judge([first or made_run(), ours, again])[1]

    early = causes(fsdp2(losses=(3.0 * (1 + 1e-4), 2.0)), LATE)
    assert early[0].startswith("the loss of batch 1 is the first number that differs")
    assert causes(OTHER_DATA, made_run()) == ("the two did not train on the same data: batch 2 of rank 1",)
    for settings, told in (
        ((OF_W, DECAYED), "weight_decay of v: 0.1, 0 on FSDP1"),
        ((OF_W,), "lr of v: none, 0.001 on FSDP1"),
    ):
        found = causes(replace(fsdp2(), settings=settings), GROUPED, GROUPED)
        assert found == (f"FSDP2's optimizer was set otherwise: {told}",)
    assert DATA in different(fsdp2(losses=(3.0,)))
    for start, told in (
        ((LACKING,), "the optimizer state is lost: before the first batch FSDP1 has exp_avg, FSDP2 has none"),
        ((LACKING, replace(MOMENT, name="v")), "the two did not begin alike: exp_avg of w, which FSDP1 alone has"),
        ((MOVED,), "the two did not begin alike: exp_avg of w"),
    ):
        assert causes(replace(fsdp2(), start=start), made_run()) == (told,)


def worst(name: str, *runs: RunRecord, **options: Any) -> tuple[str | None, float | None]:
    """The worst value of a quantity, its place, and the limit there."""
    [found] = [each for each in judge(runs, **options)[0] if each.name == name]
    return found.worst, found.limit


def test_the_worst_is_where_a_limit_is_passed():
    """If one tensor or batch has a small limit, the larger limit of another must not decide."""
    apart = with_distances("FSDP2", weight=0.4, bias=0.5)
    assert worst(PARAMETERS, made_run(), apart, NOISY_BIAS) == ("parameter of weight", 1e-6)
    early = fsdp2(losses=(1.0, 1.0 + 2e-6, *DRIFTING[2:]))
    assert worst(LOSSES, FIFTY, early, FIFTY) == ("batch 2", 1e-6)
    tiny, noise = with_distances("FSDP2", a=1e-9, b=1e-3), with_distances("FSDP1 again", a=0.0, b=1e-3)
    assert worst(PARAMETERS, made_run(), tiny, noise, tolerance=0.0)[0] == "parameter of a"


def test_fsdp1_that_does_not_repeat_is_a_verdict():
    """Three runs of hours end in a report that names the batch, not in an error that deletes them."""
    for again in ((math.nan, 2.0), (3.0, math.nan), (3.0, math.inf)):
        quantities, causes = judge([made_run(), made_run("FSDP2"), made_run("FSDP1 again", losses=again)])
        assert not all(each.is_same for each in quantities)
        batch = 1 if math.isnan(again[0]) else 2
        value = again[batch - 1]
        assert f"FSDP1 does not repeat: the loss of batch {batch} is {value:.9g} on FSDP1 again" in causes[0]
    # An earlier difference on FSDP2 is still the first cause.
    runs = [made_run(), made_run("FSDP2", losses=(3.1, 2.0)), made_run("FSDP1 again", losses=(3.0, math.nan))]
    assert judge(runs)[1][-1].startswith("the loss of batch 1 is the first number that differs")


def test_a_scale_of_gradients_is_named():
    """With clipping to the same norm, doubled gradients train the same weights; only the norms before clipping
    differ."""
    run = made_run("FSDP2")
    doubled = replace(run, batches=tuple(replace(each, gradient_norm=2 * each.gradient_norm) for each in run.batches))
    assert different(doubled) == {NORMS}
    causes = judge([made_run(), doubled, made_run("FSDP1 again")])[1]
    assert causes[0] == "FSDP2's gradients are 2 times FSDP1's in every batch: the gradient scale differs"
