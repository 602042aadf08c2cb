"""Measure the collectives and memory of a real step on this rank with dispatch modes.

Tests verify estimates against these measurements, which use no plan.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.groups import groups_of, state_of
from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2._torch.private_names import TorchDispatchMode, own_parameters
from composer_fsdp2.estimate._torch.sent import Sent, is_collective, sent_by, tensors_of

_INTO = torch.ops.aten.copy_.default
_COPIES = {_INTO, torch.ops.aten._to_copy.default}
# A storage of several kinds counts as the first of them.
_KINDS = ("parameters", "gradients", "optimizer", "communication")
_OTHER = "other"
_RANK = {kind: place for place, kind in enumerate((*_KINDS, _OTHER))}
# A process group's thread releases its buffers shortly after wait() returns.
_LETTING_GO_S = 0.001
_RESIZED = {"parameters", "communication"}  # their storages are resized to 0 and back


@dataclass(slots=True)
class _Seen:
    """A storage and its kind."""

    storage: Any  # weak
    kind: str
    num_bytes: int


class Collectives(TorchDispatchMode):
    """A dispatch mode that records the collectives issued while it is active.

    Includes those of backward: autograd propagates dispatch modes to its threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Sent] = []

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The number of calls and the total bytes of the full buffers, by operator name."""
        found: dict[str, dict[str, int]] = {}
        for call in self.calls:
            count = found.setdefault(call.operator, {"calls": 0, "bytes": 0})
            count["calls"] += 1
            count["bytes"] += call.num_bytes
        return found

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor dispatches first; its collectives come through here again
        result = func(*args, **(kwargs or {}))
        if sent := sent_by(func, args, result):
            self.calls.append(sent)
        return result


class StateBytes(TorchDispatchMode):
    """Measures the peak bytes of a step's state on this rank: parameters (sharded and unsharded), gradients (unsharded
    and reduced), optimizer state and communication buffers.

    A storage is counted from the first operator after which it is reachable as one of these until it is freed.
    Activations and temporaries are not counted. ``peak`` is the largest sum after any operator, and ``at_peak`` the
    sum's parts. ``peak_of_all`` includes all other storages that operators allocated. View operators are skipped,
    because they do not allocate.

    Tensors that no module references are read from FSDP2's own objects: all-gather outputs, parameters resharded after
    forward to a smaller mesh, unsharded accumulated gradients in the reduce dtype, and partial reduce outputs.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.peak = self.peak_of_all = 0
        self.at_peak: dict[str, int] = {}
        self._sharded = list(model.parameters())
        self._places = [(module, name) for module in model.modules() for name, _ in own_parameters(module)]
        # FSDP1's parameters are views of these, which have the gradient.
        flat = (getattr(module, "_flat_param", None) for module in model.modules())
        self._flat: list[Any] = list({id(each): each for each in flat if each is not None}.values())
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = list({id(group): group for unit in units for group in groups_of(state_of(unit))}.values())
        self._seen: dict[int, _Seen] = {}  # keyed by the address of the C++ StorageImpl
        self._resizable: dict[int, _Seen] = {}
        self._freed: deque[tuple[int, Any]] = deque()  # thread-safe: a process group's thread may free storages
        self._sums = dict.fromkeys((*_KINDS, _OTHER), 0)
        self._is_stepping = False
        optimizer.register_step_pre_hook(lambda *_: self._step(begins=True))
        optimizer.register_step_post_hook(lambda *_: self._step(begins=False))
        self._note_optimizer()
        self._look()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        if is_collective(func) or func.namespace == "fsdp":  # fsdp:: operators copy into and out of buffers
            for tensor in tensors_of((*args, *(kwargs or {}).values())):
                self._note("communication", tensor)
        if func in _COPIES and self._is_communication(args[func is _INTO]):
            self._note("communication", result)  # a reduction over one rank, or a cast to the parameter's dtype
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of((*args, *(kwargs or {}).values()))}
        for tensor in tensors_of(result):
            if tensor.untyped_storage()._cdata not in given:  # in-place and out= results are not new
                self._note(_OTHER, tensor)
        self._look()
        return result

    def _step(self, *, begins: bool) -> None:
        self._is_stepping = begins

    def _look(self) -> None:
        for kind, tensor in self._visible():
            self._note(kind, tensor)
        if self._is_stepping:
            self._note_optimizer()
        of_all, of_state = self._sums_now()
        if of_all > self.peak_of_all or of_state > self.peak:
            time.sleep(_LETTING_GO_S)
            of_all, of_state = self._sums_now()
        self.peak_of_all = max(self.peak_of_all, of_all)
        if of_state > self.peak:
            self.peak, self.at_peak = of_state, {kind: self._sums[kind] for kind in _KINDS}

    def _sums_now(self) -> tuple[int, int]:
        """The bytes of all storages, and of the state's."""
        self._forget_freed()
        for seen in self._resizable.values():
            storage = seen.storage()
            num_bytes = 0 if storage is None else storage.nbytes()
            self._sums[seen.kind] += num_bytes - seen.num_bytes
            seen.num_bytes = num_bytes
        of_all = sum(self._sums.values())
        return of_all, of_all - self._sums[_OTHER]

    def _kept_by_fsdp2(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups:
            for parameter in group.fsdp_params:
                for tensor in parameter.all_gather_outputs:
                    yield "parameters", tensor
                if (tensor := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                    yield "parameters", tensor
                if (tensor := getattr(parameter, "unsharded_accumulated_grad", None)) is not None:
                    yield "gradients", local_tensor(tensor)
            if group._partial_reduce_output is not None:
                yield "communication", group._partial_reduce_output

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        seen = self._seen.get(key)
        if seen is not None and seen.storage() is None:  # the address was reused
            self._forget_freed()
            seen = None
        if seen is None:
            freed = self._freed
            reference = ref(storage, lambda dead: freed.append((key, dead)))
            seen = self._seen[key] = _Seen(reference, kind, storage.nbytes())
            self._sums[kind] += seen.num_bytes
        elif _RANK[kind] < _RANK[seen.kind]:
            self._sums[seen.kind] -= seen.num_bytes
            self._sums[kind] += seen.num_bytes
            seen.kind = kind
        if kind in _RESIZED:
            self._resizable[key] = seen

    def _forget_freed(self) -> None:
        while self._freed:
            key, reference = self._freed.popleft()
            seen = self._seen.get(key)
            if seen is not None and seen.storage is reference:
                del self._seen[key]
                self._resizable.pop(key, None)
                self._sums[seen.kind] -= seen.num_bytes

    def _is_communication(self, tensor: torch.Tensor) -> bool:
        seen = self._seen.get(tensor.untyped_storage()._cdata)
        return seen is not None and seen.kind == "communication"

    def _visible(self) -> Iterator[tuple[str, torch.Tensor]]:
        present = [getattr(module, name) for module, name in self._places]
        for parameter in (*self._sharded, *present, *self._flat):
            yield "parameters", local_tensor(parameter)
            if parameter.is_leaf and parameter.grad is not None:
                yield "gradients", local_tensor(parameter.grad)
        for flat in self._flat:
            for name in ("_local_shard", "_full_param_padded", "_mp_shard"):
                if (tensor := getattr(flat, name, None)) is not None:
                    yield "parameters", tensor
            if (tensor := getattr(flat, "_saved_grad_shard", None)) is not None:
                yield "gradients", tensor
        yield from self._kept_by_fsdp2()

    def _note_optimizer(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._note("optimizer", local_tensor(value))
