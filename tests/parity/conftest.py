"""After the tests of this folder: how far from its reference ours was, as the README shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from parity.comparison import Difference
from parity.harness import SETTINGS, Run

HEADER = ("reference", "ranks", "optimizer", "runs", "losses", "gradient norms", "parameters", "bit for bit")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Looked up, not imported: pytest imports this file under a name of its own, and the tests fill the other one.
    assertions = sys.modules.get("parity.assertions")
    if assertions is not None and assertions.SEEN:
        terminalreporter.section("largest differences from the reference")
        for line in table(assertions.SEEN):
            terminalreporter.write_line(line)


def table(seen: dict[tuple[str, int], list[tuple[Run, Difference]]]) -> Iterator[str]:
    """In Markdown, a row for each reference, number of ranks and optimizer."""
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for reference, num_ranks in sorted(seen):
        runs = seen[reference, num_ranks]
        for kind in sorted({_kind(run) for run, _ in runs}):
            found = [difference for run, difference in runs if _kind(run) == kind]
            worst = (max(getattr(each, name) for each in found) for name in ("losses", "norms", "parameters"))
            equal = f"{sum(each.is_bit_equal for each in found)} of {len(found)}"
            cells = (reference, num_ranks, kind, len(found), *(f"{value:.1e}" for value in worst), equal)
            yield f"| {' | '.join(map(str, cells))} |"


def _kind(run: Run) -> str:
    name = {"sgd": "SGD", "adamw": "AdamW"}[run.optimizer.removesuffix("64").removesuffix("16")]
    is_low = "mixed_precision" in SETTINGS[run.settings]
    return f"{name}, {'mixed with bf16' if is_low else 'float64' if run.optimizer.endswith('64') else 'fp32'}"
