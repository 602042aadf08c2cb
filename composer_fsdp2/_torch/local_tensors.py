"""This rank's parts of DTensors, as the plain tensors that they are kept in, and fused operations on many of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, which is not part of any graph; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_tensor(tensor: Tensor, part: Tensor) -> Any:
    """``part`` as the local tensor of one that is placed as ``tensor`` is, if that is a DTensor; does not communicate.

    ``part`` has the shape of this rank's shard, and any dtype; it stays on its device, while ``DTensor.from_local``
    moves it to the mesh's. The result is part of no graph.
    """
    if not isinstance(tensor, DTensor):
        return part
    spec = tensor._spec
    if part.dtype != tensor.dtype:
        assert spec.tensor_meta is not None, "every DTensor has its shape, strides and dtype there"
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    return DTensor(part, spec, requires_grad=False)


def local_tensors(first: Tensor, *others: Tensor) -> Sequence[Tensor] | None:
    """The local tensors of tensors that lie alike, so that elementwise operations can run on them; else None.

    In a step this is called for each parameter, so it is short: DTensor's own methods are dispatched in Python.
    """
    if not isinstance(first, DTensor):
        return None if any(isinstance(other, DTensor) for other in others) else (first, *others)
    spec, parts = first._spec, [first._local_tensor]
    for other in others:
        if not isinstance(other, DTensor):
            return None
        its = other._spec
        if its is not spec and not _same_placements(its, spec):  # fully_shard gives gradients their parameter's own
            return None
        parts.append(other._local_tensor)
    return parts


def _same_placements(spec: DTensorSpec, other: DTensorSpec) -> bool:
    return spec.placements == other.placements and (spec.mesh is other.mesh or spec.mesh == other.mesh)


def group_by_device_and_dtype(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The tensors by device and dtype, each list for one fused operation, in the tensors' order."""
    if not tensors:
        return {}
    lists: list[list[Tensor | None]] = [list(tensors)]
    groups: dict[Any, Any] = _group_tensors_by_device_and_dtype(lists)
    return {kind: alike for kind, ([alike], _) in groups.items()}


def foreach_norm(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, as a scalar of ``dtype``; the tensors have one device and dtype, and none is empty."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply the tensors in place by ``factor``, a scalar of their device and dtype."""
    torch._foreach_mul_(tensors, factor)


def lion_(
    tensors: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    *,
    lr: float,
    keep: float,
    betas: Sequence[float],
) -> None:
    """Lion's update of each tensor (Chen et al. 2023, arXiv:2302.06675), in place, from a few kernels for all.

    Args:
        keep: What is left of a tensor after its weight decay. Needs memory for a copy of the tensors.
    """
    if keep != 1:
        torch._foreach_mul_(tensors, keep)
    updates = torch._foreach_lerp(averages, gradients, 1 - betas[0])
    torch._foreach_sign_(updates)
    torch._foreach_add_(tensors, updates, alpha=-lr)
    torch._foreach_lerp_(averages, gradients, 1 - betas[1])
