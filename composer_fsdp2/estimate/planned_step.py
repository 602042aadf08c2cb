"""The result of ``plan`` for a run, as one value and as the JSON object of ``--json``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.sizes import Reserve
from composer_fsdp2.config.value import Value, plain
from composer_fsdp2.estimate.bounds import Bounds
from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.links import LinkBytes, Traffic, sent_by_unit, traffic
from composer_fsdp2.estimate.step import Kind, StepEstimate
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit

# Version of the ``--json`` object, whose format is SCHEMA; it increases with an incompatible change.
VERSION = 1
SCHEMA = Path(__file__).with_name("plan.schema.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Value):
    """A device's memory, and the part of it reserved for what the estimate does not model."""

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
        source: The user's name for the run, such as its file.
        trace: None if activations are not counted.
        optimizer: Its name.
        findings: From translating the configuration and building the model.
        memory: None if unknown.
        bounds: None if the machine's speeds are unknown.
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
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)

    @property
    def exit_code(self) -> int:
        return int(self.fits is False or bool(self.blocking))

    @property
    def num_parameters(self) -> int:
        return sum(unit.numel for unit in self.plan.units)

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
            "units": [_unit(unit, sent) for unit, sent in self.units_and_bytes()],
            "collectives": [_collectives(each) for each in self.traffic],
            "bounds": _bounds(self.bounds),
            "findings": plain(self.findings),
            "notes": list(self.estimate.notes),
            "suggestions": None,
        }

    def units_and_bytes(self) -> list[tuple[ShardUnit, LinkBytes]]:
        """The plan's units in the plan's order, with the bytes that a rank sends for each in a step."""
        sent = sent_by_unit(self.estimate.calls)
        return [(unit, sent.get(unit.name, LinkBytes())) for unit in self.plan.units]

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


def _unit(unit: ShardUnit, sent: LinkBytes) -> dict[str, Any]:
    return {
        "name": unit.name,
        "parameters": unit.numel,
        "bytes": unit.unsharded_bytes,
        "is_root": unit.is_root,
        "reshard_after_forward": unit.reshard_after_forward,
        "intra_node_bytes": sent.intra,
        "inter_node_bytes": sent.inter,
    }


def _collectives(each: Traffic) -> dict[str, Any]:
    return {
        "op": each.op,
        "phase": each.phase.value,
        "calls": each.calls,
        "bytes": each.num_bytes,
        "ranks": each.ranks,
        "link": each.link.value,
        "ring_bytes": each.ring_bytes,
        "node_bytes": each.node_bytes,
    }


def _bounds(bounds: Bounds | None) -> dict[str, Any] | None:
    return None if bounds is None else bounds.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """Units that differ only in the layer indices of their names."""

    name: str
    units: int
    parameters: int
    gathered_bytes: int
    sent: LinkBytes


def unit_kinds(units: Iterable[tuple[ShardUnit, LinkBytes]]) -> Sequence[UnitKind]:
    """Group units by the pattern of their names, size and ``reshard_after_forward``; omits empty units.

    ``gathered_bytes`` is for one unit of the kind, ``sent`` for all of them.
    """
    alike: dict[tuple[str, int, str], list[tuple[ShardUnit, LinkBytes]]] = {}
    for unit, sent in units:
        if not unit.numel:
            continue
        parts = ("*" if part.isdecimal() else part for part in unit.name.split("."))
        alike.setdefault((".".join(parts), unit.numel, str(unit.reshard_after_forward)), []).append((unit, sent))
    return [
        UnitKind(
            name=name or "(the model)",
            units=len(each),
            parameters=numel,
            gathered_bytes=each[0][0].unsharded_bytes,
            sent=LinkBytes(intra=sum(sent.intra for _, sent in each), inter=sum(sent.inter for _, sent in each)),
        )
        for (name, numel, _), each in alike.items()
    ]
