"""Ours against Composer's FSDP1 on 2 ranks: each pair of settings on some model, and, slow, on each model.

Two ranks add two terms, so after all steps of SGD the parameters are bit for bit FSDP1's; `keeps_order_of_sums` in
comparison.py names the exceptions.
"""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.cases import MODELS, TWO_RANKS, TWO_RANKS_AND_MODELS, TWO_RANKS_AND_SETTINGS, pairwise, runs
from parity.comparison import keeps_order_of_sums
from parity.harness import Run

pytestmark = pytest.mark.composer


@parametrize_runs(runs(pairwise(TWO_RANKS_AND_MODELS)))
def test_every_two_settings(run: Run):
    """Two settings that go wrong only together, or one that goes wrong on one kind of model, would reach a user."""
    assert_parity(run, 2)


@parametrize_runs([Run(model=model, strategy=name) for model in MODELS for name in TWO_RANKS["strategy"]])
def test_bit_for_bit(run: Run):
    """Rounding that is another than FSDP1's would be within every tolerance, and a bug as small would hide in it."""
    assert keeps_order_of_sums(run, 2)
    assert_parity(run, 2)


@pytest.mark.slow
@parametrize_runs(runs(pairwise(TWO_RANKS_AND_SETTINGS), model="mlp"))
def test_mlp(run: Run):
    """A model of one's own, with two roots, batch norms and a parameter smaller than the ranks are many, would train
    to other weights."""
    assert_parity(run, 2)


@pytest.mark.slow
@parametrize_runs(runs(pairwise(TWO_RANKS), model="gpt2"))
def test_gpt2(run: Run):
    """A Hugging Face model with dropout and the embedding as its head would train to other weights."""
    assert_parity(run, 2)


@pytest.mark.slow
@parametrize_runs(runs(pairwise(TWO_RANKS), model="llama"))
def test_llama(run: Run):
    """A Llama, as most LLM Foundry YAMLs finetune, would train to other weights."""
    assert_parity(run, 2)


@pytest.mark.slow
@parametrize_runs(runs(pairwise(TWO_RANKS_AND_SETTINGS), model="mpt"))
def test_mpt(run: Run):
    """LLM Foundry's own model, whose root holds no parameter itself and whose tied embedding is a unit that runs twice,
    would train to other weights."""
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


@parametrize_runs(MIXED_PRECISION)
def test_mixed_precision(run: Run):
    """What is cast when (parameters, root inputs, buffers, reductions, batch norms not) would differ, and with it every
    bf16 run."""
    assert_parity(run, 2)
