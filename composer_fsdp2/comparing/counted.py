"""The collectives of a batch, counted at torch's dispatcher."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import TorchDispatchMode
from composer_fsdp2.comparing.run_record import CollectiveCount

_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# What is in an operator's name, without underscores, and what it is.
_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by operator and dtype: calls, and bytes of each call's full buffer.

    Backward is seen too: autograd carries dispatch modes into its threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, str], list[int]] = {}

    @property
    def counts(self) -> tuple[CollectiveCount, ...]:
        return tuple(
            CollectiveCount(op=op, dtype=dtype, calls=calls, num_bytes=num_bytes)
            for (op, dtype), (calls, num_bytes) in sorted(self._counts.items())
        )

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own dispatch comes first, so that what that sends is seen here
        if func.namespace in _NAMESPACES:
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        op = next((op for part, op in _OPS.items() if part in operator.replace("_", "")), "")
        buffers = [tensors for arg in args if (tensors := list(_tensors(arg)))]
        if not op or not buffers:
            return  # waiting for one, or a barrier
        full = max(buffers, key=lambda tensors: sum(tensor.nbytes for tensor in tensors))
        count = self._counts.setdefault((op, str(full[0].dtype).removeprefix("torch.")), [0, 0])
        count[0] += 1
        count[1] += sum(tensor.nbytes for tensor in full)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an argument, which may be a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
