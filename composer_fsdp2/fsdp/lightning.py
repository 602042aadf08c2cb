"""Support for Lightning, which detects FSDP2 by the type of parameters."""

import sys
from typing import Any

from torch import nn


def patch_lightning(ours: type[nn.Module]) -> None:
    """Make Lightning load a full checkpoint into an instance of ``ours`` as it does for FSDP1's class.

    Lightning takes every model with DTensors for one of its FSDP2 strategy, and would then use FQNs with the wrapper's
    prefix, which a checkpoint does not have. Called when an instance is sharded, because Lightning is imported by then.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        module: Any = sys.modules.get(f"{package}.strategies.model_parallel")
        if module is None or hasattr(module._has_dtensor_modules, "of_lightning"):
            continue

        def has_dtensor_modules(model: Any, of_lightning: Any = module._has_dtensor_modules) -> bool:
            return not isinstance(model, ours) and of_lightning(model)

        has_dtensor_modules.of_lightning = True  # type: ignore[attr-defined]
        module._has_dtensor_modules = has_dtensor_modules
