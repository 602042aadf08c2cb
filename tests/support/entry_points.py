"""Speeds up LLM Foundry's registries when imported, by caching the entry points of a group.

catalogue (2.0.10) iterates over those of all installed packages at each look-up, hundreds of times for one MPT.
"""

from __future__ import annotations

import functools
from typing import Any

import catalogue

_all = catalogue.AVAILABLE_ENTRY_POINTS


class EntryPoints:
    """The installed ones; entries registered in code are not included."""

    @functools.cache  # noqa: B019  A single instance.
    def select(self, *, group: str) -> Any:
        return tuple(_all.select(group=group))


catalogue.AVAILABLE_ENTRY_POINTS = EntryPoints()
