"""What a rank sends: bytes by collective, by link and by unit, and the least that any algorithm has to move."""

from collections.abc import Iterable
from dataclasses import dataclass

from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.step import CollectiveCall, Link, Phase

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


def ring_bytes(call: CollectiveCall) -> int:
    """What each rank sends (and receives) in a ring: (n-1)/n of the full buffer; of an all-reduce that twice."""
    return (2 if call.op == ALL_REDUCE else 1) * _of_others(call.num_bytes, call.ranks)


def _of_others(num_bytes: int, ranks: int) -> int:
    return num_bytes * (ranks - 1) // ranks if ranks else 0


def least_bytes(call: CollectiveCall) -> int:
    """What has to leave (or reach) a rank whatever the algorithm.

    As in a ring, but of an all-reduce the half: a switch that adds up (NVLink SHARP) spares the second way.
    """
    return 0 if call.op not in _MOVING else _of_others(call.num_bytes, call.ranks)


_MOVING = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


def node_bytes(call: CollectiveCall) -> int:
    """A rank's share of what has to reach its node from others (or leave it), whatever the algorithm.

    The ranks of a node have a network adapter each and share this work: of a buffer, what lies on other nodes crosses
    once for all of them. A hybrid's all-reduce has one rank of its group on a node, which sends all of it.
    """
    if call.link is not Link.INTER or call.op not in _MOVING:
        return 0
    on_node = call.ranks_on_node or 1
    return call.num_bytes * (call.ranks - on_node) // call.ranks // on_node


def ring_node_bytes(call: CollectiveCall) -> int:
    """A rank's share of what its node sends to others in a ring.

    A ring that visits one node after the other leaves each of them once, with as much as passes between two ranks; the
    ranks of a node share this work, in a ring for each of their network adapters.
    """
    return ring_bytes(call) // (call.ranks_on_node or 1) if call.link is Link.INTER else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Value):
    """Collectives of a step that are alike.

    Args:
        num_bytes: Of their full buffers.
        ring_bytes: That each rank sends in a ring.
        node_bytes: A rank's share of what its node sends to others in a ring.
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
    """All collectives of a step by operator, phase, group size and link, in the order in which they first occur."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes(Value):
    """What a rank sends in rings of groups that lie on one node, and of groups that do not."""

    intra: int = 0
    inter: int = 0


def sent_by_unit(calls: Iterable[CollectiveCall]) -> dict[str, LinkBytes]:
    """The ring's bytes of each unit in a step."""
    found: dict[str, dict[Link, int]] = {}
    for call in calls:
        of_unit = found.setdefault(call.unit, {})
        of_unit[call.link] = of_unit.get(call.link, 0) + ring_bytes(call)
    return {
        name: LinkBytes(intra=links.get(Link.INTRA, 0), inter=links.get(Link.INTER, 0)) for name, links in found.items()
    }
