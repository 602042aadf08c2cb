"""What all ranks compare in the midst of a step: right at every number of ranks, in few rounds, over one group."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.ranks import run_ranks

from composer_fsdp2 import control as control_module
from composer_fsdp2.control import control, num_rounds
from composer_fsdp2.errors import ControlGroupError
from composer_fsdp2.guard import CollectiveGuard
from composer_fsdp2.out_of_memory import OutOfMemoryVote

SOON = timedelta(seconds=60)


def simulated(num_ranks: int, numbers: list[int]) -> tuple[list[int], list[int]]:
    """What every rank has in the end, and how many messages each waited for, with the rounds of all ranks in step."""
    held, waited = list(numbers), [0] * num_ranks
    for number in range(num_rounds(num_ranks)):
        heard = [held[(rank - (1 << number)) % num_ranks] for rank in range(num_ranks)]
        held = [max(pair) for pair in zip(held, heard, strict=True)]
        waited = [count + 1 for count in waited]
    return held, waited


@pytest.mark.any_torch
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 13, 512, 1000, 1024])
def test_whoever_votes_is_heard_by_all(num_ranks: int):
    """Simulated, for many nodes: ten messages one after the other at 1,024, where gloo's ring takes 2,046."""
    for voter in {0, num_ranks // 2, num_ranks - 1}:
        held, waited = simulated(num_ranks, [int(rank == voter) for rank in range(num_ranks)])
        assert held == [1] * num_ranks
        assert set(waited) == {num_rounds(num_ranks)}
    assert 2 ** num_rounds(num_ranks) >= num_ranks > 2 ** (num_rounds(num_ranks) - 1) or num_ranks == 1


def nodes_of(size: int) -> Any:
    """As if each ``size`` ranks were on a host of their own."""
    control_module._controls.clear()
    return mock.patch.object(control_module, "_host", return_value=f"host {dist.get_rank() // size}")


def check_largest(ranks_a_node: int) -> int:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with nodes_of(ranks_a_node):
        question = control()
    numbers = question.largest([rank, -rank, -(2**62), (rank * 7) % num_ranks], SOON)
    assert numbers == [num_ranks - 1, 0, -(2**62), max(each * 7 % num_ranks for each in range(num_ranks))]
    with mock.patch.object(dist, "irecv", wraps=dist.irecv) as messages:
        for voter in range(num_ranks):
            assert question.largest([int(rank == voter)], SOON) == [1]
            assert question.largest([0], SOON) == [0]
    return messages.call_count // num_ranks // 2


def check_nodes() -> dict[str, int]:
    return for_each(check_largest, {f"nodes of {size}": (size,) for size in (1, 2, 3, dist.get_world_size())})


@pytest.mark.parametrize("num_ranks", [2, 3, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_the_largest_of_all_ranks(num_ranks: int):
    """However they lie on nodes; each node's first rank waits for ceil(log2 nodes) messages over gloo."""
    for rank, counts in enumerate(run_ranks(check_nodes, num_ranks, fresh=True)):
        for size in (1, 2, 3, num_ranks):
            expected = num_rounds(-(-num_ranks // size)) if rank % size == 0 else 0
            assert counts[f"nodes of {size}"] == expected, (rank, size)


def check_one_group(ranks_a_node: int) -> int:
    model = torch.nn.Linear(2, 2)
    with nodes_of(ranks_a_node), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        for _ in range(3):
            OutOfMemoryVote(model)
            CollectiveGuard(SOON)
    return made.call_count


def check_groups() -> list[int]:
    return [check_one_group(size) for size in (1, 2)]


def test_votes_and_guards_share_one_group():
    """And on one node there is none: gloo's sockets to every other rank are what ulimit -n ends."""
    assert run_ranks(check_groups, 2, fresh=True) == [[1, 0]] * 2


def check_late(ranks_a_node: int) -> None:
    """The last rank does not come; the group itself would wait two minutes for it."""
    with nodes_of(ranks_a_node):
        question = control()
    if dist.get_rank() == 0:
        begun = time.monotonic()
        with pytest.raises(RuntimeError):
            question.largest([0], timedelta(seconds=1))
        assert time.monotonic() - begun < control_module.CONNECT_WITHIN.total_seconds() / 2


@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_a_rank_that_does_not_come(ranks_a_node: int):
    """The limit is that of the question, not of the group, which is everybody's."""
    run_ranks(check_late, 2, ranks_a_node, fresh=True)


def check_unreachable() -> list[int]:
    """Ranks of one host's name, of which one cannot connect: it is a node of its own."""
    real = control_module._Node._connect

    def connect(self: Any, first: int, address: bytes) -> None:
        real(self, first, address if dist.get_rank() == 1 else b"\0nobody listens here")

    with nodes_of(3), mock.patch.object(control_module._Node, "_connect", connect):
        question = control()
    return question.largest([dist.get_rank(), -dist.get_rank()], SOON)


def test_ranks_of_one_name_that_do_not_reach_each_other():
    """Containers on one machine often have one host name, and each a network of its own."""
    assert run_ranks(check_unreachable, 3, fresh=True) == [[2, 0]] * 3


def check_no_group(fails_on: tuple[int, ...]) -> str:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with [...] Too many open files")

    control_module.CONNECT_WITHIN = timedelta(seconds=3)
    with (
        nodes_of(1),
        mock.patch.object(dist, "new_group", failing) if dist.get_rank() in fails_on else mock.MagicMock(),
    ):
        try:
            control()
        except ControlGroupError as error:
            return str(error)
    return ""


def check_no_groups() -> dict[str, str]:
    return for_each(check_no_group, {"on all": ((0, 1),), "on one": ((1,),)})


def test_no_gloo_group_can_be_had():
    """On every rank, with what to set. The failing call is a fake: 1,024 sockets a rank are not to be had here."""
    for said in itertools.chain.from_iterable(each.values() for each in run_ranks(check_no_groups, 2, fresh=True)):
        assert "GLOO_SOCKET_IFNAME" in said and "ulimit -n" in said
        assert "2 of 2" in said or "1 of 2" in said


def check_by_device() -> list[int]:
    """gloo connects nothing, on ranks whose default group is another backend's; it is gloo's here, on the CPU."""
    new_group = dist.new_group

    def failing(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend == "gloo":
            raise RuntimeError("Gloo connectFullMesh failed with [...]")
        return new_group(*args, **kwargs)

    with (
        nodes_of(1),
        mock.patch.object(dist, "new_group", failing),
        mock.patch.object(control_module, "sends_from_host", return_value=False),
    ):
        question = control()
    rank = dist.get_rank()
    numbers = question.largest([rank, -rank, -(2**62)], SOON)
    assert question.largest([int(rank == 1)]) == [1] and question.largest([0]) == [0]
    return numbers


def test_the_devices_backend_where_gloo_cannot_connect():
    """On GPUs a run whose hosts' names lead nowhere votes over NCCL, rather than not at all."""
    assert run_ranks(check_by_device, 2, fresh=True) == [[1, 0, -(2**62)]] * 2
