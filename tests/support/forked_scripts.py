"""A script without its imports, forked from a warm process (`support.warm`): ``run_script(imports, path, *words)``.

tests/benchmarks/test_benchmarks.py starts a script as a user does, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support import warm


def run_script(
    imports: tuple[str, ...], script: Path, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """``python script arguments`` in a process that has imported ``imports``, as have the ranks that it starts."""
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        process = warm.start(
            imports, f"{__name__}:run", [str(script), *arguments],
            streams=[given.fileno(), out.fileno(), err.fileno()],
        )  # fmt: skip
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([str(script), *arguments], code, out.read(), err.read())


def run(script: str, *arguments: str) -> None:
    """Be ``python script``; torch forks ranks where it would start them anew. Called in the forked process."""
    if spawning := sys.modules.get("torch.multiprocessing.spawn"):
        spawning.spawn = functools.partial(spawning.start_processes, start_method="fork")  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
