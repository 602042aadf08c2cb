"""The host votes of all ranks within a step: correct for every number of ranks, in few rounds, over one process
group."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import reports_soon

from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.errors import ControlGroupError, RanksDivergedError
from composer_fsdp2.sharding.meshes import unit_meshes
from composer_fsdp2.training import control as control_module
from composer_fsdp2.training import node as node_module
from composer_fsdp2.training.control import ControlGroup, Operation, connect, control_group
from composer_fsdp2.training.guard import collective_guard
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote

SOON = timedelta(seconds=60)


def on_nodes_of(size: int) -> ControlGroup:
    """Connected as if each ``size`` ranks were on a host of their own."""
    return connect(f"host {dist.get_rank() // size}")


OPERATION = Operation("the test", "Look at the test")


def largest(connected: ControlGroup, numbers: list[int], timeout: timedelta = SOON) -> list[int]:
    return connected.all_reduce_max(OPERATION, "a place", numbers, timeout)


def check_largest(ranks_a_node: int) -> int:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    connected = on_nodes_of(ranks_a_node)
    numbers = largest(connected, [rank, -rank, -(2**62), (rank * 7) % num_ranks])
    assert numbers == [num_ranks - 1, 0, -(2**62), max(each * 7 % num_ranks for each in range(num_ranks))]
    with mock.patch.object(dist, "irecv", wraps=dist.irecv) as messages:
        for voter in range(num_ranks):
            assert largest(connected, [int(rank == voter)]) == [1]
            assert largest(connected, [0], timedelta(days=365)) == [0]
    return messages.call_count // num_ranks // 2


def check_nodes() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = {1, 2, 3, num_ranks}
    counts = for_each(check_largest, {f"{size}": (size,) for size in sizes})
    for size in sizes:
        num_nodes = math.ceil(num_ranks / size)
        assert counts[f"{size}"] == (0 if rank % size else math.ceil(math.log2(num_nodes))), (size, counts)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_the_largest_of_all_ranks(num_ranks: int):
    """For every layout of nodes, the first rank of each node waits for ceil(log2 nodes) consecutive gloo messages: ten
    at 1,024 nodes, where gloo's ring takes 2,046."""
    run_ranks(check_nodes, num_ranks)


def check_one_group(ranks_a_node: int) -> int:
    model = torch.nn.Linear(2, 2)
    control_module._control_group = None
    host = f"host {dist.get_rank() // ranks_a_node}"
    with (
        mock.patch.object(control_module, "this_host", return_value=host),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        for _ in range(3):
            OutOfMemoryVote(model)
            collective_guard(SOON)
    return made.call_count


def check_groups() -> None:
    """Votes and guards share one group, and a single node has none: gloo opens a socket to every other rank, which
    exceeds ulimit -n."""
    assert [check_one_group(size) for size in (1, 2)] == [1, 0]


@on_ranks(3, fresh=True)
def test_a_default_group_with_a_device(folder: str) -> None:
    """With NCCL and ``device_id``, torch has the ranks outside a new gloo group split NCCL's communicator, and they
    would wait forever for those inside. 1,024 ranks in groups of 8 would split it 128 times, each time on all ranks.
    NCCL is faked, since CPUs have none."""
    world, split = dist.group.WORLD, mock.Mock(spec_set=["supports_splitting", "perform_nocolor_split"])
    world.bound_device_id = torch.device("cuda:0")
    try:
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", return_value=split):
            connected = on_nodes_of(2)
            unit_meshes([MeshSpec.of_groups(RankGroups(rule=GroupRule.CONSECUTIVE, number=1)).resolve(3)])
        split.perform_nocolor_split.assert_not_called()
        assert largest(connected, [dist.get_rank()]) == [2] and world.bound_device_id is not None
    finally:
        world.bound_device_id = None


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that diverge

LAYOUTS = {"one node": 4, "two nodes": 2, "four nodes": 1}


class CountingStore:
    """Counts the keys in requests."""

    def __init__(self) -> None:
        self.store, self.num_keys = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        request = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.num_keys += len(args[0]) if args and isinstance(args[0], list) else len(args[:1])
            return request(*args)

        return counted


@pytest.mark.parametrize("num_ranks", [4, 256])
def test_a_report_takes_a_few_requests_of_each_rank(num_ranks: int, monkeypatch: pytest.MonkeyPatch):
    """Without a limit, 2,048 keys of each of 1,024 ranks are two million requests to one store before the error is
    printed."""
    store, given_up = CountingStore(), ControlGroup(mock.MagicMock(), mock.MagicMock())
    monkeypatch.setattr(control_module, "default_store", lambda: store)
    monkeypatch.setattr(control_module, "_REPORT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)
    counts = []
    for rank in range(num_ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        before = store.num_keys
        found = given_up._reports(f"unit {rank},\nforward")
        counts.append(store.num_keys - before)
        assert found == [f"unit {each}, forward" if each <= rank else None for each in range(num_ranks)]
    assert max(counts) <= 4, counts


def error_of(ask: Any) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(RanksDivergedError) as error:
        ask()
    return str(error.value), time.monotonic() - start


Wait = Callable[[ControlGroup], Any]


@reports_soon
def side_by_side(cases: dict[str, tuple[int, Wait]]) -> dict[str, Any]:
    """Results by name. Each case has its own connection with so many ranks a node, over which all ranks have already
    reduced once. Cases mostly wait, so they run concurrently in threads."""
    connected = {name: on_nodes_of(ranks_a_node) for name, (ranks_a_node, _) in cases.items()}
    for each in connected.values():
        largest(each, [0])
    with ThreadPoolExecutor(len(cases)) as threads:
        waiting = {name: threads.submit(wait, connected[name]) for name, (_, wait) in cases.items()}
        found = {name: each.result() for name, each in waiting.items()}
    dist.barrier()
    return found


def comes_late(late: int, connected: ControlGroup) -> tuple[str, float]:
    """One rank arrives after the others timed out; the group itself would wait two minutes for it."""
    if dist.get_rank() == late:
        time.sleep(2.5)  # longer than the others collect reports
    message = error_of(lambda: largest(connected, [dist.get_rank()], timedelta(seconds=1)))
    assert not connected.is_open
    # A script that catches the error and retries must not receive the previous operation's result.
    error_of(lambda: largest(connected, [0]))
    return message


def ends(connected: ControlGroup) -> float:
    if dist.get_rank() == 3:
        connected.close()  # as the kernel does for a process that ends
        return 0
    if dist.get_rank() == 1:
        time.sleep(1)
    return error_of(lambda: largest(connected, [0], timedelta(minutes=5)))[1]


def check_late_and_ended() -> dict[str, Any]:
    cases = {
        f"{name}, rank {late}": (size, partial(comes_late, late))
        for name, size in LAYOUTS.items()
        for late in (0, 1, 3)
    }
    return side_by_side(cases | {f"{name}, rank 3 ends": (size, ends) for name, size in LAYOUTS.items()})


@pytest.mark.any_torch
def test_a_rank_that_comes_late_or_ends():
    """A late rank must not continue alone with numbers that the others left behind; the others name it. When a rank
    ends, the others raise at once, whatever their limit, even while waiting for another rank."""
    of_ranks = run_ranks(check_late_and_ended, 4, timeout_s=120)
    for rank, of_rank in enumerate(of_ranks):
        for name, found in of_rank.items():
            if name.endswith("ends"):
                assert found < 10, of_rank
                continue
            (text, seconds), late = found, int(name[-1])
            assert "did not meet within 1 s" in text and "Look at the test" in text, text
            assert seconds < 10, f"{name}: rank {rank} waited {seconds} s"
            for other in range(4):
                expected = "has not come" if other == late != rank else "stands before a place"
                assert f"  rank {other} {expected}" in text, f"{name}: rank {rank} says {text}"


def comes_half_way(connected: ControlGroup) -> tuple[str, float]:
    """Rank 3 never arrives; rank 2 arrives after half of the others' limit."""
    if dist.get_rank() == 2:
        time.sleep(1)
    if dist.get_rank() == 3:
        return "", 0.0
    return error_of(lambda: largest(connected, [0], timedelta(seconds=2)))


def gives_up(which: int, connected: ControlGroup) -> list[int] | str:
    """Ranks 0 to 2 are a node. One of them times out while the first still waits for rank 3 on the other node."""
    time.sleep(2 if dist.get_rank() == 3 else 0)
    try:
        return largest(connected, [0], timedelta(seconds=1 if dist.get_rank() == which else 20))
    except RanksDivergedError as error:
        return str(error)


def check_given_up() -> dict[str, Any]:
    cases = {name: (size, comes_half_way) for name, size in LAYOUTS.items()}
    return side_by_side(cases | {f"rank {which} of three": (3, partial(gives_up, which)) for which in (1, 2)})


@pytest.mark.any_torch
def test_who_gives_up_tells_the_others():
    """A rank that times out notifies its node: later ranks are then not named as missing, and wait no longer than the
    first. Between nodes, a rank may have to wait for its own limit. If a rank times out while a result is on its way to
    the node, no rank of the node receives the result: half of the node would continue without the other half."""
    of_ranks = run_ranks(check_given_up, 4, timeout_s=120)
    for rank, of_rank in enumerate(of_ranks[:3]):
        for name in LAYOUTS:
            text, seconds = of_rank[name]
            missing = [line for line in text.splitlines() if "has not come, or still waits" in line]
            assert "  rank 3 has not come, or still waits" in missing, f"{name}: {text}"
            assert len(missing) == 1 or name == "two nodes", f"{name}: rank {rank} says {text}"
            assert seconds < (2 if rank < 2 or name == "two nodes" else 1) + 3.5, f"{name}: rank {rank}, {seconds} s"
        for which in (1, 2):
            found = of_rank[f"rank {which} of three"]
            assert isinstance(found, str), f"rank {rank} goes on with {found}"


def check_different(ranks_a_node: int) -> tuple[str, float]:
    connected = on_nodes_of(ranks_a_node)
    if dist.get_rank() % 2:
        vote = Operation("a vote", "")
        message = error_of(lambda: connected.all_reduce_max(vote, "an all-gather", [0], SOON))
    else:
        guard = Operation("a guard", "")
        message = error_of(lambda: connected.barrier(guard, "clipping", [1, 2], SOON))
    # All ranks raised, so they are still in step.
    assert connected.is_open and largest(connected, [dist.get_rank()]) == [3]
    return message


@pytest.mark.any_torch
@on_ranks(4, timeout_s=120)
def test_different_questions(folder: str) -> None:
    """Ranks that diverged may run different operations at the same time. A vote must not take a guard's numbers for
    votes; where the counts differed, gloo ended the process."""
    for name, (text, seconds) in for_each(check_different, {name: (size,) for name, size in LAYOUTS.items()}).items():
        assert "are at different operations" in text, f"{name}: {text}"
        assert "rank 0 stands before clipping (a guard)" in text, f"{name}: {text}"
        assert "rank 1 stands before an all-gather (a vote)" in text, f"{name}: {text}"
        assert seconds < 10


def check_made_anew() -> None:
    """A script that catches the error and builds another model gets a working connection."""
    first, rank = control_group(), dist.get_rank()
    if rank == 1:
        first.close()
    second = control_group()
    assert second is not first and largest(second, [rank]) == [1] and largest(control_group(), [-rank]) == [0]


def check_interrupted() -> None:
    """After Ctrl-C, the pending result is not received by the next operation."""
    connected = on_nodes_of(2)
    if dist.get_rank() == 0:
        with (
            mock.patch.object(node_module.Node, "recv", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            largest(connected, [0])
    else:
        assert "rank 0 has not come" in error_of(lambda: largest(connected, [0]))[0]


@pytest.mark.any_torch
def test_after_an_error():
    """A rank that timed out or was interrupted never receives the result of an earlier operation."""
    run_ranks(all_of, 2, check_made_anew, check_interrupted)


@reports_soon
def check_forked() -> None:
    """A dead rank is detected even if a child that it forked (a loader's worker) inherited its sockets and lives on."""
    connected = control_group()
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            if os.fork():  # by the grandchild, since this rank waits for its own child
                os._exit(0)
            time.sleep(8)
            os._exit(0)
        os.waitpid(child, 0)
        connected.close_in_child()  # as the kernel does for a killed process: closed without a shutdown
    else:
        assert error_of(lambda: largest(connected, [0], timedelta(seconds=30)))[1] < 6


# ---------------------------------------------------------------------------------------------------------------------
# Where no connection can be made


@on_ranks(3)
def test_ranks_of_one_name_that_do_not_reach_each_other(folder: str) -> None:
    """Containers on one machine often share a host name, and each has its own network. A rank that cannot connect
    counts as a separate node."""
    real = node_module._connect

    def connected(address: bytes | None) -> Any:
        return real(address if dist.get_rank() == 1 else b"\0nobody listens here")

    with mock.patch.object(node_module, "_connect", connected):
        question = on_nodes_of(3)
    assert largest(question, [dist.get_rank(), -dist.get_rank()]) == [2, 0]


def check_no_group(fails_on: tuple[int, ...]) -> None:
    """Every rank raises with the setting to change. The failing call is a fake: a test cannot open 1,024 sockets a
    rank."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with [...] Too many open files")

    with (
        mock.patch.object(control_module, "CONNECT_TIMEOUT", timedelta(seconds=1)),
        mock.patch.object(dist, "new_group", failing) if dist.get_rank() in fails_on else mock.MagicMock(),
        pytest.raises(ControlGroupError) as error,
    ):
        on_nodes_of(1)
    message = str(error.value)
    assert "GLOO_SOCKET_IFNAME" in message and "ulimit -n" in message, message
    assert "2 of 2" in message or "1 of 2" in message, message


def check_no_groups() -> None:
    for_each(check_no_group, {"on all": ((0, 1),), "on one": ((1,),)})


def check_out_of_files(rank: int, left: int) -> None:
    """``rank`` may open only ``left`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in held[len(held) - left :]:
            os.close(descriptor)
        del held[len(held) - left :]
    try:
        with pytest.raises(ControlGroupError) as error:
            on_nodes_of(3)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    message = str(error.value)
    assert "ulimit -n" in message and "Too many open files" in message, message


@pytest.mark.any_torch
def test_no_more_files():
    """Every rank raises with the setting to change, whichever rank has no file descriptors left."""
    cases = {
        "the first cannot listen": (0, 0),
        "the first cannot accept": (0, 2),
        "another cannot connect": (1, 0),
    }
    run_ranks(for_each, 3, check_out_of_files, cases, fresh=True)


@reports_soon
def check_by_device() -> None:
    """Where gloo cannot connect, votes use the default group's backend; on CPU that is gloo. On GPUs, runs whose host
    names do not resolve vote over NCCL instead of not at all, within the same limit."""
    new_group = dist.new_group

    def failing(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend == "gloo":
            raise RuntimeError("Gloo connectFullMesh failed with [...]")
        return new_group(*args, **kwargs)

    with (
        mock.patch.object(dist, "new_group", failing),
        mock.patch.object(control_module, "sends_from_host", return_value=False),
    ):
        connected = on_nodes_of(1)
    rank = dist.get_rank()
    assert largest(connected, [rank, -rank, -(2**62)]) == [1, 0, -(2**62)]
    assert largest(connected, [int(rank == 1)]) == [1] and largest(connected, [0]) == [0]
    if rank == 1:
        time.sleep(2.5)
    else:
        message, seconds = error_of(lambda: largest(connected, [0], timedelta(seconds=1)))
        assert "rank 1 has not come" in message and 1 <= seconds < 4, (message, seconds)


@pytest.mark.any_torch
@on_ranks(2, fresh=True)
def test_connections(folder: str) -> None:
    """The number of process groups is minimal. Where one cannot be made, the run raises or uses the device's backend.
    No group outlives its rank."""
    # Last the case that leaves ranks with different numbers of groups.
    all_of(check_groups, check_by_device, check_forked, check_no_groups)
