"""From a ``MeshSpec`` to torch's ``DeviceMesh``."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2.config import MeshSpec

__all__ = ["device_mesh", "device_of"]


def device_mesh(spec: MeshSpec) -> DeviceMesh:
    """The mesh of a resolved ``spec`` over the ranks 0, 1, ... in order, replicas outermost.

    Called on all ranks; makes the axes' process groups (a 1-D mesh uses the default one). Two meshes of one spec are
    equal to torch, so one from here and the one that Composer's State made are interchangeable.
    """
    assert spec.is_resolved, "resolve() the spec against the world size first"
    return init_device_mesh(spec.device_type, spec.shape, mesh_dim_names=spec.axis_names)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
