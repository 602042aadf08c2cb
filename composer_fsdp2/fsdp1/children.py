"""A model's direct children, which Composer's FSDP1 wraps, and their hooks."""

from collections.abc import Callable
from typing import Any

from torch import nn


def is_metric(module: nn.Module) -> bool:
    """Whether the module is a torchmetrics Metric or MetricCollection, which FSDP1 never wraps."""
    return any(
        cls.__name__ in ("Metric", "MetricCollection") and cls.__module__.split(".")[0] == "torchmetrics"
        for cls in type(module).__mro__
    )


def wrapped_children(model: nn.Module) -> dict[str, nn.Module]:
    """Return the direct children that FSDP1 wraps: all except metrics and children with ``_fsdp_wrap = False``."""
    return {
        name: child
        for name, child in model.named_children()
        if not is_metric(child) and getattr(child, "_fsdp_wrap", True)
    }


def hook_of(owner: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a hook of ``owner``, such as ``fsdp_wrap_fn``, or None.

    Attributes that are not callable are ignored, as in FSDP1.
    """
    hook = getattr(owner, name, None)
    return hook if callable(hook) else None
