"""Scripts and launchers without import time, forked from a warm process (`support.warm`).

``run_script(imports, path, *arguments)`` runs a script; ``add_launchers(bin_folder, imports)`` puts a fast
``composer``, ``torchrun`` and ``accelerate`` into a folder for PATH, whose ranks are forked as well.
tests/benchmarks/test_benchmarks.py starts a script as a user does, and tests/cli/test_run.py each launcher.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from support import warm
from support.commands import call_forked
from support.forked_commands import STARTER
from support.ranks import name_own_file

LAUNCHER_MODULES = {
    "composer": "composer.cli.launcher",
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
}


def run_script(
    imports: tuple[str, ...], script: Path, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """``python script arguments`` in a process that has imported ``imports``, and so have the ranks that it starts."""
    words = [str(script), *arguments]
    ended = call_forked(f"{__name__}:run", {"it": words}, Path.cwd(), imports=imports, stdin=stdin)["it"]
    return subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)


def run(script: str, *arguments: str) -> None:
    """Act as ``python script``; torch forks ranks instead of spawning them. Called in the forked process."""
    if spawning := sys.modules.get("torch.multiprocessing.spawn"):
        spawning.spawn = functools.partial(spawning.start_processes, start_method="fork")  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def add_launchers(bin_folder: Path, imports: tuple[str, ...]) -> None:
    """Also adds a fast ``python``, which the launchers start as their ranks."""
    address = str(warm.server(imports))
    for name in (*LAUNCHER_MODULES, "python"):
        function = f"{__name__}:{'interpreter' if name == 'python' else name}"
        script = bin_folder / name
        script.write_text(STARTER.format(python=sys.executable, address=address, function=function))
        script.chmod(0o755)


def composer(arguments: list[str]) -> None:
    launch("composer", arguments)


def torchrun(arguments: list[str]) -> None:
    launch("torchrun", arguments)


def accelerate(arguments: list[str]) -> None:
    launch("accelerate", arguments)


def launch(name: str, arguments: list[str]) -> None:
    """Act as the launcher; ``sys.executable`` is the fast ``python``."""
    path = shutil.which(name)
    assert path is not None
    sys.argv = [path, *arguments]
    sys.executable = str(Path(path).parent / "python")
    sys.exit(importlib.import_module(LAUNCHER_MODULES[name]).main())


def interpreter(arguments: list[str]) -> None:
    """Act as ``python -m module ...``, a rank of a launcher; other commands are passed to Python itself."""
    if "RANK" not in os.environ or "-m" not in arguments:
        os.execv(sys.executable, [sys.executable, *arguments])
    name_own_file(int(os.environ["RANK"]))
    sys.argv = arguments[arguments.index("-m") + 1 :]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
