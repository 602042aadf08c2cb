"""Compute the bytes that a rank sends by collective, link and unit, in a ring and at least."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.step import CollectiveCall, Link, Phase

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


def ring_bytes(call: CollectiveCall) -> int:
    """Return the bytes that each rank sends (and receives) in a ring: (n-1)/n of the full buffer, twice for an
    all-reduce."""
    return (2 if call.op == ALL_REDUCE else 1) * _of_others(call.num_bytes, call.ranks)


def _of_others(num_bytes: int, ranks: int) -> int:
    return num_bytes * (ranks - 1) // ranks if ranks else 0


def least_bytes(call: CollectiveCall) -> int:
    """Return a lower bound of the bytes that a rank sends (or receives), for any algorithm.

    Equal to a ring, except that an all-reduce counts half: reduction in the switch (NVLink SHARP) saves the second
    pass.
    """
    return 0 if call.op not in _MOVING else _of_others(call.num_bytes, call.ranks)


_MOVING = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


def node_bytes(call: CollectiveCall) -> int:
    """Return a lower bound of a rank's share of the bytes that its node receives from (or sends to) other nodes.

    A node must receive the data of other nodes at least once. The ranks of the node share this traffic, because each
    rank has a network adapter. In an all-reduce of HSDP, the group has one rank per node, which has no others to share
    with.
    """
    if call.link is not Link.INTER or call.op not in _MOVING:
        return 0
    on_node = call.ranks_on_node or 1
    return call.num_bytes * (call.ranks - on_node) // call.ranks // on_node


def ring_node_bytes(call: CollectiveCall) -> int:
    """Return a rank's share of the bytes that its node sends to other nodes in a ring.

    One rank per node sends to another node, as many bytes as any rank sends. With one ring per network adapter, the
    ranks of a node share this traffic.
    """
    return ring_bytes(call) // (call.ranks_on_node or 1) if call.link is Link.INTER else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Value):
    """The sum of a step's collectives with the same operator, phase, group size and link.

    Args:
        num_bytes: Bytes of the full buffers.
        ring_bytes: Bytes that each rank sends in a ring.
        node_bytes: A rank's share of the bytes that its node sends to other nodes in a ring.
    """

    op: str
    phase: Phase
    ranks: int
    link: Link
    calls: int
    num_bytes: int
    ring_bytes: int
    node_bytes: int


def traffic(calls: Iterable[CollectiveCall]) -> tuple[Traffic, ...]:
    """Group the collectives of a step by operator, phase, group size and link, in the order of their first call."""
    alike: dict[tuple[str, Phase, int, Link], list[CollectiveCall]] = {}
    for call in calls:
        alike.setdefault((call.op, call.phase, call.ranks, call.link), []).append(call)
    return tuple(
        Traffic(
            op=op,
            phase=phase,
            ranks=ranks,
            link=link,
            calls=len(each),
            num_bytes=sum(call.num_bytes for call in each),
            ring_bytes=sum(map(ring_bytes, each)),
            node_bytes=sum(map(ring_node_bytes, each)),
        )
        for (op, phase, ranks, link), each in alike.items()
    )


def sent_by_unit(calls: Iterable[CollectiveCall]) -> Counter[tuple[str, Link]]:
    """Ring bytes of each unit in a step, over each link."""
    found: Counter[tuple[str, Link]] = Counter()
    for call in calls:
        found[call.unit, call.link] += ring_bytes(call)
    return found
