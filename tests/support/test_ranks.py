"""The harness itself: a wrong or slow answer here would make every other multi-rank test worthless."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import warm
from support.ranks import RankError, run_ranks


@dataclass(frozen=True)
class Pair:
    """A class of a test module, to cross the process border in both directions."""

    rank: int
    tensor: torch.Tensor


def check_double(pair: Pair) -> Pair:
    return Pair(dist.get_rank(), pair.tensor * 2)


def check_pid() -> int:
    return os.getpid()


def check_error_on_rank_1() -> None:
    print("rank", dist.get_rank(), "was here")
    if dist.get_rank() == 1:
        raise KeyError("no such parameter")
    dist.all_reduce(torch.ones(1))


def check_death_of_rank_1(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def check_hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
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


def check_meshes(num_meshes: int) -> tuple[list[float], int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(num_meshes):
        root = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("replicate", "shard", "tensor"))
        meshes = root["replicate"], root["shard", "tensor"]._flatten("flat")
        sums = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum().full_tensor().item() for mesh in meshes]
    return sums, len(os.listdir("/proc/self/task"))


def test_results_come_back_in_rank_order():
    """Values and classes of a test module cross the border, and result i belongs to rank i."""
    results = run_ranks(check_double, 2, Pair(-1, torch.arange(3)))
    assert [result.rank for result in results] == [0, 1]
    assert all(isinstance(result, Pair) for result in results)
    torch.testing.assert_close(results[1].tensor, torch.tensor([0, 2, 4]))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_equal_meshes_share_their_groups():
    """Hundreds of tests with a mesh each do not end in thousands of threads, which gloo never ends."""
    (sums, num_threads), *others = [result for num in (1, 9) for result in run_ranks(check_meshes, 2, num)]
    assert sums == [4.0, 4.0]
    assert others == [(sums, num_threads)] * 3


def test_variables_last_for_one_call(monkeypatch):
    """Ranks have a launcher's variables and a test's, not those of an earlier one; and other hashes, since what they
    do in the order of a set would be the same on all of them here and on no user's machine."""
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
    assert time.monotonic() - begin_s < 10  # Not the time-out of the all_reduce.
    assert set(run_ranks(check_pid, 2)).isdisjoint(pids)

    message = str(caught.value)
    assert message.splitlines()[0].endswith("failed first on rank 1 of 2: KeyError: 'no such parameter'")
    positions = [message.index(part) for part in ("--- rank 1: KeyError", "in check_error_on_rank_1", "--- rank 0")]
    assert positions == sorted(positions)
    assert "rank 1 was here" in message
    assert caught.value.running == [0]


def test_timeout_shows_every_stack():
    """A deadlock names the ranks and the lines they wait in."""
    with pytest.raises(RankError, match="took more than 2 s; still running: rank 0, 1") as caught:
        run_ranks(check_hang, 2, timeout_s=2)
    rank_0, rank_1 = str(caught.value).split("--- rank ")[1:3]
    assert "in all_reduce" in rank_0 and "in check_hang" in rank_0
    assert "in all_reduce" not in rank_1 and "in check_hang" in rank_1
    assert caught.value.running == [0, 1]


def test_death_of_a_rank_comes_before_its_peers_errors():
    """A crash is the first cause, not the closed connection that the other rank reports."""
    with pytest.raises(RankError, match="first on rank 1 of 2: process died with signal SIGSEGV") as caught:
        run_ranks(check_death_of_rank_1, 2, signal.SIGSEGV)
    assert "in check_death_of_rank_1" in caught.value.failures[0].traceback


def test_fresh_ranks_are_not_pooled():
    """A check that needs clean processes gets them, and leaves the pool as it was."""
    pooled, fresh = run_ranks(check_pid, 1), run_ranks(check_pid, 1, fresh=True)
    assert fresh != pooled == run_ranks(check_pid, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(fresh[0], 0)


def test_ranks_that_do_not_start_say_why(monkeypatch: pytest.MonkeyPatch):
    """A broken environment shows the interpreter's own message."""
    with pytest.raises(RuntimeError, match="imports no_such_module did not start") as caught:
        warm.server(("no_such_module",))
    assert "No module named 'no_such_module'" in str(caught.value)
    start = warm.start
    monkeypatch.setattr(warm, "start", lambda imports, _, *more, **options: start(imports, "os:no", *more, **options))
    with pytest.raises(RankError, match="starting the ranks failed first on rank") as failed:
        run_ranks(check_pid, 2, fresh=True)
    assert "has no attribute 'no'" in str(failed.value)


def test_ranks_die_with_their_parent():
    """A killed pytest leaves no process behind, not even one that would go on for minutes."""
    code = "from support import warm; print(warm.start((), 'time:sleep', [600], streams=[0, 1, 2]).pid, flush=True)"
    code += "; import time; time.sleep(600)"
    environ = {name: value for name, value in os.environ.items() if name != warm.SHARED}
    environ["PYTHONPATH"] = str(warm.TESTS)
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for is dead too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
