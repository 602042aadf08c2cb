"""The direct children of a model, which Composer's FSDP1 wrapped, and the hooks that they have."""

from collections.abc import Callable
from typing import Any

from torch import nn


def is_metric(module: nn.Module) -> bool:
    """Whether this is a torchmetrics Metric or MetricCollection, which FSDP1 never wrapped."""
    return any(
        cls.__name__ in ("Metric", "MetricCollection") and cls.__module__.split(".")[0] == "torchmetrics"
        for cls in type(module).__mro__
    )


def wrapped_children(model: nn.Module) -> dict[str, nn.Module]:
    """The direct children that FSDP1 wrapped, by name: no metrics, none with ``_fsdp_wrap = False``."""
    return {
        name: child
        for name, child in model.named_children()
        if not is_metric(child) and getattr(child, "_fsdp_wrap", True)
    }


def hook_of(owner: nn.Module, name: str) -> Callable[..., Any] | None:
    """A hook method of ``owner`` such as ``fsdp_wrap_fn``, or None; FSDP1 ignored what cannot be called."""
    hook = getattr(owner, name, None)
    return hook if callable(hook) else None
