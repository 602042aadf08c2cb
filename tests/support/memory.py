"""Out of memory errors, real or injected: ``run_out_of_memory(device)``; a batch repeated in smaller parts:
``gradients_of_halved``; and host memory use of a block.

with HostMemory() as host:
    work()
assert host.peak_bytes <= allowed
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from support.comparing import full
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer_fsdp2.training.out_of_memory import OutOfMemoryVote

TOO_MUCH_BYTES = 2**45  # 32 TiB
DEFAULT_TIMEOUT = timedelta(seconds=60)  # longer is a hang


def run_out_of_memory(device: str) -> None:
    """Raise torch.OutOfMemoryError: on a GPU by an allocation larger than any device, on the CPU directly."""
    if device == "cuda":
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32768.00 GiB (injected)")


def gradients_of_halved(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, size: int
) -> dict[str, torch.Tensor]:
    """The gradients of a batch in parts of ``size`` rows, halved each time that a rank runs out of memory.

    Called on all ranks.
    """
    votes = OutOfMemoryVote(model, DEFAULT_TIMEOUT)
    votes.start()

    def run() -> None:
        for part in rows.split(size):
            (loss_of(part) * len(part) / len(rows)).backward()

    while not votes.succeeded(run):
        model.zero_grad()
        size //= 2
    votes.stop()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


class HostMemory(TorchDispatchMode):
    """Counts the bytes of all living host tensors that were made in the block.

    Exact, from the sizes of their storages after each operator; tensors made before the block do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its own dispatch comes first; operators called inside are intercepted here.
        result = func(*args, **(kwargs or {}))
        given, there = _host_storages((args, kwargs)), _host_storages(result)
        self._made |= {address: StorageWeakRef(there[address]) for address in there.keys() - given.keys()}
        self._made = {address: storage for address, storage in self._made.items() if not storage.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(map(_num_bytes, self._made.values())))
        return result


def _host_storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """By the address of the storage object, which exists even without memory."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def _num_bytes(storage: StorageWeakRef) -> int:
    """Current size: FSDP resizes the storages of its all-gather outputs."""
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes()
