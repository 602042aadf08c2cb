"""The compared cases: the small sets cover every pair, without those that FSDP1 refuses."""

from __future__ import annotations

import pytest
from parity.cases import (
    FOUR_RANKS,
    FOUR_RANKS_FEW,
    FULL_PRODUCT,
    TWO_RANKS,
    TWO_RANKS_AND_MODELS,
    TWO_RANKS_AND_SETTINGS,
    Axes,
    is_refused,
    pairs,
    pairwise,
    product,
)


@pytest.mark.parametrize(
    ("axes", "of", "at_most"),
    [
        (TWO_RANKS, None, 26),
        (TWO_RANKS_AND_SETTINGS, None, 32),
        (TWO_RANKS_AND_MODELS, None, 23),
        (FOUR_RANKS, None, 30),
        (FOUR_RANKS_FEW, "strategy", 6),
    ],
    ids=["two ranks", "with settings", "with models", "four ranks", "replicas"],
)
def test_every_two_values_meet_unless_fsdp1_refuses_them(axes: Axes, of: str | None, at_most: int):
    """Two settings that are wrong only together would be missed; a set that grows unnoticed makes `make test` slow."""
    cases = pairwise(axes, of)
    assert cases == pairwise(axes, of) and len(cases) <= at_most
    assert not [case for case in cases if is_refused(case)]
    met = {pair for case in cases for pair in pairs(case)}
    for one, ones in axes.items():
        for other, others in axes.items():
            is_asked = one < other and of in (None, one, other)
            wanted = [{one: a, other: b} for a in ones for b in others] if is_asked else []
            assert not [case for case in wanted if not is_refused(case) and frozenset(case.items()) not in met]


def test_the_product_has_every_combination_once():
    """The slow tests cover all combinations of common settings."""
    cases = list(product(FULL_PRODUCT))
    # SGD with each clipping, AdamW with each: in float64 without clipping, in fp32 with it.
    assert len(cases) == len({tuple(case.items()) for case in cases}) == 3 * 4 * (3 + 3) * 2 * 2 * 2 * 2
