"""LLM Foundry on FSDP2: its training goes through Composer's Trainer, and so through Composer's seams."""

from collections.abc import Sequence
from typing import Any

from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.compat.install import fsdp2
from composer_fsdp2.errors import IncompatibleVersionError

__all__ = ["train_from_yaml", "use_own_names"]

# By name: importing LLM Foundry takes long, and not everybody has it.
_LAYER_FREEZING = "llmfoundry.callbacks.resumption_callbacks.LayerFreezing"


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


def use_own_names(state: Any) -> None:
    """Layers to freeze, named as in FSDP1's model or as in the model itself, under the names that they have here.

    LLM Foundry's callback LayerFreezing compares names; called on each rank before it runs (at the start of fit).
    """
    own = {canonical(name): name for name, _ in state.model.named_parameters()}
    for callback in state.callbacks:
        if any(_full_name(kind) == _LAYER_FREEZING for kind in type(callback).__mro__):
            callback.layer_names = {own.get(canonical(name), name) for name in callback.layer_names}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
