"""The result of ``plan``, as a value and as the JSON object of ``--json``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.sizes import Reserve
from composer_fsdp2.config.value import Value, plain
from composer_fsdp2.estimate.bounds import Bounds
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.links import Traffic, sent_by_unit, traffic
from composer_fsdp2.estimate.step import Kind, Link, StepEstimate
from composer_fsdp2.sharding.plan import ShardingPlan

# Version of the ``--json`` object, whose format is SCHEMA; it increases with an incompatible change.
VERSION = 1
SCHEMA = Path(__file__).with_name("plan.schema.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Value):
    """The memory of a device, and the part of it reserved for memory that the estimate does not model."""

    given_bytes: int
    reserve: Reserve = field(default_factory=Reserve)

    @property
    def reserved_bytes(self) -> int:
        return self.reserve.of(self.given_bytes)

    @property
    def usable_bytes(self) -> int:
        return max(0, self.given_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(Value):
    """The plan and estimate of one training step.

    Args:
        source: A name of the run, such as its file.
        trace: The traced microbatch; None if activations are not estimated.
        optimizer: The name of the optimizer.
        findings: Findings of the configuration's translation and of building the model.
        memory: The memory that the step must fit; None if unknown.
        bounds: Lower bounds of the step's time; None if the machine's speeds are unknown.
    """

    source: str
    plan: ShardingPlan
    estimate: StepEstimate
    trace: MicrobatchTrace | None
    optimizer: str
    precision: str
    world_size: int
    gpus_per_node: int
    microbatch_size: int
    num_microbatches: int
    sequence_length: int
    findings: tuple[Finding, ...] = ()
    memory: Memory | None = None
    bounds: Bounds | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the usable memory; None if ``memory`` is None."""
        return None if self.memory is None else self.estimate.peak_bytes <= self.memory.usable_bytes

    @property
    def left_bytes(self) -> int | None:
        """The usable memory minus the peak, negative if the step does not fit; None if ``memory`` is None."""
        return None if self.memory is None else self.memory.usable_bytes - self.estimate.peak_bytes

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)

    @property
    def exit_code(self) -> int:
        return int(self.fits is False or bool(self.blocking))

    @property
    def num_parameters(self) -> int:
        return sum(unit.numel for unit in self.plan.units)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that all ranks train on in a step.

        TP and CP peers that read the same batch count once.
        """
        config = self.plan.config
        readers = 1 if config.effective_broadcast_batch is BroadcastBatch.GATHER else config.data_block_size
        of_rank = self.num_microbatches * self.microbatch_size * self.sequence_length
        return of_rank * self.world_size // readers

    @property
    def tokens_per_s(self) -> float | None:
        """An upper bound, of all ranks; None without bounds."""
        return (
            self.num_tokens / self.bounds.lower_s if self.bounds and self.bounds.lower_s and self.num_tokens else None
        )

    @property
    def gpu_hours_per_billion_tokens(self) -> float | None:
        """A lower bound; None without bounds."""
        return None if self.tokens_per_s is None else self.world_size / self.tokens_per_s * 1e9 / 3600

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        return traffic(self.estimate.calls)

    def most_of(self, *kinds: Kind) -> int:
        """The largest sum of these kinds at one moment."""
        return max((sum(map(sample.bytes_of, kinds)) for sample in self.estimate.timeline), default=0)

    def to_json(self) -> dict[str, Any]:
        """The object of ``plan.schema.json``; the command fills in ``suggestions``."""
        return {
            "version": VERSION,
            "exit_code": self.exit_code,
            "fits": self.fits,
            "run": self._run(),
            "memory": self._memory(),
            "per_rank": self._per_rank(),
            "units": self._units(),
            "collectives": [
                {
                    "op": each.op,
                    "phase": each.phase.value,
                    "calls": each.calls,
                    "bytes": each.num_bytes,
                    "ranks": each.ranks,
                    "link": each.link.value,
                    "ring_bytes": each.ring_bytes,
                    "node_bytes": each.node_bytes,
                }
                for each in self.traffic
            ],
            "bounds": None if self.bounds is None else self.bounds.to_json(),
            "findings": plain(self.findings),
            "notes": list(self.estimate.notes),
            "suggestions": None,
        }

    def _run(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "parameters": self.num_parameters,
            "world_size": self.world_size,
            "gpus_per_node": self.gpus_per_node,
            "mesh": str(self.plan.mesh),
            "precision": self.precision,
            "optimizer": self.optimizer,
            "microbatch_size": self.microbatch_size,
            "num_microbatches": self.num_microbatches,
            "sequence_length": self.sequence_length,
            "digest": self.plan.digest,
        }

    def _units(self) -> list[dict[str, Any]]:
        sent = sent_by_unit(self.estimate.calls)
        return [
            {
                "name": unit.name,
                "parameters": unit.numel,
                "bytes": unit.unsharded_bytes,
                "is_root": unit.is_root,
                "reshard_after_forward": unit.reshard_after_forward,
                "intra_node_bytes": sent[unit.name, Link.INTRA],
                "inter_node_bytes": sent[unit.name, Link.INTER],
            }
            for unit in self.plan.units
        ]

    def _memory(self) -> dict[str, Any] | None:
        memory = self.memory
        if memory is None:
            return None
        return {
            "given_bytes": memory.given_bytes,
            "reserve": str(memory.reserve),
            "reserved_bytes": memory.reserved_bytes,
            "usable_bytes": memory.usable_bytes,
        }

    def _per_rank(self) -> dict[str, Any]:
        estimate, peak, is_traced = self.estimate, self.estimate.peak, self.trace is not None
        return {
            "parameters_bytes": estimate.parameters_bytes,
            "gradients_bytes": estimate.gradients_bytes,
            "optimizer_bytes": estimate.optimizer_bytes,
            "gathered_peak_bytes": self.most_of(Kind.GATHERED),
            "unsharded_gradients_peak_bytes": self.most_of(Kind.UNSHARDED_GRADIENTS),
            "communication_peak_bytes": self.most_of(Kind.COMMUNICATION),
            "activations_bytes": self.most_of(Kind.ACTIVATIONS, Kind.LOSS) if is_traced else None,
            "loss_bytes": self.most_of(Kind.LOSS) if is_traced else None,
            "host_bytes": estimate.host_bytes,
            "peak_bytes": peak.total_bytes,
            "peak": {
                "phase": peak.phase.value,
                "microbatch": peak.microbatch,
                "unit": peak.unit,
                "label": peak.label,
                "bytes": {kind.value: peak.bytes_of(kind) for kind in Kind},
            },
        }
