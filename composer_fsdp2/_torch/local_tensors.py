"""Local tensors of DTensors, and ``foreach`` operations on many of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, outside of any autograd graph. A plain tensor is returned unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_tensor(tensor: Tensor, part: Tensor) -> Any:
    """A DTensor with the placements of ``tensor`` and the local tensor ``part``. Does not communicate.

    ``part`` has the shape of this rank's shard, in any dtype. It stays on its device, whereas ``DTensor.from_local``
    moves it to the mesh's device. The result is outside of any autograd graph. If ``tensor`` is a plain tensor, returns
    ``part``.
    """
    if not isinstance(tensor, DTensor):
        return part
    spec = tensor._spec
    if part.dtype != tensor.dtype:
        assert spec.tensor_meta is not None, "every DTensor has its shape, strides and dtype there"
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    return DTensor(part, spec, requires_grad=False)


def local_tensors(first: Tensor, *others: Tensor) -> Sequence[Tensor] | None:
    """The local tensors of tensors with equal placements, for elementwise operations; None if the placements differ.

    Called for each parameter in each step. It does not use DTensor's own methods, because they dispatch in Python.
    """
    if not isinstance(first, DTensor):
        return None if any(isinstance(other, DTensor) for other in others) else (first, *others)
    spec, parts = first._spec, [first._local_tensor]
    for other in others:
        if not isinstance(other, DTensor):
            return None
        its = other._spec
        if its is not spec and not _same_placements(its, spec):  # fully_shard assigns a gradient its parameter's spec
            return None
        parts.append(other._local_tensor)
    return parts


def _same_placements(spec: DTensorSpec, other: DTensorSpec) -> bool:
    return spec.placements == other.placements and (spec.mesh is other.mesh or spec.mesh == other.mesh)


def group_by_device_and_dtype(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype, for one ``foreach`` operation per group. Preserves the order."""
    if not tensors:
        return {}
    lists: list[list[Tensor | None]] = [list(tensors)]
    groups: dict[Any, Any] = _group_tensors_by_device_and_dtype(lists)
    return {kind: alike for kind, ([alike], _) in groups.items()}


def foreach_norm(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor as a scalar of ``dtype``. The tensors have one device and dtype, and none is empty."""
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
    """Apply Lion's update to each tensor in place (Chen et al. 2023, arXiv:2302.06675), by ``foreach`` kernels.

    Allocates memory for one copy of the tensors.

    Args:
        keep: The weight-decay factor, by which each tensor is multiplied before the update.
    """
    if keep != 1:
        torch._foreach_mul_(tensors, keep)
    updates = torch._foreach_lerp(averages, gradients, 1 - betas[0])
    torch._foreach_sign_(updates)
    torch._foreach_add_(tensors, updates, alpha=-lr)
    torch._foreach_lerp_(averages, gradients, 1 - betas[1])
