"""The cases that are compared: that the small set really meets every pair."""

from __future__ import annotations

import itertools

import pytest
from parity.cases import (
    FOUR_RANKS,
    FOUR_RANKS_FEW,
    FULL_PRODUCT,
    REFUSED,
    TWO_RANKS,
    TWO_RANKS_AND_MODELS,
    TWO_RANKS_AND_SETTINGS,
    Axes,
    is_refused,
    pairs,
    pairwise,
    product,
)

ALL_AXES = pytest.mark.parametrize(
    "axes",
    [TWO_RANKS, TWO_RANKS_AND_SETTINGS, TWO_RANKS_AND_MODELS, FOUR_RANKS, FULL_PRODUCT],
    ids=["two ranks", "with settings", "with models", "four ranks", "full product"],
)


@ALL_AXES
def test_every_two_values_meet_unless_fsdp1_refuses_them(axes: Axes):
    """Otherwise two settings that go wrong only together would pass unseen."""
    met = {pair for case in pairwise(axes) for pair in pairs(case)}
    missing = []
    for (first, firsts), (second, seconds) in itertools.combinations(axes.items(), 2):
        for values in itertools.product(firsts, seconds):
            case = dict(zip((first, second), values, strict=True))
            is_in_table = any(row.covers(case) for row in REFUSED)
            if not is_in_table and frozenset(case.items()) not in met:
                missing.append(case)
    assert missing == []


def test_every_value_meets_each_of_the_chosen_axis():
    """A setting that goes wrong with replicas only would pass unseen."""
    axes = FOUR_RANKS_FEW
    met = {pair for case in pairwise(axes, of="strategy") for pair in pairs(case)}
    wanted = {
        frozenset({("strategy", strategy), (axis, value)})
        for strategy in axes["strategy"]
        for axis, values in axes.items()
        for value in values
        if axis != "strategy"
    }
    assert wanted <= met


@ALL_AXES
def test_no_case_is_one_that_fsdp1_refuses(axes: Axes):
    """A case without a reference would fail and say nothing about us."""
    assert [case for case in pairwise(axes) if is_refused(case)] == []


def test_cases_are_few_and_the_same_each_time():
    """A set that grows unseen would make `make test` slow; one that changes would make failures come and go."""
    assert pairwise(TWO_RANKS) == pairwise(TWO_RANKS)
    assert len(pairwise(TWO_RANKS)) <= 26
    assert len(pairwise(TWO_RANKS_AND_SETTINGS)) <= 32
    assert len(pairwise(TWO_RANKS_AND_MODELS)) <= 34
    assert len(pairwise(FOUR_RANKS)) <= 30
    assert len(pairwise(FOUR_RANKS_FEW, of="strategy")) <= 14


def test_the_product_has_every_combination_once():
    """The slow tests promise all combinations of what the issue names."""
    cases = list(product(FULL_PRODUCT))
    # SGD with each clipping, AdamW with each: in float64 without clipping, in fp32 with it.
    assert len(cases) == 3 * 4 * (3 + 3) * 2 * 2 * 2 * 2
    assert len({tuple(case.items()) for case in cases}) == len(cases)
