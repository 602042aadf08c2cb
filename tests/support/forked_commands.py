"""``composer-fsdp2`` without its imports: ``with forked_commands(folder) as bin: ...`` puts a quick one into ``bin``.

Pages of documentation run dozens of commands, and each would import torch for seconds. Here one process has imported
all of it, and forks for each command: the child gets the caller's arguments, folder, variables and standard streams,
and runs ``python -m composer_fsdp2``. tests/composer/test_cli.py runs the installed script itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

IMPORTED = (
    "composer_fsdp2.cli.main",
    "composer_fsdp2.checkpoint.convert",
    "composer_fsdp2.checkpoint.describe",
    "composer_fsdp2.checkpoint.verify",
    "composer_fsdp2.compat.migration.files",
    "rich.progress",
)
START_S = 120
# What stands where the console script would: a program of its own, which imports next to nothing.
SCRIPT = """#!{python} -ES
import os, pickle, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(pickle.dumps((sys.argv[1:], os.getcwd(), dict(os.environ))))
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16)))
"""


@contextlib.contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """A folder for PATH, in which ``composer-fsdp2`` is quick until the block ends."""
    address, bin_folder = folder / "socket", folder / "bin"
    bin_folder.mkdir()
    script = bin_folder / "composer-fsdp2"
    script.write_text(SCRIPT.format(python=sys.executable, address=str(address)))
    script.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    server = subprocess.Popen(
        [sys.executable, __file__, str(address)], env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + START_S
        while not address.exists():
            assert server.poll() is None and time.monotonic() < deadline, "the command server did not start"
            time.sleep(0.05)
        yield bin_folder
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Answer until killed. Never imports Composer, whose threads a fork would lose."""
    for name in IMPORTED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)  # there once it answers
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # what has ended by now
        if os.fork() == 0:  # it waits for the command, so that commands in a pipe run side by side
            listener.close()
            answer(connection)


def answer(connection: socket.socket) -> None:
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = b"".join(iter(lambda: connection.recv(65536), b""))
    child = os.fork()
    if child == 0:
        run(streams, *pickle.loads(request))
    _, status = os.waitpid(child, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(streams: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["composer-fsdp2", *arguments]
        runpy.run_module("composer_fsdp2", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
