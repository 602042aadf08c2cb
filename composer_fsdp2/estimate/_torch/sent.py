"""Collectives at torch's dispatcher."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_SILENT = {"wait_tensor"}
_c10d: Any = distributed_c10d
# Substring of an operator's name without underscores -> collective.
_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
}


class Sent(NamedTuple):
    """One call of a collective.

    Args:
        operator: The operator's name, such as ``_allgather_base_``.
        num_bytes: Bytes of the full buffer: the output of an all-gather, the input of a reduce-scatter, the tensor of
            an all-reduce or a broadcast.
        dtype: The buffer's dtype, without ``torch.``; "" without a buffer.
        ranks: The size of the group; 0 if the operator has no group argument.
        members: The ranks of the group; () for the default group, or without a group argument.
    """

    operator: str
    num_bytes: int
    dtype: str
    ranks: int
    members: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        """The type of collective, such as ``all_gather``, independent of torch's operator name; "" for others, such
        as barriers."""
        return next((op for part, op in _OPS.items() if part in self.operator.replace("_", "")), "")


def is_collective(func: Any) -> bool:
    return func.namespace in _NAMESPACES and func.overloadpacket.__name__ not in _SILENT


def sent_by(func: Any, args: tuple[Any, ...], result: Any) -> Sent | None:
    """Return the collective that an operator call issued; None if the operator is not a collective."""
    if not is_collective(func):
        return None
    buffers = [tensors for value in (*args, result) if (tensors := list(tensors_of(value)))]
    full = max(buffers, key=lambda tensors: sum(tensor.nbytes for tensor in tensors), default=[])
    dtype = str(full[0].dtype).removeprefix("torch.") if full else ""
    group = next((group for value in reversed(args) if (group := _group(value)) is not None), None)
    members = () if group in (None, dist.group.WORLD) else tuple(dist.get_process_group_ranks(group))
    num_ranks = 0 if group is None else group.size()
    num_bytes = sum(tensor.nbytes for tensor in full)
    return Sent(func.overloadpacket.__name__, num_bytes, dtype, num_ranks, members)


def _group(value: Any) -> Any:
    """Return the process group that is passed to an operator, as an object or by name; None for other arguments."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return _c10d._resolve_process_group(value) if isinstance(value, str) else None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in an operator's arguments or results, including nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
