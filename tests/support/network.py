"""Refuses network access in a test: ``from support.network import network_refused``."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

LOOKS_UP = ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection")
SENDS = ("connect", "connect_ex", "sendto")


@contextlib.contextmanager
def network_refused() -> Iterator[None]:
    """Every host look-up and every socket connection raises at once, and raises again at the end of the block.

    Again at the end, because libraries catch the first error and retry or continue without the network. Unix sockets
    still work, because they are local.
    """
    tried: list[str] = []

    def refuse(what: str, address: object) -> None:
        tried.append(f"{what} {address}")
        raise OSError(f"no network here: {tried[-1]}")

    def looking_up(name: str) -> Any:
        return lambda *arguments, **_: refuse(name, arguments)

    def sending(name: str) -> Any:
        original = getattr(socket.socket, name)

        def send(self: socket.socket, *arguments: Any) -> Any:
            if self.family != socket.AF_UNIX:
                refuse(name, arguments)
            return original(self, *arguments)

        return send

    with contextlib.ExitStack() as patches:
        for name in LOOKS_UP:
            patches.enter_context(mock.patch.object(socket, name, looking_up(name)))
        for name in SENDS:
            patches.enter_context(mock.patch.object(socket.socket, name, sending(name)))
        yield
    assert not tried, f"the network was asked: {tried}"
