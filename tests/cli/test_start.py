"""The imports of the command line before its output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import composer_fsdp2
from composer_fsdp2.cli import main

YAML = "model: {name: mpt}\nfsdp_config:\n  sharding_strategy: FULL_SHARD  # kept\n  limit_all_gathers: true\n"
# For each case, the arguments and environment variables.
ASKED: dict[str, tuple[list[str], dict[str, str]]] = {
    "version": (["--version"], {}),
    "a verb": ([], {"COMP_WORDS": "composer-fsdp2 mig", "COMP_CWORD": "1"}),
    "a value": ([], {"COMP_WORDS": "composer-fsdp2 migrate run.yaml --to tor", "COMP_CWORD": "4"}),
    "an option": ([], {"COMP_WORDS": "composer-fsdp2 checkpoint convert --dr", "COMP_CWORD": "3"}),
    "explain": (["explain", "sharding_strategy"], {}),
    "explain all": (["explain", "--all"], {}),
    "help": (["--help"], {}),
    "run": (["run", "--help"], {}),
    "train": (["train", "--help"], {}),
    "checkpoint": (["checkpoint", "--help"], {}),
    "inspect": (["checkpoint", "inspect", "--help"], {}),
    "convert": (["checkpoint", "convert", "--help"], {}),
    "verify": (["checkpoint", "verify", "--help"], {}),
    "migrate": (["migrate", "run.yaml"], {}),
    "check": (["migrate", "run.yaml", "--check"], {}),
    "plan": (["plan", "--help"], {}),
}
# One case after the other in one process, so a module imported for one case is imported for all that follow.
SCRIPT = """
import contextlib, io, json, os, sys

from composer_fsdp2.cli.main import main

told = {}
for name, (words, variables) in json.loads(sys.argv[1]).items():
    sys.argv = ["composer-fsdp2", *words]
    completing = {"_COMPOSER_FSDP2_COMPLETE": "complete_bash", **variables} if variables else {}
    os.environ.update(completing)
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    for variable in completing:
        del os.environ[variable]
    told[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "modules": [*sys.modules]}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each case, the exit code, the output, and the modules imported by then."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "run.yaml").write_text(YAML)
    command = [sys.executable, "-c", SCRIPT, json.dumps(ASKED)]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_torch_is_waited_for(told: dict[str, dict[str, Any]]):
    """Help, the version, explaining a key, migrating a file and completion run without importing torch."""
    for name, each in told.items():
        assert each["code"] == 0, f"{name}: {each['err']}"
        slow = {"torch", "composer", "llmfoundry", "numpy", "composer_fsdp2.prepare"} & {*each["modules"]}
        assert not slow, f"{name}: {slow}"


def test_a_verb_imports_what_it_needs(told: dict[str, dict[str, Any]]):
    """The version imports no dialect; help and the explanation of a key import no code that reads files; one file needs
    no progress bar and no processes."""
    assert not any(name.startswith(("composer_fsdp2.migration", "rich")) for name in told["version"]["modules"])
    unneeded = {"omegaconf", "rich.progress", "multiprocessing", "composer_fsdp2.migration.documents"}
    assert not unneeded & {*told["verify"]["modules"]}
    assert not {"rich.progress", "multiprocessing"} & {*told["check"]["modules"]}


def test_what_is_answered(told: dict[str, dict[str, Any]]):
    """A fast start without the verbs, their descriptions or their output would be useless."""
    assert told["version"]["out"] == f"composer-fsdp2 {composer_fsdp2.__version__}\n"
    for verb in ("run", "train", "migrate", "explain", "checkpoint"):
        [line] = [line for line in told["help"]["out"].splitlines() if line.split()[1:2] == [verb]]
        assert len(line.split()) > 4, line
    assert all(verb in told["checkpoint"]["out"] for verb in ("inspect", "convert", "verify"))
    assert "--tensors" in told["inspect"]["out"] and "--dry-run" in told["convert"]["out"]
    assert "sharding_strategy" in told["explain"]["out"]
    assert "# kept" in told["migrate"]["out"]


def test_words_are_completed(told: dict[str, dict[str, Any]]):
    """The completions that the shell receives when a user presses tab."""
    assert told["a verb"]["out"].split() == ["migrate"]
    assert told["an option"]["out"].split() == ["--dry-run"]
    assert told["a value"]["out"].split() == ["torchtitan"]


@pytest.mark.parametrize("verb", ["compare", "migrate", "explain", "plan"])
def test_ctrl_c_while_a_verb_is_imported_is_one_line(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise Ctrl-C in the first seconds prints a traceback of forty lines of torch's imports."""

    def interrupted(*arguments: object, obj: list[Callable[[], object]], **options: object) -> None:
        obj.append(interrupt)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["composer-fsdp2", verb])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "composer-fsdp2: interrupted\n")
