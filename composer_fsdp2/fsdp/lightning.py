"""Lightning on our class: what it does by the type of parameters, and not by FSDP1's class."""

import sys
from typing import Any

from torch import nn


def patch_lightning(ours: type[nn.Module]) -> None:
    """Have Lightning load full checkpoints into ``ours`` as into FSDP1's class.

    Lightning takes any model with DTensors for one of its own FSDP2 strategy, and would look for checkpoint entries
    with the names of our wrapped modules. Called where an instance is made, by Lightning after its own imports.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        module: Any = sys.modules.get(f"{package}.strategies.model_parallel")
        if module is None or hasattr(module._has_dtensor_modules, "of_lightning"):
            continue

        def has_dtensor_modules(model: Any, of_lightning: Any = module._has_dtensor_modules) -> bool:
            return not isinstance(model, ours) and of_lightning(model)

        has_dtensor_modules.of_lightning = True  # type: ignore[attr-defined]
        module._has_dtensor_modules = has_dtensor_modules
