"""The files that a comparison leaves, however it ends: a later error must not lose hours of runs.

The ranks are a stand-in that returns synthetic records; tests/compat/test_comparing.py has real ones.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import io
import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from comparing.test_judging import made_run, with_distances

from composer_fsdp2.comparing import comparison, provenance
from composer_fsdp2.comparing.comparison import compare
from composer_fsdp2.comparing.job import Job, Options
from composer_fsdp2.comparing.judging import Verdict
from composer_fsdp2.comparing.launching import RunFailedError
from composer_fsdp2.comparing.outcome import SCHEMA
from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.config.value import json_text
from composer_fsdp2.errors import ConfigError


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Options]:
    """``options(again=..., ...)``: options of a comparison with synthetic runs."""
    file, checkpoint = tmp_path / "run.yaml", tmp_path / "ep0-ba1.pt"
    file.write_text("a: 1\n")
    checkpoint.write_bytes(b"weights")

    def made(**runs: RunRecord) -> Options:
        def run_ranks(job: Job, *_: object) -> RunRecord:
            record = replace(runs.get(job.title.lower().replace(" ", "_"), made_run()), title=job.title)
            Path(job.folder).mkdir(parents=True)
            Path(job.reference).mkdir(exist_ok=True)
            job.record_path.write_text(json_text(record))
            return record

        monkeypatch.setattr(comparison, "run_ranks", run_ranks)
        return Options(
            file=str(file),
            batches=2,
            load_path=str(checkpoint),
        )

    return made


def report_of(folder: Path) -> dict:
    assert {path.name for path in folder.iterdir()} == {"run.yaml", "ep0-ba1.pt", "report"}
    report = json.loads((folder / "report" / "report.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    return report


def quiet(title: str, done: int) -> None:
    """Shows no progress."""


def test_three_runs_of_which_one_diverged_are_reported(options: Callable[..., Options], tmp_path: Path):
    """A NaN loss in the second run on FSDP1 ends in a report that names it and the training data."""
    it = options(fsdp1_again=made_run(losses=(3.0, math.nan)))
    assert compare(it, tmp_path / "report", quiet).verdict.exit_code == 1
    report = report_of(tmp_path)
    assert report["hashes"]["checkpoint"] == hashlib.sha256(b"weights").hexdigest()
    assert len(report["runs"]) == 3 and "FSDP1 does not repeat" in report["causes"][0]
    assert report["runs"][2]["batches"][1]["loss"] is None
    assert "FSDP1 does not repeat" in (tmp_path / "report" / "report.md").read_text()


def test_a_missing_package_is_an_error(options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch):
    """Python finds a folder llmfoundry of the current directory as a package without files."""
    it = options()
    for spec in (None, importlib.machinery.ModuleSpec("llmfoundry", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ConfigError, match=r"llmfoundry is not installed: pip install 'composer-fsdp2\[foundry\]'"):
            compare(it, None, quiet)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_the_verdict_fits_a_terminal(
    columns: int, options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A terminal breaks wider rows anywhere; a file keeps one row per line."""
    apart = with_distances("FSDP2", **{"model.transformer.blocks.0.attention.Wqkv.weight": 0.5, "b": 0.25})
    outcome = compare(options(fsdp2=replace(apart, engine="FSDP2")), tmp_path / "report", quiet)
    in_file = outcome.summary()
    assert outcome.verdict is Verdict.DIFFERENT and max(map(len, in_file.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = outcome.summary()
    assert max(map(len, shown.splitlines())) <= columns
    for word in ("DIFFERENT", "5.0e-01", "quantity", "samples/s"):
        assert shown.count(word) == in_file.count(word), word
    # Each character of the file's text is on the terminal, too.
    assert Counter("".join(shown.split())) == Counter("".join(in_file.split()))


def test_a_fault_in_the_verdict_does_not_cost_the_runs(
    options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An error of ours after the last run does not lose the three records, and exits with 2 rather than 1
    ("different")."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault in judge")

    monkeypatch.setattr(comparison, "judge", broken)
    outcome = compare(options(), tmp_path / "report", quiet)
    assert (outcome.verdict, outcome.verdict.exit_code) == (Verdict.UNUSABLE, 2)
    report = report_of(tmp_path)
    assert len(report["runs"]) == 3 and "a fault in judge" in report["error"]


def test_an_interrupted_comparison_does_not_read_the_checkpoint(
    options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C ends at once, without hashing terabytes for a report without a verdict."""
    it = options()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "run_ranks", interrupted)
    read = []
    monkeypatch.setattr(provenance, "_pieces", lambda path: read.append(path.name) or iter(()))
    assert compare(it, tmp_path / "report", quiet).verdict is Verdict.INTERRUPTED
    assert read == ["run.yaml"]
    assert "checkpoint" not in report_of(tmp_path)["hashes"]


def test_an_interrupted_hash_keeps_the_verdict(
    options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A user who interrupts the hash of a large checkpoint gets the verdict without it."""
    it = options()
    pieces = provenance._pieces

    def interrupted(path: Path) -> Iterator[bytes]:
        if path.suffix == ".pt":
            signal.raise_signal(signal.SIGINT)
        yield from pieces(path)

    monkeypatch.setattr(provenance, "_pieces", interrupted)
    assert compare(it, tmp_path / "report", quiet).verdict is Verdict.SAME
    assert report_of(tmp_path)["hashes"]["checkpoint"] == "not computed: interrupted"


def test_a_report_is_never_overwritten(options: Callable[..., Options], tmp_path: Path):
    """A report to be signed was overwritten by another run with the same -o."""
    output = tmp_path / "report"
    output.mkdir()  # an empty folder is accepted
    compare(options(), output, quiet)
    (output / "report.md").write_text("signed")
    it = options(fsdp2=made_run(losses=(4.0, 4.0)))
    with pytest.raises(ConfigError, match=r"report/report\.md exists and is not overwritten; give another folder"):
        compare(it, output, quiet)
    assert (output / "report.md").read_text() == "signed"
    assert report_of(tmp_path)["verdict"] == "same"


def test_a_report_that_cannot_be_written_keeps_the_records(
    options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A full disk after hours of runs."""
    it = options()

    def full(self: Path, text: str, **_: object) -> int:
        if self.name.startswith("report."):
            raise OSError(28, "No space left on device")
        return self.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunFailedError, match=r"No space left.*the records of the runs are in .*/report/logs"):
        compare(it, tmp_path / "report", quiet)
    assert len(list((tmp_path / "report").glob("logs/*/record.json"))) == 3
    assert not (tmp_path / "report" / "tensors").exists()  # as large as the model and its optimizer state
