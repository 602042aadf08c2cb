"""What a load has read and not yet put into place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.exchange import broadcast_replicas, owners, replica_of
from composer_fsdp2.checkpoint.inventory import TensorRecord
from composer_fsdp2.checkpoint.load_plan import LoadPlan
from composer_fsdp2.checkpoint.optimizer_plan import ParameterState
from composer_fsdp2.checkpoint.reading import Reader, materialized
from composer_fsdp2.checkpoint.target import Box

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


class Staging:
    """Everything that a plan reads: ``read``, ``share``, ``commit``, in this order.

    Model and optimizer are not touched before ``commit``, which communicates nothing and has no reason left to fail.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.tensors = [_Staged(planned.record, Box.of(planned.target.value)) for planned in plan.tensors]
        self.extra: dict[str, Any] = {}
        self.states: list[dict[str, Any]] = []  # tensors as _Staged
        for state in plan.optimizer.states if plan.optimizer else ():
            self.states.append({key: _stage(record, state) for key, record in state.entries.items()})
        self.groups: list[dict[str, Any]] = list(plan.optimizer.groups) if plan.optimizer else []
        for staged, owner in zip(
            self._all(), owners([(s.box, s.record.dtype.itemsize) for s in self._all()]), strict=True
        ):
            staged.owner = owner

    def _all(self) -> list[_Staged]:
        states = [value for state in self.states for value in state.values() if isinstance(value, _Staged)]
        return [*self.tensors, *states]

    def read(self, reader: Reader) -> None:
        """Read what is this rank's to read; communicates nothing."""
        for staged in self._all():
            staged.data = _memory_for(staged)
            if staged.owner is None or staged.owner == replica_of(staged.box):
                reader.read(staged.record, staged.box.offsets, staged.box.sizes, staged.data)
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

    @torch.no_grad()
    def commit(self) -> None:
        """Put everything into its place."""
        if self.plan.optimizer is not None:
            self._commit_optimizer(self.plan.optimizer.optimizer, self.plan.optimizer.states)
        for planned, staged in zip(self.plan.tensors, self.tensors, strict=True):
            assert staged.data is not None
            planned.target.local.copy_(staged.data)
            staged.data = None
        for name, (module, _) in self.plan.extra.items():
            module.set_extra_state(self.extra[name])

    def _commit_optimizer(self, optimizer: torch.optim.Optimizer, states: Sequence[ParameterState]) -> None:
        number_of = {
            parameter: number
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        state = {
            number_of[planned.parameter]: {key: _result(value) for key, value in entries.items()}
            for planned, entries in zip(states, self.states, strict=True)
        }
        groups, first = [], 0
        for new, group in zip(self.groups, optimizer.param_groups, strict=True):
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**new, "params": numbers})
            first += len(numbers)
        self.states.clear()
        # The optimizer's own, which its subclasses and hooks extend; tensors of the right dtype and device are kept.
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _stage(record: Any, state: ParameterState) -> Any:
    if not isinstance(record, TensorRecord):
        return record
    parameter = state.parameter
    if record.shape == tuple(parameter.shape) and record.shape:
        return _Staged(record, Box.of(parameter), result=_empty_like(parameter, record.dtype))
    whole = torch.empty(record.shape, dtype=record.dtype)  # a step count, or a statistic of another shape
    return _Staged(record, Box.of(whole), result=whole)


def _empty_like(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """For state of the parameter's shape and layout, on its device (the host's memory under CPU offload)."""
    return torch.empty_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)


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
