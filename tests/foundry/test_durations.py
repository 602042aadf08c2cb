"""max_duration in batches, epochs and tokens: reached where FSDP1's run reached it, whole or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import for_each
from support.foundry_runs import YAML, TrainedYaml, assert_alike, train
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.foundry

# Each ends within an epoch, at an epoch's end, or in the midst of a batch's tokens.
DURATIONS = ("3ba", "2ep", "3500tok")


def run(under: Under, folder: str, name: str, *overrides: str) -> tuple[TrainedYaml, dict[str, Any]]:
    """A run, and where it ended; the YAML's schedule ends with the duration, so its rates tell of it too."""
    ended: dict[str, Any] = {}

    def note(trainer: Any) -> None:
        timestamp = trainer.state.timestamp
        ended.update({unit: getattr(timestamp, unit).value for unit in ("epoch", "batch", "sample", "token")})
        ended["rate"] = trainer.state.optimizers[0].param_groups[0]["lr"]
        ended["elapsed"] = float(trainer.state.get_elapsed_duration())

    return train(under, YAML, folder, name, *overrides, after=note), ended


def check_durations(folder: str) -> None:
    def options(duration: str) -> list[str]:
        return [f"max_duration={duration}", "save_interval=2ba", "scheduler.t_warmup=0.25dur"]

    def check(duration: str) -> tuple[TrainedYaml, dict[str, Any]]:
        runs = {}
        for under in (FSDP1, FSDP2):
            place = f"{folder}/{duration}-{under.__name__}"
            runs[under] = run(under, folder, f"{duration}-{under.__name__}", *options(duration), f"save_folder={place}")
        (theirs, their_end), (ours, our_end) = runs[FSDP1], runs[FSDP2]
        assert_alike(ours, theirs, duration)
        assert our_end == their_end, f"{duration}: {our_end}, FSDP1 {their_end}"
        assert their_end["elapsed"] >= 1, their_end
        names = {
            path.relative_to(f"{folder}/{duration}-FSDP1") for path in Path(place).parent.glob(f"{duration}-FSDP1/**/*")
        }
        assert {path.relative_to(place) for path in Path(place).rglob("*")} == names
        return theirs, their_end

    results = for_each(check, {duration: (duration,) for duration in DURATIONS})
    ends = {(end["epoch"], end["batch"]) for _, end in results.values()}
    assert len(ends) == len(DURATIONS), f"two durations mean the same: {ends}"
    # Resumed, in the duration that ends in the midst of a batch's tokens.
    duration = DURATIONS[-1]
    saved = f"load_path={folder}/{duration}-FSDP2/ep0-ba2"
    resumed, resumed_end = run(FSDP2, folder, "resumed", *options(duration), saved)
    theirs, their_end = results[duration]
    assert resumed_end == their_end, f"{duration}, resumed: {resumed_end}, FSDP1 {their_end}"
    assert largest_difference(resumed.losses, theirs.losses[2:]) <= 1e-6


def test_runs_end_where_fsdp1s_end(folder: str):
    """A run that stops a batch early, or goes on, has another schedule, another last checkpoint and another bill."""
    run_ranks(check_durations, 2, folder)
