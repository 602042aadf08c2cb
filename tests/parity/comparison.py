"""Compare two runs number by number, with one tolerance for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from parity.harness import SAME_UNDER_FSDP1, STRATEGIES, THRESHOLDS, Observed, Run, Sharding, train
from parity.models import NOISE
from support.cases import for_each
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

# Relative for losses and norms; to the tensor's largest value for parameters and buffers.
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between two runs on one rank."""

    losses: float
    norms: float
    parameters: float
    worst: str  # the parameter with the largest difference
    buffers: float
    is_bit_equal: bool  # all parameters

    def __str__(self) -> str:
        parameters = "parameters equal" if self.is_bit_equal else f"parameters {self.parameters:.1e} ({self.worst})"
        return f"losses {self.losses:.1e}, norms {self.norms:.1e}, {parameters}, buffers {self.buffers:.1e}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A rank's report: the run's differences, and those above the tolerance."""

    difference: Difference
    problems: tuple[str, ...]


def compare(run: Run) -> Comparison:
    """FSDP2 compared with Composer's FSDP1. Called on all ranks."""
    theirs, ours = fsdp1(run), train(run, Sharding.FSDP2)
    found = difference(ours, theirs, run)
    problems = [*_problems(run, ours, found), *_structural_problems(run, ours, theirs)]
    assert theirs.unit_classes == {FullyShardedDataParallel}, theirs.unit_classes
    if keeps_order_of_sums(run, dist.get_world_size()) and not found.is_bit_equal:
        problems.append(f"parameters are not bit for bit equal: {found}")
    return Comparison(difference=found, problems=tuple(problems))


def compare_all(runs: list[Run]) -> list[Comparison]:
    """``compare`` for each run, without returning to the parent in between."""
    return [*for_each(compare, {f"{number}: {run}": (run,) for number, run in enumerate(runs)}).values()]


def compare_with_unsharded(run: Run) -> Comparison:
    """FSDP2 compared with one process that averages the losses of all ranks. Called on all ranks."""
    expected, ours = one_process(run), train(run, Sharding.FSDP2)
    assert expected.unit_classes == set(), expected.unit_classes
    found = difference(ours, expected, run)
    return Comparison(difference=found, problems=tuple(_problems(run, ours, found)))


def fsdp1(run: Run) -> Observed:
    """This run's reference, trained once for all runs that are equal under FSDP1. Called on all ranks."""
    return _reference(replace(run, strategy=SAME_UNDER_FSDP1.get(run.strategy, run.strategy)), Sharding.FSDP1)


def one_process(run: Run) -> Observed:
    """This run's reference, trained once for all runs that differ in sharding only. Called on all ranks."""
    return _reference(replace(run, strategy="FULL_SHARD", checkpointing="off", settings="default"), Sharding.NONE)


@cache
def _reference(run: Run, sharding: Sharding) -> Observed:
    return train(run, sharding)


def keeps_order_of_sums(run: Run, world_size: int) -> bool:
    """Whether SGD must reproduce FSDP1's parameters bit for bit: every sum over ranks has two terms, whose order does
    not matter.

    The exceptions are sums that FSDP1 took over other terms. The norm for clipping is a sum over all elements, which
    FSDP1 took over flat shards; the largest absolute value is the same in any order. With NO_SHARD FSDP1 reduced the
    accumulated gradients again after each microbatch. And whether a vector
    instruction rounds an element depends on its memory position, which shows in AdamW's longer formula.
    """
    num_replicas = run.num_replicas(world_size)
    has_two_terms = num_replicas <= 2 and world_size // num_replicas <= 2
    reduces_again = run.strategy == "NO_SHARD" and run.microbatches > 1
    return has_two_terms and not reduces_again and run.clipping != "norm" and not run.is_adamw


def difference(ours: Observed, reference: Observed, run: Run) -> Difference:
    """With AdamW in fp32, the parts of ``NOISE`` are not compared."""
    assert ours.parameters.keys() == reference.parameters.keys(), "the two have different parameters"
    assert len(ours.losses) == len(reference.losses), "the two have not trained alike"
    noise = NOISE.get(run.model, {}) if run.optimizer == "adamw" else {}
    off = {}
    for name, parameter in reference.parameters.items():
        deviation = (ours.parameters[name] - parameter).abs()
        for ending, part in noise.items():
            if name.endswith(ending):
                deviation[part] = 0
        off[name] = _part(deviation, parameter)
    worst = max(off, key=off.__getitem__)
    return Difference(
        losses=max(
            _relative(ours.losses, reference.losses),
            _relative(ours.mean_losses, reference.mean_losses),
        ),
        norms=_relative(ours.norms, reference.norms),
        parameters=off[worst],
        worst=worst,
        buffers=max((_off(ours.buffers[name], buffer) for name, buffer in reference.buffers.items()), default=0.0),
        is_bit_equal=all(torch.equal(ours.parameters[name], each) for name, each in reference.parameters.items()),
    )


def _relative(ours: list[float], reference: list[float]) -> float:
    """The largest difference; infinite for a value that is not finite (``max`` ignores NaN)."""
    if not all(map(math.isfinite, (*ours, *reference))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def _off(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return _part((ours.double() - reference.double()).abs(), reference.double())


def _part(deviation: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative to the tensor's largest value; infinite for a value that is not finite."""
    part = deviation.max() / reference.abs().max().clamp_min(1e-30)
    return math.inf if part.isnan() else part.item()


def _problems(run: Run, ours: Observed, found: Difference) -> list[str]:
    """Numbers above the tolerance. For clipping, also whether something was clipped, and whether the returned norms are
    those of the gradients."""
    assert ours.unit_classes == {FSDPModule}, ours.unit_classes
    problems = [
        f"{name} differ by {value:.2e}, allowed is {TOLERANCE:.0e}: {found}"
        for name in ("losses", "norms", "parameters", "buffers")
        if not (value := getattr(found, name)) <= TOLERANCE
    ]
    if run.clipping != "off" and not max(map(max, ours.clip_norms)) > THRESHOLDS[run.clipping]:
        problems.append(f"nothing was clipped: norms {ours.clip_norms}")
    if run.clipping == "norm" and not ours.left_out and not run.is_grouped:
        returned = [math.hypot(*norms) for norms in ours.clip_norms]
        if _relative(returned, ours.norms) > TOLERANCE:
            problems.append(f"clipping returned norms {returned}, the gradients have {ours.norms}")
    return problems


def _structural_problems(run: Run, ours: Observed, theirs: Observed) -> list[str]:
    """The same units, the same wrappers inside them, the same parameters in the same optimizer groups."""
    names = ["units", "roots", "checkpointed"]
    if run.settings != "flat":  # FSDP1's optimizer then has flat parameters without individual names
        names.append("groups")
    return [
        f"{name} differ: {getattr(ours, name)} here, {getattr(theirs, name)} under FSDP1"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def fsdp1_error(run: Run) -> str:
    """FSDP1's error for ``run`` on this rank, or "". Called on all ranks."""
    assert run.strategy in STRATEGIES
    try:
        train(run, Sharding.FSDP1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
