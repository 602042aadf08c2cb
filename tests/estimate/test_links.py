"""The bytes that a rank sends over each link, compared with tables by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import Model
from support.translations import config_of

from composer_fsdp2 import estimate_step, plan_sharding
from composer_fsdp2.estimate.links import node_bytes, ring_bytes, ring_node_bytes, sent_by_unit, traffic
from composer_fsdp2.estimate.step import CollectiveCall, Link, Phase, StepEstimate

pytestmark = pytest.mark.any_torch

FULL, BLOCK, ROOT = 4 * 960, 4 * 280, 4 * 400  # bytes of the model, and of its units

# Each row: operator, phase, ranks, link, calls, bytes of the buffers, bytes that a rank sends in a ring.
Row = tuple[str, str, int, str, int, int, int]


def step_of(config: dict[str, Any], *, world_size: int, gpus_per_node: int) -> StepEstimate:
    """A step of two blocks of 280 elements and a root of 400, all sharded without padding, in fp32."""
    model = Model(num_blocks=2, width=8, vocabulary=24)
    plan = plan_sharding(model, config_of(config, precision="fp32", world_size=world_size), precision="fp32")
    return estimate_step(plan, world_size=world_size, gpus_per_node=gpus_per_node)


def rows(estimate: StepEstimate) -> set[Row]:
    return {
        (each.op, each.phase.value, each.ranks, each.link.value, each.calls, each.num_bytes, each.ring_bytes)
        for each in traffic(estimate.calls)
    }


FSDP = {"sharding_strategy": "FULL_SHARD"}
HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
# For four ranks on two nodes.
STEPS: dict[str, tuple[dict[str, Any], set[Row]]] = {
    "each gather and each reduction sends three quarters of its buffer between nodes": (
        FSDP,
        {
            ("all_gather", "forward", 4, "inter", 3, FULL, FULL * 3 // 4),
            ("all_gather", "backward", 4, "inter", 2, FULL - ROOT, (FULL - ROOT) * 3 // 4),
            ("reduce_scatter", "backward", 4, "inter", 3, FULL, FULL * 3 // 4),
        },
    ),
    # Shards on a node, replicas across nodes.
    "gathers stay on the node, and an all-reduce of half of each unit crosses": (
        HSDP,
        {
            ("all_gather", "forward", 2, "intra", 3, FULL, FULL // 2),
            ("all_gather", "backward", 2, "intra", 2, FULL - ROOT, (FULL - ROOT) // 2),
            ("reduce_scatter", "backward", 2, "intra", 3, FULL, FULL // 2),
            ("all_reduce", "backward", 2, "inter", 3, FULL // 2, FULL // 2),  # twice a half of a half
        },
    ),
    # With two ranks as reshard_after_forward.
    "the second gather of a block is on the node": (
        FSDP | {"reshard_after_forward": 2},
        {
            ("all_gather", "forward", 4, "inter", 3, FULL, FULL * 3 // 4),
            ("all_gather", "backward", 2, "intra", 2, FULL - ROOT, (FULL - ROOT) // 2),
            ("reduce_scatter", "backward", 4, "inter", 3, FULL, FULL * 3 // 4),
        },
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_each_collective_goes_over_its_link(what: str):
    """Otherwise a run that is limited by its network would appear not to be."""
    config, expected = STEPS[what]
    assert rows(step_of(config, world_size=4, gpus_per_node=2)) == expected


def test_what_a_unit_sends():
    """With all ranks on one node nothing is sent to another; on two nodes each unit sends its own part of the table
    above."""
    sent = sent_by_unit(step_of(FSDP, world_size=4, gpus_per_node=2).calls)
    assert {link for _, link in sent} == {Link.INTER}
    assert sorted(sent.values()) == sorted([2 * ROOT * 3 // 4, *[3 * BLOCK * 3 // 4] * 2])
    estimate = step_of(FSDP, world_size=4, gpus_per_node=4)
    assert {each.link for each in traffic(estimate.calls)} == {Link.INTRA}
    assert sum(map(ring_node_bytes, estimate.calls)) == 0


def test_what_crosses_to_other_nodes():
    """Eight ranks on two nodes, buffers of 800 bytes: 400 are on the other node, and four ranks share the transfer.

    In a ring each rank sends 700 to the next, and so the last rank of a node to the first of another.
    """

    def call(op: str, ranks: int, on_node: int, link: Link = Link.INTER) -> CollectiveCall:
        return CollectiveCall(
            op=op, phase=Phase.FORWARD, unit="", num_bytes=800, ranks=ranks, ranks_on_node=on_node, link=link, sample=0
        )

    assert [
        (ring_bytes(each), ring_node_bytes(each), node_bytes(each))
        for each in (
            call("all_gather", 8, 4),
            call("reduce_scatter", 8, 4),
            call("all_reduce", 2, 1),
            call("all_gather", 4, 4, Link.INTRA),
            call("all_gather", 1, 1, Link.NONE),
        )
    ] == [(700, 175, 100), (700, 175, 100), (800, 800, 400), (600, 0, 0), (0, 0, 0)]
