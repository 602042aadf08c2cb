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
    "recompute": ("no", "before", "after"),
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
    """Pairs; without ``no_sync`` where FSDP1 fails: it would assign gradients in bf16 to parameters in fp32."""
    runs = [Run(**values) for values in pairwise(axes)]
    fails = {"strategy": "NO_SHARD", "trained": "all", "microbatches": "2 no_sync"}
    return [
        dataclasses.replace(run, microbatches="2")
        if run.precision in ("bf16", "bf16 reduced in fp32", "bf16 cast in each") and fails.items() <= vars(run).items()
        else run
        for run in runs
    ]


# float64 to its last digits. In fp32 a norm adds up squares in another order, and each step of AdamW rounds.
EXACT, ROUNDED = (1e-12, 1e-12), (2e-7, 1e-7)
# FSDP1 without shards adds the next backward to gradients that are averaged already, and averages the sum again, and
# takes the norm of gradients in bf16 in bf16; ours averages each backward, and takes the norm in fp32. In float64 and
# fp32 there is no difference.
ROUNDED_TO_BF16 = (2**-9, 2**-9)


def limits_of(run: Run) -> tuple[float, float]:
    is_averaged_again = run.strategy == "NO_SHARD" and "bf16" in run.precision and run.microbatches == "2"
    has_norm_in_bf16 = run.strategy == "NO_SHARD" and run.precision == "bf16 parameters"
    if is_averaged_again or has_norm_in_bf16:
        return ROUNDED_TO_BF16
    return EXACT if run.precision == "float64" else ROUNDED


def assert_same_as_fsdp1(rows: dict[str, tuple[float, float]], runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        print(*(f"{each:.1e}" for each in rows[str(run)]), run)
        limits = limits_of(run)
        if any(not found <= limit for found, limit in zip(rows[str(run)], limits, strict=True)):
            wrong.append(f"{run}: losses {rows[str(run)][0]:.1e}, parameters {rows[str(run)][1]:.1e}, not {limits}")
    assert not wrong, "\n".join(wrong)


def test_strategies_precisions_wraps_and_accumulation():
    """A script would train another model than under FSDP1, without an error."""
    runs = runs_of(AXES)
    assert_same_as_fsdp1(run_ranks(compare, 2, runs, timeout_s=900)[0], runs)


def test_batch_norms_and_mixed_precision():
    """A policy gives them instances of their own in fp32, whose inputs and outputs hooks of torch cast."""
    runs = [
        Run(norm="batch", precision=precision, wrap=wrap)
        for precision in ("bf16", "bf16 cast in each", "float64")
        for wrap in ("classes", "size")
    ]
    assert_same_as_fsdp1(run_ranks(compare, 2, runs)[0], runs)


def test_one_rank():
    """A script is tried on one device first; FSDP1 shards nothing there."""
    runs = [Run(wrap="classes", optimizer="before"), Run(precision="bf16", microbatches="2 no_sync", trained="biases")]
    assert_same_as_fsdp1(run_ranks(compare, 1, runs)[0], runs)


def test_without_shards():
    """NO_SHARD averages by one all-reduce, in each backward or in the last one."""
    runs = [
        Run(strategy="NO_SHARD", precision=precision, microbatches=microbatches)
        for precision in ("float64", "fp32")
        for microbatches in ("1", "2", "2 no_sync")
    ]
    assert_same_as_fsdp1(run_ranks(compare, 2, runs)[0], runs)


def test_replicas_of_shards_and_groups_of_ranks():
    """On four ranks hybrid shards have replicas, whose gradients must be averaged, and groups their own norms."""
    runs = [
        Run(strategy="HYBRID_SHARD", wrap="classes", optimizer="before", microbatches="2"),
        Run(strategy="_HYBRID_SHARD_ZERO2", wrap="by hand", precision="bf16", microbatches="2 no_sync"),
        Run(strategy="FULL_SHARD", wrap="size", optimizer="before"),
        Run(groups="pairs", wrap="by hand", optimizer="before"),
        Run(groups="pairs", strategy="NO_SHARD", wrap="classes", microbatches="2 no_sync"),
    ]
    assert_same_as_fsdp1(run_ranks(compare, 4, runs)[0], runs)
