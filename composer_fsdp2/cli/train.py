"""``composer-fsdp2 train run.yaml [overrides...]``: run LLM Foundry's training from a YAML on FSDP2."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from composer_fsdp2.cli.options import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Command):
    """Train from an LLM Foundry YAML; arguments key=value override its keys.

    With several ranks: composer -n 8 -m composer_fsdp2 train YAML OVERRIDES.
    """

    yaml: Annotated[str, typer.Argument(metavar="YAML [KEY=VALUE]...", help="An LLM Foundry training YAML.")]

    show_units: Annotated[bool, typer.Option("--show-units", help="Print every FSDP2 unit on rank 0.")] = False

    def __post_init__(self) -> None:
        if not Path(self.yaml).is_file():
            raise typer.BadParameter(f"no such file: {self.yaml}", param_hint="YAML")

    def __call__(self) -> None:
        from composer_fsdp2.compat.install import train_from_yaml  # imported here: --help does not need torch

        train_from_yaml(self.yaml, self.context.args, show_units=self.show_units)
