"""What a comparison leaves on the disk, however it ends: hours of runs must not be lost to what comes after them.

The ranks are a stand-in that returns made-up records; tests/compat/test_comparing.py has real ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from comparing.test_judging import made_run

from composer_fsdp2.comparing import comparison, provenance
from composer_fsdp2.comparing.comparison import Options, compare
from composer_fsdp2.comparing.judging import Verdict
from composer_fsdp2.comparing.launching import RunFailedError
from composer_fsdp2.comparing.outcome import SCHEMA
from composer_fsdp2.comparing.run_record import RunRecord


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Options]:
    """``options(again=..., ...)``: those of a comparison whose runs are made up."""
    file, checkpoint = tmp_path / "run.yaml", tmp_path / "ep0-ba1.pt"
    file.write_text("a: 1\n")
    checkpoint.write_bytes(b"weights")

    def made(**runs: RunRecord) -> Options:
        def run_ranks(job: comparison.Job, *_: object) -> RunRecord:
            record = replace(runs.get(job.title.lower().replace(" ", "_"), made_run()), title=job.title)
            Path(job.folder).mkdir(parents=True)
            record.write(job.record_path)
            return record

        monkeypatch.setattr(comparison, "run_ranks", run_ranks)
        return Options(
            file=str(file),
            arguments=(),
            num_ranks=2,
            batches=2,
            repeat=1,
            seed=17,
            tolerance=1e-6,
            load_path=str(checkpoint),
            is_deterministic=True,
            output=tmp_path / "report",
        )

    return made


def report_of(options: Options) -> dict:
    assert options.output is not None
    assert {path.name for path in options.output.parent.iterdir()} == {"run.yaml", "ep0-ba1.pt", "report"}
    report = json.loads((options.output / "report.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    return report


def test_three_runs_of_which_one_diverged_are_reported(options: Callable[..., Options]):
    """A loss that is NaN in the second run on FSDP1 ends in a report, which names it, and what was trained on."""
    it = options(fsdp1_again=made_run(losses=(3.0, math.nan)))
    assert compare(it, lambda *_: None).exit_code == 1
    report = report_of(it)
    assert report["hashes"]["checkpoint"] == hashlib.sha256(b"weights").hexdigest()
    assert len(report["runs"]) == 3 and "FSDP1 does not repeat" in report["causes"][0]
    assert "FSDP1 does not repeat" in (it.output / "report.md").read_text()


def test_a_fault_in_the_verdict_does_not_cost_the_runs(
    options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
):
    """An error of ours after the last run leaves all three records, and exit code 2 rather than 1 ("different")."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault in judge")

    monkeypatch.setattr(comparison, "judge", broken)
    it = options()
    outcome = compare(it, lambda *_: None)
    assert (outcome.verdict, outcome.exit_code) == (Verdict.UNUSABLE, 2)
    report = report_of(it)
    assert len(report["runs"]) == 3 and "a fault in judge" in report["error"]


def test_an_interrupted_comparison_does_not_read_the_checkpoint(
    options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C ends now, not after terabytes were hashed for a report that has no verdict."""
    it = options()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "run_ranks", interrupted)
    read = []
    monkeypatch.setattr(provenance, "_pieces", lambda path: read.append(path.name) or iter(()))
    assert compare(it, lambda *_: None).verdict is Verdict.INTERRUPTED
    assert read == ["run.yaml"]
    assert "checkpoint" not in report_of(it)["hashes"]


def test_an_interrupted_hash_keeps_the_verdict(options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch):
    """Whoever does not want to wait for the hash of a large checkpoint gets the verdict of the runs without it."""
    it = options()
    pieces = provenance._pieces

    def interrupted(path: Path) -> object:
        if path.suffix == ".pt":
            raise KeyboardInterrupt
        return pieces(path)

    monkeypatch.setattr(provenance, "_pieces", interrupted)
    assert compare(it, lambda *_: None).verdict is Verdict.SAME
    assert report_of(it)["hashes"]["checkpoint"] == "not computed: interrupted"


def test_a_failed_rename_keeps_both_reports(options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch):
    """Neither the earlier report nor the new runs are deleted because a folder cannot be renamed."""
    it = options()
    assert it.output is not None
    compare(it, lambda *_: None)
    earlier = (it.output / "report.json").read_bytes()
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == ".report.partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(RunFailedError, match=r"No space left.*the records of the runs are in .*\.report\.partial"):
        compare(it, lambda *_: None)
    assert (it.output / "report.json").read_bytes() == earlier
    assert len(list(it.output.with_name(".report.partial").glob("logs/*/record.json"))) == 3
    monkeypatch.setattr(Path, "rename", rename)
    # A process that was killed between the two renames leaves the earlier report under another name.
    it.output.rename(it.output.with_name(".report.old"))
    monkeypatch.setattr(comparison, "_run", failed)
    monkeypatch.setattr(comparison, "_write", failed)
    with pytest.raises(RunFailedError):
        compare(it, lambda *_: None)
    assert (it.output / "report.json").read_bytes() == earlier


def failed(*_: object) -> None:
    raise RunFailedError("rank 0 ended")
