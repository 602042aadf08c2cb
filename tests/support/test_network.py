"""Network access is refused, and refusals that a library caught are reported at the end."""

from __future__ import annotations

import contextlib
import socket
import urllib.request

import pytest
from support.network import network_refused


def connect_ex() -> None:
    with socket.socket() as ours:
        ours.connect_ex(("192.0.2.1", 80))


def test_a_library_that_goes_on_without_the_network_is_noticed():
    """Libraries query a hub first and ignore errors: a test would pass here and wait for minutes elsewhere."""
    for ask in (
        lambda: urllib.request.urlopen("http://192.0.2.1/", timeout=1),
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.getaddrinfo("example.org", 443),
        connect_ex,
    ):
        with (
            pytest.raises(AssertionError, match="the network was asked"),
            network_refused(),
            contextlib.suppress(OSError),
        ):
            ask()
