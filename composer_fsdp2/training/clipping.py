"""Gradient clipping of a sharded model: by norm with FSDP1's result, one for each root; adaptive, as unsharded."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.parts import by_kind, local_tensor, multiply_each_, norm_of_each
from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.sharding.placements import split_dimension, splitting_axes, splitting_axes_of_all
from composer_fsdp2.sharding.root_record import mesh_of, record_of
from composer_fsdp2.sharding.sharded import Unit, reshard, resting_parameters, sharded_roots
from composer_fsdp2.training.guard import check_guard
from composer_fsdp2.training.reductions import LocalValues, reduce_parts


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
    """Scale the gradients below each root so that their norm is at most ``max_norm``; return the norms before.

    FSDP1 clipped each of its roots by itself, and Composer called it for each, so a model with several roots has
    several norms. Parameters that lie under no root are not touched, as under FSDP1.

    Nothing in it waits for a GPU: the norms stay tensors on the device, and so does the scale.

    Args:
        model: A model after ``prepare_fully_shard``; gradients may be sharded, empty on some ranks, offloaded to the
            CPU or plain tensors.
        max_norm: The largest norm allowed.
        norm_type: The order p of the norm; ``math.inf`` for the largest absolute value.
    Returns:
        The total norm of each root's gradients by the root's path, a scalar on the mesh's device.

    Called on all ranks; one all-reduce of one number for each root that shards something, two with replicas if some
    parameters are unsharded.
    """
    check_guard(model, "clip_grad_norm_")
    norms = {}
    for path, root in sharded_roots(model):
        grads = _Grads.below(root)
        total = _total_norm(grads, float(norm_type), root)
        _scale(grads, total, float(max_norm))
        norms[path] = total
    return norms


# What one fused operation can take.
_ByKind = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Grads:
    """This rank's parts of a root's gradients, by device and dtype.

    Args:
        split: Those of which ranks hold different parts; beside a tensor axis by the number of these parts, else
            together, under 1.
        unsharded: The others.
        any_split, any_unsharded: Whether some rank may have such: by the parameters, whose gradients a rank may lack,
            because all ranks must communicate alike.
    """

    split: dict[int, _ByKind]
    unsharded: _ByKind
    any_split: bool
    any_unsharded: bool

    @classmethod
    def below(cls, root: Unit) -> "_Grads":
        split: dict[int, list[torch.Tensor]] = {}
        unsharded: list[torch.Tensor] = []
        any_split = any_unsharded = False
        # After a forward without gradients a root shows gathered parameters, which have none.
        has_tensor_axis = record_of(root).tensor is not None
        trainable = [parameter for parameter in resting_parameters(root) if parameter.requires_grad]
        for parameter, axes in zip(trainable, splitting_axes_of_all(trainable), strict=True):
            any_split |= bool(axes)
            any_unsharded |= not axes
            if (grad := parameter.grad) is not None:
                # A parameter that is not sharded has no mesh, and no axes.
                number = math.prod(_mesh(parameter).size(axis) for axis in axes) if has_tensor_axis else 1
                (split.setdefault(number, []) if axes else unsharded).append(local_tensor(grad))
        return cls(
            split={number: by_kind(tensors) for number, tensors in split.items()},
            unsharded=by_kind(unsharded),
            any_split=any_split,
            any_unsharded=any_unsharded,
        )


def _mesh(parameter: nn.Parameter) -> DeviceMesh:
    assert isinstance(parameter, DTensor), "nothing else is split"
    return parameter.device_mesh


@torch.no_grad()
def clip_grad_adaptive_(model: nn.Module, threshold: float) -> None:
    """Scale each row of each gradient so that its norm is at most ``threshold`` times the norm of the weights' row.

    Adaptive gradient clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171), as Composer's ``GradientClipping``
    has it: the norms are those of slices along the first dimension (a linear layer's output, a convolution's filter);
    of vectors and scalars the norm of all of them. Where it divides 0 by 0 or meets NaN, nothing is scaled.

    All parameters with a gradient are clipped, also those under no root and those that are not sharded, as in an
    unsharded model. FSDP1 refused it.

    Args:
        model: A model after ``prepare_fully_shard``; parameters and gradients may be sharded, empty on some ranks,
            offloaded to the CPU or plain tensors.
        threshold: The largest ratio of a gradient's norm to the weights' that is let through.

    Called on all ranks. Each row lies on one rank, so only vectors communicate: one all-reduce for each mesh, of two
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
            weights, grad = local_tensor(parameter), local_tensor(parameter.grad)
            grad.mul_(_adaptive_scale(_unit_norms(weights), _unit_norms(grad), threshold))
    squares = reduce_parts([_squared_norms(parameter, axes) for parameter, axes in divided.items()])
    for parameter, (weights_squared, grad_squared) in zip(divided, squares, strict=True):
        if parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            # In the gradient's own dtype from here on, as in the unsharded model.
            weights_norm, grad_norm = (
                square.sqrt().to(grad.device, grad.dtype) for square in (weights_squared, grad_squared)
            )
            grad.mul_(_adaptive_scale(weights_norm, grad_norm, threshold))


@torch.no_grad()
def norm_of_gradients(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of the full gradients of all ``parameters`` together, for what divides by it itself, as SAM does.

    A plain scalar, the same on all ranks, whatever meshes the parameters lie on. Gradients that are unsharded, and that
    nobody averages, count as in ``clip_grad_norm_``, with the mean of their squares.

    Called on all ranks with the same parameters, some of which are sharded; one all-reduce for each axis of each mesh.
    """
    by_place: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        # Also without a gradient here: all ranks must communicate alike.
        grads = by_place.setdefault((mesh, splitting_axes(parameter)), [])
        if parameter.grad is not None:
            grads.append(local_tensor(parameter.grad))
    first = next(mesh for mesh, _ in by_place if mesh is not None)
    parts = []
    for (mesh, axes), grads in by_place.items():
        square = _norm(by_kind(grads), 2.0, torch.device(first.device_type)) ** 2
        if mesh is None:
            parts.append(LocalValues(values=square, mesh=first, axes=tuple(range(first.ndim)), op="avg"))
        else:
            parts.append(LocalValues(values=square, mesh=mesh, axes=axes))
    return torch.stack(reduce_parts(parts)).sum().sqrt()


def _axes_that_divide_units(parameter: nn.Parameter) -> tuple[int, ...]:
    """Along which axes of its mesh the rows (or the vector) whose norm is asked for are spread over ranks."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(
        axis
        for axis in splitting_axes(parameter)
        if parameter.dim() <= 1 or (split_dimension(parameter.placements[axis]) or 0) % parameter.dim() != 0
    )


def _unit_norms(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One norm for each row, in a shape that multiplies the tensor; a scalar for vectors and scalars."""
    if tensor.dim() <= 1:
        return torch.linalg.vector_norm(tensor, dtype=dtype)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True, dtype=dtype)


def _squared_norms(parameter: nn.Parameter, axes: tuple[int, ...]) -> LocalValues:
    """This rank's part of the squares of weights' and gradient's norms, stacked."""
    assert isinstance(parameter, DTensor)
    weights = _unit_norms(local_tensor(parameter), torch.float64)
    grad = (
        torch.zeros_like(weights)
        if parameter.grad is None
        else _unit_norms(local_tensor(parameter.grad), torch.float64)
    )
    return LocalValues(
        values=torch.stack([weights, grad.to(weights.device)]) ** 2, mesh=parameter.device_mesh, axes=axes
    )


def _adaptive_scale(weights: torch.Tensor, grad: torch.Tensor, threshold: float) -> torch.Tensor:
    # Composer's formula (composer/algorithms/gradient_clipping/gradient_clipping.py, 0.32.1).
    return (weights * threshold / grad).nan_to_num(nan=1.0).clamp(max=1.0)


def _scale(grads: _Grads, total: torch.Tensor, max_norm: float) -> None:
    # FSDP1's formula (torch/distributed/fsdp/fully_sharded_data_parallel.py, clip_grad_norm_).
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    kinds = [kind for by_kind in (*grads.split.values(), grads.unsharded) for kind in by_kind.items()]
    for (device, dtype), tensors in kinds:
        # It travels once for all of them, and is rounded to their dtype, as FSDP1 rounded it.
        multiply_each_(tensors, scale.to(device, dtype))


def _total_norm(grads: _Grads, norm_type: float, root: Unit) -> torch.Tensor:
    """One number for all ranks, or they would scale the parts of one parameter differently.

    As FSDP1 did, what is sharded is summed over the root's ranks, also where a unit lies on a group of its own, and of
    absolute values the largest of all ranks is taken. Gradients that are unsharded and that nobody averages differ
    between ranks: their mean counts, where FSDP1 took each rank's own (torch/distributed/fsdp/
    fully_sharded_data_parallel.py, 2.7) and thereby another scale on each.
    """
    mesh, record = mesh_of(root), record_of(root)
    # Gradients may lie on the CPU while the group is NCCL's: the numbers travel on the mesh's device.
    device = torch.device(mesh.device_type)
    if not grads.any_split:
        return _norm(grads.unsharded, norm_type, device)
    all_axes = record.axes_of(AxisRole.REPLICATE) + record.axes_of(AxisRole.SHARD)
    shard_axes = record.axes_of(AxisRole.SHARD) or all_axes
    # Replicas agree on what is sharded, but not on what is unsharded.
    replicas = [axis for axis in all_axes if axis not in shard_axes] if grads.any_unsharded else []
    groups = [mesh.get_group(axis) for axis in (*shard_axes, *replicas)]
    tensor = record.tensor
    groups += [] if tensor is None else [tensor.get_group()]
    num_replicas = math.prod(map(mesh.size, replicas))
    num_ranks = num_replicas * math.prod(map(mesh.size, shard_axes)) * (1 if tensor is None else tensor.size())
    split = {number: _norm(of_number, norm_type, device) for number, of_number in grads.split.items()}
    unsharded = _norm(grads.unsharded, norm_type, device)
    total: torch.Tensor
    if math.isinf(norm_type):
        total = functools.reduce(torch.maximum, split.values(), unsharded)
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        return total
    # One number from every rank, also from one whose groups leave all or nothing unsharded.
    power = unsharded**norm_type / num_ranks
    for number, norm in split.items():
        # [Note: copies] Each element counts once. Beside a tensor axis some parameters have more parts than others.
        copies = num_replicas if tensor is None else num_ranks // number
        power = power + norm**norm_type / copies
    for group in groups:
        dist.all_reduce(power, group=group)
    total = power ** (1.0 / norm_type)
    return total


def _norm(tensors: _ByKind, norm_type: float, device: torch.device) -> torch.Tensor:
    """The p-norm of all elements together, at least in fp32, on ``device``; nothing at all has the norm zero."""
    norms: dict[torch.device, list[torch.Tensor]] = {}
    widest = torch.float32
    for (place, dtype), alike in tensors.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        widest = torch.promote_types(widest, wide)  # also of what is empty here: ranks must send alike
        # An infinity norm of no elements raises.
        filled = [tensor for tensor in alike if tensor.numel()] if math.isinf(norm_type) else alike
        if filled:
            norms.setdefault(place, []).extend(norm_of_each(filled, norm_type, wide))
    of_devices = [torch.linalg.vector_norm(torch.stack(of_device), norm_type) for of_device in norms.values()]
    if not of_devices:
        # Made there: to copy one from the CPU would wait for the GPU.
        return torch.zeros((), dtype=widest, device=device)
    if len(of_devices) == 1:
        return of_devices[0].to(device, widest)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, widest) for norm in of_devices]), norm_type)
