"""Copy GPU tensors to pinned host memory for an asynchronous save. All saves reuse the memory.

Copies to pageable memory run at 2 to 4 GB/s, and training waits for them. torch rounds pinned allocations up to a power
of two (CachingHostAllocator, torch 2.7), which increases the size of a state by a factor of 1.1 to 1.7. Ordinary memory
is therefore allocated and registered with CUDA.
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

from composer_fsdp2._torch.local_tensors import local_tensor, with_local_tensor
from composer_fsdp2._torch.replaced import replaced

log = logging.getLogger(__name__)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor must be copied to pinned memory.

    Tensors in host memory (CPU offload) are copied to pageable memory.
    """
    return tensor.device.type != "cpu"


def keep_on_device(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """In the block, Composer's State returns device tensors in its state dict, and does not copy them to pageable
    memory.

    No effect if the model is in host memory.
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
    """Copies of a rank's tensors in one pinned buffer of exactly their size.

    Each call overwrites the copies of the last.
    """

    def __init__(self) -> None:
        self._memory: _HostMemory | None = None

    @torch.no_grad()
    def of(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copy tensors (of DTensors, the local tensor), and return the copies by ``id`` of the original.

        Overwrites the copies of an earlier call, and allocates a larger buffer if necessary. Synchronises with the
        device once; does not communicate. On accelerators other than CUDA, copies are pageable.
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
        """Allocate a copy of each tensor in the buffer."""
        starts = [0, *itertools.accumulate(-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]
        num_bytes = starts.pop()
        if num_bytes and (self._memory is None or self._memory.num_bytes < num_bytes):
            self._memory = None  # first, to free its pages for the new buffer
            self._memory = _HostMemory(num_bytes, pin=any(map(_is_on_cuda, parts)))
        return [_empty_copy(self._memory, start, part) for start, part in zip(starts, parts, strict=True)]


# The alignment of torch's host allocator, sufficient for any dtype and for vectorised code.
_ALIGNMENT = 64


def _is_on_cuda(part: torch.Tensor) -> bool:
    return part.is_cuda


def _empty_copy(memory: "_HostMemory | None", start: int, part: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor in ``memory``, with the strides of ``part.to("cpu")``: those of ``part`` if it is
    dense.

    It has a separate storage, because ``torch.save`` writes a tensor's full storage.
    """
    if not part.numel():
        return torch.empty_like(part, device="cpu")
    assert memory is not None
    flat = torch.frombuffer(memory.buffer, dtype=part.dtype, count=part.numel(), offset=start)
    return flat.as_strided(part.shape, torch.empty_like(part, device="meta").stride())


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class _HostMemory:
    """Host memory of exactly the requested size.

    It is pinned while this object is alive; tensors in it may live longer.

    Args:
        pin: Whether to try to pin the memory.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A forked data loader worker would share the pages copy-on-write. After a write, the process that gets a new
        # page, possibly this one, no longer owns the page that the GPU writes to.
        self.buffer.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        if pin and _pin(address, num_bytes):
            # Runs before the pages are freed, because each tensor in them references the buffer. The end of the process
            # unpins, too.
            weakref.finalize(self, _unpin, address).atexit = False


def _pin(address: int, num_bytes: int) -> bool:
    """Pin memory; return whether this succeeded. If not, a save uses it as pageable memory, and a warning is logged."""
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if not int(error):
        return True
    log.warning(
        "async_save: %.1f GiB of host memory could not be pinned (%s); training waits longer for the copies",
        num_bytes / (1 << 30),
        runtime.cudaGetErrorString(error),
    )
    # CUDA stores an error until it is queried, which torch does at a kernel launch: clear it before training's next
    # one.
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cuda")
    return False


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
