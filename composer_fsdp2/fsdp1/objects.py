"""Parse torch objects in a configuration: meshes, process groups, policies, dtypes, modules.

``parsing.py`` imports this module only if torch is already imported. Each function returns None for objects of other
types.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision

from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.config.sharding import GradientDtype, MixedPrecision
from composer_fsdp2.errors import ConfigError


def default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_mesh(mesh: object, device_type: str, tensor_degree: int = 1) -> MeshSpec | None:
    """Convert a DeviceMesh. If it does not contain all ranks in order, the result has this rank's groups.

    Axes are identified by position, as in ``fully_shard``: the last one shards, and one before it replicates. With
    ``tensor_degree``, the mesh is a strided slice of every ``tensor_degree``-th rank.

    Raises:
        ConfigError: more than 2 axes, another device type, or a mesh without this rank; the message begins with the
            mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        return None
    if mesh.ndim > 2:
        raise ConfigError(f"{mesh} with {mesh.ndim} axes; sharding takes one, or two (replicate, shard)")
    if mesh.device_type != device_type:
        raise ConfigError(f"{mesh} on {mesh.device_type}, but the model's device is {device_type}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"{mesh}, which does not contain this rank, {dist.get_rank()}; give one of all ranks")
    *replicas, shard = range(mesh.ndim)
    if tensor_degree > 1:
        first = dist.get_rank() % tensor_degree
        if mesh.mesh.flatten().tolist() != list(range(first, dist.get_world_size(), tensor_degree)):
            raise ConfigError(
                f"{mesh}, but the ranks with the same part of a split layer are every {tensor_degree}th; create one "
                "mesh of all axes with the tensor axis last, and pass the slice of the others"
            )
        degree = mesh.size(replicas[0]) if replicas else None
        return MeshSpec.of_degrees(mesh.size(shard), degree, tensor=tensor_degree, device_type=device_type)
    if mesh.mesh.flatten().tolist() == list(range(dist.get_world_size())):
        degree = mesh.size(replicas[0]) if replicas else None
        return MeshSpec.of_degrees(mesh.size(shard), degree, device_type=device_type)
    groups = [_given(mesh.get_group(axis)) for axis in (shard, *replicas)]
    return MeshSpec.of_groups(*groups, device_type=device_type)


def process_group(group: object) -> RankGroups | None:
    return _given(group) if isinstance(group, dist.ProcessGroup) else None


def _given(group: dist.ProcessGroup) -> RankGroups:
    return RankGroups(rule=GroupRule.GIVEN, ranks=tuple(dist.get_process_group_ranks(group)))


def dtype(value: object) -> str | None:
    """Return the name of a floating-point dtype.

    Raises:
        ConfigError: the dtype is not floating point; the message begins with it.
    """
    if not isinstance(value, torch.dtype):
        return None
    if not value.is_floating_point:
        raise ConfigError(f"{value}, in which nothing can be trained; give a floating point dtype")
    return str(value).removeprefix("torch.")


def mixed_precision(value: object) -> MixedPrecision | None:
    """Parse FSDP1's or FSDP2's mixed precision policy."""
    if not isinstance(value, FSDP1MixedPrecision | MixedPrecisionPolicy):
        return None
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    found = MixedPrecision(**{name: _dtype_of(value, name) for name in names})  # type: ignore[arg-type]
    if isinstance(value, MixedPrecisionPolicy):
        casts = value.cast_forward_inputs
        return replace(found, cast_forward_inputs=casts, cast_root_inputs=casts)
    keeps = value.keep_low_precision_grads
    return replace(
        found,
        cast_forward_inputs=value.cast_forward_inputs,
        cast_root_inputs=value.cast_root_forward_inputs,
        gradients=GradientDtype.AS_REDUCED if keeps else GradientDtype.OF_PARAMETER,
    )


def mp_policy(value: object) -> MixedPrecision | None:
    """Parse FSDP2's policy only."""
    return mixed_precision(value) if isinstance(value, MixedPrecisionPolicy) else None


def _dtype_of(policy: Any, name: str) -> str | None:
    try:
        return dtype(getattr(policy, name, None))
    except ConfigError as error:
        raise ConfigError(f"{policy!r}; its {name} is {error}") from error


def offloads(value: object) -> bool | None:
    """Whether FSDP1's or FSDP2's offload policy offloads parameters."""
    if isinstance(value, CPUOffload):
        return value.offload_params
    return isinstance(value, CPUOffloadPolicy) if isinstance(value, OffloadPolicy) else None


def modules(value: object) -> tuple[nn.Module, ...] | None:
    """Parse a list of modules."""
    found = tuple(value) if isinstance(value, list | tuple | set | frozenset | nn.ModuleList) else None
    return found if found is not None and all(isinstance(module, nn.Module) for module in found) else None
