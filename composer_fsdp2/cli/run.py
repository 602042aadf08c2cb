"""``composer-fsdp2 run SCRIPT [ARGS...]``: runs an unchanged script on FSDP2."""

import contextlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from composer_fsdp2.cli.options import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Command):
    """Run a Python SCRIPT with FSDP1 replaced by FSDP2; the arguments after SCRIPT are the script's.

    Replaces torch's FullyShardedDataParallel, and Composer's use of FSDP1 if Composer is installed. With several ranks:
    composer -n 8 -m composer_fsdp2 run SCRIPT ARGS, or torchrun --nproc-per-node 8 -m composer_fsdp2 run SCRIPT ARGS.
    """

    script: Annotated[str, typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python file, or -m and a module's name.")]

    show_units: Annotated[bool, typer.Option("--show-units", help="Print every FSDP2 unit of a model on rank 0.")] = (
        False
    )

    def __post_init__(self) -> None:
        if self.script == "-m" and not self.context.args:
            raise typer.BadParameter("-m needs the name of a module", param_hint="SCRIPT")
        if self.script != "-m" and not Path(self.script).is_file():
            raise typer.BadParameter(f"no such file: {self.script}", param_hint="SCRIPT")

    def __call__(self) -> None:
        # Imported here: --help does not need torch. Imported before the script's folder is first on sys.path.
        from composer_fsdp2.compat import fsdp2
        from composer_fsdp2.compat.scripts import run_file, run_module
        from composer_fsdp2.fsdp.installing import install_fsdp

        spec = importlib.util.find_spec("composer")
        has_composer = spec is not None and spec.origin is not None  # without origin: a folder of that name
        composer = fsdp2(show_units=self.show_units) if has_composer else contextlib.nullcontext()
        with composer, install_fsdp(show_units=self.show_units):
            if self.script == "-m":
                run_module(self.context.args[0], self.context.args[1:])
            else:
                run_file(self.script, self.context.args)
