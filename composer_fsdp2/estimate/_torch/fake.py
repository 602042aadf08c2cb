"""Tensors without data, on a device that this machine need not have the memory of."""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
_LOCAL_SCALAR = _aten._local_scalar_dense.default
_NONZERO = _aten.nonzero.default
# What one-hot encodings are made of, and what keeps how many of them are set.
_EQUAL, _SET, _COPIES = _aten.eq.Tensor, _aten.scatter_.value, (_aten._to_copy.default, _aten.clone.default)


def fake_tensors() -> AbstractContextManager[Any]:
    """In the block tensors are made, and operators run, without data.

    On the type of device "cpu", where autocast works and attention takes a kernel that saves what CUDA's flash
    attention saves; fake tensors of a type of device that the machine lacks end the process in the first backward.
    """
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def with_values() -> AbstractContextManager[Any]:
    """Within a block of ``fake_tensors`` tensors are made with data."""
    block: AbstractContextManager[Any] = unset_fake_temporarily()
    return block


@contextlib.contextmanager
def lists_of_zeros() -> Iterator[None]:
    """In the block ``tolist`` of a tensor without data gives zeros at once; it asks for every element by itself."""
    cls: Any = FakeTensor
    tolist = cls.tolist
    cls.tolist = _zeros
    try:
        yield
    finally:
        cls.tolist = tolist


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _zeros(tensor: torch.Tensor) -> Any:
    found: Any = 0
    for size in reversed(tensor.shape):
        found = [found] * size
    return found


class Unknown:
    """Answers for operators whose results depend on values that tensors without data do not have.

    A single value is 0, and a condition false. ``nonzero`` finds as many places as there are in a one-hot encoding of
    which every number comes equally often, as where tokens are shared out among experts; else all places, over the
    number of experts.

    Args:
        num_experts: Of a layer, among which tokens are shared out without such an encoding.
    """

    watched = frozenset((_LOCAL_SCALAR, _NONZERO, _EQUAL, _SET, *_COPIES))

    def __init__(self, num_experts: int = 1) -> None:
        self.num_experts = num_experts
        self.has_shared_out = False
        self._set_part: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Of an operator in ``watched``; ``NotImplemented`` where no values are asked for."""
        if func is _LOCAL_SCALAR:
            return 0.0 if args[0].is_floating_point() else args[0].dtype is not torch.bool and 0
        if func is not _NONZERO:
            return NotImplemented
        part = self._set_part.get(args[0].untyped_storage())
        self.has_shared_out |= part is not None
        num_found = math.ceil(args[0].numel() * (1 / self.num_experts if part is None else part))
        return args[0].new_empty((num_found, args[0].dim()), dtype=torch.int64)

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Remember of a result of an operator in ``watched`` what part of it is set, of a one-hot encoding's."""
        part = None
        if func is _EQUAL and 1 in (sizes := (*args[0].shape[-1:], *args[1].shape[-1:])):
            part = 1 / max(*sizes, 1)
        elif func is _SET:
            part = args[2].numel() / max(1, args[0].numel())
        elif func in _COPIES:
            part = self._set_part.get(args[0].untyped_storage())
        if part is not None:
            self._set_part[result.untyped_storage()] = part
