"""Fixtures of every test folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _close_rank_pools() -> Iterator[None]:
    """End the rank processes with the session; ``atexit`` is the second line, for sessions that crash."""
    yield
    close_pools()
