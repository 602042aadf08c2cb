"""Buffers in a lower dtype for computation, in their own dtype in a state dict: FSDP1's ``buffer_dtype``."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["cast_buffers"]


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating point buffers that the modules themselves register, and restore the dtype in state dicts.

    FSDP1 cast them before the first forward and gave them back in the dtype they were registered with
    (torch/distributed/fsdp/_runtime_utils.py, 2.7); what is lost in the cast stays lost, then as now. Does not
    communicate.
    """
    originals = {
        module: {
            name: buffer.dtype
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if buffer.is_floating_point() and buffer.dtype != dtype
        }
        for module in modules
    }
    for module, dtypes in originals.items():  # noted first: modules may share a buffer
        for name in dtypes:
            buffer = getattr(module, name)
            buffer.data = buffer.data.to(dtype)
        if dtypes:
            module.register_state_dict_post_hook(_Restore(dtypes))


class _Restore:
    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self.dtypes = dtypes

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, dtype in self.dtypes.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
