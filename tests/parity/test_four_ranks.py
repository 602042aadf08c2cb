"""Ours against Composer's FSDP1 on 4 ranks: replicas, and sums whose order differs."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.cases import FOUR_RANKS, pairwise, runs
from parity.harness import Run

pytestmark = pytest.mark.composer


@parametrize_runs(runs(pairwise(FOUR_RANKS)))
def test_four_ranks(run: Run):
    """Runs on replicas of shards (2 x 2), with shards that are empty on some ranks, or freed after forward to half the
    ranks only, would train to other weights."""
    assert_parity(run, 4)
