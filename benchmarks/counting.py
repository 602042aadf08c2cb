"""What one step communicates and how much memory its state takes, counted at torch's dispatcher instead of timed."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from composer_fsdp2._torch.groups import groups_of, state_of

__all__ = ["Collectives", "LiveBytes", "StateBytes", "gathered_bytes"]

_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_INTO = torch.ops.aten.copy_.default
_COPIES = {_INTO, torch.ops.aten._to_copy.default}
_SILENT = {"wait_tensor"}
# A storage that was seen as several of these counts as the first.
_KINDS = ("parameters", "gradients", "optimizer", "communication")


class Collectives(TorchDispatchMode):
    """Counts the collectives of one step, by operator: calls, and bytes of each call's full buffer.

    The full buffer is what all ranks together hold: the output of an all-gather, the input of a reduce-scatter, the
    tensor of an all-reduce or a broadcast. Backward is seen too: autograd carries dispatch modes into its threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, dict[str, int]] = {}
        self.calls: list[tuple[str, int, int]] = []  # operator, bytes, ranks of the group

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # Its own dispatch comes first, so that what that sends is seen here.
        if _is_collective(func):
            count = self.counts.setdefault(func.overloadpacket.__name__, {"calls": 0, "bytes": 0})
            num_bytes = max((sum(tensor.nbytes for tensor in _tensors(arg)) for arg in args), default=0)
            count["calls"] += 1
            count["bytes"] += num_bytes
            self.calls.append((func.overloadpacket.__name__, num_bytes, _group_size(args)))
        return func(*args, **(kwargs or {}))


class StateBytes(TorchDispatchMode):
    """Measures the peak of a step's state on this rank: the bytes of all storages that hold parameters (sharded and
    gathered), gradients (of gathered parameters and reduced), the optimizer's state, or a collective's buffers.

    A storage counts from the operator after which it can be reached as one of these until it is freed. Activations
    and temporary tensors do not count. ``peak`` is the largest sum after any operator, ``at_peak`` its parts.

    What FSDP2 keeps out of the modules' sight is looked up in its own objects: gathered parameters before they stand
    in their modules, what is kept of them between forward and backward, gradients that were put off in the dtype they
    are reduced in, and those that wait for their reduction over replicas.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._sharded = list(model.parameters())
        self._places = [(module, name) for module in model.modules() for name in _parameter_names(module)]
        # FSDP1 hands out views of these and keeps the gradient on them.
        flat = (getattr(module, "_flat_param", None) for module in model.modules())
        self._flat: list[Any] = list({id(each): each for each in flat if each is not None}.values())
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = list({id(group): group for unit in units for group in groups_of(state_of(unit))}.values())
        self._kind_of = WeakIdKeyDictionary()
        self._look()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if _is_collective(func) or func.namespace == "fsdp":  # what copies in and out of a collective's buffers
            for tensor in _tensors((*args, *(kwargs or {}).values())):
                self._note("communication", tensor)
        if func in _COPIES and self._kind_of.get(args[func is _INTO].untyped_storage()) == "communication":
            self._note("communication", result)  # reduced over one rank, or cast to the parameter's dtype
        self._look()
        return result

    def _look(self) -> None:
        for kind, tensor in self._visible():
            self._note(kind, tensor)
        sums = dict.fromkeys(_KINDS, 0)
        for storage, kind in self._kind_of.items():
            sums[kind] += storage.nbytes()
        if sum(sums.values()) > self.peak:
            self.peak, self.at_peak = sum(sums.values()), sums

    def _kept_by_fsdp2(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups:
            for parameter in group.fsdp_params:
                for tensor in parameter.all_gather_outputs:
                    yield "parameters", tensor
                if (tensor := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                    yield "parameters", tensor
                if (tensor := parameter.unsharded_accumulated_grad) is not None:
                    yield "gradients", _local(tensor)
            if group._partial_reduce_output is not None:
                yield "communication", group._partial_reduce_output

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._kind_of.get(storage, kind)
        self._kind_of[storage] = min(known, kind, key=_KINDS.index)

    def _visible(self) -> Iterator[tuple[str, torch.Tensor]]:
        present = [getattr(module, name) for module, name in self._places]
        for parameter in (*self._sharded, *present, *self._flat):
            yield "parameters", _local(parameter)
            if parameter.is_leaf and parameter.grad is not None:
                yield "gradients", _local(parameter.grad)
        for flat in self._flat:
            for name in ("_local_shard", "_full_param_padded", "_mp_shard"):
                if (tensor := getattr(flat, name, None)) is not None:
                    yield "parameters", tensor
            if (tensor := getattr(flat, "_saved_grad_shard", None)) is not None:
                yield "gradients", tensor
        yield from self._kept_by_fsdp2()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", _local(value)


class LiveBytes(TorchDispatchMode):
    """Measures the bytes of all storages that the block made and that can still be reached: ``now``, and ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _tensors(args)}
        for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
            if id(storage) not in given:
                self._made[storage] = None
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._made)


def gathered_bytes(counts: dict[str, dict[str, int]]) -> int:
    """The bytes of all all-gathers in what ``Collectives`` counted."""
    return sum(count["bytes"] for name, count in counts.items() if "gather" in name)


def _is_collective(func: Any) -> bool:
    return func.namespace in _NAMESPACES and func.overloadpacket.__name__ not in _SILENT


def _group_size(args: Iterable[Any]) -> int:
    """Of the process group among an operator's arguments; 0 without one."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return int(dist.ProcessGroup.unbox(arg).size())
    return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an argument, which may be a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
