"""The line that rank 0 prints about a sharded model. Without it, a user cannot see that the run uses FSDP2."""

import sys
from collections.abc import Iterable
from contextvars import ContextVar

import torch.distributed as dist

# Whether each unit is printed, not their number alone.
shows_units = ContextVar("shows_units", default=False)


def summary_line(num_units: int, num_ranks: int, strategy: str) -> str:
    """``37 units on FSDP2 (8 ranks, FULL_SHARD)``; strategies have FSDP1's names."""
    return f"{num_units} unit{'s' * (num_units != 1)} on FSDP2 ({num_ranks} rank{'s' * (num_ranks != 1)}, {strategy})"


def confirm(summary: str, units: Iterable[object]) -> None:
    """Print the summary, and the units below it, to standard error of rank 0."""
    if dist.get_rank() == 0:
        print(f"composer_fsdp2: {summary}", *units, sep="\n", file=sys.stderr)
