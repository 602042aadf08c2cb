"""The ranks and the link of a collective, computed from the mesh's shape alone."""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.estimate.step import Link


@functools.lru_cache(maxsize=64)  # many units share few meshes
def members(mesh: MeshSpec, role: AxisRole, rank: int, world_size: int) -> tuple[int, ...]:
    """The ranks of ``rank``'s group along the axes of ``role``, in the order of the axis; includes ``rank``.

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
    """The link of a group; assumes ranks numbered node by node, as launchers do.

    Args:
        ranks: In ascending order.
    """
    if len(ranks) < 2:
        return Link.NONE
    return Link.INTRA if ranks[0] // gpus_per_node == ranks[-1] // gpus_per_node else Link.INTER


def num_on_node(rank: int, ranks: Sequence[int], gpus_per_node: int) -> int:
    """How many of ``ranks``, in ascending order, are on the node of ``rank``, which is one of them."""
    first = rank // gpus_per_node * gpus_per_node
    return bisect_left(ranks, first + gpus_per_node) - bisect_left(ranks, first)
