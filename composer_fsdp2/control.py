"""Numbers that all ranks compare in the midst of a step, beside the model's own collectives.

One control serves the votes of automatic microbatching and the collective guard. It belongs to the thread that trains
(and to autograd's, which runs while that one waits).

[Note: two levels] gloo's all-reduce sends what it reduces around a ring of all ranks, 2(N - 1) messages one after the
other, through threads of its own that compete with the training for the processor's cores; and each group of N ranks
costs a rank N - 1 sockets. Here the ranks of a node tell the first one of them, through a local socket, and get its
answer; only the first ranks of the nodes talk over gloo, ceil(log2 M) rounds for M nodes: in round k each hears from
the one 2^k before it and tells the one 2^k after it, and the largest number of all has then reached every one of them.
On one node there is no gloo.
"""

import resource
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from composer_fsdp2.agreement import device_of_group, gather, sends_from_host
from composer_fsdp2.errors import ControlGroupError

__all__ = ["ANSWER_WITHIN", "Control", "control", "num_rounds"]

# Where one rank cannot connect, the others wait so long for it.
CONNECT_WITHIN = timedelta(minutes=2)
# How long a rank waits for the others' numbers, unless it is told otherwise: as long as torch's own gloo groups.
ANSWER_WITHIN = timedelta(minutes=30)


class Control(Protocol):
    """How ranks compare numbers."""

    def largest(self, numbers: Sequence[int], timeout: timedelta = ANSWER_WITHIN) -> list[int]:
        """The largest of all ranks' numbers, one by one. Called on all ranks, with as many numbers of 64 bits.

        Raises:
            RuntimeError: some rank has not come within ``timeout``, or has ended.
        """


_controls: dict[dist.ProcessGroup, Control] = {}


def control() -> Control:
    """The one of this world; called on all ranks together, because the first call makes its connections.

    Raises:
        ControlGroupError: it cannot be made; on all ranks. Says what to set.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _controls:
        _controls.clear()  # of a world that was destroyed
        _controls[world] = _make(_host())
    return _controls[world]


def num_rounds(num_nodes: int) -> int:
    """Messages that the first rank of each node waits for, one after the other."""
    return (num_nodes - 1).bit_length()


def _host() -> str:
    """Differs between nodes; ranks that have one and still cannot reach each other are taken for nodes of their own."""
    return f"{socket.gethostname()} {uuid.getnode()}"


def _make(host: str) -> Control:
    node = _Node.of_this_rank(host)
    firsts = [rank for rank, first in enumerate(gather(node.first)) if first == rank]
    if len(firsts) == 1:
        return _OfNodes(node, None, firsts)
    error: RuntimeError | None = None
    group: dist.ProcessGroup | None = None
    try:
        group = dist.new_group(firsts, backend="gloo", timeout=CONNECT_WITHIN)
    except RuntimeError as raised:
        error = raised
    errors = [said for said in gather(error and str(error)[:500]) if said]
    if not errors:
        return _OfNodes(node, group, firsts)
    if not sends_from_host():
        return _ByDevice()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise ControlGroupError(
        f"{len(errors)} of {len(firsts)} nodes could not be connected by gloo: {errors[0]}\nSet GLOO_SOCKET_IFNAME to "
        "the network interface by which the nodes see each other (ip -br address lists them), where the hosts' names "
        f"lead to 127.0.0.1; and raise ulimit -n: the first rank of a node opens a socket to that of every other, and "
        f"may open {soft} files (at most {hard})"
    ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Within a node


@dataclass(slots=True)
class _Node:
    """The ranks that reach each other through local sockets, as one of them sees them.

    Args:
        first: The rank that answers.
        others: On the first one, a socket to each other.
        to_first: On each other, the socket to the first.
    """

    first: int
    others: list[socket.socket] = field(default_factory=list)
    to_first: socket.socket | None = None

    @classmethod
    def of_this_rank(cls, host: str) -> "_Node":
        """Called on all ranks; three gathers of a few bytes from each."""
        rank = dist.get_rank()
        hosts = gather(host)
        first, others = hosts.index(host), hosts.count(host) - 1
        listener = _listener(others) if rank == first and others else None
        addresses = gather(listener.getsockname() if listener else None)
        node = cls(first if rank == first else rank)
        if rank != first and addresses[first] is not None:
            node._connect(first, addresses[first])
        num_connected = sum(found == first for found in gather(node.first)) - 1
        if listener is not None:
            listener.settimeout(CONNECT_WITHIN.total_seconds())
            node.others = [listener.accept()[0] for _ in range(num_connected)]
            listener.close()
        return node

    def _connect(self, first: int, address: bytes) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
        except OSError:  # another container, say, on a host of the same name: a node of its own
            connection.close()
        else:
            self.first, self.to_first = first, connection


def _listener(backlog: int) -> socket.socket | None:
    """Of no file: the name of an abstract address ends with its socket, and belongs to one network namespace."""
    if not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(b"\0composer_fsdp2 " + uuid.uuid4().hex.encode())
        listener.listen(backlog)
    except OSError:
        listener.close()
        return None
    return listener


def _send(connection: socket.socket, numbers: Sequence[int]) -> None:
    try:
        connection.send(struct.pack(f"{len(numbers)}q", *numbers))
    except OSError as error:
        raise RuntimeError(f"a rank of this node has ended: {error}") from error


def _receive(connection: socket.socket, count: int, until: float) -> list[int]:
    connection.settimeout(max(until - time.monotonic(), 1e-3))
    size = struct.calcsize(f"{count}q")
    try:
        data = connection.recv(size + 1)
    except TimeoutError as error:
        raise RuntimeError("a rank of this node has not come within the time-out") from error
    except OSError as error:
        raise RuntimeError(f"a rank of this node has ended: {error}") from error
    if len(data) != size:
        raise RuntimeError(
            "a rank of this node has ended" if not data else "ranks of this node ask different questions"
        )
    return list(struct.unpack(f"{count}q", data))


# ---------------------------------------------------------------------------------------------------------------------
# All together


class _OfNodes:
    """See [Note: two levels]."""

    def __init__(self, node: _Node, group: dist.ProcessGroup | None, firsts: Sequence[int]) -> None:
        self._node, self._group, self._firsts = node, group, firsts

    def largest(self, numbers: Sequence[int], timeout: timedelta = ANSWER_WITHIN) -> list[int]:
        until = time.monotonic() + timeout.total_seconds()
        if self._node.to_first is not None:
            _send(self._node.to_first, numbers)
            return _receive(self._node.to_first, len(numbers), until)
        of_ranks = [numbers, *(_receive(other, len(numbers), until) for other in self._node.others)]
        found = self._of_all_nodes([max(each) for each in zip(*of_ranks, strict=True)], until)
        for other in self._node.others:
            _send(other, found)
        return found

    def _of_all_nodes(self, numbers: list[int], until: float) -> list[int]:
        if self._group is None:
            return numbers
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # no default device that may be out of memory
        place, num_nodes = self._firsts.index(dist.get_rank()), len(self._firsts)
        for number in range(num_rounds(num_nodes)):
            heard = torch.empty_like(own)
            receiving = dist.irecv(heard, self._firsts[(place - (1 << number)) % num_nodes], self._group)
            sending = dist.isend(own, self._firsts[(place + (1 << number)) % num_nodes], self._group)
            assert receiving is not None and sending is not None
            for work in (receiving, sending):
                work.wait(timedelta(seconds=max(until - time.monotonic(), 1e-3)))
            own = torch.maximum(own, heard)
        return [int(number) for number in own]


class _ByDevice:
    """By one all-reduce of the device's own backend, where gloo does not connect the nodes: it waits for the device.

    The buffer is there from the beginning, so that a rank that is out of memory can still say so.
    """

    MAX_NUMBERS = 8

    def __init__(self) -> None:
        self._group = dist.new_group()
        self._buffer = torch.zeros(self.MAX_NUMBERS, dtype=torch.int64, device=device_of_group())
        dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group)  # the backend's own buffers, too

    def largest(self, numbers: Sequence[int], timeout: timedelta = ANSWER_WITHIN) -> list[int]:
        lowest = torch.iinfo(torch.int64).min
        padded = [*numbers, *[lowest] * (self.MAX_NUMBERS - len(numbers))]
        self._buffer.copy_(torch.tensor(padded, dtype=torch.int64, device="cpu"))
        dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group)
        return self._buffer.tolist()[: len(numbers)]
