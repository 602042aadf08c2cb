"""The FSDP2 target in plain values: a mesh that does not fit is refused, with numbers that would fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2 import ConfigError, MeshSpec, ShardingConfig
from composer_fsdp2.config.mesh import AxisRole, GroupRule, MeshAxis, RankGroups
from composer_fsdp2.config.sharding import check_reshard_degree
from composer_fsdp2.config.wrap import Wrap, WrapKind


@pytest.mark.parametrize(
    ("spec", "world_size", "shape"),
    [
        (MeshSpec(), 8, (8,)),
        (MeshSpec.of_degrees(shard=8), 8, (8,)),
        (MeshSpec.of_degrees(replicate=2), 8, (2, 4)),
        (MeshSpec.of_degrees(shard=2, replicate=-1), 8, (4, 2)),
        (MeshSpec.of_degrees(shard=1, replicate=-1), 3, (3, 1)),
        (MeshSpec.of_degrees(replicate=1), 4, (1, 4)),
    ],
)
def test_open_degree_takes_what_the_world_size_leaves(spec: MeshSpec, world_size: int, shape: tuple[int, ...]):
    """-1 stands for the remaining ranks, so a job's layout is unchanged; replicas are the outer axis, as in Composer's
    mesh."""
    resolved = spec.resolve(world_size)
    assert resolved.shape == shape
    assert resolved.is_resolved and resolved.size == world_size
    assert resolved.axis_names == ("data_parallel_replicate", "data_parallel_shard")[-len(shape) :]


@given(st.integers(1, 512), st.integers(1, 512) | st.just(-1), st.integers(1, 64) | st.just(-1) | st.none())
@examples(100)
def test_resolve_fills_the_world_or_refuses(world_size: int, shard: int, replicate: int | None):
    """Every rank is in the mesh exactly once, or the degrees are refused."""
    if shard == replicate == -1:
        return
    spec = MeshSpec.of_degrees(shard=shard, replicate=replicate)
    given_ranks = (1 if shard == -1 else shard) * (1 if replicate in (-1, None) else replicate)
    is_open = -1 in (shard, replicate)
    fits = world_size % given_ranks == 0 if is_open else world_size == given_ranks
    if not fits:
        with pytest.raises(ConfigError):
            spec.resolve(world_size)
        return
    resolved = spec.resolve(world_size)
    assert resolved.size == world_size
    assert shard in (-1, resolved.shard_degree)
    assert replicate in (-1, resolved.replicate_degree if resolved.has_replicas else None)


OF_8 = MeshSpec.of_degrees(shard=8)


@pytest.mark.parametrize(
    ("mesh", "reshard"), [*((OF_8, group) for group in (True, False, 1, 2, 4, 8)), (MeshSpec(), 3)]
)
def test_reshard_group_sizes_that_divide_are_accepted(mesh: MeshSpec, reshard: bool | int):
    """Every group size that fully_shard accepts on 8 ranks is accepted, and any size if the world size is unknown."""
    assert ShardingConfig(mesh=mesh, reshard_after_forward=reshard).reshard_after_forward is reshard


def test_mesh_reads_as_a_sentence():
    """The log of a run describes its mesh."""
    spec = MeshSpec.of_degrees(shard=4, replicate=2, device_type="cuda")
    assert str(spec) == "cuda mesh, data_parallel_replicate 2 x data_parallel_shard 4"
    assert [axis["size"] for axis in spec.to_json()["axes"]] == [2, 4]


def test_groups_of_ranks():
    """Composer's setK are groups of K consecutive ranks, modK are K groups; the groups decide which gradients are
    averaged."""
    rows = RankGroups(rule=GroupRule.CONSECUTIVE, number=2)
    columns = RankGroups(rule=GroupRule.STRIDED, number=2)
    assert [rows.members(rank, 6) for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert [columns.members(rank, 6) for rank in range(6)] == [(0, 2, 4), (1, 3, 5)] * 3
    assert (rows.size(6), columns.size(6)) == (2, 3)
    given = RankGroups(rule=GroupRule.GIVEN, ranks=(5, 1))
    assert (given.members(1, 6), given.size(6)) == ((1, 5), 2)


def test_meshes_of_groups():
    """A group is a 1-D mesh, a pair a 2-D one, and with NO_SHARD the ranks have full parameters."""
    rows = RankGroups(rule=GroupRule.CONSECUTIVE, number=2)
    columns = RankGroups(rule=GroupRule.STRIDED, number=2)
    assert MeshSpec.of_groups(rows).resolve(6).shape == (2,)
    assert MeshSpec.of_groups(rows, columns).resolve(6).shape == (3, 2)
    whole = MeshSpec.of_groups(columns).without_shards().resolve(6)
    assert (whole.shape, whole.axis_names) == ((3, 1), ("data_parallel_replicate", "data_parallel_shard"))
    with pytest.raises(ConfigError, match="no common group"):
        MeshSpec.of_groups(rows, columns).without_shards()
    assert MeshSpec.of_groups(rows).resolve(2) == MeshSpec.of_degrees(shard=2), "a node that is alone has all ranks"
    assert MeshSpec.of_groups(rows).without_shards().resolve(2) == MeshSpec.of_degrees(replicate=2, shard=1)
    assert MeshSpec.of_degrees(shard=4).without_shards() == MeshSpec.of_degrees(replicate=4, shard=1)
    assert MeshSpec().without_shards().resolve(4) == MeshSpec.of_degrees(replicate=4, shard=1)


def test_full_parameters_leave_other_axes_alone():
    """NO_SHARD with tensor parallelism replicates instead of sharding; layers stay TP-sharded over the same ranks."""
    replicas, shards, tensor = (
        MeshAxis(name=role.value, role=role, size=2) for role in (AxisRole.REPLICATE, AxisRole.SHARD, AxisRole.TENSOR)
    )
    for axes, shape in (
        ((shards, tensor), (2, 1, 2)),
        ((replicas, shards, tensor), (4, 1, 2)),
        ((tensor, replicas, shards), (2, 4, 1)),
    ):
        whole = MeshSpec(axes=axes).without_shards()
        assert whole.shape == shape and tensor in whole.axes
        assert whole.size == MeshSpec(axes=axes).size
        assert whole.degree(AxisRole.SHARD) == 1


REPLICAS, SHARDS = "data_parallel_replicate_degree", "data_parallel_shard_degree"
SIZE, CLASSES = WrapKind.SIZE, WrapKind.CLASSES
ROWS, COLUMNS, GIVEN = GroupRule.CONSECUTIVE, GroupRule.STRIDED, GroupRule.GIVEN
# An invalid value, the error's text, and the keys to change.
REFUSED: list[tuple[Callable[[], object], str, tuple[str, ...] | None]] = [
    *(
        (
            lambda degrees=degrees, size=world_size: MeshSpec.of_degrees(**degrees).resolve(size),
            rf"world size (is )?{world_size}\b.*use {re.escape(numbers)}$",
            keys,
        )
        for degrees, world_size, numbers, keys in (
            ({"shard": 8}, 12, "1, 2, 3, 4, 6 or 12", (SHARDS,)),
            ({"replicate": 8}, 12, "1, 2, 3, 4, 6 or 12", (REPLICAS,)),
            ({"shard": 5, "replicate": -1}, 4, "1, 2 or 4", None),
            ({"shard": 2, "replicate": 2}, 6, "1, 2, 3 or 6", (REPLICAS, SHARDS)),
            ({"shard": 2}, 1, "1", (SHARDS,)),
        )
    ),
    *(
        (lambda degrees=degrees: MeshSpec.of_degrees(**degrees), r"data_parallel_.*_degree", keys)
        for degrees, keys in (
            ({"shard": 0}, (SHARDS,)),
            ({"shard": -2}, (SHARDS,)),
            ({"replicate": 0}, None),
            ({"shard": -1, "replicate": -1}, None),
        )
    ),
    *(
        (
            lambda group=group: ShardingConfig(
                mesh=MeshSpec.of_degrees(shard=8, replicate=2), reshard_after_forward=group
            ),
            message,
            None,
        )
        for group, message in (
            (3, "does not divide the 8 ranks.*use 1, 2, 4 or 8"),
            (0, "give true"),
            (-1, "give true"),
        )
    ),
    (
        lambda: check_reshard_degree(3, MeshSpec.of_degrees(shard=4), "blocks.0"),
        r"blocks\.0: reshard_after_forward 3",
        None,
    ),
    (lambda: RankGroups(rule=ROWS, number=4).check(6), "use set1, set2, set3 or set6", ("process_group",)),
    (lambda: RankGroups(rule=COLUMNS, number=4).check(6), "process_group mod4; use mod1", None),
    (lambda: RankGroups(rule=GIVEN, ranks=(0, 6)).check(6), "rank 6, but the world size is 6", ("process_group",)),
    (lambda: RankGroups(rule=GIVEN, ranks=(1, 1)), "list of different ranks", None),
    (lambda: RankGroups(rule=GIVEN), "list of different ranks", None),
    (lambda: RankGroups(rule=ROWS), "set0, which does not divide", None),
    # A size policy without a number would create no units, and could not be written to a file.
    *(
        (lambda given=given: Wrap(**given), re.escape(words), None)
        for given, words in (
            ({"kind": SIZE}, "min_num_params=0; give a number from 1 on"),
            ({"kind": SIZE, "min_num_params": -1}, "min_num_params=-1; give a number from 1 on"),
            ({"kind": SIZE, "min_num_params": 1, "classes": ("A",)}, "SIZE has no use for classes=('A',)"),
            ({"kind": CLASSES, "min_num_params": 1}, "CLASSES has no use for min_num_params=1"),
            ({"kind": WrapKind.ROOT, "classes": ("A",)}, "ROOT has no use for classes=('A',)"),
            ({"embeddings": True}, "HOOKS has no use for embeddings=True"),
        )
    ),
]


@pytest.mark.parametrize(("make", "message", "keys"), REFUSED)
def test_what_cannot_be_is_refused_when_it_is_written(
    make: Callable[[], object], message: str, keys: tuple[str, ...] | None
):
    """A user who moves to another number of GPUs reads the correct value before the job has its GPUs; a report points
    to the line of the file to change."""
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert keys in (None, caught.value.keys)
