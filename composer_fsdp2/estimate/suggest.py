"""The cheapest settings with which a run fits a given memory: a search over plans, which knows no file format.

Cheapest is lexicographic: bytes between nodes, then floating-point operations done a second time, then collectives,
then bytes in the host's memory. What is in none of them better than another proposal is no proposal.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from composer_fsdp2.config.mesh import AxisRole
from composer_fsdp2.config.sharding import Accumulation
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.links import ring_node_bytes
from composer_fsdp2.estimate.optimizers import OptimizerState
from composer_fsdp2.estimate.replay import StateOfStep, StateSample, estimate_step, state_of_step
from composer_fsdp2.estimate.settings import (
    Activations,
    Settings,
    Space,
    blocks_of,
    is_same,
    plan_with,
    present_settings,
    treatments_of_blocks,
)
from composer_fsdp2.estimate.step import Kind, MemorySample, StepEstimate
from composer_fsdp2.sharding.plan import ShardingPlan

MAX_PROPOSALS = 3


# ---------------------------------------------------------------------------------------------------------------------
# What a choice costs, and what it takes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cost(Value):
    """What a step costs a rank, the dearest first.

    Args:
        inter_node_bytes: That it sends to other nodes, in rings that visit one node after the other.
        recomputed_flops: Floating-point operations that it does a second time.
        calls: Collectives that it takes part in.
        offloaded_bytes: Of the host's memory.
    """

    inter_node_bytes: int
    recomputed_flops: int
    calls: int
    offloaded_bytes: int

    def is_nowhere_better_than(self, other: "Cost") -> bool:
        mine, theirs = (
            (each.inter_node_bytes, each.recomputed_flops, each.calls, each.offloaded_bytes) for each in (self, other)
        )
        return all(map(operator.ge, mine, theirs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated(Value):
    """A choice, what it costs, and the moment of a step at which it takes the most memory."""

    settings: Settings
    cost: Cost
    peak: MemorySample

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    @property
    def fixed_bytes(self) -> int:
        """Of the peak, the activations, and the output layer and loss: no number of ranks makes them smaller."""
        return self.peak.bytes_of(Kind.ACTIVATIONS) + self.peak.bytes_of(Kind.LOSS)


def cost_of(estimate: StepEstimate, trace: MicrobatchTrace, num_microbatches: int) -> Cost:
    """Of a whole step."""
    return Cost(
        inter_node_bytes=sum(map(ring_node_bytes, estimate.calls)),
        recomputed_flops=num_microbatches * sum(event.recomputed_flops for event in trace.events),
        calls=len(estimate.calls),
        offloaded_bytes=estimate.host_bytes,
    )


# From what is done with activations, and the rows of a microbatch, to how it is computed.
Traces = Callable[[Activations, int], MicrobatchTrace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run that a search is about.

    Args:
        plan: Resolved for its number of ranks.
        rows: Of a batch, on one rank.
        microbatch_size: As the run has it.
        optimizer: As ``estimate_step`` takes it.
    """

    plan: ShardingPlan
    traces: Traces
    rows: int
    microbatch_size: int
    world_size: int
    gpus_per_node: int = 8
    optimizer: OptimizerState | None = None

    @property
    def present(self) -> Settings:
        """What the run has now."""
        return present_settings(self.plan, self.microbatch_size)

    @property
    def num_data_ranks(self) -> int:
        """How many ranks, or groups of them, have rows of their own."""
        return self.world_size // self.plan.config.data_block_size

    def num_microbatches(self, settings: Settings) -> int:
        """Of a batch, on one rank; the last may have fewer rows, and counts as a whole one."""
        return -(-self.rows // settings.microbatch_size)

    def cost(self, settings: Settings) -> Cost:
        """What a step costs with other settings."""
        trace = self.traces(settings.activations, settings.microbatch_size)
        return cost_of(self.estimate(settings), trace, self.num_microbatches(settings))

    def estimate(self, settings: Settings) -> StepEstimate:
        """The run with other settings, whole."""
        return estimate_step(
            plan_with(self.plan, settings),
            self.traces(settings.activations, settings.microbatch_size),
            world_size=self.world_size,
            optimizer=self.optimizer,
            num_microbatches=self.num_microbatches(settings),
            gpus_per_node=self.gpus_per_node,
        )

    def state(self, settings: Settings, num_microbatches: int) -> StateOfStep:
        """The run with other settings, but for its activations."""
        return state_of_step(
            plan_with(self.plan, settings),
            self.traces(settings.activations, settings.microbatch_size),
            world_size=self.world_size,
            optimizer=self.optimizer,
            num_microbatches=num_microbatches,
            gpus_per_node=self.gpus_per_node,
        )

    def space(self) -> Space:
        """All that may be proposed for it, and what it has."""
        present, mesh = self.present, self.plan.mesh
        shards = mesh.shard_degree * mesh.replicate_degree
        groups = tuple(size for size in _divisors(self.gpus_per_node) if size > 1)
        replicas = tuple(each for each in _divisors(shards)[:-1] if each == 1 or self._is_aligned(shards // each))
        activations = (Activations(), *treatments_of_blocks(self.plan)) if blocks_of(self.plan) else ()
        return Space(
            microbatch_sizes=_divisors(self.rows),
            replicas=_with(replicas if _may_replicate(self.plan) else (), present.replicas),
            reshards=_with((True, False, *groups), present.reshard_after_forward),
            activations=_with(activations, present.activations),
            cpu_offloads=(False, True),
        )

    def _is_aligned(self, num_shards: int) -> bool:
        """Whether groups of so many ranks lie on nodes alike; some of others send far more to nodes than rank 0's."""
        return self.gpus_per_node % num_shards == 0 or num_shards % self.gpus_per_node == 0


def _with(values: tuple, present: object) -> tuple:
    return values if any(is_same(value, present) for value in values) else (*values, present)


def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(dict.fromkeys((*small, *(number // each for each in reversed(small)))))


def _may_replicate(plan: ShardingPlan) -> bool:
    """Whether the ranks may be divided otherwise: all of one mesh, which shards and replicates only."""
    roles = {axis.role for axis in plan.mesh.axes}
    is_plain = roles <= {AxisRole.SHARD, AxisRole.REPLICATE} and not plan.mesh.is_grouped
    return is_plain and plan.config.data_block_size == 1 and all(unit.mesh == plan.mesh for unit in plan.units)


# ---------------------------------------------------------------------------------------------------------------------
# The search


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions(Value):
    """What a search found.

    Args:
        memory_bytes: What an estimate may take.
        present: The run as it is.
        proposals: The cheapest that fit, none of which is nowhere better than another, nor than the run as it is where
            that fits. Empty if that is the cheapest.
        nearest: Where nothing fits, what takes the least.
        num_points: How many choices there were.
    """

    memory_bytes: int
    present: Rated
    proposals: tuple[Rated, ...]
    nearest: Rated | None
    num_points: int

    @property
    def fits(self) -> bool:
        return self.present.peak_bytes <= self.memory_bytes


def suggest_settings(
    subject: Subject,
    memory_bytes: int,
    space: Space | None = None,
    *,
    host_bytes: int | None = None,
    present_peak: MemorySample | None = None,
    accepts: Callable[[Settings, int], bool] = lambda settings, peak_bytes: True,
) -> Suggestions:
    """Find the cheapest settings with which the run fits.

    Args:
        memory_bytes: What an estimate may take.
        space: What to search; None: all that may be proposed.
        host_bytes: What a rank may take of its host's memory; None: as much as of its own device.
        present_peak: Of the run as it is, where more is known of it than the search's traces tell.
        accepts: Whether a choice, which takes so many bytes, can be had at all; asked of those that fit, the cheapest
            first, as it may take long.
    """
    search, present = _Search(subject), subject.present
    now = search.rated(present)
    now = now if present_peak is None else replace(now, peak=present_peak)
    points = list(dict.fromkeys((*(space or subject.space()).points(subject.plan), present)))
    order = {point: (search.cost(point), len(point.changed_from(present))) for point in points}
    points.sort(key=order.__getitem__)
    fits = now.peak_bytes <= memory_bytes
    most = memory_bytes if host_bytes is None else host_bytes
    on_hosts = [point for point in points if point == present or order[point][0].offloaded_bytes <= most]
    cheaper = on_hosts[: on_hosts.index(present)] if fits else on_hosts
    chosen: list[Settings] = []
    for point in cheaper:
        if len(chosen) == MAX_PROPOSALS:
            break
        others = (*chosen, present) if fits else chosen
        if any(order[point][0].is_nowhere_better_than(order[other][0]) for other in others):
            continue
        if (peak := search.peak_bytes(point)) <= memory_bytes and accepts(point, peak):
            chosen.append(point)
    by_peak = [] if fits or chosen else sorted(on_hosts, key=search.peak_bytes)
    nearest = next((point for point in by_peak if accepts(point, search.peak_bytes(point))), None)
    return Suggestions(
        memory_bytes=memory_bytes,
        present=now,
        proposals=tuple(map(search.rated, chosen)),
        nearest=None if nearest is None else search.rated(nearest),
        num_points=len(points),
    )


class _Search:
    """The memory and the cost of every choice, each replayed as rarely as can be.

    [Note: state and activations apart] What a step's state takes depends neither on what is done with activations nor
    on the rows of a microbatch, as long as the same hooks run: they only meet in a sum, event by event. So a step is
    replayed once for each way to shard.

    [Note: microbatches alike] All microbatches but the first and the last are alike, and where nothing is put off until
    the last, all but the first. So two or three of them tell of any number.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._puts_off = subject.plan.config.accumulation != Accumulation()
        self._microbatches: dict[tuple[Activations, int], _Microbatch] = {}
        self._orders: dict[tuple, int] = {}  # of events
        self._steps: dict[tuple, _Step] = {}
        self._hosts: dict[tuple[int, bool], int] = {}

    def cost(self, settings: Settings) -> Cost:
        number = self._subject.num_microbatches(settings)
        # Where parameters lie changes nothing of what is sent, and how much there is needs no replay.
        step, microbatch = self._step(replace(settings, cpu_offload=False)), self._microbatch(settings)
        inter_node_bytes, calls = step.traffic_of(number)
        return Cost(
            inter_node_bytes=inter_node_bytes,
            recomputed_flops=number * microbatch.recomputed_flops,
            calls=calls,
            offloaded_bytes=self._host_bytes(settings) + microbatch.host_bytes,
        )

    def peak_bytes(self, settings: Settings) -> int:
        number = self._subject.num_microbatches(settings)
        step, microbatch = self._step(settings), self._microbatch(settings)
        return max(step.most_after, *map(operator.add, step.most_of(number), microbatch.held))

    def rated(self, settings: Settings) -> Rated:
        peak = self._subject.estimate(settings).peak
        assert peak.total_bytes == self.peak_bytes(settings), "a whole replay says the same"
        return Rated(settings=settings, cost=self.cost(settings), peak=peak)

    def _host_bytes(self, settings: Settings) -> int:
        key = (settings.replicas, settings.cpu_offload)
        if key not in self._hosts:
            self._hosts[key] = self._subject.state(settings, num_microbatches=0).host_bytes
        return self._hosts[key]

    def _microbatch(self, settings: Settings) -> "_Microbatch":
        key = (settings.activations, settings.microbatch_size)
        if key not in self._microbatches:
            trace = self._subject.traces(*key)
            events = tuple((event.moment, event.unit, event.parameter) for event in trace.events)
            order = self._orders.setdefault(events, len(self._orders))
            self._microbatches[key] = _Microbatch.of(trace, order)
        return self._microbatches[key]

    def _step(self, settings: Settings) -> "_Step":
        number = min(self._subject.num_microbatches(settings), 3) if self._puts_off else 2
        key = (
            number,
            settings.replicas,
            str(settings.reshard_after_forward),
            settings.cpu_offload,
            self._microbatch(settings).order,
        )
        if key not in self._steps:
            self._steps[key] = _Step.of(self._subject.state(settings, number), number)
        return self._steps[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """What a search needs of a trace.

    Args:
        order: The number of its order of events.
        held: What its activations take: while each event's hook runs, and then until the next.
    """

    order: int
    held: tuple[int, ...]
    recomputed_flops: int
    host_bytes: int

    @classmethod
    def of(cls, trace: MicrobatchTrace, order: int) -> "_Microbatch":
        both = ((each.live_bytes, max(each.live_bytes, each.peak_bytes)) for each in trace.events)
        return cls(
            order=order,
            held=tuple(chain.from_iterable(both)),
            recomputed_flops=sum(event.recomputed_flops for event in trace.events),
            host_bytes=trace.host_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a search needs of a step's state: of its microbatches one by one, and of what comes after them.

    Args:
        most: By number of microbatches, what all but activations takes, as ``_Microbatch.held`` has it; of more, the
            last.
        sent: Of each microbatch, bytes to other nodes and calls; of what comes after them, the last.
    """

    most: tuple[tuple[int, ...], ...]
    most_after: int
    sent: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, state: StateOfStep, num_microbatches: int) -> "_Step":
        held: list[list[StateSample]] = [[] for _ in range(num_microbatches + 1)]
        for sample in state.samples:
            held[sample.microbatch].append(sample)
        each = [_bytes_of(samples) for samples in held]
        sent = [[0, 0] for _ in held]
        for call in state.calls:
            of_part = sent[state.samples[call.sample].microbatch]
            of_part[0] += ring_node_bytes(call)
            of_part[1] += 1
        return cls(
            most=tuple(accumulate(each[:-1], lambda one, other: tuple(map(max, one, other)))),
            most_after=max(each[-1]),
            sent=tuple((one, other) for one, other in sent),
        )

    def most_of(self, num_microbatches: int) -> tuple[int, ...]:
        return self.most[min(num_microbatches, len(self.most)) - 1]

    def traffic_of(self, num_microbatches: int) -> tuple[int, int]:
        *microbatches, after = self.sent
        replayed = microbatches[:num_microbatches]
        further = [microbatches[1]] * (num_microbatches - len(replayed)) if len(microbatches) > 1 else []
        parts = (*replayed, *further, after)
        return sum(each[0] for each in parts), sum(each[1] for each in parts)


def _bytes_of(samples: Iterable[StateSample]) -> tuple[int, ...]:
    return tuple(chain.from_iterable((each.meanwhile_bytes, each.afterwards_bytes) for each in samples))
