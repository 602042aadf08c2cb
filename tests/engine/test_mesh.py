"""From numbers to torch's DeviceMesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from composer_fsdp2 import MeshSpec
from composer_fsdp2.mesh import device_mesh, device_of


def check_meshes() -> tuple[list[list[int]], tuple[str, ...] | None, str]:
    mesh = device_mesh(MeshSpec(shard=2, replicate=2))
    assert device_mesh(MeshSpec(shard=2, replicate=2)) == mesh, "two meshes of one spec are different"
    sums = []
    for axis in range(2):
        rank = torch.tensor(dist.get_rank())
        dist.all_reduce(rank, group=mesh.get_group(axis))
        sums.append(rank.item())
    return mesh.mesh.tolist(), mesh.mesh_dim_names, f"{device_of(mesh)} {sums}"


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
