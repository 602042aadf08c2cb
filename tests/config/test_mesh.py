"""Creating torch's DeviceMesh from degrees."""

from __future__ import annotations

import math
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composer_fsdp2 import MeshSpec, prepare_fully_shard
from composer_fsdp2.config.mesh import GroupRule, RankGroups
from composer_fsdp2.sharding import meshes
from composer_fsdp2.sharding.meshes import device_of, unit_meshes

SET = GroupRule.CONSECUTIVE


def check_meshes() -> tuple[list[list[int]], tuple[str, ...] | None, str]:
    [mesh] = unit_meshes([MeshSpec.of_degrees(shard=2, replicate=2)])
    made, names = mesh.whole, ("data_parallel_replicate", "data_parallel_shard")
    assert made == init_device_mesh("cpu", (2, 2), mesh_dim_names=names), "to torch it is another one"
    sums = []
    for axis in range(2):
        rank = torch.tensor(dist.get_rank())
        dist.all_reduce(rank, group=made.get_group(axis))
        sums.append(rank.item())
    return made.mesh.tolist(), made.mesh_dim_names, f"{device_of(made)} {sums}"


def test_replicas_are_the_outer_axis():
    """Ranks of one node stay in one shard group, as in Composer's mesh; the axes' groups connect the right ranks."""
    results = run_ranks(check_meshes, 4)
    assert all(layout == [[0, 1], [2, 3]] for layout, _, _ in results)
    assert results[0][1] == ("data_parallel_replicate", "data_parallel_shard")
    assert [text for _, _, text in results] == ["cpu [2, 1]", "cpu [4, 1]", "cpu [2, 5]", "cpu [4, 5]"]


def check_present_meshes() -> None:
    present = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    outer, inner = dist.new_group((0, 3)), dist.new_group((1, 2))
    pair = inner if dist.get_rank() in (1, 2) else outer
    in_pairs = DeviceMesh.from_group(pair, "cpu")
    replicas, rows = (
        MeshSpec.of_degrees(shard=2, replicate=2),
        MeshSpec.of_groups(RankGroups(rule=SET, number=2)).resolve(4),
    )
    crossed = RankGroups(rule=GroupRule.GIVEN, ranks=tuple(sorted(dist.get_process_group_ranks(pair))))

    def check(spec: MeshSpec, has: list[DeviceMesh], expected: DeviceMesh | None) -> None:
        first, second = (each.whole for each in unit_meshes([spec, spec], has))
        assert first is second
        assert (first is expected) if expected is not None else first not in has, f"{first}, {has}"

    is_first = dist.get_rank() == 0
    for_each(
        check,
        {
            "equal": (replicas, [in_pairs, present], present),
            "groups": (MeshSpec.of_groups(crossed), [present, in_pairs], in_pairs),
            "another shape": (MeshSpec.of_degrees(shard=4), [present], None),
            "other groups": (rows, [in_pairs], None),
            "another type of device": (replicas, [mock.Mock(device_type="cuda", mesh=present.mesh)], None),
            "not on all ranks": (replicas, [present] if is_first else [], None),
        },
    )


def test_a_mesh_that_is_there_is_taken():
    """A second mesh over the same ranks adds communicators on each GPU; a different one would average over the wrong
    ranks."""
    run_ranks(check_present_meshes, 4)


def mesh_of(model: torch.nn.Module) -> DeviceMesh:
    """The mesh of all its parameters, each of which is sharded."""
    parameters = list(model.parameters())
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    assert len(meshes) == len(parameters) and all(found == meshes[0] for found in meshes)
    return meshes[0]


def check_prepared_with_a_mesh(has_mesh: str) -> tuple[bool, list[list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=None if has_mesh == "unnamed" else ("a", "b"))
    gives = has_mesh != "rank 0" or dist.get_rank() == 0
    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    prepare_fully_shard(model, None, {"device_mesh": mesh} if gives else degrees, device="cpu")
    found = mesh_of(model)
    assert found.mesh_dim_names is not None
    return found is mesh, found.mesh.tolist()


def test_the_mesh_of_a_configuration_is_taken_on_all_ranks_or_on_none():
    """If some ranks configure a mesh and others degrees, none uses the mesh, because ranks with different meshes wait
    for each other. fully_shard refuses a mesh with replicas and without axis names; ours has the same ranks, and
    names."""
    for has_mesh, is_taken in {"all": True, "rank 0": False, "unnamed": False}.items():
        assert run_ranks(check_prepared_with_a_mesh, 4, has_mesh) == [(is_taken, [[0, 1], [2, 3]])] * 4, has_mesh


# ---------------------------------------------------------------------------------------------------------------------
# Groups of hundreds of ranks, simulated: each rank's part is computed here, one after the other


def tables_as_rank(rank: int, specs: list[MeshSpec], gather: Any) -> Any:
    with (
        mock.patch.object(meshes.dist, "get_rank", return_value=rank),
        mock.patch.object(meshes.dist, "get_world_size", return_value=NUM_RANKS),
        mock.patch.object(meshes, "all_gather_object", gather),
    ):
        return meshes._group_tables(specs)


def sent_by(rank: int, specs: list[MeshSpec]) -> Any:
    """The data that a rank would send."""
    gather = mock.Mock(side_effect=InterruptedError)
    with pytest.raises(InterruptedError):
        tables_as_rank(rank, specs, gather)
    return gather.call_args.args[0]


NUM_RANKS, NUM_UNITS = 256, 80
OF_A_NODE = RankGroups(rule=GroupRule.CONSECUTIVE, number=8)
ACROSS_NODES = RankGroups(rule=GroupRule.STRIDED, number=8)


def test_the_groups_of_many_ranks_are_small_and_looked_at_once():
    """80 units in nodes of 8 took 12 s at 1,024 ranks, because the table of each unit was checked although all are
    equal."""
    in_nodes = MeshSpec.of_groups(OF_A_NODE, ACROSS_NODES).resolve(NUM_RANKS)
    in_pairs = MeshSpec.of_groups(RankGroups(rule=GroupRule.CONSECUTIVE, number=2)).resolve(NUM_RANKS)
    specs = [in_nodes] * NUM_UNITS + [in_pairs]
    of_ranks = [sent_by(rank, specs) for rank in range(NUM_RANKS)]
    assert max(len(pickle.dumps(sent)) for sent in of_ranks) <= 1024
    with mock.patch.object(meshes, "_problem_of", wraps=meshes._problem_of) as problem_of:
        tables = tables_as_rank(9, specs, lambda value: of_ranks)
    assert problem_of.call_count == 2
    assert len(tables) == NUM_UNITS + 1 and all(table is tables[0] for table in tables[:NUM_UNITS])
    replicas, shards = tables[0]
    assert shards[9] == tuple(range(8, 16)) and replicas[9] == tuple(range(1, NUM_RANKS, 8))
    assert tables[-1] == (tuple((rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(NUM_RANKS)),)


def test_groups_that_are_alike_on_one_rank_alone():
    """Rank 0 is in one group for both units, and its neighbour in two: two tables."""
    first = [((0, 1), (0, 1), (2, 3), (2, 3)), ((0, 1), (0, 1), (2,), (3,))]
    given = [
        [MeshSpec.of_groups(RankGroups(rule=GroupRule.GIVEN, ranks=table[rank])) for table in first]
        for rank in range(4)
    ]
    of_ranks = [sent_by(rank, given[rank]) for rank in range(4)]
    for rank in range(4):
        assert tables_as_rank(rank, given[rank], lambda value: of_ranks) == [(table,) for table in first]


def lines(*shape: int) -> meshes.GroupTable:
    """For each axis of a mesh of all ranks in order, the group of every rank."""
    with mock.patch.object(meshes.dist, "get_world_size", return_value=math.prod(shape)):
        return meshes._groups_along_axes(shape)


def test_groups_along_any_number_of_axes():
    """A mesh with another axis, for tensor parallelism, has the configured layout, and is checked along all axes."""
    for shape in ((8,), (4, 2), (2, 2, 2)):
        table = lines(*shape)
        assert meshes._nested(5, table) == torch.arange(8).view(shape).tolist()
        assert meshes._problem_of(table) == ""
    first, second, third = lines(2, 2, 2)
    crossed = (*third[:4], (5, 4), (5, 4), *third[6:])
    assert "ranks 0 and 4" in meshes._problem_of((first, second, crossed))
