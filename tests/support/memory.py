"""A device that is out of memory, where there is one: ``run_out_of_memory(device)``."""

from __future__ import annotations

import torch

TOO_MUCH_BYTES = 2**45  # 32 TiB


def run_out_of_memory(device: str) -> None:
    """Raise torch.OutOfMemoryError: of the GPU's allocator, asked for what no device has; on the CPU its stand-in."""
    if device == "cuda":
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32768.00 GiB (injected)")
