"""FSDP1's class compared with ours: the same script, losses and parameters after clipped AdamW steps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fsdp.training import Run, train
from parity import summary
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


class Differences(NamedTuple):
    """The largest differences: relative for losses and norms, to the largest parameter for parameters."""

    losses: float
    norms: float
    parameters: float


def compare(runs: list[Run]) -> dict[str, Differences]:
    return for_each(differences, {str(run): (run,) for run in runs})


def differences(run: Run) -> Differences:
    losses, norms, parameters = train(FSDP1, dataclasses.replace(run, offload="no"))  # would pin memory for a GPU
    our_losses, our_norms, own = train(FullyShardedDataParallel, run)
    assert list(own) == list(parameters)
    scale = max(each.abs().max() for each in parameters.values())
    of_parameters = max(((own[name] - each).abs().max() / scale).item() for name, each in parameters.items())
    return Differences(_largest(our_losses, losses), _largest(our_norms, norms), of_parameters)


def _largest(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


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


# float64 agrees to its last digits. In fp32 a norm sums squares in another order, and each step of AdamW rounds.
EXACT, ROUNDED = Differences(1e-12, 1e-12, 1e-12), Differences(2e-7, 1e-6, 1e-7)
# FSDP1 without shards adds the next backward to already averaged gradients and averages the sum again, and computes the
# norm of bf16 gradients in bf16. Ours averages each backward, and computes the norm in fp32. In float64 and fp32 there
# is no difference.
ROUNDED_TO_BF16 = Differences(2**-9, 2**-7, 2**-9)


def rounds_to_bf16(run: Run) -> bool:
    is_averaged_again = "bf16" in run.precision and run.microbatches == "2"
    return run.strategy == "NO_SHARD" and (is_averaged_again or run.precision == "bf16 parameters")


def limits_of(run: Run) -> Differences:
    if rounds_to_bf16(run):
        return ROUNDED_TO_BF16
    return EXACT if run.precision == "float64" else ROUNDED


def assert_same_as_fsdp1(runs: list[Run], num_ranks: int = 2, timeout_s: float = 180) -> None:
    """Checked on every rank, and recorded for the table of parity."""
    by_rank = run_ranks(compare, num_ranks, runs, timeout_s=timeout_s)
    wrong = []
    for run in runs:
        found = Differences(*(max(each) for each in zip(*(rows[str(run)] for rows in by_rank), strict=True)))
        limits = limits_of(run)
        summary.SEEN.append(summary.Row("FSDP1's class", num_ranks, _kind(run), *found, is_bit_equal=not any(found)))
        if any(not each <= limit for each, limit in zip(found, limits, strict=True)):
            wrong.append(f"{run}: {found}, not {limits}")
    assert not wrong, "\n".join(wrong)


def _kind(run: Run) -> str:
    if rounds_to_bf16(run):
        return "AdamW, NO_SHARD in bf16"
    return f"AdamW, {run.precision if run.precision in ('float64', 'fp32') else 'mixed with bf16'}"


def test_strategies_precisions_wraps_and_accumulation():
    """Otherwise a script would silently train another model than under FSDP1."""
    runs = runs_of(AXES)
    assert_same_as_fsdp1(runs, timeout_s=900)


def test_batch_norms_and_mixed_precision():
    """A policy makes batch norms separate instances in fp32, and torch's hooks cast their inputs and outputs."""
    runs = [
        Run(norm="batch", precision=precision, wrap=wrap)
        for precision in ("bf16", "bf16 cast in each", "float64")
        for wrap in ("classes", "size")
    ]
    assert_same_as_fsdp1(runs)


def test_one_rank():
    """Scripts are first tried on one device, where FSDP1 shards nothing."""
    runs = [Run(wrap="classes", optimizer="before"), Run(precision="bf16", microbatches="2 no_sync", trained="biases")]
    assert_same_as_fsdp1(runs, num_ranks=1)


def test_without_shards():
    """NO_SHARD averages with one all-reduce, in each backward or in the last one."""
    runs = [
        Run(strategy="NO_SHARD", precision=precision, microbatches=microbatches)
        for precision in ("float64", "fp32")
        for microbatches in ("1", "2", "2 no_sync")
    ]
    assert_same_as_fsdp1(runs)


def test_replicas_of_shards_and_groups_of_ranks():
    """On four ranks hybrid sharding has replicas, whose gradients must be averaged, and each group its own norm."""
    runs = [
        Run(strategy="HYBRID_SHARD", wrap="classes", optimizer="before", microbatches="2"),
        Run(strategy="_HYBRID_SHARD_ZERO2", wrap="by hand", precision="bf16", microbatches="2 no_sync"),
        Run(strategy="FULL_SHARD", wrap="size", optimizer="before"),
        Run(groups="pairs", wrap="by hand", optimizer="before"),
        Run(groups="pairs", strategy="NO_SHARD", wrap="classes", microbatches="2 no_sync"),
    ]
    assert_same_as_fsdp1(runs, num_ranks=4)
