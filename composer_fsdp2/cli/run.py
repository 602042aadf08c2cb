"""``composer-fsdp2 run SCRIPT [ARGS...]``: a script as it is, with FSDP2 under it."""

import runpy
import sys
from pathlib import Path

import typer

from composer_fsdp2.compat import fsdp2

__all__ = ["run"]


def run(
    context: typer.Context,
    script: str = typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python file, or -m and a module's name."),
) -> None:
    """Run a Python SCRIPT with Composer's FSDP1 replaced by FSDP2; all that follows SCRIPT goes to the script.

    With several ranks: composer -n 8 -m composer_fsdp2 run SCRIPT ARGS, or
    torchrun --nproc-per-node 8 -m composer_fsdp2 run SCRIPT ARGS.
    """
    arguments = list(context.args)
    if script == "-m":
        if not arguments:
            raise typer.BadParameter("-m needs the name of a module", param_hint="SCRIPT")
        _run_module(arguments[0], arguments[1:])
        return
    if not Path(script).is_file():
        raise typer.BadParameter(f"no such file: {script}", param_hint="SCRIPT")
    _run_file(script, arguments)


def _run_file(script: str, arguments: list[str]) -> None:
    """As ``python script arguments``: its own argv and folder on the path."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with fsdp2():
        runpy.run_path(script, run_name="__main__")


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    with fsdp2():
        runpy.run_module(name, run_name="__main__", alter_sys=True)
