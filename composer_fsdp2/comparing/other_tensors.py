"""A batch's structure with other tensors in it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def with_tensors(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested value, with another tensor in each one's place; mappings become dicts."""
    if isinstance(value, torch.Tensor):
        return replacement(value)
    if isinstance(value, Mapping):
        return {key: with_tensors(each, replacement) for key, each in value.items()}
    if isinstance(value, list | tuple):
        made = [with_tensors(each, replacement) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
