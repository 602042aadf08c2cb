"""What the tests of this folder say of a comparison; in the pytest process, without Composer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parity.comparison import Comparison, Difference, compare
from parity.harness import Run
from ranks import run_ranks

# Of each run that was compared in this session, the worst rank's; conftest.py sums them up.
SEEN: dict[tuple[str, int], list[tuple[Run, Difference]]] = {}


def needs(model: str) -> list[pytest.MarkDecorator]:
    """The markers of tests that build this model."""
    return [pytest.mark.foundry] if model.startswith("mpt") else []


def parametrize_runs(runs: list[Run]) -> pytest.MarkDecorator:
    """One test for each run, under the run's own name."""
    return pytest.mark.parametrize("run", [pytest.param(run, id=str(run), marks=needs(run.model)) for run in runs])


def assert_parity(run: Run, world_size: int, comparing: Callable[[Run], Comparison] = compare) -> None:
    """Run both on ``world_size`` ranks; every rank must find no problem."""
    reference = "FSDP1" if comparing is compare else "one process"
    assert_no_problem(run, run_ranks(comparing, world_size, run), reference)


def assert_no_problem(run: Run, comparisons: list[Comparison], reference: str = "FSDP1") -> None:
    """Note how far off the worst rank is, then fail with all problems of all ranks."""
    worst = max((each.difference for each in comparisons), key=lambda found: found.parameters)
    SEEN.setdefault((reference, len(comparisons)), []).append((run, worst))
    problems = [f"rank {rank}: {problem}" for rank, each in enumerate(comparisons) for problem in each.problems]
    assert not problems, "\n".join([str(run), *problems])
