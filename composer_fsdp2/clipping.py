"""Gradient clipping of a sharded model: by norm with FSDP1's result, one for each root; adaptive, as unsharded."""

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composer_fsdp2._torch import mesh_of
from composer_fsdp2.guard import check_guard
from composer_fsdp2.reductions import Part, reduce_parts
from composer_fsdp2.sharded import reshard, sharded_roots, splitting_axes

__all__ = ["clip_grad_adaptive_", "clip_grad_norm_"]


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

    Called on all ranks; one all-reduce of two numbers for each root that shards something (two with replicas, if
    some parameters are whole).
    """
    check_guard(model, "clip_grad_norm_")
    reshard(model)  # after a forward without gradients a root shows gathered parameters, which have none
    norms = {}
    for path, root in sharded_roots(model):
        trainable = [parameter for parameter in root.parameters() if parameter.requires_grad]
        grads = [parameter.grad for parameter in trainable if parameter.grad is not None]
        # By the parameters, not the gradients, which a rank may lack: all ranks must communicate alike.
        any_whole = not all(map(splitting_axes, trainable))
        total = _total_norm(grads, float(norm_type), mesh_of(root), any_whole=any_whole)
        _scale(grads, total, float(max_norm))
        norms[path] = total
    return norms


@torch.no_grad()
def clip_grad_adaptive_(model: nn.Module, threshold: float) -> None:
    """Scale each row of each gradient so that its norm is at most ``threshold`` times the norm of the weights' row.

    Adaptive gradient clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171), as Composer's ``GradientClipping``
    has it: the norms are those of slices along the first dimension (a linear layer's output, a convolution's filter);
    of vectors and scalars the norm of the whole. Where it divides 0 by 0 or meets NaN, nothing is scaled.

    All parameters with a gradient are clipped, also those under no root and those that are whole on each rank, as in
    an unsharded model. FSDP1 refused it.

    Args:
        model: A model after ``prepare_fully_shard``; parameters and gradients may be sharded, empty on some ranks,
            offloaded to the CPU or plain tensors.
        threshold: The largest ratio of a gradient's norm to the weights' that is let through.

    Called on all ranks. Rows lie whole on one rank, so only vectors communicate: one all-reduce for each mesh, of two
    numbers for each vector.
    """
    check_guard(model, "clip_grad_adaptive_")
    reshard(model)
    divided: dict[nn.Parameter, tuple[int, ...]] = {}
    for parameter in model.parameters():
        axes = _axes_that_divide_units(parameter)
        if axes:
            divided[parameter] = axes  # also without a gradient here: all ranks must communicate alike
        elif parameter.grad is not None:
            weights, grad = _local(parameter), _local(parameter.grad)
            grad.mul_(_adaptive_scale(_unit_norms(weights), _unit_norms(grad), threshold))
    squares = reduce_parts([_squared_norms(parameter, axes) for parameter, axes in divided.items()])
    for parameter, (weights_squared, grad_squared) in zip(divided, squares, strict=True):
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            # In the gradient's own dtype from here on, as in the unsharded model.
            weights_norm, grad_norm = (
                square.sqrt().to(grad.device, grad.dtype) for square in (weights_squared, grad_squared)
            )
            grad.mul_(_adaptive_scale(weights_norm, grad_norm, threshold))


def _axes_that_divide_units(parameter: nn.Parameter) -> tuple[int, ...]:
    """Along which axes of its mesh the rows (or the vector) whose norm is asked for are spread over ranks."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(
        axis
        for axis in splitting_axes(parameter)
        if parameter.dim() <= 1 or cast(Shard, parameter.placements[axis]).dim % parameter.dim() != 0
    )


def _unit_norms(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One norm for each row, in a shape that multiplies the tensor; a scalar for vectors and scalars."""
    if tensor.dim() <= 1:
        return torch.linalg.vector_norm(tensor, dtype=dtype)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True, dtype=dtype)


def _squared_norms(parameter: nn.Parameter, axes: tuple[int, ...]) -> Part:
    """This rank's part of the squares of weights' and gradient's norms, stacked."""
    assert isinstance(parameter, DTensor)
    weights = _unit_norms(_local(parameter), torch.float64)
    grad = torch.zeros_like(weights) if parameter.grad is None else _unit_norms(_local(parameter.grad), torch.float64)
    return Part(values=torch.stack([weights, grad.to(weights.device)]) ** 2, mesh=parameter.device_mesh, axes=axes)


def _adaptive_scale(weights: torch.Tensor, grad: torch.Tensor, threshold: float) -> torch.Tensor:
    # Composer's formula (composer/algorithms/gradient_clipping/gradient_clipping.py, 0.32.1).
    return (weights * threshold / grad).nan_to_num(nan=1.0).clamp(max=1.0)


def _scale(grads: list[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    # FSDP1's formula (torch/distributed/fsdp/fully_sharded_data_parallel.py, clip_grad_norm_).
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local = _local(grad)
        local.mul_(scale.to(local.device, local.dtype))


def _total_norm(grads: list[torch.Tensor], norm_type: float, mesh: DeviceMesh, *, any_whole: bool) -> torch.Tensor:
    """One number for all ranks, or they would scale the parts of one parameter differently.

    As FSDP1 did, what is sharded is summed over the root's ranks, also where a unit lies on a group of its own, and of
    absolute values the largest of all ranks is taken. Gradients that are whole and that nobody averages differ between
    ranks: their mean counts, where FSDP1 took each rank's own (torch/distributed/fsdp/fully_sharded_data_parallel.py,
    2.7) and thereby another scale on each.
    """
    sharded = [_local(grad) for grad in grads if splitting_axes(grad)]
    whole = [_local(grad) for grad in grads if not splitting_axes(grad)]
    if not sharded:
        return _norm(whole, norm_type)
    shard_axis = mesh.ndim - 1 if mesh.size(mesh.ndim - 1) > 1 else 0
    # Replicas agree on what is sharded, but not on what is whole.
    replicas = mesh.ndim == 2 and any_whole and shard_axis == 1 and mesh.size(0) > 1
    groups = [mesh.get_group(shard_axis), *([mesh.get_group(0)] if replicas else [])]
    # Gradients may lie on the CPU while the group is NCCL's: the numbers travel on the mesh's device.
    device = torch.device(mesh.device_type)
    norms = torch.stack([part.to(device) for part in (_norm(sharded, norm_type), _norm(whole, norm_type))])
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
        return norms.max()
    powers = norms**norm_type
    for group in groups:
        dist.all_reduce(powers, group=group)
    num_replicas = mesh.size(0) if replicas else 1
    num_ranks = mesh.size(shard_axis) * num_replicas
    total: torch.Tensor = (powers[0] / num_replicas + powers[1] / num_ranks) ** (1.0 / norm_type)
    return total


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
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
