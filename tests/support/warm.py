"""Processes without import time: a warm process has done the imports, and forks each of them.

``start(imports, "module:function", ...)`` returns an object like ``subprocess.Popen``. The child gets the caller's
variables, folder and streams and calls the function. Variables that a library reads on import are those of the warm
process: those of the caller that first used it.

[Note: hash seeds] Children of one warm process have the same addresses, and sets of strings in the same order. The
ranks of a launcher do not, and their joint work must not depend on it. So there is one warm process for each
``hash_seed``.

[Note: shared] The first process of a hash seed, its base, imports nothing; warm processes are forked from it. If
``share`` has started the bases, as before pytest-xdist's workers, all workers use the same warm processes: the first
worker that needs some imports starts the process, and the others wait. Forked processes end with their caller, and all
of them with the creator of the bases.

[Note: what a fork loses] Only the forking thread survives in the child. torch starts none before its first backward
pass, nor does Composer on the CPU; a module that starts threads on import cannot be among ``imports``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 300  # With Composer, on a busy machine.
TESTS = Path(__file__).resolve().parents[1]
MAX_FOLDER_BYTES = 80  # A socket path in it has at most 104 bytes.
NUMBER = struct.Struct("i")
SET_PARENT_DEATH_SIGNAL = 1
# The variable with the folder of their sockets; other copies of these tests share their own.
SHARED = f"WARM_PROCESSES_{zlib.crc32(os.fsencode(TESTS)):08x}"
HASH_SEEDS = (0, 1)

_own: list[tuple[Path, list[subprocess.Popen[bytes]]]] = []  # the folder and the bases started by this process


class WarmProcess:
    """The result of ``start``: a child of the warm process, not of this one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        received = b""
        while len(received) < NUMBER.size and (more := self._connection.recv(NUMBER.size - len(received))):
            received += more
        return NUMBER.unpack(received)[0] if len(received) == NUMBER.size else -signal.SIGKILL  # its keeper was killed

    def poll(self) -> int | None:
        if self.returncode is None:
            self._connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._connection.recv(1, socket.MSG_PEEK)
                self.wait()
        return self.returncode

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            self._connection.setblocking(True)
            self.returncode = self._number()
            self._connection.close()
        return self.returncode


def share() -> None:
    """Make all processes started from now on use the same warm processes."""
    os.environ[SHARED] = str(_folder())


def _folder() -> Path:
    """The folder of the sockets; starts a base for each hash seed."""
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    if not _own:
        folder = tempfile.mkdtemp(prefix="warm-")
        if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="warm-", dir="/tmp")
        python_path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
        bases = [
            subprocess.Popen(
                [sys.executable, "-uWignore", __file__, str(_address(Path(folder), (), seed)), str(os.getpid())],
                stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": python_path},
            )
            for seed in HASH_SEEDS
        ]  # fmt: skip
        _own.append((Path(folder), bases))
    return _own[0][0]


def _address(folder: Path, imports: tuple[str, ...], hash_seed: int) -> Path:
    return folder / f"{hash_seed}-{zlib.crc32(' '.join(imports).encode()):08x}"


def server(imports: tuple[str, ...], hash_seed: int = 0) -> Path:
    """The socket of the warm process with these modules, once it accepts connections."""
    begin(imports, hash_seed)
    address = _address(_folder(), imports, hash_seed)
    deadline = time.monotonic() + START_S
    while not address.exists():
        if address.with_suffix(".failed").exists() or time.monotonic() > deadline:
            text = address.with_suffix(".output").read_text(errors="replace")
            raise RuntimeError(f"the process that imports {', '.join(imports)} did not start:\n{text[-4000:]}")
        time.sleep(0.02)
    return address


def begin(imports: tuple[str, ...], hash_seed: int) -> None:
    """Start the warm process if it does not exist yet, without waiting for it."""
    address = _address(_folder(), imports, hash_seed)
    if imports and not address.exists():
        with contextlib.suppress(FileExistsError), address.with_suffix(".output").open("xb") as output:
            _request(
                server((), hash_seed), "support.warm:serve_or_say_why", (str(address), imports), os.getcwd(),
                os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, [0, output.fileno(), output.fileno()],
            ).close()  # fmt: skip


@atexit.register
def close_servers() -> None:
    """Forked processes die with them."""
    while _own:
        folder, bases = _own.pop()
        for base in bases:
            base.kill()
            base.wait()
        shutil.rmtree(folder, ignore_errors=True)


def start(
    imports: tuple[str, ...],
    function: str,
    arguments: Sequence[Any] = (),
    *,
    streams: Sequence[int],
    descriptors: Sequence[int] = (),
    environ: dict[str, str] | None = None,
    hash_seed: int = 0,
) -> WarmProcess:
    """Run ``function`` in a new process and session.

    Args:
        function: ``module:name``; it gets copies of ``descriptors``, then ``arguments``, which must pickle.
        streams: The descriptors of its standard input, output and error.
        environ: Its variables; the caller's by default.
        hash_seed: See [Note: hash seeds].
    """
    environ = dict(os.environ if environ is None else environ)
    address = server(imports, hash_seed)
    return WarmProcess(_request(address, function, arguments, os.getcwd(), environ, streams, descriptors))


def _request(
    address: Path,
    function: str,
    arguments: Sequence[Any],
    folder: str,
    environ: dict[str, str],
    streams: Sequence[int],
    descriptors: Sequence[int] = (),
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    socket.send_fds(connection, [b"."], [*streams, *descriptors])
    connection.sendall(pickle.dumps((function, len(descriptors), tuple(arguments), folder, environ)))
    connection.shutdown(socket.SHUT_WR)
    return connection


# --- in the warm process


def serve_or_say_why(address: str, imports: Sequence[str]) -> None:
    """For waiting processes, which did not start it."""
    try:
        serve(address, imports)
    except BaseException:
        traceback.print_exc()
    Path(address).with_suffix(".failed").touch()


def serve(address: str, imports: Sequence[str] = ()) -> None:
    """Import, then fork a keeper for each request, until killed."""
    gc.disable()
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # Otherwise each collection in a child walks, and copies, all imported objects.
    gc.enable()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)  # exists only once it accepts connections
    server_pid = os.getpid()
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # ended in the meantime
        if os.fork() == 0:
            listener.close()
            die_with(server_pid)
            keep(connection)
        connection.close()


def keep(connection: socket.socket) -> None:
    """Fork the process, send its process id and, after its end, its exit status."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 16)
    request = b"".join(iter(lambda: connection.recv(65536), b""))
    keeper_pid = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        die_with(keeper_pid)
        call(descriptors, *pickle.loads(request))
    for descriptor in descriptors:
        os.close(descriptor)
    _say(connection, child)
    _say(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def _say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # The caller no longer waits for it.
        connection.sendall(NUMBER.pack(number))


def call(
    descriptors: Sequence[int],
    function: str,
    num_arguments: int,
    arguments: tuple[Any, ...],
    folder: str,
    environ: dict[str, str],
) -> None:
    """Become the process; never returns."""
    code = 1
    try:
        os.setsid()  # Ctrl-C reaches the caller only, and one signal reaches all processes that this one starts.
        streams, given = descriptors[: -num_arguments or None], descriptors[len(descriptors) - num_arguments :]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*given, *arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies, also inside a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    serve(sys.argv[1])
