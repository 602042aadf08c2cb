"""Numbers that all ranks compare in the midst of a step, beside the model's own collectives.

One control serves the votes of automatic microbatching, the collective guard, and the question whether an asynchronous
save is written. It belongs to the thread that trains (and to autograd's, which runs while that one waits).

[Note: two levels] gloo's all-reduce sends what it reduces around a ring of all ranks, 2(N - 1) messages one after the
other, through threads of its own that compete with the training for the processor's cores; and each group of N ranks
costs a rank N - 1 sockets. Here the ranks of a node send to the first one of them, through a local socket, and get its
answer; only the first ranks of the nodes talk over gloo, ceil(log2 M) rounds for M nodes: in round k each hears from
the one 2^k before it and tells the one 2^k after it, and the largest number of all has then reached every one of them.
On one node there is no gloo.

[Note: giving up] A rank that came too late for the others must not get their answer, and go on alone. So who gives up
closes its links, for good: those that wait for it give up too, at once, and so does whoever comes later (the first
rank of another node may see it when its own limit is over). Where each rank stood when it gave up is in the default
store, from which every one's error lists all of them. What is left is the moment between the first rank's last look at
the others and its answer.
"""

import contextlib
import itertools
import os
import resource
import time
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from composer_fsdp2._torch.groups import new_group_of
from composer_fsdp2._torch.private_names import default_store
from composer_fsdp2.errors import ControlGroupError, RanksDivergedError
from composer_fsdp2.sharding.agree import all_gather_object, device_of_group, sends_from_host
from composer_fsdp2.sharding.hosts import this_host
from composer_fsdp2.training.node import Node

# Where one rank cannot connect, the others wait so long for it.
CONNECT_TIMEOUT = timedelta(minutes=2)
# How long a rank waits for the others' numbers, unless it is told otherwise: as long as torch's own gloo groups.
DEFAULT_TIMEOUT = timedelta(minutes=30)
# How long ranks that gave up wait for each other's reports.
_REPORT_TIMEOUT_S = 2.0
# All messages have room for so many numbers: gloo ends a process that gets a message of another size.
MAX_NUMBERS = 4
_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class Operation:
    """What numbers are compared for. Ranks that have diverged may be at different ones.

    Args:
        name: By which users know it.
        advice: What to do where ranks diverge over it.
    """

    name: str
    advice: str

    @property
    def number(self) -> int:
        return zlib.crc32(self.name.encode())


_COUNT = itertools.count()


class ControlGroup:
    """How ranks compare numbers; ``control_group`` makes it.

    Attributes:
        world: The default process group whose ranks it connects.
    """

    def __init__(self, world: dist.ProcessGroup, links: "_Links") -> None:
        self.world = world
        self._links, self._is_open = links, True
        self._name = f"composer_fsdp2/control/{next(_COUNT)}"  # ranks make their controls in one order
        self._num_operations = 0
        self._last_agreed: object = "the beginning"

    @property
    def is_open(self) -> bool:
        """Whether this rank has not given up."""
        return self._is_open

    def all_reduce_max(
        self, operation: Operation, where: object, numbers: Sequence[int], timeout: timedelta = DEFAULT_TIMEOUT
    ) -> list[int]:
        """The largest of all ranks' numbers, one by one.

        Args:
            where: Where this rank stands, for the error.
            numbers: As many on all ranks, at most ``MAX_NUMBERS``; of 64 bits, signed.
            timeout: How long this rank waits.
        Raises:
            RanksDivergedError: a rank has not come within ``timeout``, is at another operation, or has ended; says
                where each stands. Raised by all that come, and by this rank from then on.

        Called on all ranks.
        """
        found = self._all_reduce_max(operation, where, numbers, timeout)
        self._last_agreed = where
        return found

    def barrier(self, operation: Operation, where: object, numbers: Sequence[int], timeout: timedelta) -> None:
        """Go on where all ranks have the same numbers; two at most.

        Raises:
            RanksDivergedError: they have not, or as in ``all_reduce_max``.

        Called on all ranks.
        """
        own = [*numbers, *(-number for number in numbers)]
        # Where the largest of all is also the smallest, all have it.
        if self._all_reduce_max(operation, where, own, timeout) != own:
            raise self._diverged(operation, where, "stand before different collectives")
        self._last_agreed = where

    def close(self) -> None:
        """Give up: this rank asks nothing any more, and the others that do are told."""
        if self._is_open:
            self._is_open = False
            self._links.close()

    def close_in_child(self) -> None:
        """In a forked child: leave everything to the parent."""
        self._links.close_in_child()

    def _all_reduce_max(
        self, operation: Operation, where: object, numbers: Sequence[int], timeout: timedelta
    ) -> list[int]:
        missed = f"did not meet within {timeout.total_seconds():g} s, or one has ended"
        if not self._is_open:
            raise self._diverged(operation, where, missed)
        self._num_operations += 1
        asked = [operation.number, -operation.number, *numbers, *[_LOWEST] * (MAX_NUMBERS - len(numbers))]
        try:
            found = self._links.all_reduce_max(asked, time.monotonic() + timeout.total_seconds())
        except (OSError, RuntimeError) as error:
            traceback.clear_frames(error.__traceback__)  # those of torch hold the group, which is to go
            self.close()
            raise self._diverged(operation, where, missed) from error
        except BaseException:  # Ctrl-C: the answer may still come, and would be taken for the next operation's
            self.close()
            raise
        if found[:2] != asked[:2]:
            raise self._diverged(operation, f"{where} ({operation.name})", "are at different operations")
        return found[2 : 2 + len(numbers)]

    def _diverged(self, operation: Operation, where: object, what: str) -> RanksDivergedError:
        try:
            reports = self._reports(str(where))
        except RuntimeError as error:
            lines = [f"  where they stand is not known: the store cannot be reached ({str(error)[:200]})"]
        else:
            lines = [
                f"  rank {rank} stands before {other}" if other else f"  rank {rank} has not come, or still waits"
                for rank, other in enumerate(reports)
            ]
        first = f"{operation.name}: ranks {what}; all were together at {self._last_agreed}:"
        return RanksDivergedError("\n".join([first, *lines, operation.advice]))

    def _reports(self, where: str) -> list[str | None]:
        """The place of each rank that came to this operation; None for the others.

        All append to one key, so each rank sends the store a few requests, however many ranks there are.
        """
        store, key, num_ranks = default_store(), f"{self._name}/{self._num_operations}", dist.get_world_size()
        _append(store, key, f"{dist.get_rank()} {' '.join(where.split())}\n")
        store.add(f"{key}/count", 1)
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while time.monotonic() < deadline and store.add(f"{key}/count", 0) < num_ranks:
            time.sleep(0.05)
        came = (line.split(" ", 1) for line in store.get(key).decode().splitlines())
        places = {int(rank): place for rank, place in came}
        return [places.get(rank) for rank in range(num_ranks)]


def _append(store: Any, key: str, text: str) -> None:
    if store.has_extended_api():
        store.append(key, text)
        return
    before = ""  # a file
    while (now := store.compare_set(key, before, before + text).decode()) != before + text:
        before = now


_control_group: ControlGroup | None = None


def control_group() -> ControlGroup:
    """This world's control, replaced where a rank gave up the earlier one. Called on all ranks together.

    Gathers a few bytes from each rank, and makes the connections where there are none.

    Raises:
        ControlGroupError: it cannot be made; on all ranks. Says what to set.
    """
    global _control_group
    world = dist.group.WORLD
    assert world is not None
    own = _control_group
    known = own if own is not None and own.world is world and own.is_open else None
    if not all(all_gather_object(known is not None)):
        if _control_group is not None:
            _control_group.close()
        known = _control_group = connect(this_host())
    assert known is not None
    return known


def connect(host: str) -> ControlGroup:
    """A control of its own, beside the one that all share. Called on all ranks together.

    Args:
        host: The same on ranks of one host.
    Raises:
        ControlGroupError: as in ``control_group``.
    """
    world = dist.group.WORLD
    assert world is not None
    return ControlGroup(world, _links(host))


def _close_in_child() -> None:
    if _control_group is not None:
        _control_group.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


# ---------------------------------------------------------------------------------------------------------------------
# By which ways the numbers go


def _links(host: str) -> "_Links":
    """Called on all ranks."""
    try:
        node = Node.connect(host, CONNECT_TIMEOUT)
        return _NodeLinks(node, _connect_nodes(node.first_ranks))
    except ControlGroupError:
        if sends_from_host():
            raise
        return _DeviceLinks()


def _connect_nodes(first_ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """What the first ranks of the nodes talk over; None on the others, and where there is but one. Called on all."""
    if len(first_ranks) == 1:
        return None
    error: RuntimeError | None = None
    group: dist.ProcessGroup | None = None
    try:
        group = new_group_of([first_ranks], "gloo", CONNECT_TIMEOUT)
    except RuntimeError as raised:
        error = raised
    errors = [text for text in all_gather_object(error and str(error)[:500]) if text]
    if not errors:
        return group
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise ControlGroupError(
        f"{len(errors)} of {len(first_ranks)} nodes could not be connected by gloo: {errors[0]}\nSet "
        "GLOO_SOCKET_IFNAME to the network interface by which the nodes see each other (ip -br address lists them), "
        "where the hosts' names lead to 127.0.0.1; and raise ulimit -n: the first rank of a node opens a socket to "
        f"that of every other, and may open {soft} files (at most {hard})"
    ) from error


class _NodeLinks:
    """See [Note: two levels]."""

    def __init__(self, node: Node, group: dist.ProcessGroup | None) -> None:
        self._node, self._group = node, group

    def all_reduce_max(self, numbers: Sequence[int], deadline: float) -> list[int]:
        """The largest of all ranks' numbers, place by place.

        Args:
            until: On ``time.monotonic``'s clock.
        Raises:
            OSError, RuntimeError: a rank did not come in time.
        """
        if not self._node.is_first:
            self._node.send(numbers)
            [answer] = self._node.recv(deadline)
            return answer
        of_node = [max(each) for each in zip(numbers, *self._node.recv(deadline), strict=True)]
        found = self._all_reduce_nodes(of_node, deadline)
        self._node.send(found)
        return found

    def close(self) -> None:
        self._node.close()
        group, self._group = self._group, None  # gloo closes its sockets with the last reference
        if group is not None:
            with contextlib.suppress(ValueError):  # it went with its world
                dist.destroy_process_group(group)

    def close_in_child(self) -> None:
        self._node.close_in_child()

    def _all_reduce_nodes(self, numbers: list[int], deadline: float) -> list[int]:
        if self._group is None:
            return numbers
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # no default device that may be out of memory
        place, num_nodes = self._node.first_ranks.index(dist.get_rank()), len(self._node.first_ranks)
        sends: list[dist.Work | None] = []
        for number in range((num_nodes - 1).bit_length()):
            received = torch.empty_like(own)
            receive = dist.irecv(received, self._node.first_ranks[(place - (1 << number)) % num_nodes], self._group)
            sends.append(dist.isend(own, self._node.first_ranks[(place + (1 << number)) % num_nodes], self._group))
            _wait(receive, deadline)
            own = torch.maximum(own, received)
        for work in sends:  # last: who gave up is noticed by those that receive from it
            _wait(work, deadline)
        return [int(number) for number in own]


def _wait(work: dist.Work | None, deadline: float) -> None:
    assert work is not None  # as only for ranks outside of the group
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))


class _DeviceLinks:
    """One all-reduce of the device's own backend, where gloo does not connect the nodes: it waits for the device.

    The buffer is there from the beginning, so that a rank that is out of memory can still say so. Who comes when others
    have given up is not told here.
    """

    def __init__(self) -> None:
        self._group = dist.new_group()
        self._buffer = torch.zeros(2 + MAX_NUMBERS, dtype=torch.int64, device=device_of_group())
        dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group)  # the backend's own buffers, too

    def all_reduce_max(self, numbers: Sequence[int], deadline: float) -> list[int]:
        self._buffer.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        work = dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        while not work.is_completed():  # NCCL's wait is the device's, and knows no limit
            if time.monotonic() > deadline:
                raise TimeoutError("not all ranks have come within the time-out")
            time.sleep(1e-4)
        work.wait()
        found: list[int] = self._buffer.tolist()
        return found

    def close(self) -> None:
        pass

    def close_in_child(self) -> None:
        pass


_Links: TypeAlias = _NodeLinks | _DeviceLinks
