"""``collective_guard``: raise an error with the positions of ranks that have diverged, instead of hanging.

A rank that takes a different branch, has one batch less or evaluates alone launches a different collective than the
others, or none. The others hang until a process group times out, or data of the same size is mixed up. With the
guard, ranks compare their positions before each collective, over the control group.
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
    """A barrier over the control group that also compares the ranks' positions.

    It raises RanksDivergedError on all ranks that arrive, with the position of each, and the last position at which all
    agreed.

    Args:
        limit: The timeout of each barrier.

    Called on all ranks together, as ``control_group``.
    """
    connected, numbers = control_group(), itertools.count()

    def check(where: PendingCollective | str) -> None:
        connected.barrier(_OPERATION, where, [next(numbers), zlib.crc32(str(where).encode())], limit)

    return check


def start_guard(model: nn.Module, limit_s: float) -> None:
    """Guard all collectives of a sharded model, until the model is deleted. Called on all ranks.

    Args:
        limit_s: The timeout of each barrier, in seconds.
    """
    check = collective_guard(timedelta(seconds=limit_s))
    run_of(model).guard = check
    watch_collectives(units(model), check)


def check_guard(model: nn.Module, where: str) -> None:
    """If the model is guarded, a barrier outside of its collectives. Called on all ranks.

    Args:
        model: The model or a submodule.
        where: This rank's position, for the error.
    """
    run = find_run(model)
    if run is not None and run.guard is not None:
        run.guard(where)
