"""The state of a sharded model besides its parameters: plan, process groups, guard and votes."""

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
    """The ranks that train on the same batch, and how each of them gets it.

    Args:
        ranks: Global ranks in ascending order.
        group: Their gloo process group: batches are in host memory.
        how: Whether a batch is broadcast, gathered, or left as the loader returned it.
        check: Whether batches are compared, once per loader and epoch.
        tensor_degree: The number of consecutive ranks that TP-shard layers.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    how: BroadcastBatch
    check: bool
    tensor_degree: int


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """The state of one sharded model between steps. It references no module, which would keep the model alive.

    Args:
        plan: The plan of the model; None if the script called ``fully_shard`` itself.
        report: The translation of the configuration, as text.
        findings: The findings of the translation, one per key.
        groups: Process groups by unit: an all-reduce over each in turn reaches all ranks that train the unit's root.
        guard: Compares the position of all ranks, if ``collective_guard`` is on.
        latest_vote: Weak reference to the last ``OutOfMemoryVote``, which may be stopped.
        context: The context-parallel group of this rank, if any.
        batch: The ranks that train on the same batch as this rank, under tensor or context parallelism.
        exchanging: The process groups of the all-to-alls that exchange tokens between experts.
    """

    plan: ShardingPlan | None = None
    report: str = ""
    findings: tuple[Finding, ...] = ()
    groups: WeakKeyDictionary[nn.Module, Sequence[dist.ProcessGroup | None]] = field(default_factory=WeakKeyDictionary)
    guard: Callable[[str], None] | None = None
    latest_vote: weakref.ref[Any] | None = None
    context: ContextGroup | None = None
    batch: BatchGroup | None = None
    exchanging: tuple[dist.ProcessGroup, ...] = ()


def start_run(model: nn.Module, plan: ShardingPlan, meshes: Mapping[str, UnitMesh]) -> Run:
    """Create the ``Run`` of a model that ``apply_agreed_plan`` has sharded, and attach it to the model.

    Args:
        plan: The plan of the model.
        meshes: The mesh of each unit by name, as ``apply_agreed_plan`` returns them.

    Called on all ranks; gathers one bool per root whose mesh is not the world.
    """
    run = Run(plan=plan)
    for units in units_by_root(plan.units).values():
        groups = training_groups(meshes[units[-1].name].whole, [meshes[unit.name].whole for unit in units])
        run.groups.update((at_path(model, path), groups) for unit in units for path in unit.modules)
    attach(run, (at_path(model, path) for unit in plan.units for path in unit.modules))
    return run


# By every unit of the model.
_RUNS: WeakKeyDictionary[nn.Module, Run] = WeakKeyDictionary()


def attach(run: Run, units: Iterable[nn.Module]) -> None:
    """Attach ``run`` to the units of its model. It is freed with the last of them."""
    _RUNS.update((unit, run) for unit in units)


def find_run(model: nn.Module) -> Run | None:
    """The ``Run`` of a model, or of a submodule that contains a unit; None if the model is not sharded."""
    return next((_RUNS[module] for module in model.modules() if module in _RUNS), None) if _RUNS else None


def run_of(model: nn.Module) -> Run:
    """As ``find_run``, but create a ``Run`` if the script called ``fully_shard`` itself."""
    run = find_run(model)
    if run is None:
        run = Run()
        attach(run, (module for module in model.modules() if isinstance(module, FSDPModule)))
    return run


def find_context(model: nn.Module) -> ContextGroup | None:
    """The context-parallel group of a model; None without context parallelism."""
    run = find_run(model)
    return None if run is None else run.context


def find_batch_group(model: nn.Module) -> BatchGroup | None:
    """The ranks that train on the same batch as this rank; None without tensor or context parallelism."""
    run = find_run(model)
    return None if run is None else run.batch
