"""The estimate of one step: a memory timeline and its collectives."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value


class Phase(enum.Enum):
    """The phase of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(enum.Enum):
    """A kind of device memory of a rank, in the order in which charts stack them."""

    PARAMETERS = "parameters"  # the rank's own shards
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"  # sharded, as the optimizer reads them
    GATHERED = "gathered parameters"  # unsharded, or resharded to a smaller mesh between forward and backward
    UNSHARDED_GRADIENTS = "unsharded gradients"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations"
    LOSS = "output layer and loss"


class Link(enum.Enum):
    """The link between a group's ranks."""

    NONE = "none"  # a group of one rank
    INTRA = "intra"  # all on one node
    INTER = "inter"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample(Value):
    """The peak device memory of a rank between two consecutive events of a step.

    Args:
        microbatch: Index from 0; -1 in the optimizer's step.
        event: Index into the events of the ``MicrobatchTrace``; -1 in the optimizer's step.
        label: A human-readable name of the event.
        bytes_by_kind: One number per ``Kind``, in the order of the enum.
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
    """One collective issued by a rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``.
        num_bytes: Bytes of the full buffer: the output of an all-gather, the input of a reduce-scatter or an
            all-reduce.
        ranks: The size of the group.
        ranks_on_node: How many ranks of the group are on this rank's node; 0 if unknown.
        sample: Index of the sample in the timeline during which the collective is issued.
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
    """The estimated memory and collectives of one training step on one rank.

    Args:
        host_bytes: Host memory per rank, of offloaded parameters, gradients, state and activations.
        timeline: Memory samples from the first forward to the optimizer's step.
        calls: The collectives in the order in which they are issued.
        notes: Assumptions, as sentences.

    Example:
        >>> plan = plan_sharding(nn.Sequential(nn.Linear(1024, 1024)), translate({}, device="cpu").config)
        >>> [call.op for call in estimate_step(plan, world_size=8).calls]
        ['all_gather', 'reduce_scatter']
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
        """The first sample with the largest total."""
        return max(self.timeline, key=lambda sample: sample.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes
