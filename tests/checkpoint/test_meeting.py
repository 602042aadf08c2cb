"""Ranks that wait for each other outside of collectives."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch.distributed as dist
from support.ranks import run_ranks

from composer_fsdp2.checkpoint.convert import meeting
from composer_fsdp2.checkpoint.convert.meeting import Meeting
from composer_fsdp2.errors import CheckpointError


def check_long_work() -> list[object]:
    """One rank takes longer than a silent rank is waited for; it lives all the while."""
    times = {"_GONE_AFTER_S": 1.0, "_BEAT_EVERY_S": 0.1, "_ASK_EVERY_S": 0.02}
    with mock.patch.multiple(meeting, **times), Meeting() as together:
        first = together.on_first_rank(lambda: time.sleep(2.5) or 7)
        return [first, together.together(lambda: dist.get_rank() * 10)]


def test_work_that_takes_long():
    """Rank 0 unpacks for hours, and nobody's collective times out."""
    assert run_ranks(check_long_work, 2) == [[7, 0], [None, 10]]


def check_error() -> str:
    def work() -> None:
        if dist.get_rank() == 1:
            raise CheckpointError("rank 1's own")

    with Meeting() as together:
        try:
            together.together(work)
        except CheckpointError as error:
            return str(error)
    return ""


def test_an_error_is_everybodys():
    """No rank goes on where one could not."""
    ours, theirs = run_ranks(check_error, 2)
    assert theirs == "rank 1's own" and "rank 1" in ours


def check_gone() -> str:
    """Rank 1 neither comes nor says anything, as after a kill."""
    if dist.get_rank() == 1:
        next(meeting._NUMBERS)  # as if it had made its own
        time.sleep(4)
        return ""
    times = {"_GONE_AFTER_S": 1.0, "_BEAT_EVERY_S": 0.1, "_ASK_EVERY_S": 0.02}
    with mock.patch.multiple(meeting, **times), Meeting() as together:
        try:
            together.on_first_rank(lambda: None)
        except CheckpointError as error:
            return str(error)
    return "nobody missed it"


def test_a_rank_that_was_killed():
    """The others waited for seven days."""
    assert "rank 1 has stopped responding" in run_ranks(check_gone, 2)[0]


def test_alone():
    """Without a process group there is nobody to wait for, and no thread."""
    before = threading.active_count()
    with Meeting() as together:
        assert together.on_first_rank(lambda: 3) == together.together(lambda: 3) == 3
        assert threading.active_count() == before
