"""A dispatch mode that follows every storage from where it is made until it is freed, on real and on fake tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
_LOCAL_SCALAR = _aten._local_scalar_dense.default
# torch's counter knows attention's CUDA kernels; the one that a CPU takes in their place has the same arguments.
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward


class LiveStorages(TorchDispatchMode):
    """The bytes of all storages that operators in the block make, while they are alive.

    What exists before, and what ``disregard`` is told of, does not count. ``peak`` is the largest sum since ``mark``.

    Args:
        is_marked: Asked of each storage when it is made, whether it is to be summed up apart as well.
        is_recomputing: Asked whether what is computed now was computed before.
    """

    def __init__(
        self, is_marked: Callable[[], bool] = lambda: False, is_recomputing: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self.is_marked = is_marked
        self.is_recomputing = is_recomputing
        self.now = 0
        self.marked = 0
        self.peak = 0
        self.marked_at_peak = 0
        self.flops = 0
        self.recomputed_flops = 0
        self.num_made = 0
        self._known: dict[int, tuple[Any, int, bool, int]] = {}  # by the storage's address in C++

    def mark(self) -> None:
        """Begin to look for the largest sum anew."""
        self.peak, self.marked_at_peak = self.now, self.marked

    def unmark(self, made_from: int = 0) -> None:
        """Sum up apart no longer what was made from a number of storages on; ``num_made`` says how many there were."""
        for key, (reference, size, is_marked, number) in self._known.items():
            if is_marked and number >= made_from:
                self._known[key] = (reference, size, False, number)
                self.marked -= size

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were there before."""
        for tensor in tensors:
            self._follow(tensor, counts=False)

    def disregard(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage no longer, though it lives on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            reference, num_bytes, is_marked, number = self._known[key]
            self._add(-num_bytes, is_marked)
            self._known[key] = (reference, 0, is_marked, number)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (func is _LOCAL_SCALAR and args[0].device.type != "cpu") or (func is _LOCAL_SCALAR and _is_fake(args[0])):
            return torch.zeros((), dtype=args[0].dtype).item()  # no value is known: branches take that of zero
        for tensor in tensors_of(args):
            if tensor.untyped_storage()._cdata not in self._known:
                self._follow(tensor, counts=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            if tensor.untyped_storage()._cdata not in self._known:
                self._follow(tensor, counts=True)
        if self.now > self.peak:
            self.mark()
        if flops := flops_of(func, args, kwargs or {}, result):
            self.flops += flops
            self.recomputed_flops += flops if self.is_recomputing() else 0
        return result

    def _follow(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes() if counts else 0
        is_marked = counts and self.is_marked()
        self._known[key] = (ref(storage, lambda _: self._forget(key)), num_bytes, is_marked, self.num_made)
        self.num_made += 1
        self._add(num_bytes, is_marked)

    def _forget(self, key: int) -> None:
        _, num_bytes, is_marked, _ = self._known.pop(key)
        self._add(-num_bytes, is_marked)

    def _add(self, num_bytes: int, is_marked: bool) -> None:
        self.now += num_bytes
        if is_marked:
            self.marked += num_bytes


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an operator's arguments or results, which may be lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one operator: matrix products and attention; the others do not count.

    Attention counts in full, also where a causal mask lets half of it be left out, as in torch's own counter.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _FLASH:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is _FLASH_BACKWARD:
        gradient, query, key, value = (each.shape for each in args[:4])
        return int(sdpa_backward_flop_count(gradient, query, key, value))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0
