"""Expert parallelism through the real Trainer: LLM Foundry's torch_dmoe, whose ranks hold different experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.context_runs import Run, Trained, build, train
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference
from support.training import FULL

from composer_fsdp2 import UnsupportedError, prepare_fully_shard

pytestmark = pytest.mark.composer


def split(degree: int, **config: Any) -> dict[str, Any]:
    return {"expert_parallel_degree": degree, **config}


def runs_split(folder: str) -> dict[str, Trained]:
    def run(kind: str, config: dict[str, Any], options: dict[str, Any]) -> Trained:
        with FSDP2():
            return train(Run(kind=kind, config=config, **{"degree": 1} | options))

    glu, mlp = f"{folder}/glu", f"{folder}/mlp"
    sharded = {"state_dict_type": "sharded"}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "sequences divided too": ("mpt-glu", split(2), {"degree": 2}),
        "sharded, saved": ("mpt-glu", split(2, **sharded), {"save_folder": glu}),
        "sharded, resumed at 4": ("mpt-glu", split(4, **sharded), {"load_path": f"{glu}/ep0-ba2"}),
        "full, saved": ("mpt-mlp", split(2, activation_checkpointing=False), {"save_folder": mlp}),
    }
    return for_each(run, cases)


def alone(load_path: str | None) -> dict[str, Trained]:
    """One process; under the shim for what it mends in checkpoints."""
    with FSDP2():
        kinds = ("mpt-mlp",) if load_path else ("mpt-glu", "mpt-mlp")
        return {kind: train(Run(kind=kind, degree=0, load_path=load_path)) for kind in kinds}


def test_a_trainer_splits_experts_and_trains_as_one_process(tmp_path: Path):
    """The curve, metrics and weights; and from a checkpoint of degree 2, at 4 and on one process."""
    [expected] = run_ranks(alone, 1, None)
    runs = run_ranks(runs_split, 4, str(tmp_path))[0]
    runs["full, resumed alone"] = run_ranks(alone, 1, f"{tmp_path}/mlp/ep0-ba2-rank0.pt")[0]["mpt-mlp"]
    for name, found in runs.items():
        theirs = expected["mpt-mlp" if "full" in name else "mpt-glu"]
        assert largest_difference(found.losses, theirs.losses[-len(found.losses) :]) <= 1e-12, name
        if "resumed" not in name:  # after its evaluation
            assert found.metrics == pytest.approx(theirs.metrics, rel=1e-6, nan_ok=True), name  # fp32 accumulators
        for each, value in theirs.parameters.items():
            difference = float((found.parameters[each] - value).abs().max())
            assert difference <= 1e-10, f"{name}, {each}: {difference}"


def check_own_values() -> None:
    """From the meta device; and with replicas, which LLM Foundry refuses too."""
    torch.set_default_dtype(torch.float64)
    values = []
    for config in ({}, split(2)):
        with torch.device("meta"):
            model = build("mpt-glu")
        torch.manual_seed(7)
        prepare_fully_shard(model, None, FULL | config, device="cpu")
        values.append(full_parameters(model))
    assert_same(values[1], values[0])
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    with FSDP2(), pytest.raises(UnsupportedError, match=r"HSDP [+] MoE is not supported"):
        train(Run(kind="mpt-glu", degree=1, config=split(2, sharding_strategy="HYBRID_SHARD", **replicas)))


def test_split_experts_get_the_values_of_foundrys_initialization():
    """The same weights as without the key, drawn by MPT's own param_init_fn."""
    run_ranks(check_own_values, 4)
