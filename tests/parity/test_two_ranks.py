"""FSDP2 compared with Composer's FSDP1 on 2 ranks: pairs of settings on some model, and, slow, each pair on each model.

Two ranks add two terms, so after all steps of SGD the parameters are bit for bit FSDP1's; `keeps_order_of_sums` in
comparison.py names the exceptions.
"""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.cases import (
    MODELS,
    TWO_RANKS,
    TWO_RANKS_AND_MODELS,
    TWO_RANKS_AND_SETTINGS,
    TWO_RANKS_ONCE,
    pairwise,
    runs,
)
from parity.comparison import keeps_order_of_sums
from parity.harness import Run

pytestmark = pytest.mark.composer


@parametrize_runs([*runs(pairwise(TWO_RANKS_AND_MODELS)), *TWO_RANKS_ONCE])
def test_every_two_settings(run: Run):
    """Two settings that are wrong only together, or one that is wrong for one kind of model, would reach a user."""
    assert_parity(run, 2)


# Two fast cases that share neither model nor strategy; most of the pairs above are bit for bit equal as well.
BIT_FOR_BIT = [Run(model=model, strategy=name) for model in MODELS for name in TWO_RANKS["strategy"]]


@parametrize_runs(BIT_FOR_BIT, slow=[run for number, run in enumerate(BIT_FOR_BIT) if number not in (9, 15)])
def test_bit_for_bit(run: Run):
    """Different rounding from FSDP1's would be within every tolerance, and could hide an equally small bug."""
    assert keeps_order_of_sums(run, 2)
    assert_parity(run, 2)


# The MLP has two roots, batch norms and a parameter with fewer elements than ranks. GPT-2 has dropout and tied
# embeddings. Most LLM Foundry YAMLs finetune a Llama. MPT's root has no parameters, and its tied embedding is a unit
# that runs twice.
ON_EACH_MODEL = [
    run
    for model in MODELS
    for run in runs(pairwise(TWO_RANKS_AND_SETTINGS if model in ("mlp", "mpt") else TWO_RANKS), model=model)
]


@pytest.mark.slow
@parametrize_runs(ON_EACH_MODEL)
def test_every_two_settings_on_each_model(run: Run):
    """Two settings that are wrong together on one kind of model only would train other weights."""
    assert_parity(run, 2)


MIXED_PRECISION = [
    Run(model=model, tied=True, optimizer=optimizer, microbatches=microbatches, evaluate=True, settings=settings)
    for model in MODELS
    for settings, optimizer, microbatches in (
        ("bf16", "sgd", 1),
        ("bf16-reduced-in-fp32", "adamw", 3),
        ("reduced-in-bf16", "sgd", 3),
    )
]


# Fast are all three on the MLP, for its batch norms, and one on MPT, whose tied embedding is a unit.
@parametrize_runs(
    MIXED_PRECISION, slow=[run for run in MIXED_PRECISION[3:] if (run.model, run.settings) != ("mpt", "bf16")]
)
def test_mixed_precision(run: Run):
    """All bf16 runs depend on casts: of parameters, root inputs, buffers and reductions, and none of batch norms."""
    assert_parity(run, 2)
