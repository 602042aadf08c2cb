"""What an estimate of one step says: its memory as a timeline, its collectives, its units."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value


class Phase(enum.Enum):
    """The part of a step in which something happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(enum.Enum):
    """What memory on a rank's device holds, in the order in which pictures stack it."""

    PARAMETERS = "parameters"  # the rank's own shards
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"  # sharded, as the optimizer finds them
    GATHERED = "gathered parameters"  # unsharded, and what is kept of them between forward and backward
    UNSHARDED_GRADIENTS = "unsharded gradients"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations"
    LOSS = "output layer and loss"


class Link(enum.Enum):
    """Over what a group's ranks reach each other."""

    NONE = "none"  # a group of one rank
    INTRA = "intra"  # all on one node
    INTER = "inter"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample(Value):
    """The memory of a rank's device from one moment of the step to the next: the largest sum in between.

    Args:
        microbatch: Counted from 0; -1 for what comes after the last.
        event: Its place in the ``MicrobatchTrace``; -1 in the optimizer's step.
        label: What happens, for a person.
        bytes_by_kind: One number for each ``Kind``, in its order.
    """

    phase: Phase
    microbatch: int
    event: int
    unit: str
    label: str
    bytes_by_kind: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_kind)

    def bytes_of(self, kind: Kind) -> int:
        return self.bytes_by_kind[_PLACE[kind]]


_PLACE = {kind: place for place, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall(Value):
    """One collective that a rank takes part in.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``.
        num_bytes: The full buffer: the output of an all-gather, the input of a reduce-scatter or an all-reduce.
        ranks: The group's size.
        ranks_on_node: How many of them lie on this rank's node; 0 where nobody has said.
        sample: The place in the timeline at which it is issued.
    """

    op: str
    phase: Phase
    unit: str
    num_bytes: int
    ranks: int
    ranks_on_node: int = 0
    link: Link
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate(Value):
    """One training step of one rank.

    Args:
        host_bytes: Of the host's memory, per rank: what is offloaded.
        timeline: From the first microbatch's forward to the optimizer's step.
        calls: In the order in which they are issued.
        notes: What was assumed, in whole sentences.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    timeline: tuple[MemorySample, ...]
    calls: tuple[CollectiveCall, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> MemorySample:
        """The first moment at which the most memory is taken."""
        return max(self.timeline, key=lambda sample: sample.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes
