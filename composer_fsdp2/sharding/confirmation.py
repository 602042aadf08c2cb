"""The line that rank 0 prints about a sharded model. Without it, a user cannot see that the run uses FSDP2."""

import sys
from collections.abc import Iterable

import torch.distributed as dist

# The callers that want each unit listed, not only their number: ``fsdp2`` and ``install_fsdp``, while they are active.
_listing: list[object] = []


def list_units(caller: object) -> None:
    """List the units of models that are sharded from now on, until ``stop_listing_units`` of the same caller."""
    _listing.append(caller)


def stop_listing_units(caller: object) -> None:
    """Revert ``list_units``; no effect without it."""
    _listing[:] = [each for each in _listing if each is not caller]


def lists_units() -> bool:
    """Whether a caller of ``list_units`` is active."""
    return bool(_listing)


def summary_line(num_units: int, num_ranks: int, strategy: str) -> str:
    """``37 units on FSDP2 (8 ranks, FULL_SHARD)``; strategies have FSDP1's names."""
    return f"{num_units} unit{'s' * (num_units != 1)} on FSDP2 ({num_ranks} rank{'s' * (num_ranks != 1)}, {strategy})"


def confirm(summary: str, units: Iterable[object], *, with_units: bool) -> None:
    """Print the summary, and the units below it if ``with_units``, to standard error of rank 0."""
    if dist.get_rank() == 0:
        print(f"composer_fsdp2: {summary}", *(units if with_units else ()), sep="\n", file=sys.stderr)
