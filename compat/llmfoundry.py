"""LLM Foundry on FSDP2: its training goes through Composer's Trainer, and so through Composer's seams."""

from collections.abc import Sequence
from typing import Any

from composer_fsdp2.errors import IncompatibleVersionError

from .install import fsdp2


def train_from_yaml(yaml_path: str, overrides: Sequence[str] = ()) -> Any:
    """LLM Foundry's ``train_from_yaml`` with ``install`` in force for its length; returns Composer's Trainer.

    Args:
        yaml_path: A training YAML of LLM Foundry.
        overrides: ``key=value`` each, merged into the YAML.
    Raises:
        IncompatibleVersionError: LLM Foundry is missing, or Composer is of a version that was not tested.

    Called on all ranks.
    """
    try:
        from llmfoundry.command_utils import train_from_yaml as foundry_train_from_yaml
    except ModuleNotFoundError as error:
        if error.name != "llmfoundry":
            raise
        raise IncompatibleVersionError("LLM Foundry is not installed: pip install 'composer-fsdp2[foundry]'") from error
    with fsdp2():
        return foundry_train_from_yaml(yaml_path, list(overrides))
