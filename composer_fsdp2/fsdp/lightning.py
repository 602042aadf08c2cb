"""Support for Lightning, which detects FSDP2 by the type of parameters."""

import sys
from typing import Any

from torch import nn


def patch_lightning(ours: type[nn.Module]) -> None:
    """Make Lightning load full checkpoints into ``ours`` as into FSDP1's class.

    Lightning assumes that a model with DTensors uses its FSDP2 strategy, and would look up checkpoint entries by the
    names of wrapped modules. Called when an instance is created, which Lightning does after its own imports.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        module: Any = sys.modules.get(f"{package}.strategies.model_parallel")
        if module is None or hasattr(module._has_dtensor_modules, "of_lightning"):
            continue

        def has_dtensor_modules(model: Any, of_lightning: Any = module._has_dtensor_modules) -> bool:
            return not isinstance(model, ours) and of_lightning(model)

        has_dtensor_modules.of_lightning = True  # type: ignore[attr-defined]
        module._has_dtensor_modules = has_dtensor_modules
