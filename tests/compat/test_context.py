"""Runs whose ranks divide each sequence, through Composer's Trainer, beside one process: the same curve."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import for_each
from support.context_runs import KINDS, Run, Trained, train
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.composer


def check_alone(kinds: tuple[str, ...]) -> dict[str, Trained]:
    return {kind: train(Run(kind=kind, degree=0, by_tokens=kind in BY_TOKENS)) for kind in kinds}


BY_TOKENS = ("qwen2", "mpt-alibi")


def check_runs(alone: dict[str, Trained], folder: str) -> None:
    for_each(check_run, {kind: (kind, theirs, folder) for kind, theirs in alone.items()})


def check_run(kind: str, theirs: Trained, folder: str) -> None:
    """Two batches with degree 2, the third with degree 4, from a checkpoint."""
    by_tokens, saved = kind in BY_TOKENS, f"{folder}/{kind}"
    with FSDP2():
        whole = train(Run(kind=kind, degree=2, by_tokens=by_tokens, save_folder=saved))
        resumed = train(Run(kind=kind, degree=4, by_tokens=by_tokens, load_path=f"{saved}/ep0-ba2-rank0.pt"))
    assert_alike(whole, theirs)
    assert largest_difference(resumed.losses, theirs.losses[2:]) <= 1e-12, (resumed.losses, theirs.losses)
    assert_same_parameters(resumed, theirs)


def assert_alike(ours: Trained, theirs: Trained) -> None:
    assert largest_difference(ours.losses, theirs.losses) <= 1e-12, (ours.losses, theirs.losses)
    assert_same_parameters(ours, theirs)
    differ = {
        name: (ours.metrics[name], each)
        for name, each in theirs.metrics.items()
        if not _is_close(ours.metrics[name], each)
    }
    assert ours.metrics.keys() == theirs.metrics.keys() and not differ, differ


def _is_close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-6, nan_ok=True)


def assert_same_parameters(ours: Trained, theirs: Trained) -> None:
    for name, each in theirs.parameters.items():
        difference = float((ours.parameters[name] - each).abs().max())
        assert difference <= 1e-12, f"{name}: {difference}"


def test_a_run_that_divides_sequences_is_that_of_one_process(tmp_path: Path):
    """Wrong positions, weights or labels would train another model, with losses that look right."""
    [alone] = run_ranks(check_alone, 1, KINDS)
    run_ranks(check_runs, 4, alone, str(tmp_path))
