"""Gradient clipping of a sharded model: by norm as FSDP1, per root; and adaptive, as in the unsharded model."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import foreach_mul_, foreach_norm, group_by_device_and_dtype, local_tensor
from composer_fsdp2.errors import CallError, PlanError
from composer_fsdp2.sharding.placements import shard_axes, shard_axes_of_all, sharded_dim
from composer_fsdp2.sharding.sharded import reshard, resharded_parameters, sharded_roots
from composer_fsdp2.training.guard import check_guard
from composer_fsdp2.training.reductions import LocalValues, all_reduce_values
from composer_fsdp2.training.run import run_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float | str = 2.0) -> dict[str, torch.Tensor]:
    """Scale the gradients of each root so that their norm is at most ``max_norm``. Return the norms before scaling.

    FSDP1 clipped each of its roots separately, and Composer called it for each root, so a model with several roots has
    several norms. Parameters outside of all roots are not scaled, as under FSDP1. The norms and the scale stay on the
    device; nothing synchronizes with a GPU.

    Args:
        model: A model after ``prepare_fully_shard``. Gradients may be sharded, empty on some ranks, offloaded to the
            CPU or plain tensors.
        max_norm: The maximum norm.
        norm_type: The order p of the norm, above 0; ``math.inf`` or ``"inf"`` for the maximum absolute value.
    Returns:
        The total norm of each root's gradients by the root's path, a scalar on the mesh's device.
    Raises:
        CallError: ``norm_type`` is not above 0. FSDP1 divided by zero, or returned a meaningless number.
        PlanError: the script called ``fully_shard`` directly.

    Called on all ranks. One all-reduce of one number per root; none if every rank has all averaged gradients
    (NO_SHARD). Two for a root whose mesh is a 2-D part of the world.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> norms = clip_grad_norm_(model, 1.0)
        >>> {path: round(float(norm), 3) for path, norm in norms.items()}
        {'0': 9.487}
    """
    order = float(norm_type)
    if not order > 0:
        raise CallError(f"norm_type is {norm_type}; it is the order of the norm: a number above 0, or math.inf")
    check_guard(model, "clip_grad_norm_")
    norms = {}
    for path, root in sharded_roots(model):
        run = run_of(root)
        groups = run.groups.get(root)
        if run.plan is None or groups is None:
            raise PlanError(
                f"a {type(root).__name__} was sharded by fully_shard itself; shard the model with prepare_fully_shard "
                "or apply_plan, or use torch's own functions for it"
            )
        trainable = (parameter for parameter in resharded_parameters(root) if parameter.requires_grad)
        grads = _grads_of(trainable)
        total = _total_norm(grads, order, groups, torch.device(run.plan.mesh.device_type))
        _scale(grads, total, float(max_norm))
        norms[path] = total
    return norms


# Tensors that one fused operation can process.
_ByKind = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
# This rank's local gradients, by the mesh of their parameters (None: unsharded) and the axes that shard them.
_Grads = dict[tuple[DeviceMesh | None, tuple[int, ...]], _ByKind]


def _grads_of(parameters: Iterable[nn.Parameter]) -> _Grads:
    """The local gradients of all ``parameters``.

    A parameter without a gradient gets an entry too, because all ranks must launch the same collectives.
    """
    parameters = list(parameters)
    places: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter, axes in zip(parameters, shard_axes_of_all(parameters), strict=True):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        tensors = places.setdefault((mesh, axes), [])
        if (grad := parameter.grad) is not None:
            tensors.append(local_tensor(grad))
    return {place: group_by_device_and_dtype(tensors) for place, tensors in places.items()}


@torch.no_grad()
def clip_grad_adaptive_(model: nn.Module, threshold: float) -> None:
    """Scale each row of each gradient so that its norm is at most ``threshold`` times the norm of the weights' row.

    Adaptive gradient clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171), as in Composer's
    ``GradientClipping``: norms are computed per slice along the first dimension (an output of a linear layer, a filter
    of a convolution), and over all elements of vectors and scalars. Rows for which it divides 0 by 0 or meets NaN are
    not scaled.

    All parameters with a gradient are clipped, as in an unsharded model, including those outside of all roots and those
    that are not sharded. FSDP1 rejected it.

    Args:
        model: A model after ``prepare_fully_shard``. Parameters and gradients may be sharded, empty on some ranks,
            offloaded to the CPU or plain tensors.
        threshold: The maximum ratio of a gradient's norm to the weights' norm.

    Called on all ranks. Each row is on one rank, so only vectors communicate: one all-reduce per mesh, of two numbers
    per vector.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2, bias=False))
        >>> _ = prepare_fully_shard(model, None, {}, precision="fp32", device="cpu")
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> clip_grad_adaptive_(model, 0.01)
        >>> reshard(model)
        >>> ratio = model[0].weight.grad.full_tensor().norm(dim=1) / model[0].weight.full_tensor().norm(dim=1)
        >>> bool((ratio <= 0.0101).all())
        True
    """
    check_guard(model, "clip_grad_adaptive_")
    reshard(model)
    sharded_rows: dict[nn.Parameter, tuple[int, ...]] = {}
    for parameter in model.parameters():
        axes = _axes_that_shard_rows(parameter)
        if axes:
            sharded_rows[parameter] = axes  # also without a gradient here: all ranks must communicate alike
        elif parameter.grad is not None:
            weights, grad = local_tensor(parameter), local_tensor(parameter.grad)
            grad.mul_(_adaptive_scale(_row_norms(weights), _row_norms(grad), threshold))
    squares = all_reduce_values([_squared_norms(parameter, axes) for parameter, axes in sharded_rows.items()])
    for parameter, (weights_squared, grad_squared) in zip(sharded_rows, squares, strict=True):
        if parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            # From here in the gradient's dtype, as in the unsharded model.
            weights_norm, grad_norm = (
                square.sqrt().to(grad.device, grad.dtype) for square in (weights_squared, grad_squared)
            )
            grad.mul_(_adaptive_scale(weights_norm, grad_norm, threshold))


@torch.no_grad()
def norm_of_gradients(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of the full gradients of all ``parameters`` together, for algorithms such as SAM.

    A plain scalar, equal on all ranks, for any mix of meshes ([Note: shares]).

    Called on all ranks with the same parameters, of which at least one is sharded. At most one all-reduce of one
    number.
    """
    grads = _grads_of(parameters)
    device = torch.device(next(mesh.device_type for mesh, _ in grads if mesh is not None))
    return _total_norm(grads, 2.0, (None,), device)


def _axes_that_shard_rows(parameter: nn.Parameter) -> tuple[int, ...]:
    """The mesh axes over which a norm must be reduced: those that shard the elements of a row, or of a vector."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(
        axis
        for axis in shard_axes(parameter)
        if parameter.dim() <= 1 or (sharded_dim(parameter.placements[axis]) or 0) % parameter.dim() != 0
    )


def _row_norms(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm of each row, in a shape that broadcasts to the tensor. Vectors and scalars have one norm."""
    if tensor.dim() <= 1:
        return torch.linalg.vector_norm(tensor, dtype=dtype)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())), keepdim=True, dtype=dtype)


def _squared_norms(parameter: nn.Parameter, axes: tuple[int, ...]) -> LocalValues:
    """This rank's contribution to the squared norms of weights and gradient, stacked."""
    assert isinstance(parameter, DTensor)
    weights = _row_norms(local_tensor(parameter), torch.float64)
    grad = (
        torch.zeros_like(weights) if parameter.grad is None else _row_norms(local_tensor(parameter.grad), torch.float64)
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
    for (device, dtype), tensors in (kind for kinds in grads.values() for kind in kinds.items()):
        # One copy of the scale per device and dtype, rounded to the gradients' dtype as under FSDP1.
        foreach_mul_(tensors, scale.to(device, dtype))


def _total_norm(
    grads: _Grads, norm_type: float, groups: Sequence[dist.ProcessGroup | None], device: torch.device
) -> torch.Tensor:
    """The total norm, equal on all ranks of ``groups``, so that all shards of a parameter are scaled equally.

    [Note: shares] The contribution of a rank's shard is weighted by the number of shards over the number of ranks. This
    is one over the number of ranks with the same shard, so each element counts once on any mesh. Ranks may have
    different gradients of the same parameter: of unsharded parameters whose gradients are not averaged, or in a unit on
    its own groups of ranks. In both cases the mean of the p-th powers counts. FSDP1 used each rank's own gradients in
    the first case, and therefore a different scale per rank; and each group's in the second
    (torch/distributed/fsdp/fully_sharded_data_parallel.py, 2.7).

    Args:
        groups: All-reducing over each in turn reaches all ranks that need the same norm.
        device: The device of the groups' tensors. Gradients may be on the CPU while the groups use NCCL.

    Called on all ranks of ``groups``.
    """
    num_ranks = math.prod(map(dist.get_world_size, groups))
    is_largest = math.isinf(norm_type)
    total, dtype = torch.zeros((), dtype=torch.float64, device=device), torch.float32
    for (mesh, axes), kinds in grads.items():  # one iteration per mesh and placement
        norm = _norm(kinds, norm_type, device)
        dtype = torch.promote_types(dtype, norm.dtype)
        # float64 can represent the squares of all fp32 numbers, and all ranks must send the same dtype.
        value = norm.to(torch.float64)
        num_parts = 1 if mesh is None else math.prod(map(mesh.size, axes))
        total = torch.maximum(total, value) if is_largest else total + value**norm_type * (num_parts / num_ranks)
    # If every rank has all averaged gradients, the sum over ranks is known.
    if all(mesh is not None and not axes and mesh.size() == num_ranks for mesh, axes in grads):
        total = total if is_largest else total * num_ranks
    elif num_ranks > 1:
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group)
    return (total if is_largest else total ** (1.0 / norm_type)).to(dtype)


def _norm(tensors: _ByKind, norm_type: float, device: torch.device) -> torch.Tensor:
    """The p-norm of all elements of all tensors, in fp32 or wider, on ``device``. Zero without elements."""
    norms: dict[torch.device, list[torch.Tensor]] = {}
    widest = torch.float32
    for (place, dtype), alike in tensors.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # also for tensors that are empty here: all ranks return the same dtype
        widest = torch.promote_types(widest, wide)
        # The infinity norm of an empty tensor raises.
        filled = [tensor for tensor in alike if tensor.numel()] if math.isinf(norm_type) else alike
        if filled:
            norms.setdefault(place, []).extend(foreach_norm(filled, norm_type, wide))
    of_devices = [torch.linalg.vector_norm(torch.stack(of_device), norm_type) for of_device in norms.values()]
    if not of_devices:
        # Created on the device: a copy from the CPU would synchronize with the GPU.
        return torch.zeros((), dtype=widest, device=device)
    if len(of_devices) == 1:
        return of_devices[0].to(device, widest)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, widest) for norm in of_devices]), norm_type)
