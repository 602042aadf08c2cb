"""Compute the ranks of a collective and the link that it uses, from the mesh's shape alone."""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.estimate.step import Link


@functools.lru_cache(maxsize=64)  # many units share few meshes
def members(mesh: MeshSpec, role: AxisRole, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks in the group of ``rank`` along the axes of ``role``, including ``rank``, in the order of the
    axis.

    Args:
        mesh: A resolved mesh.
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
    """Return the link that a group uses. Assumes that ranks are numbered node by node, as by launchers.

    Args:
        ranks: The group's ranks in ascending order.
    """
    if len(ranks) < 2:
        return Link.NONE
    return Link.INTRA if ranks[0] // gpus_per_node == ranks[-1] // gpus_per_node else Link.INTER


def num_on_node(rank: int, ranks: Sequence[int], gpus_per_node: int) -> int:
    """Return how many of ``ranks`` (ascending, including ``rank``) are on the node of ``rank``."""
    first = rank // gpus_per_node * gpus_per_node
    return bisect_left(ranks, first + gpus_per_node) - bisect_left(ranks, first)
