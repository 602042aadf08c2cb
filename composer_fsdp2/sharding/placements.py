"""Along which axes of its mesh a tensor is split, and what a rank has of it."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


def splitting_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks hold different parts of a tensor; one rank, or replicas, split nothing."""
    return _axes_with(Shard, tensor)


def replicating_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks hold the same part of a tensor."""
    return _axes_with(Replicate, tensor)


def _axes_with(kind: type[Placement], tensor: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    sizes = tensor.device_mesh.mesh.shape
    return tuple(
        [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, kind) and sizes[axis] > 1]
    )


def splitting_axes_of_all(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """``splitting_axes`` of each of many, most of which lie as the one before."""
    mesh, placements, axes = None, None, tuple[int, ...]()
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield ()
            continue
        if tensor.device_mesh is not mesh or tensor.placements != placements:
            mesh, placements, axes = tensor.device_mesh, tensor.placements, splitting_axes(tensor)
        yield axes
