"""``composer-fsdp2 run SCRIPT [ARGS...]``: a script as it is, with FSDP2 under it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer


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
        context.obj.append(partial(_run_module, arguments[0], arguments[1:]))
        return
    if not Path(script).is_file():
        raise typer.BadParameter(f"no such file: {script}", param_hint="SCRIPT")
    context.obj.append(partial(_run_file, script, arguments))


# Imported here and not above: --help need not wait for torch; and before the script's folder is where modules are
# found.


def _run_file(script: str, arguments: Sequence[str]) -> None:
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.compat.scripts import run_file

    with fsdp2():
        run_file(script, arguments)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    from composer_fsdp2.compat import fsdp2
    from composer_fsdp2.compat.scripts import run_module

    with fsdp2():
        run_module(name, arguments)
