"""Pack many small reductions into one all-reduce per mesh axis."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import pending_reduction

K = TypeVar("K", bound=Hashable)

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalValues:
    """Local values to be reduced over a mesh.

    Args:
        values: A tensor on any device. Its shape must be equal on all ranks of ``mesh``.
        mesh: The mesh over whose ranks they are reduced.
        axes: The mesh axes of the reduction, ascending.
        op: ``sum``, ``avg``, ``max`` or ``min``.
    """

    values: torch.Tensor
    mesh: DeviceMesh
    axes: tuple[int, ...]
    op: str = "sum"


def all_reduce_values(parts: Sequence[LocalValues]) -> list[torch.Tensor]:
    """All-reduce the values; return each as a float64 tensor on its mesh's device.

    float64, because most are squares, whose sum over ranks may overflow in fp32 although its square root does not.

    Called on all ranks, with equal meshes, axes, reductions and shapes in the same order. One all-reduce per mesh axis
    and reduction (an average is a sum); none along an axis of size 1.
    """
    # Values of offloaded parameters are on the CPU, while the group uses NCCL.
    reduced = [part.values.detach().to(torch.device(part.mesh.device_type), torch.float64) for part in parts]
    for axis in range(max((axis + 1 for part in parts for axis in part.axes), default=0)):
        together: dict[tuple[DeviceMesh, dist.ReduceOp.RedOpType], list[int]] = {}
        for index, part in enumerate(parts):
            if axis in part.axes and part.mesh.size(axis) > 1:
                together.setdefault((part.mesh, _OPS[part.op]), []).append(index)
        for (mesh, op), indices in together.items():
            buffer = torch.cat([reduced[index].flatten() for index in indices])
            dist.all_reduce(buffer, op=op, group=mesh.get_group(axis))
            pieces = buffer.split([reduced[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                num_ranks = mesh.size(axis) if parts[index].op == "avg" else 1
                reduced[index] = piece.view_as(reduced[index]) / num_ranks
    return reduced


def reduce_to_floats(values: Mapping[K, torch.Tensor]) -> dict[K, float]:
    """Convert one-element tensors to floats; a DTensor to the value of its full tensor, not of this rank's shard.

    A norm or sum of a sharded tensor is a DTensor with a pending reduction. ``full_tensor()`` reduces one of them with
    a collective; ``item()`` silently returns this rank's local value.

    Called on all ranks with the same DTensors in the same order, see ``all_reduce_values``. A plain tensor is not
    reduced. Synchronizes once with the device.
    """
    parts: dict[K, LocalValues] = {}
    powers: dict[K, float] = {}
    reduced_values: dict[K, torch.Tensor] = {}
    for key, value in values.items():
        part = _pending_reduction(value) if isinstance(value, DTensor) else None
        if part is not None:
            parts[key], powers[key] = part
        else:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            reduced_values[key] = full.detach()
    reduced_values |= {
        key: reduced if powers[key] == 1.0 else reduced ** (1.0 / powers[key])
        for key, reduced in zip(parts, all_reduce_values(list(parts.values())), strict=True)
    }
    return dict(zip(values, _to_floats([reduced_values[key] for key in values]), strict=True))


def _pending_reduction(value: DTensor) -> tuple[LocalValues, float] | None:
    """The pending reduction of a DTensor, and the order of the root to take of the reduced value (1 for none).

    None if torch must reduce the DTensor.
    """
    pending = [pending_reduction(placement) for placement in value.placements]
    kinds = {kind for kind in pending if kind is not None}
    if len(kinds) > 1 or not all(placement.is_replicate() or placement.is_partial() for placement in value.placements):
        return None
    op, power = kinds.pop() if kinds else ("sum", 1.0)
    if (op != "norm" and op not in _OPS) or power <= 0:
        return None
    local = value.to_local()
    axes = tuple(axis for axis, kind in enumerate(pending) if kind is not None)
    if op == "norm":
        return LocalValues(values=local.detach().double() ** power, mesh=value.device_mesh, axes=axes), power
    return LocalValues(values=local, mesh=value.device_mesh, axes=axes, op=op), 1.0


def _to_floats(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Copy the tensors to the host, with one transfer per device."""
    numbers: list[float] = [math.nan] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        together = torch.stack([tensors[index].reshape(()).double() for index in indices])
        for index, number in zip(indices, together.tolist(), strict=True):
            numbers[index] = number
    return numbers
