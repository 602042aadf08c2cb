"""A dispatch mode that tracks each storage from allocation to free, for real and fake tensors."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import TorchDispatchMode
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.estimate._torch.fake import Unknown
from composer_fsdp2.estimate._torch.flops import flops_of
from composer_fsdp2.estimate._torch.sent import Sent, sent_by, tensors_of


@dataclass(slots=True)
class _Storage:
    reference: Any  # weak
    num_bytes: int
    is_marked: bool
    is_host: bool
    number: int  # index in allocation order


class LiveStorages(TorchDispatchMode):
    """Counts the live bytes of all storages that operators allocate while the mode is active.

    Storages that existed before, and those passed to ``disregard``, are excluded. ``peak`` is the largest sum since the
    last ``mark``.

    Args:
        is_marked: Called for each new storage. If it returns True, the bytes are also counted in ``marked``.
        is_recomputing: Called for each operator. If it returns True, the FLOPs are counted as recomputed.
        num_experts: Experts per layer; see ``Unknown``.
    """

    def __init__(
        self,
        is_marked: Callable[[], bool] = lambda: False,
        is_recomputing: Callable[[], bool] = lambda: False,
        num_experts: int = 1,
    ) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.is_marked = is_marked
        self.is_recomputing = is_recomputing
        self.unknown = Unknown(num_experts)
        self.now = self.peak = 0
        self.marked = self.marked_at_peak = 0
        self.on_host = self.host_peak = 0
        self.flops = self.recomputed_flops = 0
        self.num_made = 0
        self._is_host = False
        self._known: dict[int, _Storage] = {}  # keyed by the address of the C++ StorageImpl

    def mark(self) -> None:
        """Reset all peaks to the current sums."""
        self.peak, self.marked_at_peak, self.host_peak = self.now, self.marked, self.on_host

    def unmark(self, made_from: int = 0) -> None:
        """Unmark the storages allocated since ``num_made`` was ``made_from``."""
        for each in self._known.values():
            if each.is_marked and each.number >= made_from:
                each.is_marked = False
                self.marked -= each.num_bytes

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors that existed before the mode was active from the count."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), counts=False)

    def disregard(self, tensor: torch.Tensor) -> None:
        """Stop counting the tensor's storage, although it stays alive."""
        each = self._known.get(tensor.untyped_storage()._cdata)
        if each is not None:
            self._add(each, -each.num_bytes)
            each.num_bytes = 0

    def host(self) -> AbstractContextManager[None]:
        """Count storages allocated in the block as host memory."""
        return replaced(self, "_is_host", True)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor dispatches first; its local operators come through here again
        for tensor in tensors_of(args):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._follow(storage, counts=False)
        is_watched = func in Unknown.watched and isinstance(args[0], FakeTensor)
        result = self.unknown.answer(func, args) if is_watched else NotImplemented
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        if is_watched and isinstance(result, torch.Tensor):
            self.unknown.note(func, args, result)
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._follow(storage, counts=True)
        self.host_peak = max(self.host_peak, self.on_host)
        if self.now > self.peak:
            self.peak, self.marked_at_peak = self.now, self.marked
        if sent := sent_by(func, args, result):
            self.sent.append(sent)
        if flops := flops_of(func, args, kwargs or {}, result):
            self.flops += flops
            self.recomputed_flops += flops if self.is_recomputing() else 0
        return result

    def _follow(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        key, num_bytes = storage._cdata, storage.nbytes() if counts else 0
        is_marked = counts and self.is_marked()
        followed = _Storage(
            ref(storage, lambda _: self._forget(key)), num_bytes, is_marked, self._is_host, self.num_made
        )
        self._known[key] = followed
        self.num_made += 1
        self._add(followed, num_bytes)

    def _forget(self, key: int) -> None:
        each = self._known.pop(key)
        self._add(each, -each.num_bytes)

    def _add(self, each: _Storage, num_bytes: int) -> None:
        if each.is_host:
            self.on_host += num_bytes
            return
        self.now += num_bytes
        if each.is_marked:
            self.marked += num_bytes
