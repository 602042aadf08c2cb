"""``composer-fsdp2 compare`` without its ranks' import time: ``compare_all({"it": [SCRIPT, ...]}, folder)``.

Its own process and every rank are forked from a warm one. tests/comparing/test_launching.py starts real ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forked_commands
from support.commands import Ended, call_forked
from support.forked_scripts import add_launchers
from support.ranks import WITH_COMPOSER


@dataclass(frozen=True)
class Compared:
    """A comparison that has ended."""

    ended: Ended
    report: dict[str, Any]
    markdown: str

    def quantity(self, name: str) -> dict[str, Any]:
        return next(each for each in self.report["quantities"] if each["name"] == name)

    @property
    def different(self) -> set[str]:
        return {each["name"] for each in self.report["quantities"] if not each["same"]}


def compare_all(commands: dict[str, list[Any]], folder: Path) -> dict[str, Compared]:
    """``compare`` with these arguments, sequentially, each with a report in a folder of its name."""
    quick = folder / "quick"
    quick.mkdir()
    add_launchers(quick, WITH_COMPOSER)
    found = {}
    for name, arguments in commands.items():
        words = ["compare", *map(str, arguments[:1]), "-o", name, *map(str, arguments[1:])]
        ended = call_forked(f"{__name__}:run", {name: [str(quick / "python"), words]}, folder)[name]
        report = folder / name / "report.json"
        assert report.exists(), f"{name}: {ended.code}\n{ended.out}\n{ended.err}"
        found[name] = Compared(ended, json.loads(report.read_text()), (folder / name / "report.md").read_text())
    return found


def run(python: str, words: list[str]) -> None:
    """Act as the command; the ranks that it starts are ``python``."""
    sys.executable = python
    forked_commands.run(words)
