"""Make the virtual environment of one stack, unless a current one exists.

    python3.11 tools/make_venv.py official
    python3.11 tools/make_venv.py engine
    python3.11 tools/make_venv.py newest
    python3.11 tools/make_venv.py site

An environment is current if its stamp, which is written last, was made from this pyproject.toml, in this folder, by
this version of Python, and its interpreter still starts. Any other one, an interrupted install included, is removed and
made again. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
STAMP = "composer-fsdp2.stamp"
LOG_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The packages of an environment, and their cost."""

    folder: Path
    requirements: tuple[str, ...]
    contents: str
    cost: str
    upgraded: tuple[str, ...] = ()  # upgraded each time
    modules: tuple[str, ...] = ("torch", "pytest")  # of a complete install

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")

    def fingerprint(self) -> str:
        """A digest of all inputs of the environment, including the folder, because scripts contain their path."""
        made_from = (sys.version_info[:2], str(self.folder), self.requirements)
        return hashlib.sha256(repr(made_from).encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
STACKS = {
    "official": Stack(
        folder=ROOT / ".venv",
        requirements=("--editable", ".[composer,foundry,test]"),
        contents="Composer 0.32.1, LLM Foundry 0.22.0, torch 2.7.0 and the test tools",
        cost="about 7 minutes and 7 GB",
    ),
    "engine": Stack(
        folder=ROOT / ".venv-engine",
        requirements=("torch==2.13.0", "--editable", ".[engine-test]"),
        contents="torch 2.13.0, transformers 5.24.0 and the engine's test tools, without Composer",
        cost="1 to 5 minutes and up to 5 GB",
    ),
    "newest": Stack(
        folder=ROOT / ".venv-newest",
        requirements=("torch", "--editable", ".[engine-test]"),
        contents="the newest torch that pip finds, transformers 5.24.0 and the engine's test tools, without Composer",
        cost="2 to 10 minutes and up to 8 GB",
        upgraded=("torch",),
    ),
    "site": Stack(
        folder=ROOT / ".venv-site",
        requirements=tuple(EXTRAS["site"]),  # without this package, which would bring torch
        contents="mkdocs-material",
        cost="half a minute and 170 MB",
        modules=("material",),
    ),
}
PYTHONS = ((3, 11), (3, 12))
PIP = ["-m", "pip", "install", "--no-input", "--disable-pip-version-check"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment of one stack, unless it is current.")
    parser.add_argument("stack", choices=STACKS)
    stack = STACKS[parser.parse_args().stack]
    if sys.version_info[:2] not in PYTHONS:
        known = " and ".join(".".join(map(str, version)) for version in PYTHONS)
        sys.exit(
            f"the stack runs on Python {known}, this is {sys.version.split()[0]}; use make PYTHON=path/to/python3.11"
        )
    if not is_current(stack):
        make(stack)
    elif stack.upgraded:
        with stack.log.open("a") as log:
            run([stack.python, *PIP, "--upgrade", *stack.upgraded], log, stack)


def is_current(stack: Stack) -> bool:
    """Whether the environment can be used unchanged."""
    stamp = stack.folder / STAMP
    if not stamp.is_file() or stamp.read_text() != stack.fingerprint():
        return False
    # Looked up instead of imported: importing torch would add seconds to every make target.
    probe = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {stack.modules})))"
    try:
        return subprocess.run([stack.python, "-c", probe], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def make(stack: Stack) -> None:
    """Build the environment from scratch and stamp it; on failure exits with the end of pip's output."""
    name = stack.folder.name
    print(f"{name}: installing {stack.contents}; {stack.cost}, once (progress: {stack.log.name})", flush=True)
    started = time.monotonic()
    if stack.folder.exists():
        shutil.rmtree(stack.folder)
    with stack.log.open("w") as log:
        if importlib.util.find_spec("ensurepip"):
            run([sys.executable, "-m", "venv", stack.folder], log, stack)
        else:
            # Debian packages ensurepip separately; the pip of another Python can install into the environment.
            run([sys.executable, "-m", "venv", "--without-pip", stack.folder], log, stack)
            run([sys.executable, "-m", "pip", "--python", stack.python, "install", "pip"], log, stack)
        run([stack.python, *PIP, *stack.requirements], log, stack)
    (stack.folder / STAMP).write_text(stack.fingerprint())
    print(f"{name}: ready after {time.monotonic() - started:.0f} s", flush=True)


def run(command: list[str | Path], log: TextIO, stack: Stack) -> None:
    """Run one step with its output in the log; on failure exits with the end of the log."""
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode == 0:
        return
    tail = stack.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    sys.exit("\n".join([*tail, f"{stack.folder.name}: failed; the whole output is in {stack.log.name}"]))


if __name__ == "__main__":
    main()
