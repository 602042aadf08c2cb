"""Along which axes of its mesh a tensor is split, and what a rank has of it."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def sharded_dim(placement: Placement) -> int | None:
    """Which dimension of a tensor a placement splits, if it splits it.

    A parameter that is split by tensor parallelism and then sharded has a placement of its own for the two, which is a
    ``Shard`` on torch 2.7, and none on 2.13.
    """
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def shard_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks hold different parts of a tensor; one rank, or replicas, split nothing."""
    return _axes_with(lambda placement: sharded_dim(placement) is not None, tensor)


def replicate_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks hold the same part of a tensor."""
    return _axes_with(lambda placement: placement.is_replicate(), tensor)


def _axes_with(has: Callable[[Placement], bool], tensor: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    sizes = tensor.device_mesh.mesh.shape
    return tuple([axis for axis, placement in enumerate(tensor.placements) if has(placement) and sizes[axis] > 1])


def shard_axes_of_all(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """``shard_axes`` of each of many, most of which lie as the one before."""
    mesh, placements, axes = None, None, tuple[int, ...]()
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield ()
            continue
        if tensor.device_mesh is not mesh or tensor.placements != placements:
            mesh, placements, axes = tensor.device_mesh, tensor.placements, shard_axes(tensor)
        yield axes
