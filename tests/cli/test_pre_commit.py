"""``.pre-commit-hooks.yaml``: its commands exist, its packages suffice, and pre-commit itself runs it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from composer_fsdp2.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
}
FILES = {
    "fsdp1.yaml": "fsdp_config:\n  sharding_strategy: FULL_SHARD\n",
    "fsdp2.yaml": "fsdp_config:\n  reshard_after_forward: true\n",
    "workflow.yml": "jobs:\n  test:\n    runs-on: ${{ matrix.os }}\n",
    "chart.yaml": "{{- if .Values.enabled }}\nkind: Job\n{{- end }}\n",
    "two.yaml": "a: 1\n---\nb: 2\n",
    "tsconfig.json": '{\n  // a comment\n  "strict": true\n}\n',
    "pyproject.toml": '[project]\nname = "x"\n',
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_what_a_hook_calls_exists(tmp_path: Path, hook: dict[str, Any]):
    """A renamed option would fail every commit of every user of the hook."""
    assert set(hook) >= {"id", "name", "entry", "language", "types_or"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = [*hook["entry"].split(), *hook["args"]]
    assert code_of(tmp_path, [*words, *FILES]) == 1  # one is FSDP1's
    assert code_of(tmp_path, [*words, *(name for name in FILES if name != "fsdp1.yaml")]) == 0


def code_of(folder: Path, words: Sequence[str]) -> object:
    out = io.TextIOWrapper(io.BytesIO())
    with (
        mock.patch.object(sys, "argv", list(words)),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return ended.value.code


def test_a_hook_installs_what_the_package_asks_for():
    """Except torch, and numpy for it, it must list all dependencies, in versions that the package accepts."""
    first, *pins = HOOKS["composer-fsdp2"]["additional_dependencies"]
    assert first == "--no-deps"
    pinned = {canonicalize_name(name): version for name, _, version in (pin.partition("==") for pin in pins)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    without = {"numpy", "torch"}
    assert without < {each.name for each in asked} and not without & set(pinned)
    for each in asked:
        if each.name not in without:
            assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each


def run_hook(repository: Path, hook: str) -> subprocess.CompletedProcess[str]:
    """Runs the hook as pre-commit does for a commit, from this checkout."""
    pre_commit = shutil.which("pre-commit")
    if pre_commit is None:
        pytest.skip("there is no pre-commit on the PATH")
    sources = repository.parent / f"{repository.name}-hooks"
    if not sources.exists():
        git(repository, "clone", "-q", str(ROOT), str(sources))
        (sources / ".pre-commit-hooks.yaml").write_text((ROOT / ".pre-commit-hooks.yaml").read_text())
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(repository.parent / f"{repository.name}-cache"),
        "PYTHONPATH": str(ROOT) if HOOKS[hook]["language"] == "system" else "",
    }
    command = [pre_commit, "try-repo", str(sources), hook, "--all-files", "--verbose"]
    return subprocess.run(command, cwd=repository, env=variables, text=True, capture_output=True)


def check_fails(repository: Path, hook: str) -> None:
    done = run_hook(repository, hook)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fsdp1.yaml: would change" in done.stdout and "Failed" in done.stdout, done.stdout
    assert "unusable" not in done.stdout


def test_pre_commit_runs_what_is_installed(repository: Path):
    """A file for FSDP1 stops the commit; all other files of a repository, of any kind, do not."""
    check_fails(repository, "composer-fsdp2-installed")
    (repository / "fsdp1.yaml").write_text(FILES["fsdp2.yaml"])
    git(repository, "add", ".")
    done = run_hook(repository, "composer-fsdp2-installed")
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_pre_commit_installs_an_environment(repository: Path):
    """The pinned packages are all that the command imports. Needs PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(repository.parent), "mdurl"]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("PyPI cannot be reached")
    check_fails(repository, "composer-fsdp2")
