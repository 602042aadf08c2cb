"""From ``MeshSpec``s to torch's ``DeviceMesh``es."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2.agreement import gather
from composer_fsdp2.config import MeshSpec
from composer_fsdp2.errors import ConfigError

__all__ = ["device_mesh", "device_meshes", "device_of"]

Ranks: TypeAlias = tuple[int, ...]
# For one mesh and each axis, the group of every rank.
GroupTable: TypeAlias = tuple[tuple[Ranks, ...], ...]


def device_mesh(spec: MeshSpec) -> DeviceMesh:
    """The mesh of a resolved ``spec`` over the ranks 0, 1, ... in order, replicas outermost.

    Called on all ranks; makes the axes' process groups (a 1-D mesh uses the default one). Two meshes of one spec are
    equal to torch, so one from here and the one that Composer's State made are interchangeable.
    """
    assert spec.is_resolved and not spec.is_grouped, "resolve() the spec first; groups are for device_meshes()"
    return init_device_mesh(spec.device_type, spec.shape, mesh_dim_names=spec.axis_names)


def device_meshes(specs: Sequence[MeshSpec]) -> list[DeviceMesh]:
    """The mesh of each resolved spec; where it divides the ranks into groups, the mesh of this rank's group.

    Raises:
        ConfigError: the groups that the ranks named do not fit together; on every rank.

    Called on all ranks with the specs in the same order. Gathers the groups that ranks know only for themselves, and
    makes the process groups, one for each set of ranks.
    """
    tables = iter(_group_tables([spec for spec in specs if spec.is_grouped]))
    made: dict[object, DeviceMesh] = {}
    groups: dict[Ranks, dist.ProcessGroup] = {}
    meshes = []
    for spec in specs:
        table = next(tables) if spec.is_grouped else None
        key = table or spec  # what ranks give for themselves may be alike on some and not on others
        if key not in made:
            made[key] = device_mesh(spec) if table is None else _mesh_of_table(spec, table, groups)
        meshes.append(made[key])
    return meshes


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _group_tables(specs: Sequence[MeshSpec]) -> list[GroupTable]:
    if not specs:
        return []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = [tuple(groups.members(rank, world_size) for groups in spec.axis_groups) for spec in specs]
    # Units by the dozen have the same groups: those are sent once, and looked at once.
    distinct = {groups: number for number, groups in enumerate(dict.fromkeys(own))}
    of_ranks: list[tuple[list[tuple[range | Ranks, ...]], list[int]]]
    of_ranks = gather(([tuple(map(_packed, groups)) for groups in distinct], [distinct[groups] for groups in own]))
    members = [[tuple(map(tuple, groups)) for groups in of_rank] for of_rank, _ in of_ranks]
    tables: dict[Ranks, GroupTable] = {}
    chosen = []
    for number, spec in enumerate(specs):
        key = tuple(of_unit[number] for _, of_unit in of_ranks)
        if key not in tables:
            of_unit = [members[rank][which] for rank, which in enumerate(key)]
            tables[key] = tuple(tuple(groups[axis] for groups in of_unit) for axis in range(len(spec.axis_groups)))
        chosen.append(tables[key])
    problems = dict.fromkeys(problem for table in tables.values() if (problem := _problem_of(table)))
    if problems:
        raise ConfigError("\n".join(problems))
    return chosen


def _packed(ranks: Ranks) -> range | Ranks:
    """What is sent of a group: a thousand ranks in a row are three numbers."""
    if len(ranks) > 2:
        even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(even) == ranks:
            return even
    return ranks


def _problem_of(table: GroupTable) -> str:
    """What is wrong with a table of groups, or ""."""
    for of_ranks in table:
        for rank, members in enumerate(of_ranks):
            if rank not in members:
                return f"process_group of rank {rank} is {list(members)}, without the rank itself"
            other = next((member for member in members if of_ranks[member] != members), None)
            if other is not None:
                return (
                    f"process_group of rank {rank} is {list(members)}, but rank {other} says "
                    f"{list(of_ranks[other])}; all ranks of a group must name the same ranks"
                )
    if len(table) == 2:
        replicas, shards = table
        for rank, members in enumerate(replicas):
            for member in members:
                if len(shards[member]) != len(shards[rank]) or (
                    shards[member].index(member) != shards[rank].index(rank)
                ):
                    return (
                        f"ranks {rank} and {member} are replicas, but hold different shards: they are in the groups "
                        f"{list(shards[rank])} and {list(shards[member])}"
                    )
    return ""


def _mesh_of_table(spec: MeshSpec, table: GroupTable, groups: dict[Ranks, dist.ProcessGroup]) -> DeviceMesh:
    """This rank's mesh; the process groups of all ranks' meshes are made on the way, in one order on all ranks."""
    for of_ranks in table:
        for members in sorted(set(of_ranks)):
            if members not in groups:
                groups[members] = _process_group(members)
    rank = dist.get_rank()
    own = [groups[of_ranks[rank]] for of_ranks in table]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], spec.device_type, mesh_dim_names=spec.axis_names)
    replicas, shards = table
    layout = torch.tensor([shards[member] for member in replicas[rank]], dtype=torch.int)
    return DeviceMesh.from_group(own, spec.device_type, mesh=layout, mesh_dim_names=spec.axis_names)


def _process_group(members: Ranks) -> dist.ProcessGroup:
    if len(members) == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    return dist.new_group(list(members))
