"""FSDP1's ``buffer_dtype``: buffers in a lower dtype for computation, in their original dtype in a state dict."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.private_names import own_buffers


def cast_buffers(dtypes: Mapping[nn.Module, torch.dtype | None]) -> None:
    """Cast the floating point buffers that the modules themselves register, and restore their dtype in state dicts.

    FSDP1 cast them before the first forward, and returned them in their registered dtype
    (torch/distributed/fsdp/_runtime_utils.py, 2.7). State dicts thus contain values rounded to the lower dtype, as
    under FSDP1. Does not communicate.

    Args:
        dtypes: The dtype of each module's buffers; None leaves them unchanged. If modules share a buffer, the first one
            decides. Pass modules bottom-up: FSDP1 used the innermost unit.
    """
    decided: dict[torch.Tensor, torch.dtype | None] = {}
    for module, dtype in dtypes.items():
        for _, buffer in own_buffers(module):
            if buffer.is_floating_point():
                decided.setdefault(buffer, dtype)
    originals = {buffer: buffer.dtype for buffer, dtype in decided.items() if dtype not in (None, buffer.dtype)}
    for module in dtypes if originals else ():
        restored = {name: originals[buffer] for name, buffer in own_buffers(module) if buffer in originals}
        if restored:
            module.register_state_dict_post_hook(_Restore(restored))
    for buffer in originals:
        buffer.data = buffer.data.to(decided[buffer])


class _Restore:
    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self.dtypes = dtypes

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, dtype in self.dtypes.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
