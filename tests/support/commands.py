"""Commands as a user types them: ``from support.commands import LAUNCHERS, SCRIPT, run_all, run_forked, run_here``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from support import warm
from support.ranks import WITH_COMPOSER

SCRIPT = Path(__file__).parent / "scripts" / "train_with_trainer.py"
BIN = Path(sys.executable).parent
PYTHON = [sys.executable]
LAUNCHERS = {
    "composer": [BIN / "composer", "-n", "2", "-m", "composer_fsdp2"],
    "torchrun": [
        BIN / "torchrun",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        "-m",
        "composer_fsdp2",
    ],
}


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> Any:
        """The last line of its output that is a JSON object; Composer's launcher may print more after it."""
        return json.loads(next(line for line in reversed(self.out.splitlines()) if line.startswith("{")))


def environment() -> dict[str, str]:
    # One thread each; a fixed terminal width; gloo must not look the host's name up.
    more = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "GLOO_SOCKET_IFNAME": "lo"}
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in taken} | more


def run_here(folder: Path, *arguments: object) -> Ended:
    """``composer-fsdp2`` with these arguments, in this process, for commands that need neither ranks nor a terminal."""
    from composer_fsdp2.cli.main import main

    # Like a pipe: it also accepts bytes, and changes no line end.
    out, err = io.TextIOWrapper(io.BytesIO(), newline=""), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["composer-fsdp2", *map(str, arguments)]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int), code
    out.seek(0)
    return Ended(code, out.read(), err.getvalue())


def run_all(commands: dict[str, list[Any]], folder: Path, *, timeout_s: float = 400) -> dict[str, Ended]:
    """Run commands concurrently, because each spends seconds on imports."""
    started: dict[str, subprocess.Popen] = {}
    try:
        for name, command in commands.items():
            started[name] = subprocess.Popen(
                [*map(str, command)],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        outputs = {name: process.communicate(timeout=timeout_s) for name, process in started.items()}
        return {name: Ended(started[name].returncode, *output) for name, output in outputs.items()}
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # killing only the launcher would leave its ranks running


def run_forked(
    commands: dict[str, list[Any]], folder: Path, *, variables: dict[str, dict[str, str]] | None = None
) -> dict[str, Ended]:
    """Run ``composer-fsdp2`` with these arguments concurrently, without import time.

    Args:
        variables: Additional environment variables, by command name.
    """
    calls = {name: [[*map(str, arguments)]] for name, arguments in commands.items()}
    return call_forked("support.forked_commands:run", calls, folder, variables=variables)


def call_forked(
    function: str,
    calls: dict[str, list[Any]],
    folder: Path,
    *,
    variables: dict[str, dict[str, str]] | None = None,
    imports: tuple[str, ...] = WITH_COMPOSER,
    stdin: str = "",
    timeout_s: float = 550,
) -> dict[str, Ended]:
    """Call ``function``, ``module:name``, concurrently in processes forked from one that has imported ``imports``."""
    started: dict[str, warm.WarmProcess] = {}
    with tempfile.TemporaryDirectory() as outputs, contextlib.chdir(folder):
        files = {
            name: (Path(outputs, f"{number}.out"), Path(outputs, f"{number}.err")) for number, name in enumerate(calls)
        }
        given = Path(outputs, "stdin")
        given.write_text(stdin)
        try:
            for name, arguments in calls.items():
                with given.open() as read, files[name][0].open("wb") as out, files[name][1].open("wb") as err:
                    started[name] = warm.start(
                        imports,
                        function,
                        arguments,
                        streams=[read.fileno(), out.fileno(), err.fileno()],
                        environ=environment() | (variables or {}).get(name, {}),
                    )
            _wait_for(started, timeout_s)
            return {name: Ended(started[name].wait(), *(file.read_text() for file in files[name])) for name in calls}
        finally:
            for process in started.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _wait_for(started: dict[str, warm.WarmProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while running := [name for name, process in started.items() if process.poll() is None]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still running after {timeout_s:g} s: {', '.join(running)}")
        time.sleep(0.02)
