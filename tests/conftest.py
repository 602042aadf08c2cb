"""Hooks for all tests: ranks end with the session, two lanes, and the table of parity at the end."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from parity import summary
from support import lanes, measured, ranks, warm

# torch.compile's backends here generate no code, and its pool would import torch in a process for each core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
gc.disable()  # Until all tests are imported: hundreds of thousands of objects, and almost no garbage.


@pytest.fixture(scope="session", autouse=True)
def _close_rank_pools() -> Iterator[None]:
    """End the rank processes with the session; ``atexit`` also does, for sessions that crash."""
    yield
    ranks.close_pools()
    warm.close_servers()


@pytest.fixture(autouse=True)
def _put_back_default_dtype() -> Iterator[None]:
    """Restore torch's default dtype after tests that build models in float64; ranks reset theirs."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before the test's fixtures, which may use ranks as well."""
    measured.begin(item.nodeid)
    ranks.choose_imports(composer=any(item.get_closest_marker(name) for name in lanes.NEEDS_COMPOSER))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# --- with pytest-xdist


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts the workers, before it starts them."""
    if getattr(config.option, "numprocesses", None):
        warm.share()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = lanes.in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.LaneScheduling:
    return lanes.LaneScheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: pass this lane's results on."""
    gc.freeze()  # pytest collects five times at the end, for seconds each, to find errors in finalizers.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = [tuple(row) for row in summary.SEEN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    summary.SEEN.extend(summary.Row(*row) for row in getattr(node, "workeroutput", {}).get("parity", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if summary.SEEN:
        terminalreporter.section("largest differences from the reference")
        for line in summary.table(summary.SEEN):
            terminalreporter.write_line(line)
