"""Estimate a rough duration of a step, to rank plans of one run. It is not a prediction of the real duration.

Computation and communication are assumed to overlap within each forward and each backward, so the slowest counts:

    seconds of a part = max(computation, traffic in the node, traffic to other nodes, offloaded parameters over PCIe)
    seconds of a step = parts + offloaded activations over PCIe + the optimizer on the host

The computation includes recomputation, at the fraction of a device's bfloat16 peak that published steps achieved
(``Machine.achieved``); fp8 steps were little faster. FSDP2 copies offloaded parameters and gradients on separate
streams; ``save_on_cpu``, which offloads activations, blocks on each copy. Omitted, as small or equal in all plans: the
optimizer on the device, the first all-gather, the last reduction, latencies, and ``bounds.UNKNOWN``.
"""

from collections import defaultdict

from composer_fsdp2.estimate.bounds import Machine, inter_node_s, intra_node_s
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.links import ALL_GATHER, REDUCE_SCATTER
from composer_fsdp2.estimate.step import Phase, StepEstimate
from composer_fsdp2.sharding.dtypes import dtype_bytes
from composer_fsdp2.sharding.plan import ShardingPlan

# Fraction of a link's peak; nccl-tests report 230 to 250 of the 300 GB/s of an A100's NVLink for large buffers.
LINK_SHARE = 0.8
# torch's AdamW on a CPU makes one pass over a parameter's tensors for each of its operations: it reads and writes 80
# bytes of an fp32 parameter, whose value, gradient and moments are 16 (torch/optim/adam.py, _single_tensor_adam).
HOST_PASSES = 80 / 16


def step_seconds(
    plan: ShardingPlan, estimate: StepEstimate, trace: MicrobatchTrace, machine: Machine, num_microbatches: int
) -> float:
    """Estimate the duration of one step in seconds.

    Args:
        estimate: The estimate for ``plan`` and ``trace``, with all microbatches, or with three: the second then
            represents all between the first and the last.
        machine: The speeds; none may be None.
    """
    assert machine.flops and machine.achieved and machine.pcie_bytes_per_s and machine.host_bytes_per_s
    offloaded = {
        unit.name: sum(each.numel_of(unit.mesh.split_degree) * dtype_bytes(each.dtype) for each in unit.parameters)
        for unit in plan.units
        if unit.cpu_offload
    }
    parts: defaultdict[tuple[int, Phase], list[float]] = defaultdict(lambda: [0.0] * 4)
    for sample in estimate.timeline:
        flops = trace.events[sample.event].flops if sample.microbatch >= 0 else 0
        parts[sample.microbatch, sample.phase][0] += flops / (machine.flops * machine.achieved)
    for call in estimate.calls:
        part = parts[estimate.timeline[call.sample].microbatch, call.phase]
        part[1] += intra_node_s(call, machine) / LINK_SHARE
        part[2] += inter_node_s(call, machine) / LINK_SHARE
        if call.unit in offloaded and call.op in (ALL_GATHER, REDUCE_SCATTER):
            part[3] += offloaded[call.unit] / call.ranks / (machine.pcie_bytes_per_s * LINK_SHARE)
    microbatches: defaultdict[int, float] = defaultdict(float)
    for (number, _), part in parts.items():
        microbatches[number] += max(part)
    num_replayed = max(microbatches) + 1
    between = microbatches[1] * (num_microbatches - num_replayed) if num_microbatches > num_replayed else 0.0
    activations = 2 * trace.host_bytes * num_microbatches / (machine.pcie_bytes_per_s * LINK_SHARE)
    optimizer = HOST_PASSES * (estimate.host_bytes - trace.host_bytes) / machine.host_bytes_per_s
    return sum(microbatches.values()) + between + activations + optimizer
