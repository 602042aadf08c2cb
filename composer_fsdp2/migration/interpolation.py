"""OmegaConf's ``${...}`` in a configuration: resolved where that can be done here, and found where it cannot."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_fsdp2.migration.documents import Document


def resolved_values(document: Document) -> dict[str, Any]:
    """The values with interpolations resolved; those that cannot be resolved here stay as they are written."""
    if not document.interpolates:
        return document.values
    config = OmegaConf.create(document.values)
    resolved: dict[str, Any] = _resolve(document.values, config, "")
    return resolved


def _resolve(value: Any, config: DictConfig, path: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolve(each, config, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_resolve(each, config, f"{path}.{number}") for number, each in enumerate(value)]
    if not has_interpolation(value):
        return value
    try:
        found = OmegaConf.select(config, path.removeprefix("."), throw_on_missing=True)
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException:
        return value


def has_interpolation(value: Any) -> bool:
    """Whether an interpolation stands in a value or, nested, below it."""
    if isinstance(value, Mapping):
        return any(map(has_interpolation, value.values()))
    if isinstance(value, list):
        return any(map(has_interpolation, value))
    return isinstance(value, str) and "${" in value
