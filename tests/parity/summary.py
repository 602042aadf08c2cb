"""The largest differences from each reference after a run (migration_docs/parity.md). Imports neither torch nor
Composer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

HEADER = ("reference", "ranks", "optimizer", "runs", "losses", "gradient norms", "parameters", "bit for bit")


class Row(NamedTuple):
    """One compared run, with its worst rank; plain values, which pytest-xdist can serialize."""

    reference: str
    num_ranks: int
    optimizer: str
    losses: float
    norms: float
    parameters: float
    is_bit_equal: bool


SEEN: list[Row] = []


def table(rows: list[Row]) -> Iterator[str]:
    """In Markdown, a row for each reference, number of ranks and optimizer."""
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for kind in sorted({row[:3] for row in rows}):
        found = [row for row in rows if row[:3] == kind]
        worst = (max(getattr(row, name) for row in found) for name in ("losses", "norms", "parameters"))
        equal = f"{sum(row.is_bit_equal for row in found)} of {len(found)}"
        cells = (*kind[:3], len(found), *(f"{value:.1e}" for value in worst), equal)
        yield f"| {' | '.join(map(str, cells))} |"
