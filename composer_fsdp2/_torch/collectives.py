"""Call watches before each collective of a sharded model: those of ``fully_shard``, and those between its units.

[Note: reserve memory] Functional collectives of TP-sharded layers (DTensors) allocate their own output. A rank that
runs out of memory in that allocation cannot report it before the other ranks have entered the collective. We therefore
allocate and free the same number of bytes before the watches run; torch's caching allocator then has the memory ready.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import placement_types

# The names in torch 2.7 and 2.13, of fully_shard's collectives and of the functional collectives that DTensors call.
_KINDS = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that is about to be launched; its buffers are allocated.

    Args:
        unit: The path of the unit's module; "" for a collective between units.
        kind: all-gather, reduce-scatter, all-reduce or all-to-all.
        phase: forward or backward; unshard() if a script called it; or "a layer that ranks divide" for a collective of
            tensor, context or expert parallelism.
    """

    unit: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"the {self.kind} of {self.unit or 'the model'} in {self.phase}"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Watch:
    """A callback for the collectives of a model.

    Args:
        before: Called on each rank before it launches a collective, after the collective's buffers are allocated.
    """

    before: Callable[[PendingCollective], None]


@contextlib.contextmanager
def collectives_of_unit(watches: Sequence[tuple[Watch, str]], phase: str) -> Iterator[None]:
    """Within the block, call a unit's watches before each collective that ``fully_shard`` launches.

    Args:
        watches: The unit's watches. Each is paired with the path of the unit in the watched model.
        phase: As in ``PendingCollective``.
    """
    global _current_unit
    if not watches:
        yield
        return
    outer, _current_unit = _current_unit, (tuple(watches), phase)
    _fsdp_module.dist = _WatchedDistributed()
    try:
        yield
    finally:
        _current_unit = outer
        if outer is None:
            _fsdp_module.dist = dist


def watch_functional_collectives(watch: Watch, *, first: bool) -> Callable[[], None]:
    """Call a watch before each functional collective of TP-sharded layers, and in each ``announce``.

    Args:
        first: Call it before the registered watches, instead of after them.
    Returns:
        A function that removes the watch. The watch is referenced weakly, so deleting it removes it too.
    """
    listed = weakref.ref(watch, _forget)
    _between_units.insert(0 if first else len(_between_units), listed)
    for name in _functional:
        setattr(_functional_collectives, name, functools.partial(_launch_functional, name))
    _placement_module.shard_dim_alltoall = _announced_shard_dim_alltoall
    return functools.partial(_forget, listed)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce ``tensor`` in place. Calls the current unit's watches before."""
    _launch(dist.all_reduce, "all-reduce", tensor, group=group)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    to_receive: Sequence[int],
    to_send: Sequence[int],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> Any:
    """All-to-all with the given numbers of elements per rank. Calls the current unit's watches before."""
    sizes = list(to_receive), list(to_send)
    return _launch(dist.all_to_all_single, "all-to-all", received, sent, *sizes, group=group, async_op=async_op)


def announce(kind: str) -> None:
    """Call the watches of collectives between units. Called on all ranks, before each such collective.

    Args:
        kind: As in ``PendingCollective``, or the name of a function of ``torch.distributed``.
    """
    for listed in tuple(_between_units):
        if (watch := listed()) is not None:
            watch.before(PendingCollective("", kind, "a layer that ranks divide"))


def is_announced() -> bool:
    """Whether ``announce`` would call a watch."""
    return any(listed() is not None for listed in _between_units)


def launch(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``announce``, then a collective such as ``dist.all_to_all_single`` that belongs to no unit.

    Its buffers are already allocated.
    """
    announce(collective.__name__)
    collective(*args, **kwargs)


def all_gather_single(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Call ``dist.all_gather_into_tensor``. torch 2.13 deprecates it in favour of ``all_gather_single``."""
    launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    launch(output, part, group)


def reduce_scatter_single(part: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Call ``dist.reduce_scatter_tensor`` with sums. torch 2.13 renames it to ``reduce_scatter_single``."""
    launch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    launch(part, full, group=group)


def _forget(listed: weakref.ref[Watch]) -> None:
    if listed in _between_units:
        _between_units.remove(listed)
    if not _between_units:
        vars(_functional_collectives).update(_functional)
        _placement_module.shard_dim_alltoall = _shard_dim_alltoall


# (watches, phase) of the unit whose collectives run
_current_unit: tuple[tuple[tuple[Watch, str], ...], str] | None = None
_between_units: list[weakref.ref[Watch]] = []  # weak references: units own their watches
_fsdp_module: Any = _fsdp_collectives
_placement_module: Any = placement_types
_shard_dim_alltoall: Callable[..., torch.Tensor] = _placement_module.shard_dim_alltoall
_functional = {name: function for name in _KINDS if (function := vars(_functional_collectives).get(name)) is not None}


class _WatchedDistributed:
    """Replaces ``torch.distributed`` in the module of fully_shard's collectives."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(dist, name)
        return functools.partial(_launch, value, _KINDS[name]) if name in _KINDS else value


def _launch_functional(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Announce and launch one of torch's functional collectives; see [Note: reserve memory]."""
    if type(tensor) in (torch.Tensor, _functional_collectives.AsyncCollectiveTensor):  # not traced by a compiler
        kind, group = _KINDS[name], kwargs.get("group")
        mesh, axis = group if isinstance(group, tuple) else (None, None)
        num_ranks = dist.get_world_size() if mesh is None else mesh.size(axis)
        copies = (1, num_ranks) if kind == "all-gather" else (1, 1)
        room = [torch.empty(copy * tensor.nbytes, dtype=torch.uint8, device=tensor.device) for copy in copies]
        del room
        announce(kind)
    return _functional[name](tensor, *args, **kwargs)


def _announced_shard_dim_alltoall(
    tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """Announce and run the all-to-all by which a DTensor changes its sharded dimension.

    On the CPU torch runs an all-gather, which is announced as an all-gather.
    """
    if mesh.device_type != "cpu" and type(tensor) in (torch.Tensor, _functional_collectives.AsyncCollectiveTensor):
        room = [torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device) for _ in range(3)]
        del room
        announce("all-to-all")
    return _shard_dim_alltoall(tensor, gather_dim, shard_dim, mesh, mesh_dim)


def _launch(function: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    watches, phase = _current_unit or ((), "")
    announced = [PendingCollective(path, kind, phase) for _, path in watches]
    for (watch, _), collective in zip(watches, announced, strict=True):
        watch.before(collective)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        for collective in dict.fromkeys(announced):  # watches of the same unit announce the same collective
            error.add_note(f"in {collective}")
        raise
