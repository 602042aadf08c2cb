"""FSDP2 compared with Composer's FSDP1 on 4 ranks: replicas, and sums in a different order."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.cases import FOUR_RANKS, FOUR_RANKS_FEW, FOUR_RANKS_ONCE, pairwise, runs
from parity.harness import Run

pytestmark = pytest.mark.composer


@parametrize_runs([*runs(pairwise(FOUR_RANKS_FEW, of="strategy")), *FOUR_RANKS_ONCE])
def test_each_setting_on_replicas(run: Run):
    """Runs on replicas of shards (2 x 2), with empty shards on some ranks, or resharded after forward to two ranks,
    would train other weights."""
    assert_parity(run, 4)


@pytest.mark.slow
@parametrize_runs(runs(pairwise(FOUR_RANKS)))
def test_every_two_settings(run: Run):
    """Two settings that are wrong on replicas only together would train other weights."""
    assert_parity(run, 4)
