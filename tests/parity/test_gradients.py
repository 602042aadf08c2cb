"""Ours against Composer's FSDP1 where some gradients are not what `fully_shard` makes of them."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.harness import Run

pytestmark = pytest.mark.composer


@parametrize_runs(
    [
        Run(settings="ignored", evaluate=True, microbatches=3),
        Run(settings="ignored", clipping="value", groups="several", checkpointing="non-reentrant"),
        Run(settings="ignored", model="gpt2", tied=True, optimizer="adamw64", evaluate=True),
        Run(settings="ignored", model="llama", clipping="value", groups="frozen"),
        Run(settings="ignored", model="mpt", tied=True, strategy="SHARD_GRAD_OP"),
        Run(settings="ignored", strategy="NO_SHARD"),
    ]
)
def test_ignored_modules(run: Run):
    """Modules that a user keeps out of FSDP would be sharded, or their gradients averaged or left out of the norm.

    Not clipped by the 2-norm, for which FSDP1 took a number of each rank's own: see clipping.py.
    """
    assert_parity(run, 2)


@parametrize_runs(
    [
        Run(optimizer="sgd16", settings="low-gradients", clipping="value"),
        Run(optimizer="sgd16", settings="low-gradients", model="gpt2", tied=True, microbatches=3),
        Run(optimizer="sgd16", settings="low-gradients", model="llama", groups="several"),
    ]
)
def test_gradients_in_low_precision(run: Run):
    """A model in bf16 whose gradients stay in bf16 would train to other weights."""
    assert_parity(run, 2)
