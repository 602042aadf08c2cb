"""``collective_guard``: ranks that have parted are told where, instead of waiting for each other.

A rank that takes another branch, has a batch less or evaluates alone launches another collective than the others, or
none. That hangs until a process group times out, or mixes up data of one size. With the guard ranks compare where they
stand before each collective, over the control group.
"""

import itertools
import time
import zlib
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch import InFlight, default_store, watch_collectives
from composer_fsdp2.control import control
from composer_fsdp2.errors import RanksPartedError
from composer_fsdp2.sharded import units

__all__ = ["CollectiveGuard", "check_guard", "start_guard"]

_COUNT = itertools.count()
_COLLECT_S = 2.0  # how long ranks that gave up wait for each other's reports


class CollectiveGuard:
    """Compares where the ranks stand. Made on all of them together: the first one makes the control group.

    Args:
        limit: How long the ranks that have come wait for the others.
    """

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit
        self._control = control()
        self._name = f"guard/{next(_COUNT)}"  # ranks make their guards in one order
        self._number = 0
        self._last = "the beginning"

    def check(self, where: InFlight | str) -> None:
        """Meet the other ranks at ``where``, and compare two numbers.

        Raises:
            RanksPartedError: on all ranks that come; names where each stands, and where all were together last.
        """
        here = str(where)
        own = [self._number, zlib.crc32(here.encode())]
        try:
            largest = self._control.largest([*own, *(-number for number in own)], self._limit)
        except RuntimeError as error:
            raise self._parted(self._reports(here), "did not meet within the limit") from error
        # Where the largest of all is also the smallest, all have it.
        if largest != [*own, *(-number for number in own)]:
            raise self._parted(self._reports(here), "stand before different collectives")
        self._number, self._last = self._number + 1, here

    def _reports(self, here: str) -> list[str | None]:
        """Where the ranks stand that came or gave up as well; None for those that have not."""
        store, rank = default_store(), dist.get_rank()
        keys = [f"{self._name}/{self._number}/{other}" for other in range(dist.get_world_size())]
        store.set(keys[rank], here)
        deadline = time.monotonic() + _COLLECT_S
        while time.monotonic() < deadline and not store.check(keys):
            time.sleep(0.05)
        return [store.get(key).decode() if store.check([key]) else None for key in keys]

    def _parted(self, of_ranks: list[str | None], what: str) -> RanksPartedError:
        seconds = self._limit.total_seconds()
        lines = [
            f"  rank {rank} stands before {where}" if where else f"  rank {rank} has not come in {seconds:g} s"
            for rank, where in enumerate(of_ranks)
        ]
        return RanksPartedError(
            f"collective_guard: ranks {what}; all were together at {self._last}:\n" + "\n".join(lines) + "\nRanks must "
            "run the same modules in the same order: look for a branch on the rank or on the data, a different number "
            "of batches, or a forward on some ranks only"
        )


_GUARDS: WeakKeyDictionary[nn.Module, CollectiveGuard] = WeakKeyDictionary()


def start_guard(model: nn.Module, limit: timedelta) -> None:
    """Guard a model that was just sharded, for as long as it lives. Called on all ranks."""
    guard = CollectiveGuard(limit)
    _GUARDS.update((unit, guard) for unit in model.modules() if isinstance(unit, FSDPModule))
    watch_collectives(units(model), guard.check)


def check_guard(model: nn.Module, where: str) -> None:
    """A place beside the collectives of a model, or of a part of it, where ranks must meet, if it is guarded."""
    if not _GUARDS:
        return
    guard = next((_GUARDS[module] for module in model.modules() if module in _GUARDS), None)
    if guard is not None:
        guard.check(where)
