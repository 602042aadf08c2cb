"""Imported, it makes LLM Foundry's registries quick: the entry points of a group are looked for once.

catalogue (2.0.10) goes through those of all installed packages at each look-up, hundreds of times for one MPT.
"""

from __future__ import annotations

import functools
from typing import Any

import catalogue

_all = catalogue.AVAILABLE_ENTRY_POINTS


class EntryPoints:
    """Those that are installed; what is registered in code is not among them."""

    @functools.cache  # noqa: B019  There is one object.
    def select(self, *, group: str) -> Any:
        return tuple(_all.select(group=group))


catalogue.AVAILABLE_ENTRY_POINTS = EntryPoints()
