"""``composer-fsdp2``: the verbs and their help."""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable

import typer

import composer_fsdp2
from composer_fsdp2.cli.lazy import Verb, lazy_typer
from composer_fsdp2.cli.printing import refuse
from composer_fsdp2.errors import IncompatibleVersionError

# Everything after SCRIPT or YAML belongs to the script, its --help included.
_PASS_THROUGH = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    "options_metavar": "",
}
app = lazy_typer(
    Verb(name="run", file="run", settings=_PASS_THROUGH),
    Verb(name="train", file="train", settings=_PASS_THROUGH),
    Verb(name="compare", file="compare"),
    Verb(name="migrate", file="migrate"),
    Verb(name="explain", file="explain"),
    Verb(name="plan", file="plan"),
    name="composer-fsdp2",
    help="Run training written for FSDP1 on FSDP2; migrate its configurations; predict the memory and communication of "
    "a step; inspect, convert and verify checkpoints.",
)
checkpoint = lazy_typer(
    Verb(name="convert", file="checkpoint_convert"),
    Verb(name="inspect", file="checkpoint_inspect"),
    Verb(name="verify", file="checkpoint_verify"),
    name="checkpoint",
    help="Inspect, convert and verify checkpoints.",
    add_completion=False,
)
app.add_typer(checkpoint)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"composer-fsdp2 {composer_fsdp2.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Parse the options before a command."""


def main() -> None:
    """Run the console script. ``run`` and ``train`` exit with the script's exit code, or 2 without a script.

    Other commands exit with 141 (128 + SIGPIPE) if the pipe that reads their output is closed, and with 130 (128 +
    SIGINT) if they are interrupted before they set a signal handler.
    """
    is_of_script = sys.argv[1:2] in (["run"], ["train"])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that a terminal cannot show
            with contextlib.suppress(OSError):  # reconfigure fails on a stream without a position
                # Files are UTF-8 in every locale.
                encoding = None if is_of_script or stream.isatty() else "utf-8"
                stream.reconfigure(encoding=encoding, errors="backslashreplace")
    # Commands run outside of typer, which would replace the traceback of a script's EOFError or Ctrl-C by "Aborted.".
    work: list[Callable[[], object]] = []
    try:
        app(prog_name="composer-fsdp2", obj=work)
    except SystemExit:
        if not work:
            raise
    try:
        work.pop()()
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO) and error.filename is None
        is_over = isinstance(error, BrokenPipeError)
        if is_of_script or not (is_over or is_full):
            raise
        # The reader of `checkpoint inspect ... | head` has ended; Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:
            refuse(f"standard output cannot be written: {error.strerror}")
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        if is_of_script:
            raise
        refuse("interrupted", 128 + signal.SIGINT)
    except IncompatibleVersionError as error:
        refuse(error)
