"""Meshes with a tensor axis: what a slice was cut from, and which shapes ``fully_shard`` takes beside one."""

import functools
import inspect
from typing import Any

from torch.distributed import device_mesh as _device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def parent_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of (``parent["tp"]``), or the mesh itself.

    torch 2.7 asks a registry of its own, later versions the mesh.
    """
    ask: Any = getattr(mesh, "_get_root_mesh", None)
    parent: DeviceMesh = ask() if ask is not None else _device_mesh._mesh_resources.get_root_mesh(mesh)
    return parent


@functools.cache
def needs_even_shards() -> bool:
    """Whether a parameter whose rows tensor parallelism splits must have a multiple of all ranks' number of rows.

    torch 2.7 says so where it shards such a parameter; 2.13 has no such words, and pads.
    """
    code = inspect.unwrap(FSDPParam._init_sharded_param).__code__  # under torch.no_grad()
    return any(isinstance(text, str) and "FSDP+TP sharding does not support uneven" in text for text in code.co_consts)
