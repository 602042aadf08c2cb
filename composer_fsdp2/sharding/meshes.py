"""Create ``DeviceMesh``es from ``MeshSpec``s."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_fsdp2._torch.groups import new_group_of
from composer_fsdp2.config.mesh import DATA_PARALLEL, GROUPS_KEY, AxisRole, MeshSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.sharding.agree import all_gather_object

Ranks: TypeAlias = tuple[int, ...]
# For each axis of a mesh, outermost first, the group of every rank.
GroupTable: TypeAlias = tuple[tuple[Ranks, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnitMesh:
    """The device mesh of a unit and its slices.

    Args:
        whole: The mesh with all axes.
        fsdp: The shard and replicate axes, for ``fully_shard``.
        tensor: The tensor-parallel axis, or None.
    """

    whole: DeviceMesh
    fsdp: DeviceMesh
    tensor: DeviceMesh | None

    @classmethod
    def of(cls, mesh: DeviceMesh, spec: MeshSpec) -> "UnitMesh":
        fsdp, tensor = (_slice(mesh, spec, *roles) for roles in (DATA_PARALLEL, [AxisRole.TENSOR]))
        assert fsdp is not None, "every mesh shards or replicates"
        return cls(mesh, fsdp, tensor)


def _slice(mesh: DeviceMesh, spec: MeshSpec, *roles: AxisRole) -> DeviceMesh | None:
    axes = [number for number, axis in enumerate(spec.axes) if axis.role in roles]
    if len(axes) in (0, mesh.ndim):
        return mesh if axes else None
    names = mesh.mesh_dim_names
    assert names is not None, "unit_meshes() takes and makes meshes with names where there are several axes"
    return mesh[tuple(names[axis] for axis in axes)]


def unit_meshes(specs: Sequence[MeshSpec], existing_meshes: Sequence[DeviceMesh] = ()) -> list[UnitMesh]:
    """Create the mesh of each resolved spec; for groups of ranks, that of this rank's group.

    Without groups a mesh contains the ranks 0, 1, ... in order, with replicas outermost. It compares equal to the mesh
    that Composer's State creates from the same spec.

    Args:
        existing_meshes: Meshes that the caller has already made. A mesh whose ranks, shape and device type equal a
            spec's is reused, with its own axis names, if every rank passes such a mesh. A second mesh would create
            process groups whose communicators take additional device memory.
    Raises:
        ConfigError: the groups of the ranks are inconsistent. Raised on all ranks.

    Called on all ranks with the specs in the same order. All-gathers the groups (each rank knows its own only) and
    whether each rank has the meshes; creates the missing process groups.
    """
    tables = iter(_group_tables([spec for spec in specs if spec.is_grouped]))
    # Ranks specify only their own groups, which may be equal on some ranks and differ on others; the tables show it.
    keys: list[MeshSpec | GroupTable] = [next(tables) if spec.is_grouped else spec for spec in specs]
    wanted = dict(zip(keys, specs, strict=True))
    layouts = [_layout(spec, None if isinstance(key, MeshSpec) else key) for key, spec in wanted.items()]
    made: dict[object, UnitMesh] = {}
    for (key, spec), layout, mesh in zip(
        wanted.items(), layouts, _reusable_meshes(wanted, layouts, existing_meshes), strict=True
    ):
        if mesh is None:
            mesh = _make_mesh(spec, layout, _groups_along_axes(spec.shape) if isinstance(key, MeshSpec) else key)
        made[key] = UnitMesh.of(mesh, spec)
    return [made[key] for key in keys]


def _make_mesh(spec: MeshSpec, layout: list[Any], table: GroupTable) -> DeviceMesh:
    world = _world_group(spec.device_type)
    own: Any = [
        world
        if axis.role in DATA_PARALLEL and len(of_ranks[dist.get_rank()]) == dist.get_world_size()
        else group_of(of_ranks, axis.role.value)
        for of_ranks, axis in zip(table, spec.axes, strict=True)
    ]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], spec.device_type, mesh_dim_names=spec.axis_names)
    ranks = torch.tensor(layout, dtype=torch.int)
    return DeviceMesh.from_group(own, spec.device_type, mesh=ranks, mesh_dim_names=spec.axis_names)


def group_along(shape: Sequence[int], axis: int, use: str, **options: Any) -> dist.ProcessGroup:
    """``group_of`` along one axis of ``arange(world_size).view(shape)``. Called on all ranks."""
    return group_of(_groups_along_axes(shape)[axis], use, **options)


def _groups_along_axes(shape: Sequence[int]) -> GroupTable:
    """For each axis of ``arange(world_size).view(shape)`` and each rank, the ranks along that axis."""
    ranks = torch.arange(dist.get_world_size()).view(*shape)
    table = []
    for axis, size in enumerate(ranks.shape):
        lines = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        of_rank = {rank: line for line in map(tuple, lines) for rank in line}
        table.append(tuple(of_rank[rank] for rank in range(ranks.numel())))
    return tuple(table)


# Process groups of the current world by (ranks, use); None for groups without this rank.
_groups: dict[tuple[Ranks, str], dist.ProcessGroup | None] = {}
_world: dist.ProcessGroup | None = None


def group_of(
    of_ranks: Sequence[Ranks], use: str, *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """This rank's process group in a partition of the world, created once per world. Called on all ranks.

    Args:
        of_ranks: For each global rank, the ranks of its group, in the same order on all members.
        use: Groups for different uses have separate communicators, even over the same ranks. NCCL serializes the
            collectives of a communicator, so an exchange would wait for prefetched parameters.
        backend, timeout: None means those of the default group.
    """
    _clear_stale_groups()
    rank = dist.get_rank()
    missing = [ranks for ranks in dict.fromkeys(of_ranks) if (ranks, use) not in _groups]
    if missing:
        made = new_group_of(missing, backend, timeout)
        _groups.update(((ranks, use), made if rank in ranks else None) for ranks in missing)
    own = _groups[of_ranks[rank], use]
    assert own is not None, "this rank's"
    return own


def _world_group(device_type: str) -> dist.ProcessGroup:
    """torch's process group of all ranks for meshes of this device type. Called on all ranks.

    This is the default group, except on torch 2.7 if that group uses gloo and there are GPUs: then a new NCCL group.
    torch selects a GPU for a rank that has no current one.
    """
    _clear_stale_groups()
    key = tuple(range(dist.get_world_size())), f"world, {device_type}"
    if key not in _groups:
        _groups[key] = init_device_mesh(device_type, (dist.get_world_size(),)).get_group()
    group = _groups[key]
    assert group is not None, "of all ranks"
    return group


def _clear_stale_groups() -> None:
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _groups.clear()


def training_groups(mesh: DeviceMesh, of_units: Iterable[DeviceMesh]) -> tuple[dist.ProcessGroup | None, ...]:
    """The process groups whose ranks together train parts of one root; None stands for the default group.

    If the root's mesh is smaller than the world, its ranks train it alone, unless a unit below it has a larger mesh.

    Args:
        mesh: The root's mesh, with all axes.
        of_units: The meshes of all its units.

    Called on all ranks; all-gathers a flag if the root's mesh is not the whole world.
    """
    if mesh.size() < dist.get_world_size():
        own = set(mesh.mesh.flatten().tolist())
        if all(
            all_gather_object(all(own.issuperset(each.mesh.flatten().tolist()) for each in dict.fromkeys(of_units)))
        ):
            return tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    return (None,)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _matches(mesh: DeviceMesh, device_type: str, layout: list[Any]) -> bool:
    """Whether the mesh has this device type and layout. ``fully_shard`` requires names for two axes."""
    is_named = mesh.ndim == 1 or mesh.mesh_dim_names is not None
    return is_named and mesh.device_type == device_type and mesh.mesh.tolist() == layout


def _reusable_meshes(
    wanted: Mapping[MeshSpec | GroupTable, MeshSpec],
    layouts: Sequence[list[Any]],
    existing_meshes: Sequence[DeviceMesh],
) -> list[DeviceMesh | None]:
    """For each wanted mesh, the existing one; None on all ranks if a rank has none."""
    own = [
        next((mesh for mesh in existing_meshes if _matches(mesh, spec.device_type, layout)), None)
        for spec, layout in zip(wanted.values(), layouts, strict=True)
    ]
    # All ranks create groups together, so they must make the same choice.
    of_ranks = all_gather_object([mesh is not None for mesh in own])
    return [mesh if all(has[number] for has in of_ranks) else None for number, mesh in enumerate(own)]


def _layout(spec: MeshSpec, table: GroupTable | None) -> list[Any]:
    """The ranks of this rank's mesh, nested as in ``DeviceMesh.mesh``."""
    if table is None:
        ranks: list[Any] = torch.arange(spec.size).view(spec.shape).tolist()
        return ranks
    return _nested(dist.get_rank(), table)


def _nested(rank: int, table: GroupTable) -> list[Any]:
    of_ranks, *inner = table
    return [_nested(member, tuple(inner)) if inner else member for member in of_ranks[rank]]


def _group_tables(specs: Sequence[MeshSpec]) -> list[GroupTable]:
    if not specs:
        return []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = [tuple(groups.members(rank, world_size) for groups in spec.groups) for spec in specs]
    # Dozens of units may have the same groups; these are sent and checked once.
    distinct = {groups: number for number, groups in enumerate(dict.fromkeys(own))}
    of_ranks: list[tuple[list[tuple[range | Ranks, ...]], list[int]]]
    of_ranks = all_gather_object(
        ([tuple(map(_as_range, groups)) for groups in distinct], [distinct[groups] for groups in own])
    )
    members = [[tuple(map(tuple, groups)) for groups in of_rank] for of_rank, _ in of_ranks]
    tables: dict[Ranks, GroupTable] = {}
    chosen = []
    for number, spec in enumerate(specs):
        key = tuple(of_unit[number] for _, of_unit in of_ranks)
        if key not in tables:
            of_unit = [members[rank][which] for rank, which in enumerate(key)]
            tables[key] = tuple(tuple(groups[axis] for groups in of_unit) for axis in range(len(spec.groups)))
        chosen.append(tables[key])
    problems = dict.fromkeys(problem for table in tables.values() if (problem := _problem_of(table)))
    if problems:
        raise ConfigError("\n".join(problems), keys=(GROUPS_KEY,))
    return chosen


def _as_range(ranks: Ranks) -> range | Ranks:
    """A group of ranks in a compact form for sending: a thousand consecutive ranks take three numbers."""
    if len(ranks) > 2:
        even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(even) == ranks:
            return even
    return ranks


def _problem_of(table: GroupTable) -> str:
    """The inconsistency in a table of groups, or "" if it is consistent."""
    for of_ranks in table:
        for rank, members in enumerate(of_ranks):
            if rank not in members:
                return f"{GROUPS_KEY} of rank {rank} is {list(members)}, without the rank itself"
            other = next((member for member in members if of_ranks[member] != members), None)
            if other is not None:
                return (
                    f"{GROUPS_KEY} of rank {rank} is {list(members)}, but rank {other} says "
                    f"{list(of_ranks[other])}; all ranks of a group must name the same ranks"
                )
    # The ranks of a group along one axis must have equal positions within their groups along the inner axes.
    for outer, inner in combinations(table, 2):
        for rank, members in enumerate(outer):
            for member in members:
                if len(inner[member]) != len(inner[rank]) or inner[member].index(member) != inner[rank].index(rank):
                    return (
                        f"ranks {rank} and {member} are replicas, but hold different shards: they are in the groups "
                        f"{list(inner[rank])} and {list(inner[member])}"
                    )
    return ""
