"""max_duration in tokens: reached where FSDP1's run reached it, whole or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.foundry_runs import YAML, TrainedYaml, assert_alike, train
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.foundry

DURATION = "3500tok"  # which ends in the midst of a batch's tokens


def run(under: Under, folder: str, name: str, *overrides: str) -> tuple[TrainedYaml, dict[str, Any]]:
    """A run, and where it ended; the YAML's schedule ends with the duration, so its rates tell of it too."""
    ended: dict[str, Any] = {}

    def note(trainer: Any) -> None:
        timestamp = trainer.state.timestamp
        ended.update({unit: getattr(timestamp, unit).value for unit in ("epoch", "batch", "sample", "token")})
        ended["rate"] = trainer.state.optimizers[0].param_groups[0]["lr"]
        ended["elapsed"] = float(trainer.state.get_elapsed_duration())

    return train(under, YAML, folder, name, *overrides, after=note), ended


def check_duration(folder: str) -> None:
    options = [f"max_duration={DURATION}", "save_interval=2ba", "scheduler.t_warmup=0.25dur", "model.n_layers=1"]
    runs, names = {}, {}
    for under in (FSDP1, FSDP2):
        place = Path(folder, f"{DURATION}-{under.__name__}")
        runs[under] = run(under, folder, place.name, *options, f"save_folder={place}")
        names[under] = {path.relative_to(place) for path in place.rglob("*")}
    (theirs, their_end), (ours, our_end) = runs[FSDP1], runs[FSDP2]
    assert_alike(ours, theirs, DURATION)
    assert our_end == their_end, f"{our_end}, FSDP1 {their_end}"
    assert their_end["elapsed"] >= 1, their_end
    assert names[FSDP2] == names[FSDP1]
    resumed, resumed_end = run(FSDP2, folder, "resumed", *options, f"load_path={place}/ep0-ba2")
    assert resumed_end == their_end, f"resumed: {resumed_end}, FSDP1 {their_end}"
    assert largest_difference(resumed.losses, theirs.losses[2:]) <= 1e-6


def test_runs_end_where_fsdp1s_end(folder: str):
    """A run that stops a batch early, or goes on, has another schedule, another last checkpoint and another bill."""
    run_ranks(check_duration, 2, folder)
