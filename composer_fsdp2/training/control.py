"""The control group: compares a few integers between all ranks within a step, separately from the model's collectives.

One control group serves the votes of automatic microbatching, the collective guard, and the check whether an
asynchronous save has been written. It belongs to the training thread (and to autograd's, which runs while that thread
waits).

[Note: two levels] gloo's all-reduce passes its data around a ring of all ranks, 2(N - 1) messages in sequence, with its
own threads, which compete with training for CPU cores. Each group of N ranks costs a rank N - 1 sockets. Here the ranks
of a node send to the first rank of the node through a local socket, and receive the result from it. Only the first
ranks of the nodes use gloo, in ceil(log2 M) rounds for M nodes: in round k each receives from the rank 2^k before it
and sends to the rank 2^k after it. All of them then have the maximum. A single node does not use gloo.

[Note: timeouts] A rank that arrives after the others have timed out must not receive their result and continue
alone. A rank that times out therefore closes its links permanently. Ranks that are waiting for it raise immediately,
and so does any rank that arrives later (the first rank of another node may notice only when its own timeout
expires). Each rank that raises writes its position to the default store, and the error of each rank lists the
positions of all. A race remains between the first rank's last check of the others and its reply.
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

# How long the other ranks wait for a rank that cannot connect.
CONNECT_TIMEOUT = timedelta(minutes=2)
# The default timeout of an operation: that of torch's gloo groups.
DEFAULT_TIMEOUT = timedelta(minutes=30)
# How long ranks that timed out wait for each other's reports.
_REPORT_TIMEOUT_S = 2.0
# All messages have this size: gloo aborts a process that receives a message of a different size.
MAX_NUMBERS = 4
_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class Operation:
    """The purpose of a comparison across ranks. Diverged ranks may be in different operations.

    Args:
        name: Shown to users.
        advice: What the user can do if ranks diverge in this operation.
    """

    name: str
    advice: str

    @property
    def number(self) -> int:
        return zlib.crc32(self.name.encode())


_COUNT = itertools.count()


class ControlGroup:
    """Compares integers across all ranks. Created by ``control_group``.

    Attributes:
        world: The default process group, whose ranks it connects.
    """

    def __init__(self, world: dist.ProcessGroup, links: "_Links") -> None:
        self.world = world
        self._links, self._is_open = links, True
        self._name = f"composer_fsdp2/control/{next(_COUNT)}"  # all ranks create their control groups in the same order
        self._num_operations = 0
        self._last_agreed: object = "the beginning"

    @property
    def is_open(self) -> bool:
        """Whether this rank has not closed its links."""
        return self._is_open

    def all_reduce_max(
        self, operation: Operation, where: object, numbers: Sequence[int], timeout: timedelta = DEFAULT_TIMEOUT
    ) -> list[int]:
        """The element-wise maximum of all ranks' numbers.

        Args:
            where: This rank's position, for the error.
            numbers: Signed 64-bit integers, the same count on all ranks, at most ``MAX_NUMBERS``.
            timeout: How long this rank waits.
        Raises:
            RanksDivergedError: a rank did not arrive within ``timeout``, is at a different operation, or has ended.
                Lists the position of each rank. Raised on all ranks that arrive, and for every later operation of this
                rank.

        Called on all ranks.
        """
        found = self._all_reduce_max(operation, where, numbers, timeout)
        self._last_agreed = where
        return found

    def barrier(self, operation: Operation, where: object, numbers: Sequence[int], timeout: timedelta) -> None:
        """Wait for all ranks, and check that they have the same numbers; at most two.

        Raises:
            RanksDivergedError: the numbers differ, or as in ``all_reduce_max``.

        Called on all ranks.
        """
        own = [*numbers, *(-number for number in numbers)]
        # If the maximum equals the minimum, all ranks have the same numbers.
        if self._all_reduce_max(operation, where, own, timeout) != own:
            raise self._diverged(operation, where, "stand before different collectives")
        self._last_agreed = where

    def close(self) -> None:
        """Close the links. This rank takes part in no later operation; other ranks that start one get an error."""
        if self._is_open:
            self._is_open = False
            self._links.close()

    def close_in_child(self) -> None:
        """Called in a forked child: close the child's copies of the sockets. The parent stays connected."""
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
            traceback.clear_frames(error.__traceback__)  # torch's frames reference the group, which must be freed
            self.close()
            raise self._diverged(operation, where, missed) from error
        except BaseException:  # Ctrl-C: a late result would be taken for that of the next operation
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
        """The position of each rank that reached this operation; None for the others. Reads the default store.

        All ranks append to one key, so the number of requests per rank does not depend on the number of ranks.
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
    before = ""  # a FileStore
    while (now := store.compare_set(key, before, before + text).decode()) != before + text:
        before = now


_control_group: ControlGroup | None = None


def control_group() -> ControlGroup:
    """The control group of this world, created anew if a rank closed the previous one. Called on all ranks together.

    All-gathers a few bytes from each rank; connects the ranks if necessary.

    Raises:
        ControlGroupError: it cannot be created; on all ranks, with the settings to change.
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
    """A separate control group, in addition to the shared one. Called on all ranks together.

    Args:
        host: Equal on the ranks of one host.
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
# Transports


def _links(host: str) -> "_Links":
    """Connect the ranks. Called on all ranks."""
    try:
        node = Node.connect(host, CONNECT_TIMEOUT)
        return _NodeLinks(node, _connect_nodes(node.first_ranks))
    except ControlGroupError:
        if sends_from_host():
            raise
        return _DeviceLinks()


def _connect_nodes(first_ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A gloo group of the nodes' first ranks; None on other ranks, and with a single node. Called on all ranks."""
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
    """Communicates over local sockets within a node, and over gloo between nodes; see [Note: two levels]."""

    def __init__(self, node: Node, group: dist.ProcessGroup | None) -> None:
        self._node, self._group = node, group

    def all_reduce_max(self, numbers: Sequence[int], deadline: float) -> list[int]:
        """The element-wise maximum of all ranks' numbers. Called on all ranks.

        Args:
            deadline: In seconds of ``time.monotonic``.
        Raises:
            OSError, RuntimeError: a rank did not arrive in time.
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
            with contextlib.suppress(ValueError):  # already destroyed with its world
                dist.destroy_process_group(group)

    def close_in_child(self) -> None:
        self._node.close_in_child()

    def _all_reduce_nodes(self, numbers: list[int], deadline: float) -> list[int]:
        if self._group is None:
            return numbers
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # the default device may be out of memory
        place, num_nodes = self._node.first_ranks.index(dist.get_rank()), len(self._node.first_ranks)
        sends: list[dist.Work | None] = []
        for number in range((num_nodes - 1).bit_length()):
            received = torch.empty_like(own)
            receive = dist.irecv(received, self._node.first_ranks[(place - (1 << number)) % num_nodes], self._group)
            sends.append(dist.isend(own, self._node.first_ranks[(place + (1 << number)) % num_nodes], self._group))
            _wait(receive, deadline)
            own = torch.maximum(own, received)
        for work in sends:  # last: a receiving rank notices a rank that closed its links
            _wait(work, deadline)
        return [int(number) for number in own]


def _wait(work: dist.Work | None, deadline: float) -> None:
    assert work is not None  # None is for ranks outside of the group only
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))


class _DeviceLinks:
    """Communicates over the device's own backend, by one all-reduce. Used if gloo cannot connect the nodes.

    Synchronizes with the device. The buffer is allocated in advance, so a rank that is out of memory can still vote. A
    rank that arrives after the others have timed out gets no error here.
    """

    def __init__(self) -> None:
        self._group = dist.new_group()
        self._buffer = torch.zeros(2 + MAX_NUMBERS, dtype=torch.int64, device=device_of_group())
        dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group)  # also allocates the backend's own buffers

    def all_reduce_max(self, numbers: Sequence[int], deadline: float) -> list[int]:
        self._buffer.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        work = dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        while not work.is_completed():  # NCCL's wait blocks on the device and has no timeout
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
