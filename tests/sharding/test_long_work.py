"""Ranks that wait for hours for other ranks' work, outside of collectives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.cases import for_each
from support.ranks import RankError, impatient, run_ranks
from torch.distributed.checkpoint.api import CheckpointException

from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding import long_work as module
from composer_fsdp2.sharding.long_work import long_work

# The surviving rank must first notice that the others are gone, and then see it in the store.
NOTICED_WITHIN_S = 60.0
QUICK = {"_GONE_AFTER_S": 0.6, "_COME_WITHIN_S": 0.6, "_BEAT_EVERY_S": 0.1}


def check_longer_than_every_limit() -> list[object]:
    """Work of 1.5 s, with a collective timeout of 1 s and a heartbeat timeout of 0.6 s."""
    rank = dist.get_rank()
    with impatient(1.0), mock.patch.multiple(module, **QUICK):
        alone = long_work(lambda: time.sleep(1.5) or "packed", "packing", ranks=[0])
        both = long_work(lambda: time.sleep(1.5 * rank) or rank, "copying")
    return [alone, both]


@pytest.mark.any_torch
def test_work_that_takes_longer_than_a_collective_may():
    """Rank 0 packs a checkpoint for an hour; the run used to end after Composer's dist_timeout of 300 s."""
    assert run_ranks(check_longer_than_every_limit, 2) == [["packed", 0], [None, 1]]


def check_errors() -> dict[str, tuple[str, str]]:
    rank, done = dist.get_rank(), []

    def fails(rank_that_fails: int, error: BaseException, ranks: list[int]) -> tuple[str, str]:
        def work() -> None:
            if rank == rank_that_fails:
                raise error
            time.sleep(0.3)
            done.append(rank)

        try:
            long_work(work, "packing", ranks=ranks, error_type=CheckpointError)
        except BaseException as caught:
            return type(caught).__name__, str(caught)
        return "", ""

    found = for_each(
        fails,
        {
            "only worker": (0, KeyError("no space"), [0]),
            "one of two": (1, KeyError("no space"), [0, 1]),
            "Ctrl-C": (0, KeyboardInterrupt(), [0]),
            "no Exception": (0, CheckpointException("a load", {}), [0]),
            "not text": (0, CheckpointError(os.fsdecode(b"run-\xff.pt")), [0]),
        },
    )
    assert done == [0] * (rank == 0), "a rank that could go on was not waited for"
    assert long_work(lambda: rank, "packing") == rank, "no more work after an error"
    return found


def test_an_error_is_everybodys():
    """A full disk on the packing rank leaves no rank polling forever; each raises and names the rank that failed."""
    first, second = run_ranks(check_errors, 2)
    of_other = "could not go on: KeyError: 'no space'"
    assert first["only worker"] == second["one of two"] == ("KeyError", "'no space'")
    assert second["only worker"] == ("CheckpointError", f"rank 0 {of_other}")
    assert first["one of two"] == ("CheckpointError", f"rank 1 {of_other}")
    assert first["Ctrl-C"][0] == "KeyboardInterrupt" and "rank 0" in second["Ctrl-C"][1]
    assert first["no Exception"][0] == "CheckpointException", "as torch's loader raises it"
    assert "rank 0 could not go on: CheckpointException" in second["no Exception"][1]
    assert second["not text"][0] == "CheckpointError" and "run-" in second["not text"][1]


def check_killed() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.multiple(module, **QUICK):
        long_work(work, "copying", error_type=CheckpointError)


def test_a_rank_that_is_killed():
    """If a rank runs out of memory while unpacking, the others must not wait forever."""
    with pytest.raises(RankError) as caught:
        run_ranks(check_killed, 2, fresh=True, peer_grace_s=NOTICED_WITHIN_S)
    errors = {failure.rank: failure.error for failure in caught.value.failures}
    assert "SIGKILL" in errors[1]
    assert "CheckpointError: rank 1 has stopped responding while copying (no heartbeat" in errors[0]


def check_node_that_dies() -> None:
    """Ranks 1 to 3 are killed at once; only rank 3 is still working."""
    rank = dist.get_rank()

    def dies() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank in (1, 2):
        threading.Thread(target=dies, daemon=True).start()
    with mock.patch.multiple(module, **QUICK):
        long_work(dies if rank == 3 else lambda: None, "copying", error_type=CheckpointError)


@pytest.mark.any_torch
def test_a_node_that_dies_with_finished_ranks():
    """A working rank died together with the finished rank that watched it, and the others waited forever."""
    with pytest.raises(RankError) as caught:
        run_ranks(check_node_that_dies, 4, fresh=True, peer_grace_s=NOTICED_WITHIN_S)
    errors = {failure.rank: failure.error for failure in caught.value.failures}
    assert "CheckpointError: rank 3 has stopped responding while copying (no heartbeat" in errors[0]


def check_absent() -> str:
    """Rank 1 never calls it."""
    if dist.get_rank() == 1:
        next(module._numbers["copying"])  # advances its counter as if it had
        time.sleep(1.0)
        return ""
    with mock.patch.multiple(module, **QUICK), pytest.raises(CheckpointError) as caught:
        long_work(lambda: None, "copying", error_type=CheckpointError)
    return str(caught.value)


@pytest.mark.any_torch
def test_a_rank_that_never_comes():
    """If ranks diverge, the error names the missing rank, and other ranks do not wait."""
    assert "rank 1 has stopped responding" in run_ranks(check_absent, 2)[0]


def check_one_rank() -> int | None:
    return long_work(lambda: threading.active_count(), "unpacking", ranks=[0]) - threading.active_count()


@pytest.mark.any_torch
def test_alone():
    """A single-process script needs neither store nor thread; Composer starts a process group on a single GPU too."""
    before = threading.active_count()
    assert long_work(lambda: threading.active_count(), "unpacking", ranks=[0]) == before
    assert run_ranks(check_one_rank, 1) == [0]


class CountingStore:
    """A store that records the keys that a rank uses, and their number."""

    def __init__(self, store: Any) -> None:
        self.store, self.keys = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(key: str, *values: Any) -> Any:
            self.keys.append(key)
            return getattr(self.store, name)(key, *values)

        return call


def stores_of_many_ranks(num_workers: int, work: Callable[[int, list[Any]], None]) -> list[CountingStore]:
    """64 threads as ranks; the first ones run ``work`` with their number and all ranks' calls."""
    num_ranks, shared, own = 64, dist.HashStore(), threading.local()
    stores = [CountingStore(shared) for _ in range(num_ranks)]
    world = mock.Mock(get_rank=lambda: own.rank)
    calls: list[Any] = [None] * num_ranks

    def be(rank: int) -> Any:
        own.rank = rank
        calls[rank] = module._LongWork("copying", range(num_workers), CheckpointError)
        ready.wait()
        return calls[rank].run(lambda: work(rank, calls) or rank)

    ready = threading.Barrier(num_ranks)
    with (
        mock.patch.object(module, "dist", world),
        mock.patch.object(module, "default_store", side_effect=lambda: stores[own.rank]),
        mock.patch.object(module, "_numbers", mock.MagicMock(__getitem__=lambda *_: iter([0]))),
        mock.patch.multiple(module, _BEAT_EVERY_S=0.2, _GONE_AFTER_S=60, _COME_WITHIN_S=60),
        ThreadPoolExecutor(num_ranks) as ranks,
    ):
        values = list(ranks.map(be, range(num_ranks)))
    assert values == [*range(num_workers), *[None] * (num_ranks - num_workers)]
    return stores


@pytest.mark.any_torch
@pytest.mark.parametrize("num_workers", [1, 64])
def test_messages_do_not_grow_with_the_ranks(num_workers: int):
    """If each rank polled the store about each other rank, 1,024 ranks would send a million messages and wait for
    them."""
    stores = stores_of_many_ranks(num_workers, lambda rank, calls: time.sleep(0.5))
    assert max(len(set(store.keys)) for store in stores) <= 4
    assert len({key for store in stores for key in store.keys}) == num_workers + 1
    assert max(len(store.keys) for store in stores) < 40


@pytest.mark.any_torch
def test_the_last_working_rank_is_watched():
    """63 finished ranks are skipped in a few steps, without a message for each pair."""
    watched: list[int | None] = []

    def work(rank: int, calls: list[Any]) -> None:
        if rank == 40:
            time.sleep(3)
            watched.extend(call._watched_rank() for call in calls)

    stores = stores_of_many_ranks(64, work)
    assert watched == [None if rank == 40 else 40 for rank in range(64)]
    assert max(len(set(store.keys)) for store in stores) <= 3 + 2 * 6  # log2(64)
    assert max(len(store.keys) for store in stores) < 100
