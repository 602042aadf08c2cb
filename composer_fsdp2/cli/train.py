"""``composer-fsdp2 train run.yaml [overrides...]``: LLM Foundry's training from a YAML, on FSDP2."""

from functools import partial
from pathlib import Path

import typer


def train(
    context: typer.Context,
    yaml: str = typer.Argument(metavar="YAML [KEY=VALUE]...", help="An LLM Foundry training YAML."),
) -> None:
    """Train from an LLM Foundry YAML; what follows it (key=value) overrides the YAML's keys.

    With several ranks: composer -n 8 -m composer_fsdp2 train YAML OVERRIDES.
    """
    if not Path(yaml).is_file():
        raise typer.BadParameter(f"no such file: {yaml}", param_hint="YAML")
    context.obj.append(partial(_train, yaml, context.args))


def _train(yaml: str, overrides: list[str]) -> None:
    from composer_fsdp2.compat.install import train_from_yaml  # here and not above: --help need not wait for torch

    train_from_yaml(yaml, overrides)
