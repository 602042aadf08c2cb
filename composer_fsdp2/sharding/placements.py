"""The mesh axes along which a tensor is sharded or replicated."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement shards; None if it does not shard.

    A parameter that is TP-sharded and then sharded along the same dimension has a ``_StridedShard``, which is a
    ``Shard`` in torch 2.7, but not in 2.13.
    """
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def shard_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which a tensor is sharded. Axes of size 1 and replicas are excluded."""
    return _axes_with(lambda placement: sharded_dim(placement) is not None, tensor)


def replicate_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which a tensor is replicated. Axes of size 1 are excluded."""
    return _axes_with(lambda placement: placement.is_replicate(), tensor)


def _axes_with(has: Callable[[Placement], bool], tensor: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    sizes = tensor.device_mesh.mesh.shape
    return tuple([axis for axis, placement in enumerate(tensor.placements) if has(placement) and sizes[axis] > 1])


def shard_axes_of_all(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """``shard_axes`` of each tensor. Fast if most tensors have the same placements as the previous one."""
    mesh, placements, axes = None, None, tuple[int, ...]()
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield ()
            continue
        if tensor.device_mesh is not mesh or tensor.placements != placements:
            mesh, placements, axes = tensor.device_mesh, tensor.placements, shard_axes(tensor)
        yield axes
