"""``composer-fsdp2``: the verbs and their help."""

import contextlib
import io
import os
import sys
from collections.abc import Callable

import typer

from composer_fsdp2.cli import (  # noqa: F401 - each registers its verb
    checkpoint_convert,
    checkpoint_inspect,
    checkpoint_verify,
)
from composer_fsdp2.cli.checkpoint import checkpoint
from composer_fsdp2.cli.explain import explain
from composer_fsdp2.cli.migrate import migrate
from composer_fsdp2.cli.run import run
from composer_fsdp2.cli.train import train
from composer_fsdp2.errors import IncompatibleVersionError

app = typer.Typer(
    name="composer-fsdp2",
    help="Run training written for FSDP1 on FSDP2; migrate its configurations; inspect, convert and verify its "
    "checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Everything after SCRIPT or YAML belongs to the script, its --help included.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
app.command(context_settings=_PASS_THROUGH, options_metavar="")(run)
app.command(context_settings=_PASS_THROUGH, options_metavar="")(train)
app.command()(migrate)
app.command()(explain)
app.add_typer(checkpoint)


def main() -> None:
    """The console script. Exit code: the script's own for ``run`` and ``train``, 2 if there is nothing to run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that a terminal cannot show are told with escapes
            with contextlib.suppress(OSError):  # a stream that cannot say where it stands
                stream.reconfigure(errors="backslashreplace")
    # A verb leaves its work here, to be done outside of typer, which would answer a script's EOFError or Ctrl-C with
    # "Aborted." in place of the traceback.
    work: list[Callable[[], object]] = []
    try:
        app(prog_name="composer-fsdp2", obj=work)
    except SystemExit:
        if not work:
            raise
    try:
        work.pop()()
    except BrokenPipeError:
        if sys.argv[1:2] not in (["checkpoint"], ["migrate"], ["explain"]):
            raise  # a script's own
        # `checkpoint inspect ... | head` has seen enough; Python would complain once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except IncompatibleVersionError as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        sys.exit(2)
