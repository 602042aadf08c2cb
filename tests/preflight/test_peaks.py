"""The peak of a step, its state and its collectives, planned from a file and counted on real ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from support.peaks import Case, differences
from support.ranks import run_ranks

pytestmark = pytest.mark.foundry

HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_policy": "auto"}
EXPERTS, CONTEXT = {"expert_parallel_degree": 2}, {"context_parallel_degree": 2}
STRATEGIES = {
    "full": {"config": {}, "microbatches": 2},
    "grad op, fp32": {"config": {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "FULL"}, "precision": "fp32"},
    "replicas": {"config": HSDP | {"mixed_precision": "DEFAULT"}, "microbatches": 2},
    "recomputed": {"config": RECOMPUTED},
}
FAMILIES = ("mpt", "llama", "gpt2", "t5", "qwen3_moe")
DIVIDED = {
    "layers of Llama": Case(model="llama", tensor=2, microbatches=2),
    "layers of MPT": Case(model="mpt", tensor=2, config={"activation_checkpointing": True}),
    "layers of LoRA": Case(model="lora", tensor=2),
    "norms of Qwen3's heads": Case(model="qwen3_moe", tensor=2, config={"check_data": False}, within=0.002),
    "sequences of Llama": Case(model="llama", config=CONTEXT),
    "sequences of MPT, recomputed": Case(model="mpt", config=CONTEXT | {"activation_checkpointing": True}),
    "experts of Qwen3": Case(model="qwen3_moe", config=EXPERTS | RECOMPUTED, microbatches=2, within=0.002),
    "experts of MPT": Case(model="mpt_experts", config=EXPERTS),
    "pieces of Llama": Case(model="llama", config={"tiled_mlp": {"classes": ["LlamaMLP"], "chunks": 4}}),
    "pieces of MPT's layers": Case(model="mpt", tensor=2, config={"tiled_mlp": {"classes": ["MPTMLP"], "chunks": 3}}),
    "operators of blocks": Case(model="llama_by_operator"),
    "operators of divided blocks": Case(model="llama_by_operator", tensor=2),
    "blocks that a script wrapped": Case(model="llama_wrapped"),
    "adapters in blocks": Case(model="lora"),
    "adapters as units": Case(model="lora_units", config={"activation_checkpointing": True}, microbatches=2),
    "adapters as units, kept": Case(model="lora_units", config={"sharding_strategy": "SHARD_GRAD_OP"}),
    # The plan counts the index lists of its experts, which no operator makes.
    "MPT's experts in full": Case(model="mpt_experts", within=0.02),
}
FOUR = {
    "layers and sequences": Case(model="llama", tensor=2, config=CONTEXT),
    "layers and experts": Case(model="qwen3_moe", tensor=2, config=EXPERTS | {"check_data": False}, within=0.002),
    "sequences and experts": Case(model="qwen3_moe", config=EXPERTS | CONTEXT),
}
# One family, and one of each kind of parallelism; the others take four minutes.
QUICK = (
    "llama",
    "layers of MPT",
    "sequences of MPT, recomputed",
    "experts of MPT",
    "operators of blocks",
    "blocks that a script wrapped",
    "pieces of Llama",
    "adapters in blocks",
)


def slow_but(quick: Iterable[str], names: Iterable[str]) -> list[object]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_a_step_takes_and_sends_what_was_planned(family: str):
    """To the byte, for five families and four strategies: with a peak that is too low, a run ends out of memory."""
    cases = {name: Case(model=family, **options) for name, options in STRATEGIES.items()}  # type: ignore[arg-type]
    if family == "qwen3_moe":  # one more list of tokens is alive on the ranks
        cases["recomputed"] = replace(cases["recomputed"], within=0.002)
    if family == "mpt":  # its own hook names the blocks
        cases["recomputed"] = Case(model=family, config={"activation_checkpointing": True})
    assert run_ranks(differences, 2, cases) == [{}, {}]


@pytest.mark.parametrize("name", slow_but(QUICK, DIVIDED))
def test_what_ranks_divide_is_planned_divided(name: str):
    """TP, CP, EP, tiled MLPs and adapters: a plan of the undivided model would refuse runs that fit, and omit their
    communication."""
    assert run_ranks(differences, 2, {name: DIVIDED[name]}) == [{}, {}]


@pytest.mark.slow
def test_what_ranks_divide_in_two_ways_is_planned_so():
    assert run_ranks(differences, 4, FOUR) == [{}] * 4
