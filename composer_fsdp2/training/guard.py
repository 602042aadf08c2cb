"""``collective_guard``: ranks that have diverged are told where, instead of waiting for each other.

A rank that takes another branch, has a batch less or evaluates alone launches another collective than the others, or
none. That hangs until a process group times out, or mixes up data of one size. With the guard ranks compare where they
stand before each collective, over the control group.
"""

import zlib
from datetime import timedelta

from torch import nn

from composer_fsdp2._torch.collectives import InFlight
from composer_fsdp2._torch.unit import watch_collectives
from composer_fsdp2.sharding.sharded import units
from composer_fsdp2.training.control import Operation, control
from composer_fsdp2.training.run import find_run, run_of


class CollectiveGuard:
    """Compares where the ranks stand. Made on all of them together, as the control is.

    Args:
        limit: How long the ranks that have come wait for the others.
    """

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit
        self._control = control()
        self._number = 0

    def check(self, where: InFlight | str) -> None:
        """Meet the other ranks at ``where``, and compare two numbers.

        Raises:
            RanksDivergedError: on all ranks that come; names where each stands, and where all were together last.
        """
        self._control.meet(_OPERATION, where, [self._number, zlib.crc32(str(where).encode())], self._limit)
        self._number += 1


_OPERATION = Operation(
    "collective_guard",
    "Ranks must run the same modules in the same order: look for a branch on the rank or on the data, a different "
    "number of batches, or a forward on some ranks only",
)


def start_guard(model: nn.Module, limit_s: float) -> None:
    """Guard a model that was just sharded, for as long as it lives. Called on all ranks.

    Args:
        limit_s: How long ranks wait for each other.
    """
    guard = CollectiveGuard(timedelta(seconds=limit_s))
    run_of(model).guard = guard.check
    watch_collectives(units(model), guard.check)


def check_guard(model: nn.Module, where: str) -> None:
    """A place beside the collectives of a model, or of a part of it, where ranks must meet, if it is guarded."""
    run = find_run(model)
    if run is not None and run.guard is not None:
        run.guard(where)
