"""Two lanes of one test run (``pytest -n 2``): tests that start ranks, and tests that run by themselves.

Ranks spend a part of their time on waiting for each other. So ``in_order`` puts the files that start ranks first, and
of two workers of pytest-xdist one takes files from the front and the other from the back, until they meet. A file's
tests stay together, because they share fixtures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# What a test file imports to start ranks, or commands that start some.
STARTS = ("run_ranks", "run_all")
WITH_COMPOSER = ("composer", "foundry")


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """First what keeps both cores busy and needs Composer in every rank, last what needs neither."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        module = item.getparent(pytest.Module)
        starts_ranks = module is not None and any(hasattr(module.obj, name) for name in STARTS)
        needs_composer = any(item.get_closest_marker(name) for name in WITH_COMPOSER)
        return not starts_ranks, not needs_composer

    places: dict[str, tuple[bool, bool]] = {}
    for item in items:  # of a file as a whole: a file is not taken apart
        places[item.nodeid.partition("::")[0]] = min(
            places.get(item.nodeid.partition("::")[0], (True, True)), place(item)
        )
    return sorted(items, key=lambda item: places[item.nodeid.partition("::")[0]])


class LaneScheduling(LoadFileScheduling):
    """Every second worker begins at the end."""

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # By default the files with the most tests come first.
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
