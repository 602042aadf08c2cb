"""Coverage under ``make coverage``: the test file that runs a line, also in ranks and in processes that are killed.

``coverage`` is looked up, not imported: without it, each function here does nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def begin(test: str | None = None) -> None:
    """Attribute coverage from now on to this test's file; ranks read the variable that pytest sets."""
    if current := _current():
        test = test or os.environ.get("PYTEST_CURRENT_TEST", "")
        current.switch_context(test.partition("::")[0])


def save() -> None:
    """Write the coverage so far, because ranks are killed rather than ending."""
    if current := _current():
        current.save()


def _current() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None
