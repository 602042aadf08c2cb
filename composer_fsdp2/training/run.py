"""What is kept of a sharded model beside its parameters, for as long as the model lives."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.sharding.meshes import UnitMesh, training_groups
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.sharding.plan import ShardingPlan, units_by_root
from composer_fsdp2.training.context import ContextGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """The ranks that compute this rank's batch together, and how they come to have the same one.

    Args:
        ranks: In ascending order.
        group: Theirs, over gloo: batches lie in host memory, and nobody waits for a device.
        how: What is done with each batch.
        check: Whether the batches are compared, once for each loader and epoch.
        tensor_degree: How many of the ranks in a row split layers.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    how: BroadcastBatch
    check: bool
    tensor_degree: int


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """A sharded model while it is trained. It holds no module, which would live for ever.

    Args:
        plan: None where ``fully_shard`` sharded the model without us.
        report: What became of each key of its configuration, as text.
        findings: The same, one by one.
        groups: By root, process groups: an all-reduce over each in turn reaches all ranks that train parts of the root.
        guard: Meets the other ranks at a place, where ``collective_guard`` is on.
        latest_vote: The last ``OutOfMemoryVote``, which may be off.
        context: The ranks that share this rank's sequences.
        batch: The ranks that share this rank's batch.
    """

    plan: ShardingPlan | None = None
    report: str = ""
    findings: tuple[Finding, ...] = ()
    groups: WeakKeyDictionary[nn.Module, Sequence[dist.ProcessGroup | None]] = field(default_factory=WeakKeyDictionary)
    guard: Callable[[str], None] | None = None
    latest_vote: weakref.ref[Any] | None = None
    context: ContextGroup | None = None
    batch: BatchGroup | None = None


def start_run(model: nn.Module, plan: ShardingPlan, meshes: Mapping[str, UnitMesh]) -> Run:
    """Of a model that was just sharded. Called on all ranks; gathers a bit for each root on groups of ranks.

    Args:
        plan: Carried out.
        meshes: Of its units, by name.
    """
    run = Run(plan=plan)
    for units in units_by_root(plan.units).values():
        groups = training_groups(meshes[units[-1].name].whole, [meshes[unit.name].whole for unit in units])
        run.groups[at_path(model, units[-1].name)] = groups
    attach(run, (at_path(model, path) for unit in plan.units for path in unit.modules))
    return run


# By every unit of the model.
_RUNS: WeakKeyDictionary[nn.Module, Run] = WeakKeyDictionary()


def attach(run: Run, units: Iterable[nn.Module]) -> None:
    """Keep ``run`` for as long as one of its model's units lives."""
    _RUNS.update((unit, run) for unit in units)


def find_run(model: nn.Module) -> Run | None:
    """Of a model, or of a part of one that has units; None where there is none."""
    return next((_RUNS[module] for module in model.modules() if module in _RUNS), None) if _RUNS else None


def run_of(model: nn.Module) -> Run:
    """The same; a new one for a model that ``fully_shard`` sharded without us."""
    run = find_run(model)
    if run is None:
        run = Run()
        attach(run, (module for module in model.modules() if isinstance(module, FSDPModule)))
    return run


def find_context(model: nn.Module) -> ContextGroup | None:
    """The ranks that share this rank's sequences; None where every rank has whole ones."""
    run = find_run(model)
    return None if run is None else run.context


def find_batch_group(model: nn.Module) -> BatchGroup | None:
    """The ranks that share this rank's batch; None where every rank has its own."""
    run = find_run(model)
    return None if run is None else run.batch
