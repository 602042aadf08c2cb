"""Which ranks a collective of one rank reaches, and over which link, from a mesh's numbers alone."""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.estimate.step import Link


@functools.lru_cache(maxsize=64)  # few meshes, of many units
def members(mesh: MeshSpec, role: AxisRole, rank: int, world_size: int) -> tuple[int, ...]:
    """The ranks that lie with ``rank`` along the axes of ``role``, itself among them, in the order of the axis.

    Args:
        mesh: Resolved.
    """
    axes = mesh.axes_of(role)
    if not axes:
        return (rank,)
    if mesh.is_grouped:
        found = [groups.members(rank, world_size) for axis in axes if (groups := mesh.axes[axis].groups) is not None]
        return found[0] if found else (rank,)
    ranks: tuple[int, ...] = (rank,)
    for axis in axes:
        stride = math.prod(mesh.shape[axis + 1 :])
        place = rank // stride % mesh.shape[axis]
        ranks = tuple(each + (step - place) * stride for each in ranks for step in range(mesh.shape[axis]))
    return tuple(sorted(ranks))


def link_of(ranks: Sequence[int], gpus_per_node: int) -> Link:
    """Whether all lie on one node, ranks being numbered node by node as every launcher does.

    Args:
        ranks: In ascending order.
    """
    if len(ranks) < 2:
        return Link.NONE
    return Link.INTRA if ranks[0] // gpus_per_node == ranks[-1] // gpus_per_node else Link.INTER


def num_on_node(rank: int, ranks: Sequence[int], gpus_per_node: int) -> int:
    """How many of ``ranks``, in their order, lie on the node of ``rank``, which is one of them."""
    first = rank // gpus_per_node * gpus_per_node
    return bisect_left(ranks, first + gpus_per_node) - bisect_left(ranks, first)
