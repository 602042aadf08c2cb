"""What a load has read and not yet put into place."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composer_fsdp2.agreement import gather
from composer_fsdp2.checkpoint.exchange import (
    broadcast_replicas,
    owners,
    ranks_of_node,
    replica_of,
    send_or_receive,
)
from composer_fsdp2.checkpoint.inventory import ObjectRecord, TensorRecord, walk_tensors
from composer_fsdp2.checkpoint.loading.optimizer_plan import ParameterState
from composer_fsdp2.checkpoint.loading.plan import LoadPlan
from composer_fsdp2.checkpoint.reading import Reader, bytes_of, files_of, materialized
from composer_fsdp2.checkpoint.target import Box
from composer_fsdp2.errors import CheckpointError

__all__ = ["Staging"]


@dataclass(slots=True)
class _Staged:
    """This rank's part of one tensor, in host memory once it is read.

    Args:
        result: Where it will stay, for optimizer state; the model's own tensors are copied into at the end.
    """

    record: TensorRecord
    box: Box
    result: torch.Tensor | None = None
    owner: int | None = None
    data: torch.Tensor | None = None

    @property
    def reads_here(self) -> bool:
        """Whether this rank reads it, rather than another one that holds the same part."""
        return self.owner is None or self.owner == replica_of(self.box)


class Staging:
    """What a plan reads: ``read``, ``share``, ``check_copies``, ``set_extra_state``, ``commit``, in this order.

    Model and optimizer are not touched before ``set_extra_state``, which can be undone, and then ``commit``, which
    communicates nothing and has no reason left to fail.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.tensors = [_Staged(planned.record, Box.of(planned.target.value)) for planned in plan.tensors]
        self.copies = [
            (staged, _Staged(copy, staged.box))
            for planned, staged in zip(plan.tensors, self.tensors, strict=True)
            for copy in planned.copies
        ]
        self.extra: dict[str, Any] = {}
        self._extra_before: list[tuple[nn.Module, Any]] = []
        self.states: list[dict[str, Any]] = []  # tensors as _Staged
        for state in plan.optimizer.states if plan.optimizer else ():
            own = plan.optimizer.optimizer.state.get(state.parameter, {}) if plan.optimizer else {}
            self.states.append({key: _stage(record, state, own.get(key)) for key, record in state.entries.items()})
        self.groups: list[dict[str, Any]] = list(plan.optimizer.groups) if plan.optimizer else []
        for staged, owner in zip(
            self._all(), owners([(s.box, s.record.dtype.itemsize) for s in self._all()]), strict=True
        ):
            staged.owner = owner

    def _all(self) -> list[_Staged]:
        states = [value for state in self.states for value in state.values() if isinstance(value, _Staged)]
        return [*self.tensors, *(copy for _, copy in self.copies), *states]

    def files(self) -> frozenset[Path]:
        """The files that ``read`` opens on this rank."""
        files: set[Path] = set()
        for staged in self._all():
            if staged.reads_here:
                files.update(files_of(staged.record, staged.box.offsets, staged.box.sizes))
        others = [record for _, record in self.plan.extra.values()]
        others += [record for _, record in walk_tensors(self.groups)]
        others += [value for state in self.states for value in state.values()]
        for record in others:
            if isinstance(record, TensorRecord):
                files.update(files_of(record, (0,) * len(record.shape), record.shape))
            elif isinstance(record, ObjectRecord) and record.source is not None:
                files.add(record.source.path)
        return frozenset(files)

    def read(self, reader: Reader) -> None:
        """Read what is this rank's to read; communicates nothing."""
        for staged in self._all():
            staged.data = _memory_for(staged)
            if staged.reads_here:
                reader.read(staged.record, staged.box.offsets, staged.box.sizes, staged.data)
        self._read_values(reader)

    def read_for_node(self, reader: Reader) -> None:
        """The same, by the first rank of each node for all of them, which are sent their parts.

        Called on all ranks. An error of the reading rank is raised after everything was sent, so nobody waits.
        """
        me, ranks = dist.get_rank(), ranks_of_node()
        everything = self._all()
        wanted = gather([(s.box.offsets, s.box.sizes) if s.reads_here else None for s in everything])
        error: Exception | None = None
        for number, staged in enumerate(everything):
            staged.data = _memory_for(staged)
            for rank in ranks:
                box = wanted[rank][number]
                if box is None or me not in (rank, ranks[0]):
                    continue
                data = staged.data if rank == me else torch.empty(box[1], dtype=staged.record.dtype)
                if me == ranks[0] and error is None:
                    try:
                        reader.read(staged.record, box[0], box[1], data)
                    except Exception as caught:
                        error = caught
                if rank != ranks[0]:
                    send_or_receive(data, ranks[0], rank)
        if error is not None:
            raise error
        self._read_values(reader)

    def _read_values(self, reader: Reader) -> None:
        """What is no part of a large tensor; each rank for itself."""
        self.extra = {
            name: materialized(record if isinstance(record, TensorRecord) else record.value(), reader)
            for name, (_, record) in self.plan.extra.items()
        }
        self.groups = [materialized(group, reader) for group in self.groups]
        for state in self.states:
            for key, value in state.items():
                if not isinstance(value, _Staged):
                    state[key] = materialized(value.value(), reader)

    def share(self) -> None:
        """Give the other replicas what this one read, and take theirs. Called on all ranks; broadcasts shards."""
        for staged in self._all():
            if staged.owner is not None:
                assert staged.data is not None
                broadcast_replicas(staged.data, staged.box, staged.owner)

    def check_copies(self) -> None:
        """Compare what the file holds for one shared parameter under several names; communicates nothing.

        Raises:
            CheckpointError: they are not equal; names them.
        """
        unlike = [
            f"{staged.record.name} = {copy.record.name}"
            for staged, copy in self.copies
            if staged.data is not None and copy.data is not None and bytes_of(staged.data) != bytes_of(copy.data)
        ]
        self.copies.clear()
        if unlike:
            raise CheckpointError(
                f"{self.plan.inventory.path}: the model shares one parameter under several names, for which the file "
                f"holds different values; nothing was changed: {', '.join(unlike)}"
            )

    def set_extra_state(self) -> None:
        """Give the modules their extra state, by the model's own code, which may refuse it; communicates nothing.

        Raises:
            CheckpointError: a module refused; names it.
        """
        for name, (module, _) in self.plan.extra.items():
            try:
                self._extra_before.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(self.extra[name])
            except Exception as error:
                raise CheckpointError(
                    f"{self.plan.inventory.path}: {name}: {type(module).__name__} refused its extra state "
                    f"({type(error).__name__}: {error}); nothing was changed"
                ) from error

    def put_extra_state_back(self) -> None:
        """Undo ``set_extra_state``, wherever it got to."""
        for module, before in reversed(self._extra_before):
            module.set_extra_state(before)

    @torch.no_grad()
    def commit(self) -> None:
        """Put everything into its place."""
        if self.plan.optimizer is not None:
            self._commit_optimizer(self.plan.optimizer.optimizer, self.plan.optimizer.states)
        for planned, staged in zip(self.plan.tensors, self.tensors, strict=True):
            assert staged.data is not None
            planned.target.local.copy_(staged.data)
            staged.data = None

    def _commit_optimizer(self, optimizer: torch.optim.Optimizer, states: Sequence[ParameterState]) -> None:
        number_of = {
            parameter: number
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        # What the file does not have stays.
        state = {parameter: dict(own) for parameter, own in optimizer.state.items() if parameter in number_of}
        dtypes = {parameter: _dtypes(own) for parameter, own in state.items()}
        for planned, entries in zip(states, self.states, strict=True):
            state[planned.parameter] = {key: _result(value) for key, value in entries.items()}
            dtypes[planned.parameter] = planned.dtypes
        groups, first = [], 0
        for new, group in zip(self.groups, optimizer.param_groups, strict=True):
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**new, "params": numbers})
            first += len(numbers)
        self.states.clear()
        # The optimizer's own, which its subclasses and hooks extend; tensors of the right dtype and device are kept.
        by_number = {number_of[parameter]: dict(entries) for parameter, entries in state.items()}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        # Except that torch casts a parameter's state to the parameter's dtype, and breaks text.
        for parameter, entries in state.items():
            loaded = optimizer.state[parameter]
            for key, dtype in dtypes[parameter].items():
                if isinstance(loaded.get(key), torch.Tensor) and loaded[key].dtype != dtype:
                    loaded[key] = entries[key].to(device=loaded[key].device, dtype=dtype)
            loaded.update({key: value for key, value in entries.items() if isinstance(value, str)})


def _stage(record: Any, state: ParameterState, own: Any) -> Any:
    """Where a value of a parameter's state will stay, which tells how it is sharded.

    Args:
        own: What the optimizer has there already.
    """
    if not isinstance(record, TensorRecord):
        return record
    parameter = state.parameter
    if record.shape and isinstance(own, torch.Tensor) and record.shape == tuple(own.shape):
        result = _empty_like(own, record.dtype)
    elif record.shape and record.shape == tuple(parameter.shape):
        result = _empty_like(parameter.detach(), record.dtype)
    elif record.shape and isinstance(parameter, DTensor):  # a statistic, as Adafactor's of rows
        whole = torch.empty(record.shape, dtype=record.dtype, device=parameter.to_local().device)
        replicated = [Replicate()] * parameter.device_mesh.ndim
        result = DTensor.from_local(whole, parameter.device_mesh, replicated, run_check=False)
    else:  # a step count
        result = torch.empty(record.shape, dtype=record.dtype)
    return _Staged(record, Box.of(result), result=result)


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the same layout and on the same device (the host's memory under CPU offload)."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _dtypes(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}


def _memory_for(staged: _Staged) -> torch.Tensor:
    """Where to read it to: its final place, if that is ordinary host memory."""
    if staged.result is not None:
        local = staged.result.to_local() if isinstance(staged.result, DTensor) else staged.result
        if local.device.type == "cpu" and local.is_contiguous():
            return local
    return torch.empty(staged.box.sizes, dtype=staged.record.dtype)


def _result(value: Any) -> Any:
    if not isinstance(value, _Staged):
        return value
    assert value.result is not None and value.data is not None
    local = value.result.to_local() if isinstance(value.result, DTensor) else value.result
    if local.data_ptr() != value.data.data_ptr() or local.device != value.data.device:
        local.copy_(value.data)
    return value.result
