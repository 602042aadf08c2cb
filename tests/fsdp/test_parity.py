"""FSDP1's class against ours: the same script, losses and parameters after clipped AdamW steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp.training import Run, train
from parity.cases import pairwise
from support.cases import for_each
from support.ranks import run_ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from composer_fsdp2.fsdp import FullyShardedDataParallel

AXES: dict[str, tuple[str, ...]] = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
    "precision": ("float64", "fp32", "bf16", "bf16 reduced in fp32", "reduced in bf16", "bf16 cast in each",
        "bf16 parameters"),
    "wrap": ("none", "classes", "transformer", "size", "lambda", "custom", "by hand"),
    "microbatches": ("1", "2", "2 no_sync"),
    "optimizer": ("before", "after"),
    "trained": ("all", "biases"),
    "offload": ("no", "yes"),
}  # fmt: skip


def compare(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """For each run the largest relative difference of losses, and of parameters to the largest one."""
    return for_each(differences, {str(run): (run,) for run in runs})


def differences(run: Run) -> tuple[float, float]:
    losses, parameters = train(FSDP1, dataclasses.replace(run, offload="no"))  # it would pin memory for a GPU
    ours, own = train(FullyShardedDataParallel, run)
    assert list(own) == list(parameters)
    of_losses = max(abs(one - other) / abs(other) for one, other in zip(ours, losses, strict=True))
    scale = max(each.abs().max() for each in parameters.values())
    of_parameters = max(((own[name] - each).abs().max() / scale).item() for name, each in parameters.items())
    return of_losses, of_parameters


def runs_of(axes: dict[str, Any]) -> list[Run]:
    return [Run(**values) for values in pairwise(axes)]


# float64 to its last digits. In fp32 a norm adds up squares in another order, and each step of AdamW rounds. A sum of
# replicated gradients in bf16 rounds once for each backward, FSDP1's once for all of them.
LIMITS = {"float64": (1e-12, 1e-12), "NO_SHARD reduced in bf16": (1e-5, 1e-4)}
OTHERWISE = (2e-7, 1e-7)


def assert_same_as_fsdp1(rows: dict[str, tuple[float, float]], runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        key = f"{run.strategy} {run.precision}" if run.microbatches == "2" else run.precision
        print(*(f"{each:.1e}" for each in rows[str(run)]), run)
        limits = LIMITS.get(key, OTHERWISE)
        if any(not found <= limit for found, limit in zip(rows[str(run)], limits, strict=True)):
            wrong.append(f"{run}: losses {rows[str(run)][0]:.1e}, parameters {rows[str(run)][1]:.1e}, not {limits}")
    assert not wrong, "\n".join(wrong)


def test_strategies_precisions_wraps_and_accumulation():
    """A script would train another model than under FSDP1, without an error."""
    runs = runs_of(AXES)
    assert_same_as_fsdp1(run_ranks(compare, 2, runs, timeout_s=900)[0], runs)


def test_replicas_of_shards():
    """On four ranks hybrid shards have replicas, whose gradients would not be averaged."""
    runs = [
        Run(strategy="HYBRID_SHARD", wrap="classes", optimizer="before", microbatches="2"),
        Run(strategy="_HYBRID_SHARD_ZERO2", wrap="by hand", precision="bf16", microbatches="2 no_sync"),
        Run(strategy="FULL_SHARD", wrap="size", optimizer="before"),
    ]
    assert_same_as_fsdp1(run_ranks(compare, 4, runs)[0], runs)
