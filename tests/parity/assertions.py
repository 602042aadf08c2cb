"""Assertions on comparisons; used in the pytest process, without Composer."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from parity.comparison import Comparison, compare
from parity.harness import SETTINGS, Run
from parity.summary import SEEN, Row
from support.ranks import run_ranks


def needs(model: str) -> list[pytest.MarkDecorator]:
    """The markers of tests that build this model."""
    return [pytest.mark.foundry] if model.startswith("mpt") else []


def parametrize_runs(runs: list[Run], slow: Collection[Run] = ()) -> pytest.MarkDecorator:
    """One test for each run, under the run's own name; those also in ``slow`` are run by the slow tests."""

    def marks(run: Run) -> list[pytest.MarkDecorator]:
        return [*needs(run.model), *([pytest.mark.slow] if run in slow else [])]

    return pytest.mark.parametrize("run", [pytest.param(run, id=str(run), marks=marks(run)) for run in runs])


def assert_parity(run: Run, world_size: int, comparing: Callable[[Run], Comparison] = compare) -> None:
    """Run both on ``world_size`` ranks; every rank must find no problem."""
    reference = "FSDP1" if comparing is compare else "one process"
    assert_no_problem(run, run_ranks(comparing, world_size, run), reference)


def assert_no_problem(run: Run, comparisons: list[Comparison], reference: str = "FSDP1") -> None:
    """Record the largest difference over ranks, then fail with all problems of all ranks."""
    worst = max((each.difference for each in comparisons), key=lambda found: found.parameters)
    SEEN.append(
        Row(
            reference=reference,
            num_ranks=len(comparisons),
            optimizer=_optimizer(run),
            losses=worst.losses,
            norms=worst.norms,
            parameters=worst.parameters,
            is_bit_equal=worst.is_bit_equal,
        )
    )
    problems = [f"rank {rank}: {problem}" for rank, each in enumerate(comparisons) for problem in each.problems]
    assert not problems, "\n".join([str(run), *problems])


def _optimizer(run: Run) -> str:
    name = {"sgd": "SGD", "adamw": "AdamW"}[run.optimizer.removesuffix("64").removesuffix("16")]
    is_low = "mixed_precision" in SETTINGS[run.settings]
    return f"{name}, {'mixed with bf16' if is_low else 'float64' if run.optimizer.endswith('64') else 'fp32'}"
