"""Two lanes of one test run (``pytest -n 2``): tests that start ranks, and tests in a single process.

Ranks spend part of their time waiting for each other. So ``in_order`` sorts files that start ranks to the front; of two
pytest-xdist workers, one takes files from the front and the other from the back, until they meet. A file's tests stay
together, because they share fixtures.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Imports of a test file that starts ranks, or commands that start some.
STARTS = ("run_ranks", "on_ranks", "run_all", "run_script", "call_forked", "on_gpus")
NEEDS_COMPOSER = ("composer", "foundry")
# Slow tests of many minutes without shared fixtures: each parameter may go to another lane.
APART = ("test_all_combinations", "test_every_combination_loads")


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """First the files that use both cores and need Composer in every rank, last those that need neither."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(file_of(item.nodeid), []).append(item)
    return list(itertools.chain.from_iterable(sorted(files.values(), key=lambda tests: min(map(place, tests)))))


def place(item: pytest.Item) -> tuple[bool, bool]:
    """The sort key of a test."""
    module = item.getparent(pytest.Module)
    starts_ranks = module is not None and any(hasattr(module.obj, name) for name in STARTS)
    needs_composer = any(item.get_closest_marker(name) for name in NEEDS_COMPOSER)
    return not starts_ranks, not needs_composer


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class LaneScheduling(LoadFileScheduling):
    """Every second worker starts at the end."""

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # By default the files with the most tests come first.
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        test = nodeid.partition("::")[2]
        return nodeid if test.startswith(APART) else file_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
