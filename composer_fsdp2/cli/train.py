"""``composer-fsdp2 train run.yaml [overrides...]``: LLM Foundry's training from a YAML, on FSDP2."""

from pathlib import Path

import typer

from composer_fsdp2.compat import fsdp2

__all__ = ["train"]


def train(
    context: typer.Context,
    yaml: str = typer.Argument(help="An LLM Foundry training YAML."),
) -> None:
    """Train from an LLM Foundry YAML; what follows it (key=value) overrides the YAML's keys.

    With several ranks: composer -n 8 -m composer_fsdp2 train YAML OVERRIDES.
    """
    if not Path(yaml).is_file():
        raise typer.BadParameter(f"no such file: {yaml}", param_hint="YAML")
    try:
        from llmfoundry.command_utils import train_from_yaml
    except ModuleNotFoundError as error:
        if error.name != "llmfoundry":
            raise
        raise typer.BadParameter(
            "LLM Foundry is not installed: pip install 'composer-fsdp2[foundry]'", param_hint="YAML"
        ) from error
    with fsdp2():
        train_from_yaml(yaml, list(context.args))
