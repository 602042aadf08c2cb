"""Under ``make coverage``: which test file runs a line, also in ranks and in processes that are killed.

``coverage`` is looked up, not imported: without it, each function here does nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def begin(test: str | None = None) -> None:
    """What runs from here on belongs to this test's file; ranks ask the variable that pytest sets."""
    if current := _current():
        test = test or os.environ.get("PYTEST_CURRENT_TEST", "")
        current.switch_context(test.partition("::")[0])


def save() -> None:
    """Write what was seen so far: ranks do not end by themselves."""
    if current := _current():
        current.save()


def _current() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None
