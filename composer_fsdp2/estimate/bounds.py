"""Compute lower bounds of a step's time: computation, communication, and communication that cannot overlap.

No step is faster than these bounds. ``UNKNOWN`` lists the reasons why a real step is slower.
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
    """Peak speeds of one rank's device and links. A speed of None is unknown, and gives no bound.

    Args:
        flops: Floating-point operations per second, in bfloat16 if the peak depends on the dtype.
        fp8_flops: Floating-point operations per second in fp8.
        intra_bytes_per_s: Bandwidth to other ranks on the node, in one direction.
        inter_bytes_per_s: The rank's share of the node's network bandwidth, in one direction.
        sources: The sources of these numbers.
        pcie_bytes_per_s: Bandwidth to the host, in one direction.
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
        """Return the machine with the peak FLOPS of a Composer precision, as if all matrix products used it."""
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
    """Return ``given`` with missing speeds taken from a GPU model with that much memory."""
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
        compute_s, intra_s, inter_s: Time of the computation, and of the traffic over each link, each if it never waits.
            0 if the speed is unknown.
        lower_s: The lower bound of the step's time.
        serial_s: The time without any overlap of computation and communication.
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
    """Compute the lower bounds of a step from its computation, its traffic, and the dependencies between them.

    Args:
        trace: The trace from which ``estimate`` was computed. With None, the computation is unknown.
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
    """Return the time on the links within a node. Of a group across nodes, only traffic within the node is counted."""
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
MODEL = "the model's collectives"  # of its own computation, such as those of TP-sharded layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Value):
    """A computation or a collective with its time in the schedule.

    Args:
        track: ``COMPUTE``; ``MODEL`` for collectives of the model itself; or the operator of a collective of
            ``fully_shard``.
        sample: Index into the timeline of the estimate.
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


class _Streams:
    """Tracks when each CUDA stream of ``fully_shard`` is free, and models the waits between streams.

    In parentheses: the functions in torch/distributed/fsdp/_fully_shard that wait.

    - The all-gather stream waits for the computation where a root's forward begins (``FSDPState._root_pre_forward``).
      In forward it waits for the copy-out before the last one, because the buffer of that unit is freed then; in
      backward for the last one (``FSDPParamGroup.wait_for_unshard``). A unit that was resharded to fewer ranks is
      gathered after its forward (``FSDPParamGroup.reshard``).
    - The computation waits for its unit's all-gather (``foreach_all_gather_copy_out``), before a reduction for the
      previous reduce-scatter (``FSDPParamGroup.post_backward``), and at the end of backward for all reductions
      (``FSDPState._root_post_backward_final_callback``).
    - A reduce-scatter waits for the computation, an all-reduce for its reduce-scatter (``foreach_reduce``).
    """

    def __init__(self) -> None:
        self.free_s: defaultdict[str, float] = defaultdict(float)  # by operator, and of COMPUTE
        self._gathered_s: dict[str, float] = {}  # ends of all-gathers before their copy-out, by unit
        self._copied_out_s = 0.0  # FSDPCommContext.all_gather_state
        self._resharded_s: defaultdict[str, float] = defaultdict(float)  # when its last forward ended, by unit
        self._num_ranks: dict[str, int] = {}  # of a unit's first all-gather
        self._forward_root: str | None = None
        self._hook: Hook | None = None
        self._is_unshard = False
        self._unit = ""

    def begin(self, hook: Hook | None, unit: str) -> None:
        self._hook, self._unit = hook, unit
        self._is_unshard = hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD)
        if hook is Hook.PRE_FORWARD and self._forward_root is None:
            self._forward_root = unit
            self._wait(ALL_GATHER, self.free_s[COMPUTE])

    def send(self, call: CollectiveCall, seconds: float) -> float:
        """Start a collective of the current hook; returns when."""
        if call.op == ALL_GATHER or self._is_unshard:  # gathered parts of experts are sent by an all-to-all
            if call.unit != self._unit:  # a prefetch, after the hook's own unit
                self._copy_out()
            is_of_part = call.ranks < self._num_ranks.setdefault(call.unit, call.ranks)
            start_s = self.run(ALL_GATHER, seconds, self._resharded_s[call.unit] if is_of_part else 0.0)
            self._gathered_s[call.unit] = start_s + seconds
            return start_s
        if call.op == REDUCE_SCATTER:
            self._wait(COMPUTE, self.free_s[REDUCE_SCATTER])
        reduced_s = self.free_s[REDUCE_SCATTER] if call.op == ALL_REDUCE else 0.0
        return self.run(call.op, seconds, max(self.free_s[COMPUTE], reduced_s))

    def end(self) -> None:
        self._copy_out()
        if self._hook is Hook.END:
            self._wait(COMPUTE, max(self.free_s[op] for op in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)))
        if self._hook is Hook.POST_FORWARD:
            self._resharded_s[self._unit] = self.free_s[COMPUTE]
        if self._hook is Hook.POST_FORWARD and self._unit == self._forward_root:
            self._wait(ALL_GATHER, self._copied_out_s)
            self._forward_root = None

    def run(self, stream: str, seconds: float, not_before_s: float = 0.0) -> float:
        start_s = max(self.free_s[stream], not_before_s)
        self.free_s[stream] = start_s + seconds
        return start_s

    def _wait(self, stream: str, until_s: float) -> None:
        self.free_s[stream] = max(self.free_s[stream], until_s)

    def _copy_out(self) -> None:
        if not self._is_unshard or self._unit not in self._gathered_s:
            return
        before_s = self._copied_out_s
        self._wait(COMPUTE, self._gathered_s.pop(self._unit))
        self._copied_out_s = self.free_s[COMPUTE]
        self._wait(ALL_GATHER, before_s if self._hook is Hook.PRE_FORWARD else self._copied_out_s)


def timed_step(estimate: StepEstimate, trace: MicrobatchTrace | None, machine: Machine) -> Iterator[Timed]:
    """Schedule the kernels of a step in issue order, each as early as the streams and events of ``fully_shard`` allow.

    Assumes that the CPU never delays a kernel, and that no kernel waits for collectives of the model itself (TP, CP,
    EP). The result is therefore a lower bound.

    Args:
        trace: The trace from which ``estimate`` was computed. With None, computation takes no time.
    """
    by_sample: defaultdict[int, list[CollectiveCall]] = defaultdict(list)
    for call in estimate.calls:
        by_sample[call.sample].append(call)
    events = trace.events if trace is not None else ()
    streams = _Streams()
    for place, sample in enumerate(estimate.timeline):
        event = events[sample.event] if 0 <= sample.event < len(events) else None
        calls = by_sample[place]
        num_of_hook = len(calls) - (len(event.sent) if event else 0)
        streams.begin(event.hook if event else None, sample.unit)
        for number, call in enumerate(calls):
            seconds, is_of_hook = call_s(call, machine), number < num_of_hook
            yield Timed(
                track=call.op if is_of_hook else MODEL,
                label=call.unit if is_of_hook else f"{call.op} in {call.unit}",
                sample=place,
                start_s=streams.send(call, seconds)
                if is_of_hook
                else streams.run(MODEL, seconds, streams.free_s[COMPUTE]),
                seconds=seconds,
                num_bytes=call.num_bytes,
            )
        streams.end()
        if event is not None:
            seconds = event.flops / machine.flops if machine.flops else 0.0
            yield Timed(
                track=COMPUTE,
                label=sample.label,
                sample=place,
                start_s=streams.run(COMPUTE, seconds),
                seconds=seconds,
                flops=event.flops,
            )
