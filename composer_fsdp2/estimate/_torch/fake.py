"""Fake tensors: shapes and dtypes without data, for models larger than this machine's memory."""

import math
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from composer_fsdp2._torch.replaced import replaced

_aten = torch.ops.aten
_LOCAL_SCALAR = _aten._local_scalar_dense.default
_NONZERO = _aten.nonzero.default
# Operators that create one-hot encodings, and those that preserve their density.
_EQUAL, _SET, _COPIES = _aten.eq.Tensor, _aten.scatter_.value, (_aten._to_copy.default, _aten.clone.default)


def fake_tensors() -> AbstractContextManager[Any]:
    """In the block, create tensors and run operators without data.

    The device type must be "cpu": fake tensors of an unavailable device type abort the process in the first backward.
    Autocast works on the CPU, and its attention kernel saves the same tensors as CUDA's flash attention.
    """
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def with_values() -> AbstractContextManager[Any]:
    """Create real tensors within a block of ``fake_tensors``."""
    block: AbstractContextManager[Any] = unset_fake_temporarily()
    return block


def lists_of_zeros() -> AbstractContextManager[None]:
    """In the block, ``tolist`` of a fake tensor returns zeros at once. torch's reads the elements one by one."""
    return replaced(FakeTensor, "tolist", _zeros)


def _zeros(tensor: torch.Tensor) -> Any:
    found: Any = 0
    for size in reversed(tensor.shape):
        found = [found] * size
    return found


class Unknown:
    """Provides assumed results for operators that depend on data, which fake tensors do not have.

    ``item()`` returns 0 or False. ``nonzero`` of a one-hot encoding assumes that every class is equally frequent, as
    with tokens balanced among experts. ``nonzero`` of any other tensor returns ``numel / num_experts`` indices.

    Args:
        num_experts: Experts per layer, for routing without a one-hot encoding.
    """

    watched = frozenset((_LOCAL_SCALAR, _NONZERO, _EQUAL, _SET, *_COPIES))

    def __init__(self, num_experts: int = 1) -> None:
        self.num_experts = num_experts
        self.has_shared_out = False
        self._set_part: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the assumed result of an operator in ``watched``; ``NotImplemented`` if it does not depend on data."""
        if func is _LOCAL_SCALAR:
            return 0.0 if args[0].is_floating_point() else args[0].dtype is not torch.bool and 0
        if func is not _NONZERO:
            return NotImplemented
        part = self._set_part.get(args[0].untyped_storage())
        self.has_shared_out |= part is not None
        num_found = math.ceil(args[0].numel() * (1 / self.num_experts if part is None else part))
        return args[0].new_empty((num_found, args[0].dim()), dtype=torch.int64)

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Track the density of one-hot encodings through the operators in ``watched``."""
        part = None
        if func is _EQUAL and 1 in (sizes := (*args[0].shape[-1:], *args[1].shape[-1:])):
            part = 1 / max(*sizes, 1)
        elif func is _SET:
            part = args[2].numel() / max(1, args[0].numel())
        elif func in _COPIES:
            part = self._set_part.get(args[0].untyped_storage())
        if part is not None:
            self._set_part[result.untyped_storage()] = part
