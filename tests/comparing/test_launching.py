"""Comparisons that end without a verdict: no process continues, and one line shows the next step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from support.commands import Ended, environment, run_here
from support.hub import hub

from composer_fsdp2.comparing import launching
from composer_fsdp2.comparing.job import Engine, Job, Options
from composer_fsdp2.comparing.outcome import SCHEMA


def processes_naming(text: str) -> set[int]:
    """The processes with this in their command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.add(int(folder.name))
        except OSError:
            continue  # it has ended
    return found - {os.getpid()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_comparison_leaves_a_report_and_no_process(tmp_path: Path, number: signal.Signals):
    """Interrupting a comparison frees the GPUs at once, and a scheduler's log shows the reason."""
    (tmp_path / "script.py").write_text("import time\ntime.sleep(500)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "composer_fsdp2", "compare", "script.py", "-o", "report", "--json"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    job = f"{tmp_path}/report/logs/fsdp1/job.json"
    deadline = time.monotonic() + 120
    while len(processes_naming(job)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert err.splitlines()[-2:] == [
        "composer-fsdp2: interrupted: no verdict; completed runs: none",
        "report: report/report.md",
    ]
    assert processes_naming(job) == set()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report == json.loads(out)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert (report["verdict"], report["exit_code"], report["quantities"]) == ("interrupted", 2, [])
    assert "interrupted" in (tmp_path / "report" / "report.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "report"}


# The arguments, and the expected one-line error.
UNUSABLE = {
    ("not_there.yaml",): "no such file: not_there.yaml",
    ("run.yaml", "max_duration"): "max_duration: a YAML takes key=value",
    ("run.yaml", "--load-path", "gone"): "--load-path gone: no such file or folder",
    ("run.yaml", "-o", "mine"): "-o mine: mine exists and is not overwritten; give another folder",
    ("run.yaml", "-o", "run.yaml"): "-o run.yaml: run.yaml exists",
    ("run.yaml", "-o", "signed"): "-o signed: signed/report.md exists and is not overwritten",
    ("run.yaml", "-o", "no/report"): "no is no folder",
    ("run.yaml", "-n", "1"): "--ranks",
    ("run.yaml", "--batches", "0"): "--batches",
}


@pytest.mark.parametrize("arguments", UNUSABLE)
def test_what_cannot_be_compared_is_said_before_anything_runs(tmp_path: Path, arguments: tuple[str, ...]):
    """A misspelt argument costs a second instead of three runs, and no folder of the user is overwritten."""
    (tmp_path / "run.yaml").write_text("a: 1\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "signed").mkdir()
    (tmp_path / "signed" / "report.md").write_text("accepted by: me")
    ended: Ended = run_here(tmp_path, "compare", *arguments)
    assert ended.code == 2, ended
    assert UNUSABLE[arguments] in " ".join(ended.err.replace("│", " ").split()), ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "mine", "signed"}
    assert (tmp_path / "signed" / "report.md").read_text() == "accepted by: me"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


RANK = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], "config.json")
"""


def test_a_rank_that_the_hub_refuses_says_what_to_do(tmp_path: Path):
    """The last lines of a traceback through three packages name neither the licence nor the login."""
    engine, options = Engine.FSDP1, Options(file="a.yaml")
    job = Job(title="FSDP1", engine=engine, options=options, folder=str(tmp_path), reference="", writes_reference=True)
    with hub(tmp_path / "hub") as environment:
        for name, words in {
            "meta-llama/Llama-2-70b-hf": ("https://huggingface.co/meta-llama/Llama-2-70b-hf", "accept its licence"),
            "nobody/nothing": ("nobody/nothing", "correct the name"),
        }.items():
            with job.log_path(0).open("wb") as log:  # as a rank's own
                command = [sys.executable, "-c", RANK, name]
                assert subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=400).returncode == 1
            first = launching._failure(job, 0, 1).splitlines()[0]
            assert all(word in first for word in (*words, "huggingface-cli login", str(job.log_path(0)))), first
    job.log_path(0).write_text("RuntimeError: GatedRepo")
    assert "huggingface" not in launching._failure(job, 0, 1)
