"""``composer-fsdp2 run SCRIPT [ARGS...]``: a script as it is, with FSDP2 under it."""

import os
import runpy
import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

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


def _run_file(script: str, arguments: list[str]) -> None:
    """Run a file as ``python script arguments`` does: with its own argv, folder on the path, and ``__main__``.

    ``runpy.run_path`` would give another ``__package__`` and ``__file__``, and take ``__main__`` away again before
    what runs at exit.
    """
    # Here and not above: --help need not wait for torch; and before the script's folder is where modules are found.
    from composer_fsdp2.compat import fsdp2

    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)  # not get_code, which leaves a __pycache__ there
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __package__=None, __cached__=None, __builtins__=__builtins__)
    _set_first_on_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [script, *arguments]
    sys.modules["__main__"] = main
    with fsdp2():
        exec(code, main.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m name arguments`` does."""
    from composer_fsdp2.compat import fsdp2

    _set_first_on_path(os.getcwd())
    sys.argv = [name, *arguments]
    with fsdp2():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_on_path(folder: str) -> None:
    """Replace what Python put first for the command: the folder of the console script, or where it was called."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
