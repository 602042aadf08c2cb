"""Local sockets between the ranks of one host: the first rank receives from the others, and replies to them."""

import contextlib
import math
import resource
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from composer_fsdp2.errors import ControlGroupError
from composer_fsdp2.sharding.agree import agree, all_gather_object

T = TypeVar("T")


class Node:
    """This rank's connections to the other ranks of its node, by local sockets.

    If a rank closes its node or exits, the ranks that are connected to it raise at their next receive or send.

    Attributes:
        first_ranks: The first rank of each node, which replies to the others.
        is_first: Whether this rank is the first of its node.
    """

    def __init__(self, first_ranks: Sequence[int], is_first: bool, links: Sequence[socket.socket]) -> None:
        self.first_ranks, self.is_first = first_ranks, is_first
        self._links = {link.fileno(): link for link in links}
        self._poll = select.poll()
        for descriptor in self._links:
            self._poll.register(descriptor, select.POLLIN)

    @classmethod
    def connect(cls, host: str, timeout: timedelta) -> "Node":
        """Connect the ranks of each host. Called on all ranks: three all-gathers of a few bytes, and three agreements.

        Raises:
            ControlGroupError: on all ranks, if one cannot open more files.
        """
        rank, hosts = dist.get_rank(), all_gather_object(host)
        first = hosts.index(host)
        with contextlib.ExitStack() as at_end, contextlib.ExitStack() as at_error:
            listener = _open_on_all_ranks(lambda: _listen(hosts.count(host) - 1, timeout) if rank == first else None)
            if listener is not None:
                at_end.enter_context(listener)
            address = all_gather_object(listener and listener.getsockname())[first]
            to_first = _open_on_all_ranks(lambda: _connect(address) if rank != first else None)
            if to_first is not None:
                at_error.enter_context(to_first)
            first_rank_of = all_gather_object(rank if to_first is None else first)
            others = _open_on_all_ranks(lambda: _accept(listener, first_rank_of.count(rank) - 1))
            at_error.pop_all()
        return cls(sorted(set(first_rank_of)), to_first is None, others if to_first is None else [to_first])

    def recv(self, deadline: float) -> list[list[int]]:
        """Receive one message from each linked rank: the first rank from all others, each other rank from the first.

        Args:
            deadline: In seconds of ``time.monotonic``.
        Raises:
            OSError: a rank has ended, closed its links, or did not send in time.
        """
        received: dict[int, list[int]] = {}
        while len(received) < len(self._links):
            left_ms = math.ceil((deadline - time.monotonic()) * 1000)
            ready = self._poll.poll(min(max(0, left_ms), _LONGEST_POLL_MS))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError("a rank of this node has not come within the time-out")
            for descriptor, _ in ready:
                data = self._links[descriptor].recv(_MAX_BYTES)
                if not data:
                    raise ConnectionError(_IS_GONE)
                received[descriptor] = list(struct.unpack(f"{len(data) // 8}q", data))
        return list(received.values())

    def send(self, numbers: Sequence[int]) -> None:
        """Send one message to each linked rank.

        Raises:
            OSError: a rank has exited or closed its links. Other ranks have then received nothing, unless it did so
                during this call.
        """
        if self._poll.poll(0):  # a waiting rank does not send
            raise ConnectionError(_IS_GONE)
        data = struct.pack(f"{len(numbers)}q", *numbers)
        for link in self._links.values():
            link.send(data)

    def close(self) -> None:
        """Close the links. The others notice immediately, even if a child of this process has the sockets open."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the other end was already closed
                link.shutdown(socket.SHUT_RDWR)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's sockets only. A forked child calls it for the sockets that it inherited."""
        for link in self._links.values():
            link.close()


_MAX_BYTES = 1024
_LONGEST_POLL_MS = 2**31 - 1  # a C int: 24 days
_IS_GONE = "a rank of this node has ended, or gave up"


def _open_on_all_ranks(open_: Callable[[], T]) -> T:
    """Open a socket on every rank; return it if all ranks succeeded. Called on all ranks."""

    def decide() -> T:
        try:
            return open_()
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise ControlGroupError(
                f"rank {dist.get_rank()} cannot open a socket to the ranks of its host: {error}. It may open {soft} "
                f"files (at most {hard}): raise ulimit -n"
            ) from error

    return agree(decide, lambda _: "", ControlGroupError)


def _listen(backlog: int, timeout: timedelta) -> socket.socket | None:
    """A listening socket at an abstract address, which is unique per network namespace.

    The address is released when the socket is closed.
    """
    if not backlog or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(b"\0composer_fsdp2 " + uuid.uuid4().hex.encode())
        listener.listen(backlog)
        listener.settimeout(timeout.total_seconds())
    except OSError:  # the operating system has no abstract addresses
        listener.close()
        return None
    return listener


def _connect(address: bytes | None) -> socket.socket | None:
    """Connect to the first rank. None if nothing listens, or if the host of this name is another container."""
    if address is None:
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(address)
    except OSError:
        link.close()
        return None
    return link


def _accept(listener: socket.socket | None, number: int) -> list[socket.socket]:
    with contextlib.ExitStack() as at_error:
        links = [] if listener is None else [at_error.enter_context(listener.accept()[0]) for _ in range(number)]
        at_error.pop_all()
    return links
