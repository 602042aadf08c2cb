"""The harness itself: a wrong or slow result would invalidate every other multi-rank test."""

from __future__ import annotations

import os
import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, run_ranks


def check_pid() -> int:
    return os.getpid()


def check_error_on_rank_1() -> None:
    print("rank", dist.get_rank(), "was here")
    if dist.get_rank() == 1:
        raise KeyError("no such parameter")
    dist.all_reduce(torch.ones(1))


def check_variables() -> tuple[str | None, ...]:
    seen = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "CALLS", "CHECKS")]
    os.environ["CHECKS"] = "left behind"
    return (*seen, str(hash("a word")))


def check_settings() -> tuple[object, ...]:
    seen = torch.get_default_dtype(), torch.get_num_threads(), torch.rand(1).item(), random.random(), os.getcwd()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.chdir("/")
    warnings.simplefilter("error")
    return seen


def test_variables_last_for_one_call(monkeypatch):
    """Ranks have a launcher's variables and the test's, not those of an earlier test. Their hash seeds differ as on
    users' machines, where the order of a set differs between ranks."""
    run_ranks(check_variables, 2, env={"CALLS": "1"})
    *first, hash_0 = run_ranks(check_variables, 2)[0]
    assert first == ["0", "2", "0", "0", None, None]
    monkeypatch.setenv("CALLS", "parent")
    *second, hash_1 = run_ranks(check_variables, 2)[1]
    assert second == ["1", "2", "1", "0", "parent", None]
    assert hash_0 != hash_1


def test_settings_are_reset(tmp_path, monkeypatch):
    """A check that changes global settings does not change the result of the next one."""
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(check_settings, 2), run_ranks(check_settings, 2)
    assert first == second
    assert first[0][:2] == (torch.float32, 1)
    assert first[0][-1] == str(tmp_path)


def test_pool_is_reused_and_replaced_after_a_failure():
    """Tests share the cost of one start, but never the ranks of a failed check."""
    pids = run_ranks(check_pid, 2)
    assert run_ranks(check_pid, 2) == pids
    begin_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(check_error_on_rank_1, 2, peer_grace_s=0.2)
    assert time.monotonic() - begin_s < 10  # Not the timeout of the all_reduce.
    assert set(run_ranks(check_pid, 2)).isdisjoint(pids)

    message = str(caught.value)
    assert message.splitlines()[0].endswith("failed first on rank 1 of 2: KeyError: 'no such parameter'")
    positions = [message.index(part) for part in ("--- rank 1: KeyError", "in check_error_on_rank_1", "--- rank 0")]
    assert positions == sorted(positions)
    assert "rank 1 was here" in message
    assert caught.value.running == [0]
