"""The verdict on made-up runs: what is the same, what is not, and that neither depends on how long one looked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from composer_fsdp2.comparing.judging import DATA, LOSSES, NORMS, PARAMETERS, SETTINGS, START, Verdict, judge
from composer_fsdp2.comparing.run_record import BatchRecord, Fingerprint, RunRecord, Settings, TensorDistance

MOMENT = Fingerprint(kind="exp_avg", name="w", total=1.0, squares=2.0, size=4)


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
        distances=(TensorDistance(kind="parameter", name="w", distance=distance, largest=distance),),
    )


def different(fsdp2: RunRecord, again: RunRecord | None = None, first: RunRecord | None = None) -> set[str]:
    judgement = judge(first or made_run(), fsdp2, [again or made_run("FSDP1 again")])
    names = {each.name for each in judgement.quantities if not each.is_same}
    assert (judgement.verdict is Verdict.DIFFERENT) == bool(names)
    assert bool(judgement.causes) == bool(names)
    return names


def test_a_difference_counts_from_the_tolerance_on():
    """Rounding is no difference, and a difference no rounding."""
    assert different(made_run("FSDP2")) == set()
    assert different(made_run("FSDP2", losses=(3.0 * (1 + 9e-7), 2.0))) == set()
    assert different(made_run("FSDP2", losses=(3.0 * (1 + 2e-6), 2.0))) == {LOSSES, NORMS}
    assert different(made_run("FSDP2", distance=1e-3)) == {PARAMETERS}


def test_twice_the_noise_of_fsdp1_is_no_difference():
    """A run that does not repeat on FSDP1 need not on FSDP2."""
    noisy = made_run("FSDP1 again", losses=(3.0 * (1 + 1e-3), 2.0))
    assert different(made_run("FSDP2", losses=(3.0 * (1 + 1.9e-3), 2.0)), noisy) == set()
    assert different(made_run("FSDP2", losses=(3.0 * (1 + 2.1e-3), 2.0)), noisy) == {LOSSES, NORMS}


def test_noise_of_one_tensor_does_not_excuse_another():
    """A bias whose gradient is rounding alone must not hide a weight that trains wrongly at a distance of 0.4."""

    def run(title: str, weight: float, bias: float) -> RunRecord:
        tensors = (("weight", weight), ("bias", bias))
        distances = tuple(
            TensorDistance(kind="parameter", name=name, distance=each, largest=each) for name, each in tensors
        )
        return replace(made_run(title), distances=distances)

    noisy = run("FSDP1 again", 0.0, 0.3)
    assert different(run("FSDP2", 0.0, 0.5), noisy) == set()
    assert different(run("FSDP2", 0.4, 0.5), noisy) == {PARAMETERS}
    judgement = judge(made_run(), run("FSDP2", 0.4, 0.5), [noisy])
    [parameters] = [each for each in judgement.quantities if each.name == PARAMETERS]
    assert (parameters.worst, parameters.floor, parameters.limit) == ("parameter of weight", 0.0, 1e-6)


def test_noise_of_a_late_batch_does_not_excuse_an_early_one():
    """FSDP1 that drifts from itself at the end must not hide a first batch that is wrong."""
    noisy = made_run("FSDP1 again", losses=(3.0, 2.0 * (1 + 1e-3)))
    assert different(made_run("FSDP2", losses=(3.0, 2.0 * (1 + 1.9e-3))), noisy) == set()
    judgement = judge(made_run(), made_run("FSDP2", losses=(3.0 * (1 + 1e-4), 2.0)), [noisy])
    assert [each.name for each in judgement.quantities if not each.is_same] == [LOSSES, NORMS]
    assert judgement.causes[0].startswith("the loss of batch 1 is the first number that differs")
    # Two runs of one noise need not differ in the same batch.
    early = made_run("FSDP1 again", losses=(3.0 * (1 + 1e-3), 2.0))
    assert different(made_run("FSDP2", losses=(3.0, 2.0 * (1 + 1e-3))), early) == set()


def test_noise_of_one_setting_does_not_excuse_another():
    """A learning rate that a file draws must not hide a weight decay that is lost, nor the last one a first one."""

    def run(title: str, first: tuple[float, float], last: tuple[float, float]) -> RunRecord:
        settings, last_settings = (
            (Settings(values={"lr": rate, "weight_decay": decay}, names=("w",)),) for rate, decay in (first, last)
        )
        return replace(made_run(title), settings=settings, last_settings=last_settings)

    plain = run("FSDP1", (1e-3, 0.1), (1e-3, 0.1))
    noisy = run("FSDP1 again", (1e-3, 0.1), (2e-3, 0.1))
    assert different(run("FSDP2", (1e-3, 0.1), (2e-3, 0.1)), noisy, plain) == set()
    assert different(run("FSDP2", (2e-3, 0.1), (1e-3, 0.1)), noisy, plain) == {SETTINGS}
    assert different(run("FSDP2", (1e-3, 0.1), (1e-3, 0.0)), noisy, plain) == {SETTINGS}


def test_fsdp1_that_does_not_repeat_is_a_verdict():
    """Three runs of hours end in a report that names the batch, not in an error that deletes them."""
    for again in ((math.nan, 2.0), (3.0, math.nan), (3.0, math.inf)):
        judgement = judge(made_run(), made_run("FSDP2"), [made_run("FSDP1 again", losses=again)])
        assert judgement.verdict is Verdict.DIFFERENT
        batch = 1 if math.isnan(again[0]) else 2
        value = again[batch - 1]
        assert f"FSDP1 does not repeat: the loss of batch {batch} is {value:.9g} on FSDP1 again" in judgement.causes[0]
    # What FSDP2 does wrong before that stays the first cause.
    judgement = judge(
        made_run(), made_run("FSDP2", losses=(3.1, 2.0)), [made_run("FSDP1 again", losses=(3.0, math.nan))]
    )
    assert judgement.causes[-1].startswith("the loss of batch 1 is the first number that differs")


def test_a_tolerance_of_zero_hides_nothing():
    """Where the limit of one tensor is zero, a larger limit of another must not decide."""
    distances = tuple(
        TensorDistance(kind="parameter", name=name, distance=each, largest=each)
        for name, each in (("a", 1e-9), ("b", 1e-3))
    )
    noisy = replace(made_run("FSDP1 again"), distances=(replace(distances[0], distance=0.0), distances[1]))
    judgement = judge(made_run(), replace(made_run("FSDP2"), distances=distances), [noisy], tolerance=0.0)
    assert [each.worst for each in judgement.quantities if not each.is_same] == ["parameter of a"]


def test_rounding_may_build_up_in_longer_comparisons_alone():
    """Fifty batches drift apart by five times as much as ten; up to ten the tolerance is what was given."""
    first = made_run(losses=(1.0,) * 50)
    losses = tuple(1.0 + 9e-8 * number for number in range(1, 51))
    assert different(made_run("FSDP2", losses=losses, distance=4e-6), made_run(losses=(1.0,) * 50), first) == set()
    late = made_run("FSDP2", losses=losses, distance=6e-6)
    assert different(late, made_run(losses=(1.0,) * 50), first) == {PARAMETERS}
    # What is wrong early is no less wrong because there are many batches after it.
    early = made_run("FSDP2", losses=(1.0, 1.0 + 2e-6, *losses[2:]))
    assert different(early, made_run(losses=(1.0,) * 50), first) == {LOSSES, NORMS}
    judgement = judge(first, early, [made_run(losses=(1.0,) * 50)])
    [of_losses] = [each for each in judgement.quantities if each.name == LOSSES]
    assert (of_losses.worst, of_losses.limit) == ("batch 2", 1e-6)
    assert different(made_run("FSDP2", distance=2e-6)) == {PARAMETERS}


def test_settings_of_the_optimizer_are_compared_by_name():
    """A decay or a rate of one tensor's own shows in no loss of the first batches."""
    group = Settings(values={"lr": 1e-3, "weight_decay": 0.0}, names=("w", "v"))
    first, again = (replace(made_run(title), settings=(group,)) for title in ("FSDP1", "FSDP1 again"))
    apart = (replace(group, names=("w",)), replace(group, names=("v",), values={"lr": 1e-3, "weight_decay": 0.1}))
    for settings, told in (
        (apart, "weight_decay of v: 0.1, 0 on FSDP1"),
        ((replace(group, names=("w",)),), "lr of v: none, 0.001 on FSDP1"),
    ):
        fsdp2 = replace(made_run("FSDP2"), settings=settings)
        judgement = judge(first, fsdp2, [again])
        assert different(fsdp2, again, first) == {SETTINGS}
        assert judgement.causes == (f"FSDP2's optimizer was set otherwise: {told}",)
    # Other groups with the same settings are the same.
    assert (
        different(replace(made_run("FSDP2"), settings=(replace(group, names=("v",)), apart[0])), again, first) == set()
    )


def test_a_scale_of_gradients_is_named():
    """Clipped to one norm, doubled gradients train the same weights: only the norms before clipping tell."""
    run = made_run("FSDP2")
    doubled = replace(run, batches=tuple(replace(each, gradient_norm=2 * each.gradient_norm) for each in run.batches))
    assert different(doubled) == {NORMS}
    causes = judge(made_run(), doubled, [made_run("FSDP1 again")]).causes
    assert causes[0] == "FSDP2's gradients are 2 times FSDP1's in every batch: the gradient scale differs"


def test_no_number_is_never_the_same_as_a_number():
    """A run that diverges on FSDP2 alone, or on both, is not let pass."""
    assert different(made_run("FSDP2", losses=(math.nan, 2.0))) == {LOSSES, NORMS}
    assert different(made_run("FSDP2", distance=math.inf)) == {PARAMETERS}
    diverged = made_run("FSDP1 again", distance=math.inf)
    assert different(made_run("FSDP2", distance=math.inf), diverged) == {PARAMETERS}
    # The first batches of fp16, in which a scaler looks for its scale, are no numbers on either.
    first = made_run(losses=(math.inf, 2.0))
    assert different(made_run("FSDP2", losses=(math.inf, 2.0)), made_run(losses=(math.inf, 2.0)), first) == set()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.nan, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (math.inf, math.inf),
        (math.inf, math.nan),
        (-math.inf, math.nan),
    ],
)
def test_a_start_that_is_no_number_is_not_the_same(theirs: float, ours: float):
    """Weights of NaN began 'the same' as weights that can be trained."""

    def started(title: str, *sums: float) -> RunRecord:
        broken = replace(MOMENT, kind="parameter", total=sums[0], squares=abs(sums[-1]))
        return replace(made_run(title), start=(broken, MOMENT))

    for a, b in (((theirs,), (ours,)), ((1.0, theirs), (1.0, ours)), ((theirs, 1.0), (ours, 1.0))):
        first, again = started("FSDP1", *a), started("FSDP1 again", *a)
        assert START in different(started("FSDP2", *b), again, first)


def test_losses_that_are_no_numbers_are_the_same_while_a_scale_is_looked_for():
    """Runs that both diverge prove nothing; with fp16 the first norms are no numbers in a run that trains."""
    runs = [made_run(title, losses=(math.nan, 2.0)) for title in ("FSDP1", "FSDP2", "FSDP1 again")]
    first, fsdp2, again = runs
    assert different(fsdp2, again, first) == {LOSSES, NORMS}
    first, fsdp2, again = (replace(each, precision="amp_fp16") for each in runs)
    assert different(fsdp2, again, first) == set()


def test_what_one_run_alone_has_is_a_difference():
    """Tensors that are not there cannot be apart; a report of those that are would be a good one."""
    assert different(replace(made_run("FSDP2"), start=made_run().start[:1])) == {START}
    assert different(replace(made_run("FSDP2"), missing=("parameter of v",))) == {PARAMETERS}
    shorter = made_run("FSDP2", losses=(3.0,))
    assert DATA in different(shorter)


def test_other_data_of_any_rank_is_a_difference():
    """Curves of other data may be as good, and prove nothing."""
    run = made_run("FSDP2")
    other = replace(run, batches=(run.batches[0], replace(run.batches[1], digests=("a", "c"))))
    judgement = judge(made_run(), other, [made_run("FSDP1 again")])
    assert judgement.causes == ("the two did not train on the same data: batch 2 of rank 1",)
    # Not even where FSDP1 draws others each time, too.
    assert DATA in different(other, replace(other, title="FSDP1 again"))
