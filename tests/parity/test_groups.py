"""FSDP2 compared with Composer's FSDP1 for units on groups of ranks: `process_group`, for all units or for one."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.harness import Run

pytestmark = pytest.mark.composer

FOUR_RANKS = [
    Run(strategy="set2", groups="several", clipping="norm", evaluate=True, microbatches=2),
    Run(strategy="mod2", model="llama", evaluate=True, clipping="norm"),
    Run(strategy="given", clipping="value"),
    Run(strategy="objects", tied=True, checkpointing="non-reentrant", clipping="value"),
    Run(strategy="self", optimizer="adamw64"),
    Run(strategy="set2-NO_SHARD", clipping="value", tied=True),
    Run(strategy="pair", clipping="norm", groups="several", evaluate=True, microbatches=2),
    Run(strategy="pair-ZERO2", model="mpt", tied=True, clipping="value"),
    Run(strategy="pair", model="gpt2", tied=True, optimizer="adamw64", checkpointing="reentrant"),
    Run(strategy="objects", model="mpt", tied=True, evaluate=True),
]


@parametrize_runs(FOUR_RANKS, slow=FOUR_RANKS[8:])
def test_process_groups(run: Run):
    """Runs that shard within a node, or train one model a group, must not average over all ranks."""
    assert_parity(run, 4)


ALONE = [
    Run(strategy="self", clipping="norm", settings="bf16"),
    Run(model="owngroups", strategy="set2", evaluate=True),
    Run(model="owngroups", strategy="set2", microbatches=2, optimizer="adamw64", checkpointing="non-reentrant"),
]


@parametrize_runs(ALONE, slow=ALONE[2:])
def test_groups_of_one_rank(run: Run):
    """`process_group: self`, for all modules or for one, such as an expert on a single rank, must not average gradients
    that FSDP1 left separate, and a module replicated on every rank must not be sharded like the rest."""
    assert_parity(run, 2)


@parametrize_runs([Run(model="ownmesh", strategy="mod1", evaluate=True)])
def test_replicas_of_a_single_module(run: Run):
    """A module with its own replicas must not be sharded over all ranks."""
    assert_parity(run, 4)
