"""A fake of CUDA's host memory pinning, for machines without a GPU: ``with CudaPlayed() as cuda: ...``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

SUCCESS, OUT_OF_MEMORY = 0, 2  # cudaError


@dataclass
class CudaPlayed(contextlib.ExitStack):
    """Counts the memory registered with CUDA, and the size of torch's own pinned memory.

    Attributes:
        limit_bytes: Pinning more than this at a time raises, as on a host without enough memory.
        pinned: Currently pinned memory: bytes by address.
        events: Operations in order: ``pin`` and ``unpin`` with bytes, ``wait`` with the device.
    """

    limit_bytes: float = float("inf")
    pinned: dict[int, int] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> CudaPlayed:
        runtime = SimpleNamespace(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda error: {OUT_OF_MEMORY: "out of memory"}[error],
        )
        self.enter_context(mock.patch.object(torch.cuda, "cudart", return_value=runtime))
        self.enter_context(mock.patch.object(torch.cuda, "current_stream", self._stream))
        self.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: self._pin_by_torch(tensor)))
        return self

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self.pinned
        if sum(self.pinned.values()) + num_bytes > self.limit_bytes:
            return OUT_OF_MEMORY
        self.pinned[address] = num_bytes
        self.events.append(("pin", num_bytes))
        return SUCCESS

    def _unregister(self, address: int) -> int:
        self.events.append(("unpin", self.pinned.pop(address)))
        return SUCCESS

    def _stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: self.events.append(("wait", device)))

    def _pin_by_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like CachingHostAllocator of torch 2.7: rounds up to a power of two."""
        if tensor.nbytes:
            self._register(tensor.data_ptr(), 1 << (tensor.nbytes - 1).bit_length(), 0)
        return tensor
