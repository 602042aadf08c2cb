"""Where an asynchronous save keeps its copy of what lies on a GPU: in pinned host memory, the same for every save.

Copies to pageable memory go at 2 to 4 GB/s, and training waits for them; torch's stager pins its memory, and keeps it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import composer.core.state
import torch
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

__all__ = ["PinnedCopies", "is_on_device", "left_on_device"]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether it is copied to pinned memory; what lies in host memory (CPU offload) is copied within it."""
    return tensor.device.type != "cpu" and tensor.dim() > 0  # torch's stager keeps no copy of a scalar DTensor


@contextlib.contextmanager
def left_on_device(model: nn.Module) -> Iterator[None]:
    """In the block, Composer's State collects what lies on a device as it is, and makes no pageable copy of it.

    Without effect for a model in host memory.
    """
    original: Any = composer.core.state.StateDictOptions

    def options(**given: Any) -> Any:
        return original(**{**given, "cpu_offload": False})

    if any(is_on_device(parameter) for parameter in model.parameters()):
        composer.core.state.StateDictOptions = options
    try:
        yield
    finally:
        composer.core.state.StateDictOptions = original


class PinnedCopies:
    """Copies of a rank's tensors in pinned memory of their size, which stays for the next copies."""

    def __init__(self) -> None:
        self._stager: BlockingAsyncStager | None = None
        self._layout: list[object] = []

    def of(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The copies, by the ``id`` of what was copied; DTensors are copied as their local parts.

        The copies of an earlier call are written over, if its tensors had the same shapes. Waits for the device, and
        does not communicate.
        """
        by_id = {id(tensor): tensor.detach() for tensor in tensors}
        if not by_id:
            return {}
        layout = [_layout_of(tensor) for tensor in by_id.values()]
        if self._stager is None or layout != self._layout:
            self._stager = None  # first, so that its memory is there for the new one's
            self._stager, self._layout = BlockingAsyncStager(cache_staged_state_dict=True), layout
        staged = self._stager.stage({str(number): tensor for number, tensor in enumerate(by_id.values())})
        return dict(zip(by_id, staged.values(), strict=True))


def _layout_of(tensor: torch.Tensor) -> object:
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tensor.placements, tensor.shape, tensor.to_local().shape, tensor.dtype
    return tensor.shape, tensor.dtype
