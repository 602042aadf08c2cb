"""``composer-fsdp2``: the verbs and their help."""

import sys

import typer

from composer_fsdp2.cli.run import run
from composer_fsdp2.cli.train import train
from composer_fsdp2.errors import IncompatibleVersionError

__all__ = ["app", "main"]

app = typer.Typer(
    name="composer-fsdp2",
    help="Run Composer and LLM Foundry training that was written for FSDP1 on FSDP2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Everything after SCRIPT or YAML belongs to the script, its --help included.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
app.command(context_settings=_PASS_THROUGH, options_metavar="")(run)
app.command(context_settings=_PASS_THROUGH, options_metavar="")(train)


def main() -> None:
    """The console script. Exit code: the script's own for ``run`` and ``train``, 2 if there is nothing to run."""
    try:
        app(prog_name="composer-fsdp2")
    except IncompatibleVersionError as error:
        print(f"composer-fsdp2: {error}", file=sys.stderr)
        sys.exit(2)
