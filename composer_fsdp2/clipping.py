"""Gradient clipping of a sharded model, with FSDP1's result: one norm for each root."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2.apply import sharded_roots

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
    """Scale the gradients below each root so that their norm is at most ``max_norm``; return the norms before.

    FSDP1 clipped each of its roots by itself, and Composer called it for each, so a model with several roots has
    several norms. Parameters that lie under no root are not touched, as under FSDP1.

    Args:
        model: A model after ``prepare_fully_shard``; gradients may be sharded, empty on some ranks, offloaded to the
            CPU or plain tensors.
        max_norm: The largest norm allowed.
        norm_type: The order p of the norm; ``math.inf`` for the largest absolute value.
    Returns:
        The total norm of each root's gradients by the root's path, a scalar on the mesh's device.

    Called on all ranks; one all-reduce of a scalar for each root and axis that shards.
    """
    norms = {}
    for path, root in sharded_roots(model):
        grads = [parameter.grad for parameter in root.parameters() if parameter.grad is not None]
        norms[path] = _clip(grads, float(max_norm), float(norm_type))
    return norms


def _clip(grads: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    total = _total_norm(grads, norm_type)
    # FSDP1's formula (torch/distributed/fsdp/fully_sharded_data_parallel.py, clip_grad_norm_).
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local = _local(grad)
        local.mul_(scale.to(local.device, local.dtype))
    return total


def _total_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    # Every rank walks the meshes in the same order, that of the parameters, or ranks would wait for each other.
    by_mesh: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(_sharding_of(grad), []).append(_local(grad))
    parts = []
    for sharding, tensors in by_mesh.items():
        part = _norm(tensors, norm_type)
        if sharding is not None:
            mesh, axes = sharding
            # Gradients may lie on the CPU while the group is NCCL's: the scalar travels on the mesh's device.
            part = part.to(mesh.device_type)
            for axis in axes:
                part = _all_reduce_norm(part, norm_type, mesh.get_group(axis))
        parts.append(part)
    if not parts:
        return torch.zeros(())
    device = max((part.device for part in parts), key=lambda device: device.type != "cpu")
    return _norm([part.to(device) for part in parts], norm_type) if len(parts) > 1 else parts[0]


def _sharding_of(grad: torch.Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and its axes over which a gradient is split; replicas hold the same values and are not counted."""
    if not isinstance(grad, DTensor):
        return None
    axes = tuple(axis for axis, placement in enumerate(grad.placements) if isinstance(placement, Shard))
    return grad.device_mesh, axes


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norm(tensors: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The p-norm of all elements together, at least in fp32; an empty shard counts as zero, also for infinity."""
    norms = []
    for tensor in tensors:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if tensor.numel():
            norms.append(torch.linalg.vector_norm(tensor.detach(), norm_type, dtype=dtype))
        else:
            norms.append(torch.zeros((), dtype=dtype, device=tensor.device))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _all_reduce_norm(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powered = norm**norm_type
    dist.all_reduce(powered, group=group)
    return powered ** (1.0 / norm_type)
