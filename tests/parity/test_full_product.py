"""Every combination of strategy, checkpointing, optimizer, clipping, groups, ties, microbatches and evaluation.

1152 runs for each model; one test for each strategy and checkpointing. Four steps, since pairs have ten.
"""

from __future__ import annotations

import pytest
from parity.assertions import assert_no_problem, needs
from parity.cases import FULL_PRODUCT, product, runs
from parity.comparison import compare_all
from support.ranks import run_ranks

pytestmark = [pytest.mark.composer, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("checkpointing", FULL_PRODUCT["checkpointing"])
@pytest.mark.parametrize("strategy", FULL_PRODUCT["strategy"])
@pytest.mark.parametrize("model", [pytest.param(name, marks=needs(name)) for name in ("mlp", "gpt2", "llama", "mpt")])
def test_all_combinations(model: str, strategy: str, checkpointing: str):
    """An error in a combination of three or more settings would reach a user first."""
    axes = {**FULL_PRODUCT, "strategy": (strategy,), "checkpointing": (checkpointing,)}
    chosen = runs(product(axes), model=model, steps=4)
    by_rank = run_ranks(compare_all, 2, chosen, timeout_s=3500)
    for run, comparisons in zip(chosen, zip(*by_rank, strict=True), strict=True):
        assert_no_problem(run, list(comparisons))
