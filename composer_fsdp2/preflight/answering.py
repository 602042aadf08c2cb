"""Tensors without values, asked for some."""

from collections.abc import Sequence
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


_ANSWERS = {torch.Tensor.__bool__: False, torch.Tensor.item: 0, torch.Tensor.tolist: []}
_PLACES = (torch.where, torch.nonzero, torch.Tensor.where, torch.Tensor.nonzero)


class _Answering(TorchFunctionMode):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_asked = func in _ANSWERS or (func in _PLACES and len(args) == 1)
        if not is_asked:
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:  # of fake tensors as of those on meta
            return _ANSWERS[func] if func in _ANSWERS else self._places(func, args[0])

    def _places(self, func: Any, mask: torch.Tensor) -> Any:
        count = -(-mask.numel() // self._num_experts)
        places = tuple(torch.zeros(count, dtype=torch.long, device=mask.device) for _ in range(mask.dim()))
        return places if func in (torch.where, torch.Tensor.where) else torch.stack(places, dim=1)
