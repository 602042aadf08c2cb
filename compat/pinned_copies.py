"""Pinned host memory for an asynchronous save's copy of what lies on a GPU, the same memory for every save.

Copies to pageable memory go at 2 to 4 GB/s, and training waits for them. torch pins a tensor's memory rounded up to a
power of two (CachingHostAllocator, torch 2.7), which makes a state 1.1 to 1.7 times as large; so this is ordinary
memory, registered with CUDA.
"""

import contextlib
import itertools
import logging
import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import composer.core.state
import torch
from torch import nn

from composer_fsdp2._torch.parts import local_tensor, with_local_tensor
from composer_fsdp2._torch.replaced import replaced

log = logging.getLogger(__name__)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether it is copied to pinned memory; what lies in host memory (CPU offload) is copied within it."""
    return tensor.device.type != "cpu"


def keep_on_device(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """In the block, Composer's State collects what lies on a device as it is, and makes no pageable copy of it.

    Without effect for a model in host memory.
    """
    if not any(is_on_device(parameter) for parameter in model.parameters()):
        return contextlib.nullcontext()
    original: Any = composer.core.state.StateDictOptions
    return replaced(
        composer.core.state, "StateDictOptions", lambda **given: original(**{**given, "cpu_offload": False})
    )


# ---------------------------------------------------------------------------------------------------------------------
# Copies


class PinnedCopies:
    """Copies of a rank's tensors in one piece of pinned memory of their size, which stays for the next copies."""

    def __init__(self) -> None:
        self._memory: _HostMemory | None = None

    @torch.no_grad()
    def of(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The copies, by the ``id`` of what was copied; DTensors are copied as their local parts.

        The copies of an earlier call are written over. Memory for more than all earlier calls had is allocated. Waits
        for the device once, and does not communicate. Accelerators that are not CUDA's copy to pageable memory.
        """
        by_id = {id(tensor): tensor for tensor in tensors}
        parts = [local_tensor(tensor) for tensor in by_id.values()]
        copies = self._empty_copies(parts)
        for copied, part in zip(copies, parts, strict=True):
            copied.copy_(part, non_blocking=_is_on_cuda(part))
        for device in {part.device for part in parts if _is_on_cuda(part)}:
            torch.cuda.current_stream(device).synchronize()
        return {key: with_local_tensor(by_id[key], copied) for key, copied in zip(by_id, copies, strict=True)}

    def _empty_copies(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room in the memory for a copy of each."""
        starts = [0, *itertools.accumulate(-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]
        num_bytes = starts.pop()
        if num_bytes and (self._memory is None or self._memory.num_bytes < num_bytes):
            self._memory = None  # first, so that its pages are there for the new one
            self._memory = _HostMemory(num_bytes, pin=any(map(_is_on_cuda, parts)))
        return [_empty_copy(self._memory, start, part) for start, part in zip(starts, parts, strict=True)]


# Where a tensor begins: torch's own allocator for the host aligns so, for any dtype and vectorised code.
_ALIGNMENT = 64


def _is_on_cuda(part: torch.Tensor) -> bool:
    return part.is_cuda


def _empty_copy(memory: "_HostMemory | None", start: int, part: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the strides of ``part.to("cpu")``: those of ``part`` where it is dense, to copy its bytes.

    It has a storage of its own, because ``torch.save`` writes all of a tensor's storage.
    """
    if not part.numel():
        return torch.empty_like(part, device="cpu")
    assert memory is not None
    flat = torch.frombuffer(memory.buffer, dtype=part.dtype, count=part.numel(), offset=start)
    return flat.as_strided(part.shape, torch.empty_like(part, device="meta").stride())


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class _HostMemory:
    """Memory of the very size that was asked for. Pinned while this object lives; tensors in it may live longer.

    Args:
        pin: Whether to try.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A data loader's worker that is forked would share the pages until one of the two writes; the process that gets
        # a new page then, this one perhaps, no longer has the one that the GPU writes to.
        self.buffer.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        if pin and _pin(address, num_bytes):
            # Before the pages are given back: each tensor in them holds the buffer. The end of the process unpins, too.
            weakref.finalize(self, _unpin, address).atexit = False


def _pin(address: int, num_bytes: int) -> bool:
    """Whether it could be done; a save to pageable memory is better than none."""
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if not int(error):
        return True
    log.warning(
        "async_save: %.1f GiB of host memory could not be pinned (%s); training waits longer for the copies",
        num_bytes / (1 << 30),
        runtime.cudaGetErrorString(error),
    )
    # CUDA keeps an error until it is asked for, which torch does where it launches a kernel: this one, not training's.
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cuda")
    return False


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
