"""Tensors without data on a device that this machine need not have the memory of."""

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> AbstractContextManager[Any]:
    """In the block tensors are made, and operators run, without data.

    On the type of device "cpu", where autocast works and attention takes a kernel that saves what CUDA's flash
    attention saves; fake tensors of a type of device that the machine lacks end the process in the first backward.
    """
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode
