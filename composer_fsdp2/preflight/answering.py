"""Tensors without values, asked for some."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def without_values(num_experts: int = 1) -> AbstractContextManager[Any]:
    """Within it models get answers where a tensor has no values, of which they ask a few things.

    - ``if tensor:``, ``tensor.item()``: whether a batch is padded on the left, or all of its targets are ignored: no.
    - ``torch.where(mask)``, which tokens go to an expert: as many as to each of ``num_experts``.
    """
    return _Answering(num_experts)


class _Answering(TorchFunctionMode):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:  # within this function nobody is asked, and it may compute a forward anew
            with self:
                return torch.autograd.backward(args, **_as_of_autograd(kwargs or {}))
        if len(args) == 1 and not kwargs and _has_no_values(args[0]):
            if func in _ANSWERS:
                return _ANSWERS[func](args[0])
            if func in (torch.where, torch.Tensor.where):
                return self._places(args[0])
            if func in (torch.nonzero, torch.Tensor.nonzero):
                return torch.stack(self._places(args[0]), dim=1)
        return func(*args, **(kwargs or {}))

    def _places(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = -(-mask.numel() // self._num_experts)
        return tuple(torch.zeros(count, dtype=torch.long, device=mask.device) for _ in range(mask.dim()))


def _has_no_values(value: Any) -> bool:
    """Whether it is a tensor on meta, or a fake one, which knows its mode."""
    return isinstance(value, torch.Tensor) and (value.is_meta or hasattr(value, "fake_mode"))


def _zeros(tensor: torch.Tensor) -> Any:
    numbers: Any = 0
    for size in reversed(tensor.shape):
        numbers = [numbers] * size
    return numbers


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.__bool__: lambda tensor: False,
    torch.Tensor.item: lambda tensor: 0,
    torch.Tensor.tolist: _zeros,
}


def _as_of_autograd(options: dict[str, Any]) -> dict[str, Any]:
    return {{"gradient": "grad_tensors"}.get(name, name): value for name, value in options.items()}
