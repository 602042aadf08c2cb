"""A run that is killed while it saves: its latest link always leads to a readable checkpoint, and the next start loads
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import call_forked
from support.examples import IS_THOROUGH

pytestmark = pytest.mark.composer

KILLED = [-9, -9]
NUM_KINDS = 4 if IS_THOROUGH else 2  # full and sharded, synchronous or asynchronous


def reports(folder: Path, num_rounds: int | None = None) -> list[dict[str, Any]]:
    """The reports of ``support/killed_runs.py`` for each run, in order."""
    done = call_forked("support.killed_runs:main", {"it": [folder, num_rounds]}, folder)["it"]
    assert done.code == 0, done.err[-4000:]
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]


def assert_resumable(killed: list[dict[str, Any]]) -> None:
    """In each kind, every run began at the checkpoint of the previous run's link, and never lost more than two
    steps."""
    for kind in sorted({run["kind"] for run in killed}):
        latest = 0
        for run in (run for run in killed if run["kind"] == kind):
            assert run["codes"] == KILLED, run
            assert run["began"] == latest, f"{run} did not go on from {latest}"
            assert run["latest"] is not None and f"-ba{run['latest']}" in run["link"], run
            # One save was at its end, and with async_save the previous one may still be in the writer.
            assert run["reached"] - 2 <= run["latest"] <= run["reached"], run
            latest = run["latest"]


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [12, 52])
def test_killed_at_random_points(tmp_path: Path, num_rounds: int):
    """Full and sharded, synchronous or asynchronous: the folder always has a complete latest checkpoint."""
    killed = reports(tmp_path, num_rounds)
    assert len(killed) == num_rounds
    assert_resumable(killed)
    assert any(run["unfinished"] for run in killed), f"none was within a save: {killed}"


def test_killed_in_the_middle_of_a_file(tmp_path: Path):
    """A partial file is no obstacle: the next start resumes from the previous one, and writes it again."""
    runs = reports(tmp_path)
    assert len(runs) == 2 * NUM_KINDS
    for killed, again in zip(runs[::2], runs[1::2], strict=True):
        is_async = "True" in killed["kind"]
        assert killed["codes"] == KILLED and len(killed["unfinished"]) == 1, killed
        assert killed["latest"] == 3 and killed["reached"] in ((8, 9) if is_async else (6,)), killed
        assert again["codes"] == [0, 0] and again["began"] == 3, again
        assert again["latest"] == 12 and not again["unfinished"], again
