"""``collective_guard``: ranks that have diverged are told where, instead of waiting for each other.

A rank that takes another branch, has a batch less or evaluates alone launches another collective than the others, or
none. That hangs until a process group times out, or mixes up data of one size. With the guard ranks compare where they
stand before each collective, over the control group.
"""

import itertools
import zlib
from collections.abc import Callable
from datetime import timedelta

from torch import nn

from composer_fsdp2._torch.collectives import PendingCollective
from composer_fsdp2._torch.unit import watch_collectives
from composer_fsdp2.sharding.sharded import units
from composer_fsdp2.training.control import Operation, control_group
from composer_fsdp2.training.run import find_run, run_of

_OPERATION = Operation(
    "collective_guard",
    "Ranks must run the same modules in the same order: look for a branch on the rank or on the data, a different "
    "number of batches, or a forward on some ranks only",
)


def collective_guard(limit: timedelta) -> Callable[[PendingCollective | str], None]:
    """A function that meets the other ranks where they call it, and compares two numbers.

    It raises RanksDivergedError, on all ranks that come, with where each stands and where all were together last.

    Args:
        limit: How long the ranks that have come wait for the others.

    Called on all ranks together, as ``control_group``.
    """
    connected, numbers = control_group(), itertools.count()

    def check(where: PendingCollective | str) -> None:
        connected.barrier(_OPERATION, where, [next(numbers), zlib.crc32(str(where).encode())], limit)

    return check


def start_guard(model: nn.Module, limit_s: float) -> None:
    """Guard a model that was just sharded, for as long as it lives. Called on all ranks.

    Args:
        limit_s: How long ranks wait for each other.
    """
    check = collective_guard(timedelta(seconds=limit_s))
    run_of(model).guard = check
    watch_collectives(units(model), check)


def check_guard(model: nn.Module, where: str) -> None:
    """A place beside the collectives of a model, or of a part of it, where ranks must meet, if it is guarded."""
    run = find_run(model)
    if run is not None and run.guard is not None:
        run.guard(where)
