"""From numbers to torch's DeviceMesh."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from composer_fsdp2 import MeshSpec, mesh
from composer_fsdp2.config import GroupRule, RankGroups
from composer_fsdp2.mesh import device_mesh, device_of


def check_meshes() -> tuple[list[list[int]], tuple[str, ...] | None, str]:
    made = device_mesh(MeshSpec(shard=2, replicate=2))
    assert device_mesh(MeshSpec(shard=2, replicate=2)) == made, "two meshes of one spec are different"
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


def test_an_open_spec_is_a_mistake_of_ours():
    """-1 reaches no mesh: torch would take it for a size."""
    with pytest.raises(AssertionError, match="resolve"):
        device_mesh(MeshSpec())


# ---------------------------------------------------------------------------------------------------------------------
# Groups of a thousand ranks, simulated: each rank's part is computed here, one after the other


class Sent(Exception):
    """What a rank would send, in place of sending it."""


def tables_as_rank(rank: int, specs: list[MeshSpec], gather: Any) -> Any:
    with (
        mock.patch.object(mesh.dist, "get_rank", return_value=rank),
        mock.patch.object(mesh.dist, "get_world_size", return_value=NUM_RANKS),
        mock.patch.object(mesh, "gather", gather),
    ):
        return mesh._group_tables(specs)


def sent_by(rank: int, specs: list[MeshSpec]) -> Any:
    def gather(value: Any) -> Any:
        raise Sent(value)

    try:
        tables_as_rank(rank, specs, gather)
    except Sent as sent:
        return sent.args[0]
    raise AssertionError("nothing was sent")


NUM_RANKS, NUM_UNITS = 1024, 80
OF_A_NODE = RankGroups(rule=GroupRule.CONSECUTIVE, number=8)
ACROSS_NODES = RankGroups(rule=GroupRule.STRIDED, number=8)


def test_the_groups_of_many_ranks_are_small_and_looked_at_once():
    """80 units in nodes of 8 took 13 s at 1,024 ranks: each unit's table was checked, though they are one table."""
    in_nodes = MeshSpec(shard=8, replicate=128, shard_groups=OF_A_NODE, replicate_groups=ACROSS_NODES)
    in_pairs = MeshSpec(shard=2, shard_groups=RankGroups(rule=GroupRule.CONSECUTIVE, number=2))
    specs = [in_nodes] * NUM_UNITS + [in_pairs]
    of_ranks = [sent_by(rank, specs) for rank in range(NUM_RANKS)]
    assert max(len(pickle.dumps(sent)) for sent in of_ranks) <= 1024
    with mock.patch.object(mesh, "_problem_of", wraps=mesh._problem_of) as problem_of:
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
        [
            MeshSpec(shard=len(table[rank]), shard_groups=RankGroups(rule=GroupRule.GIVEN, ranks=table[rank]))
            for table in first
        ]
        for rank in range(4)
    ]
    of_ranks = [sent_by(rank, given[rank]) for rank in range(4)]
    for rank in range(4):
        assert tables_as_rank(rank, given[rank], lambda value: of_ranks) == [(table,) for table in first]
