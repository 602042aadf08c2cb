"""``composer-fsdp2`` without import time: ``add_command(bin_folder)`` puts a fast one into a folder for PATH.

Pages of documentation run dozens of commands, and each would import torch for seconds. Here each is forked from a warm
process (`support.warm`), and gets the caller's arguments, folder, variables and standard streams.
tests/cli/test_checkpoint_convert.py runs the installed script itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

from support import warm
from support.ranks import WITH_COMPOSER

COMMAND = Path(sys.executable).parent / "composer-fsdp2"
# Replaces the console script: a separate program with almost no imports. It sends the request of `warm.start`, and
# exits with the exit code of the process that this makes.
STARTER = """#!{python} -ES
import os, pickle, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(pickle.dumps(({function!r}, 0, (sys.argv[1:],), os.getcwd(), dict(os.environ))))
server.shutdown(socket.SHUT_WR)
process, code = struct.unpack("2i", server.recv(8, socket.MSG_WAITALL))
sys.exit(code)
"""


def add_command(bin_folder: Path) -> None:
    """Put a fast ``composer-fsdp2`` into a folder for PATH; it works until the session ends."""
    script = bin_folder / COMMAND.name
    address = str(warm.server(WITH_COMPOSER))
    script.write_text(STARTER.format(python=sys.executable, address=address, function=f"{__name__}:run"))
    script.chmod(0o755)


def run(arguments: list[str]) -> None:
    """Act as the console script, in a separate process."""
    warnings.resetwarnings()  # The warm process shows no warnings; these are Python's default filters.
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    installed = next(number for number, folder in enumerate(sys.path) if folder.endswith(".zip"))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(COMMAND.parent), *given, *sys.path[installed:]]
    sys.argv = [str(COMMAND), *arguments]
    found = shutil.which(COMMAND.name)
    if found is not None and Path(found) != COMMAND and (quick := Path(found).with_name("python")).exists():
        sys.executable = str(quick)  # of `forked_scripts.add_launchers`, for the ranks of `compare`
    from composer_fsdp2.cli.main import main

    main()
