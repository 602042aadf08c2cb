"""Compared with one process that averages the losses of all ranks, in float64, where FSDP1 has no CPU form."""

from __future__ import annotations

import re

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.comparison import compare_with_unsharded, fsdp1_error
from parity.harness import Run
from support.ranks import run_ranks

pytestmark = pytest.mark.composer

COMMON = {"dropout": False, "microbatches": 2, "evaluate": True}

# Errors of layers whose weight is a flat shard.
FLAT_SHARD = "size mismatch|same shape|must be a matrix|Cannot writeback"

# Each with FSDP1's error.
WITHOUT_FSDP1 = (
    # torch broadcasts module states from CUDA only (torch/distributed/fsdp/_init_utils.py).
    (Run(optimizer="adamw64", settings="sync_module_states", **COMMON), "sync_module_states"),
    # Composer never supported it.
    (Run(model="llama", optimizer="sgd64", settings="cpu_offload", checkpointing="reentrant", **COMMON), "CPU Offload"),
    # A parameter in two units, or a unit in two places.
    (Run(model="tiedunits", optimizer="adamw64", checkpointing="non-reentrant", **COMMON), FLAT_SHARD),
    (Run(model="tiedchildren", optimizer="adamw64", strategy="SHARD_GRAD_OP", **COMMON), FLAT_SHARD),
    (Run(model="gpt2-embeddings", tied=True, optimizer="adamw64", **COMMON), FLAT_SHARD),
    (Run(model="shared", optimizer="sgd64", **COMMON), FLAT_SHARD),
    # Members of a container without a forward become roots at their first call, and its own root detects that too late.
    (Run(model="container", optimizer="sgd64", **COMMON), "Non-root FSDP instance"),
    # Gradient norms in float64.
    (Run(optimizer="adamw64", clipping="norm", groups="several", **COMMON), "linalg.vector_norm"),
)
SLOW = (
    (Run(model="gpt2", optimizer="sgd64", settings="sync_module_states", tied=True, **COMMON), "sync_module_states"),
    (Run(optimizer="adamw64", settings="cpu_offload", **COMMON), "FSDP CPU Offload not supported yet"),
    (Run(model="gpt2-embeddings", tied=True, optimizer="sgd64", strategy="NO_SHARD", **COMMON), FLAT_SHARD),
    (Run(model="tiedunits", optimizer="sgd64", **COMMON), FLAT_SHARD),
    (Run(model="tiedchildren", optimizer="sgd64", **COMMON), FLAT_SHARD),
    (Run(model="gpt2", optimizer="adamw64", clipping="value", tied=True, **COMMON), "linalg.vector_norm"),
)
SLOW_RUNS = [run for run, _ in SLOW]


@parametrize_runs([run for run, _ in (*WITHOUT_FSDP1, *SLOW)], slow=SLOW_RUNS)
def test_against_one_process(run: Run):
    """Runs that FSDP1 refused, or supported on GPUs only, would train other weights than one process."""
    assert_parity(run, 2, compare_with_unsharded)


@pytest.mark.others
@parametrize_runs([run for run, _ in (*WITHOUT_FSDP1, *SLOW)])
def test_fsdp1_refuses(run: Run):
    """If FSDP1 supported it, FSDP1 would be the better reference."""
    for text in run_ranks(fsdp1_error, 2, run):
        assert re.search(dict((*WITHOUT_FSDP1, *SLOW))[run], text)


def test_one_rank_in_each_replica():
    """HYBRID_SHARD with as many replicas as ranks: FSDP1 turned to NO_SHARD within each group of one and silently
    averaged nothing; FSDP2 averages, as one process does."""
    run = Run(optimizer="sgd64", strategy="HYBRID_SHARD:2", **COMMON)
    assert_parity(run, 2, compare_with_unsharded)


FOUR_RANKS = [
    Run(model="tiedchildren", optimizer="adamw64", strategy="_HYBRID_SHARD_ZERO2:2", dropout=False, microbatches=2),
    Run(tied=True, optimizer="adamw64", strategy="reshard:2", clipping="norm", groups="several", dropout=False),
    Run(model="llama", optimizer="adamw64", clipping="value", groups="several", dropout=False, evaluate=True),
    Run(model="mpt", tied=True, optimizer="sgd64", strategy="reshard:2", clipping="norm", dropout=False, evaluate=True),
    Run(model="gpt2", tied=True, optimizer="adamw64", strategy="HYBRID_SHARD:2", clipping="norm", **COMMON),
    Run(model="tiedunits", optimizer="sgd64", **COMMON),
]


@parametrize_runs(FOUR_RANKS, slow=FOUR_RANKS[2:])
def test_four_ranks_against_one_process(run: Run):
    """FSDP1 and FSDP2 could have the same error; one process without sharding is the reference for replicas as well."""
    assert_parity(run, 4, compare_with_unsharded)
