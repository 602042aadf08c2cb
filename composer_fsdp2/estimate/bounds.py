"""Lower bounds of a step's time on a machine: computation, communication and the part of it that cannot overlap.

No step is faster than these bounds. How much slower it is depends on ``UNKNOWN``.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace
from composer_fsdp2.estimate.links import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, least_bytes, node_bytes
from composer_fsdp2.estimate.step import CollectiveCall, Link, StepEstimate

UNKNOWN = (
    "contention on links and switches that other jobs, or this one's checkpoints and data, use too",
    "stragglers: a collective waits for the slowest of its ranks",
    "how near kernels come to the peak of the device, and what the optimizer's step takes",
    "data loading, and Python's time between kernels",
    "NCCL's choice of algorithm and protocol, and each collective's latency",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Value):
    """Peak speeds of one rank's device and links; None is unknown and bounds nothing.

    Args:
        flops: Floating-point operations per second, in bfloat16 if the peak depends on the dtype.
        fp8_flops: The same in fp8.
        intra_bytes_per_s: To other ranks on the node, in one direction.
        inter_bytes_per_s: To other nodes, in one direction: the rank's share of the node's network.
        sources: Sources of the numbers.
        pcie_bytes_per_s: To the host, in one direction.
        host_bytes_per_s: The rank's share of the host's memory bandwidth.
        achieved: The fraction of ``flops`` that published steps achieved.
    """

    flops: float | None = None
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    sources: tuple[str, ...] = ()
    fp8_flops: float | None = field(default=None, metadata={"json": False})
    pcie_bytes_per_s: float | None = field(default=None, metadata={"json": False})
    host_bytes_per_s: float | None = field(default=None, metadata={"json": False})
    achieved: float | None = field(default=None, metadata={"json": False})

    def computing_in(self, precision: str) -> "Machine":
        """The machine with the peak of a Composer precision, as if all matrix products ran in it."""
        return replace(self, flops=self.fp8_flops) if precision == "amp_fp8" and self.fp8_flops else self

    @property
    def has_any_speed(self) -> bool:
        return any((self.flops, self.intra_bytes_per_s, self.inter_bytes_per_s))


# Peaks from NVIDIA's white papers of the A100 and the H100 (the H200 has the same chip): dense bfloat16 and fp8 on
# tensor cores, NVLink in one direction (the papers add up both), and the DGX node's network with one adapter per GPU.
# PCIe: 16 lanes of generation 4 and 5. Host memory: a quarter of a socket, 8 channels of DDR4-3200 and DDR5-4800.
# Achieved: approximately LLM Foundry's HFU (with recomputation) for 7B to 70B parameters, 0.53 to 0.79 on the A100 and
# 0.38 to 0.59 on the H100 (its scripts/train/benchmarking/README.md).
GPUS = {
    "a100": Machine(
        flops=312e12,
        intra_bytes_per_s=300e9,
        inter_bytes_per_s=25e9,
        pcie_bytes_per_s=31.5e9,
        host_bytes_per_s=51.2e9,
        achieved=0.65,
        sources=("NVIDIA A100 SXM: 312 TFLOPS, NVLink 600 GB/s", "DGX A100: 8 × HDR 200 Gb/s"),
    ),
    "h100": Machine(
        flops=989.4e12,
        intra_bytes_per_s=450e9,
        inter_bytes_per_s=50e9,
        fp8_flops=1978.9e12,
        pcie_bytes_per_s=63e9,
        host_bytes_per_s=76.8e9,
        achieved=0.5,
        sources=("NVIDIA H100 SXM: 989.4 TFLOPS, 1978.9 in fp8, NVLink 900 GB/s", "DGX H100: 8 × NDR 400 Gb/s"),
    ),
}
GPUS["h200"] = replace(
    GPUS["h100"],
    sources=("NVIDIA H200 SXM: 989.4 TFLOPS, 1978.9 in fp8, NVLink 900 GB/s", "DGX H200: 8 × NDR 400 Gb/s"),
)
# From the data sheets of the A100 (PCIe), the L40S, HGX B200 and the MI300X: dense peaks, links in one direction. The
# network of a node is the DGX's for the B200, and unknown for the others, whose nodes differ.
GPUS["a100-pcie"] = replace(
    GPUS["a100"],
    intra_bytes_per_s=31.5e9,
    inter_bytes_per_s=None,
    sources=("NVIDIA A100 PCIe: 312 TFLOPS, PCIe 4.0 x16 64 GB/s (both directions)",),
)
GPUS["l40s"] = Machine(
    flops=362.05e12,
    fp8_flops=733e12,
    intra_bytes_per_s=31.5e9,
    pcie_bytes_per_s=31.5e9,
    sources=("NVIDIA L40S: 362.05 TFLOPS, 733 in fp8, PCIe 4.0 x16 64 GB/s (both directions)",),
)
GPUS["b200"] = Machine(
    flops=2250e12,
    fp8_flops=4500e12,
    intra_bytes_per_s=900e9,
    inter_bytes_per_s=50e9,
    pcie_bytes_per_s=63e9,
    sources=("NVIDIA B200 SXM: 2,250 TFLOPS, 4,500 in fp8, NVLink 1,800 GB/s", "DGX B200: 8 × NDR 400 Gb/s"),
)
GPUS["mi300x"] = Machine(
    flops=1307.4e12,
    fp8_flops=2614.9e12,
    intra_bytes_per_s=448e9,
    pcie_bytes_per_s=63e9,
    sources=("AMD Instinct MI300X: 1,307.4 TFLOPS, 2,614.9 in fp8, Infinity Fabric 896 GB/s (7 links)",),
)

# Without --gpu, the first of these with at least the device's memory is assumed.
_BY_MEMORY = {"a100": 40 * 2**30, "h100": 80 * 2**30, "h200": 141 * 2**30}


def with_assumed_speeds(given: Machine | None, memory_bytes: int) -> Machine:
    """Fill in missing speeds with those of a GPU with that much memory."""
    given = given or Machine()
    assumed = GPUS[next((name for name, most in _BY_MEMORY.items() if memory_bytes <= most), "h200")]
    names = {each.name for each in fields(given)} - {"sources", "fp8_flops"}
    lacking = [name for name in names if getattr(given, name) is None]
    if not lacking:
        return given
    sources = (*given.sources, *assumed.sources, "assumed from the memory; --gpu names another")
    return replace(given, **{name: getattr(assumed, name) for name in lacking}, sources=sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(Value):
    """Lower bounds of one step on one rank, in seconds.

    Args:
        flops: FLOPs of a rank, including recomputation.
        model_flops: FLOPs without recomputation.
        compute_s, intra_s, inter_s: Time of the computation, and of the traffic over each link, each without waiting.
            0 if the speed is unknown.
        lower_s: No step is shorter.
        serial_s: At these speeds without any overlap.
        exposed_s: ``lower_s`` minus ``compute_s``: communication that cannot overlap; None without FLOPs.
        mfu_at_most: ``model_flops`` over the device's peak in ``lower_s``; None without FLOPs.
    """

    machine: Machine
    flops: int
    model_flops: int
    compute_s: float
    intra_s: float
    inter_s: float
    lower_s: float
    serial_s: float
    exposed_s: float | None
    mfu_at_most: float | None
    unknown: tuple[str, ...] = UNKNOWN


def step_bounds(estimate: StepEstimate, trace: MicrobatchTrace | None, machine: Machine) -> Bounds:
    """Bound a step by its computation, its traffic, and the dependencies between them.

    Args:
        trace: The trace of ``estimate``; None: the computation is unknown.
    """
    timed = list(timed_step(estimate, trace, machine))
    compute_s = sum(each.seconds for each in timed if each.track == COMPUTE)
    flops = sum(each.flops for each in timed)
    recomputed = sum(event.recomputed_flops for event in trace.events) if trace else 0
    num_microbatches = 1 + max((sample.microbatch for sample in estimate.timeline), default=-1)
    model_flops = flops - recomputed * num_microbatches
    intra_s = sum(intra_node_s(call, machine) for call in estimate.calls)
    inter_s = sum(inter_node_s(call, machine) for call in estimate.calls)
    lower_s = max([compute_s, intra_s, inter_s, *(each.end_s for each in timed)])
    mfu = model_flops / (machine.flops * lower_s) if machine.flops and model_flops else None
    return Bounds(
        machine=machine,
        flops=flops,
        model_flops=model_flops,
        compute_s=compute_s,
        intra_s=intra_s,
        inter_s=inter_s,
        lower_s=lower_s,
        serial_s=sum(each.seconds for each in timed),
        exposed_s=lower_s - compute_s if compute_s else None,
        mfu_at_most=mfu,
    )


def call_s(call: CollectiveCall, machine: Machine) -> float:
    """A lower bound of one collective's time, without latency."""
    both = (machine.intra_bytes_per_s, machine.inter_bytes_per_s)
    # In a group over several nodes, a rank may receive over both links at once.
    over_both_s = least_bytes(call) / sum(both) if call.link is Link.INTER and all(both) else 0.0  # type: ignore[arg-type]
    return max(intra_node_s(call, machine), inter_node_s(call, machine), over_both_s)


def intra_node_s(call: CollectiveCall, machine: Machine) -> float:
    """The time on the link within the node; in a group over several nodes, only for data of the node's other ranks."""
    if not machine.intra_bytes_per_s or call.link is Link.NONE:
        return 0.0
    num_bytes = least_bytes(call)
    if call.link is Link.INTER:
        num_bytes = num_bytes * (call.ranks_on_node - 1) // (call.ranks - 1) if call.ranks_on_node else 0
    return num_bytes / machine.intra_bytes_per_s


def inter_node_s(call: CollectiveCall, machine: Machine) -> float:
    return node_bytes(call) / machine.inter_bytes_per_s if machine.inter_bytes_per_s else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# A schedule that no step can beat

COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Value):
    """A scheduled computation or collective.

    Args:
        track: ``COMPUTE``, or a collective's operator.
        sample: Index into the estimate's timeline.
    """

    track: str
    label: str
    sample: int
    start_s: float
    seconds: float
    num_bytes: int = 0
    flops: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def timed_step(estimate: StepEstimate, trace: MicrobatchTrace | None, machine: Machine) -> Iterator[Timed]:
    """Schedule a step in issue order, as early as its dependencies allow.

    All-gathers run on one stream with unlimited prefetching; reduce-scatters and all-reduces have a stream each. A unit
    computes after its all-gather, and its gradients are reduced after they are computed. Other dependencies of a real
    step are ignored, which keeps this a lower bound.
    """
    by_sample: defaultdict[int, list[CollectiveCall]] = defaultdict(list)
    for call in estimate.calls:
        by_sample[call.sample].append(call)
    events = trace.events if trace is not None else ()
    computed_s = 0.0
    free_s: dict[str, float] = {}  # when an operator's stream is free
    done_s: dict[tuple[str, str], float] = {}  # when an operator has run for a unit
    for place, sample in enumerate(estimate.timeline):
        for call in by_sample[place]:
            start_s = free_s.get(call.op, 0.0)
            if call.op != ALL_GATHER:
                start_s = max(start_s, computed_s)
            if call.op == ALL_REDUCE:
                start_s = max(start_s, done_s.get((REDUCE_SCATTER, call.unit), 0.0))
            seconds = call_s(call, machine)
            free_s[call.op] = done_s[call.op, call.unit] = start_s + seconds
            yield Timed(
                track=call.op,
                label=call.unit,
                sample=place,
                start_s=start_s,
                seconds=seconds,
                num_bytes=call.num_bytes,
            )
        if 0 <= sample.event < len(events):
            event = events[sample.event]
            if event.hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD):
                computed_s = max(computed_s, done_s.get((ALL_GATHER, event.unit), 0.0))
            seconds = event.flops / machine.flops if machine.flops else 0.0
            yield Timed(
                track=COMPUTE,
                label=sample.label,
                sample=place,
                start_s=computed_s,
                seconds=seconds,
                flops=event.flops,
            )
            computed_s += seconds
