"""What is kept of a sharded model beside its parameters: one record for each root, for as long as the root lives."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2.config.sharding import Accumulation
from composer_fsdp2.errors import PlanError

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RootRecord:
    """What is kept of one root and the units below it; without the mesh, if ``fully_shard`` sharded it without us.

    Args:
        mesh: The root's, as ``fully_shard`` got it.
        groups: An all-reduce over each in turn reaches all ranks that train parts of this root.
        replicated: By mesh, the parameters that lie unsharded on every rank of it, with averaged gradients.
        accumulation: What is put off until the last microbatch.
        guard: Meets the other ranks at a place, where ``collective_guard`` is on.
        summoned: The sharded parameters that ``summon_full_params`` shows unsharded now, and with which options.
        kept: What other rooms keep of this root, one value of a type.
    """

    mesh: DeviceMesh | None = None
    groups: Sequence[dist.ProcessGroup | None] = (None,)
    replicated: Mapping[DeviceMesh, Sequence[nn.Parameter]] = field(default_factory=dict)
    accumulation: Accumulation = field(default_factory=Accumulation)
    guard: Callable[[str], None] | None = None
    summoned: dict[nn.Parameter, Any] = field(default_factory=dict)
    kept: dict[type, Any] = field(default_factory=dict)


# By every unit of the root.
_RECORDS: WeakKeyDictionary[nn.Module, RootRecord] = WeakKeyDictionary()


def keep_record(units: Iterable[nn.Module], record: RootRecord) -> None:
    """``units`` are the root and those below it."""
    _RECORDS.update((unit, record) for unit in units)


def record_of(unit: nn.Module) -> RootRecord:
    """The record of the root that a unit belongs to; where ``fully_shard`` sharded without us, of the first asked for.

    That is a root or a unit below it: torch makes roots where a forward begins.
    """
    if unit not in _RECORDS:
        below = (module for module in unit.modules() if isinstance(module, FSDPModule) and module not in _RECORDS)
        keep_record([unit, *below], RootRecord())
    return _RECORDS[unit]


def find_record(model: nn.Module) -> RootRecord | None:
    """The first record of a model, or of a part of one; None where there is none."""
    if not _RECORDS:
        return None
    return next((_RECORDS[module] for module in model.modules() if module in _RECORDS), None)


def keep(model: nn.Module, value: object) -> None:
    """Keep a value for as long as the root of a sharded model lives, in place of an earlier one of its type."""
    record = find_record(model)
    (record_of(model) if record is None else record).kept[type(value)] = value


def find_kept(model: nn.Module, kind: type[T]) -> T | None:
    """The value of this type that was kept last."""
    record = find_record(model)
    value: T | None = None if record is None else record.kept.get(kind)
    return value


def mesh_of(root: nn.Module) -> DeviceMesh:
    """The mesh of a root that ``apply_plan`` sharded.

    Raises:
        PlanError: ``fully_shard`` sharded it without us.
    """
    mesh = record_of(root).mesh
    if mesh is None:
        raise PlanError(
            f"a {type(root).__name__} was sharded by fully_shard itself; shard the model with prepare_fully_shard or "
            "apply_plan, or use torch's own functions for it"
        )
    return mesh
