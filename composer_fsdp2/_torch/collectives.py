"""A sharded model's collectives, announced before they are launched: ``fully_shard``'s, and those between its units.

[Note: room before] A collective of split layers, which are DTensors, allocates what it returns: too late for a rank
that is out of memory to say so before the others have entered it. So as much is allocated before it is announced, and
freed: torch's allocator has it ready for the collective.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import placement_types

from composer_fsdp2._torch.groups import groups_of, put_in_place, state_of

# In the module that launches them, by the names that torch 2.7 and 2.13 call.
_LAUNCHES = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


# What DTensors of split layers call, by the names of torch 2.7 and 2.13.
_OF_SPLIT_LAYERS = {
    "all_gather_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


@dataclass(frozen=True, slots=True)
class InFlight:
    """A collective of a unit, whose buffers are there and which is not launched yet.

    Args:
        unit: The path of the unit's module.
        kind: all-gather, reduce-scatter, all-reduce or all-to-all.
        phase: forward, backward, unshard() where a script called it, or a layer that ranks divide.
    """

    unit: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"the {self.kind} of {self.unit or 'the model'} in {self.phase}"


def watch_collectives(
    units: Mapping[str, FSDPModule],
    before: Callable[[InFlight], None],
    *,
    first: bool = False,
    between_units: bool = False,
) -> Callable[[], None]:
    """Call ``before`` for each collective of these units, between the allocation of its buffers and its launch.

    What ``before`` raises ends the forward or backward; ``reset_after_error`` then. An error of the collective itself
    gets a note that names the unit.

    Args:
        units: By path; each unit once.
        first: Ahead of those that watch already.
        between_units: Also for collectives of tensor, context and expert parallelism, by whatever model.
    Returns:
        A function that ends it. Until then each collective costs a few Python calls more. A watch ends with its model,
        too, which it does not keep alive.
    """
    watch = _Watch(before, between_units=between_units)
    undo = []
    for path, module in units.items():
        state = state_of(module)
        # The end of a backward averages what lies unsharded on every rank.
        undo.append(_replace_call(state, "_root_post_backward_final_callback", path, watch))
        for group in groups_of(state):
            undo.extend(_replace_call(group, name, path, watch) for name in ("unshard", "post_backward"))
    listed = weakref.ref(watch, _forget)
    _watched.insert(0 if first else len(_watched), listed)
    _launching.dist = _WatchedDistributed()
    if between_units:
        for name in _functional:
            setattr(_functional_collectives, name, functools.partial(_launch_of_split_layer, name))
        _placing.shard_dim_alltoall = _exchange_of_split_layer

    def stop() -> None:
        _forget(listed)
        for put_back in reversed(undo):
            put_back()

    return stop


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce ``tensor``, announced to the watches like a unit's own collective."""
    _launching.dist.all_reduce(tensor, group=group)


def announce(kind: str) -> None:
    """Announce to the watches of what lies between units; all ranks come to it."""
    for watch in _live():
        if watch.between_units:
            watch.before(InFlight("", kind, "a layer that ranks divide"))


def is_announced() -> bool:
    """Whether ``announce`` reaches a watch."""
    return any(watch.between_units for watch in _live())


def launch(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Launch a collective between units, as ``dist.all_to_all_single``, whose buffers are there; announced."""
    announce(collective.__name__)
    collective(*args, **kwargs)


def all_gather_single(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``dist.all_gather_into_tensor``, which torch 2.13 renames to this, deprecating the old name."""
    launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    launch(output, part, group)


def reduce_scatter_single(part: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``dist.reduce_scatter_tensor`` with sums, which torch 2.13 renames to this."""
    launch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    launch(part, full, group=group)


def _forget(listed: "weakref.ref[_Watch]") -> None:
    if listed in _watched:
        _watched.remove(listed)
    if not _watched:
        _launching.dist = dist
    if not any(watch.between_units for watch in _live()):
        vars(_functional_collectives).update(_functional)
        _placing.shard_dim_alltoall = _shard_dim_alltoall


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Watch:
    before: Callable[[InFlight], None]
    between_units: bool = False
    unit: str = ""
    phase: str = ""
    depth: int = 0


# Weakly: the units hold their watch, in what replaces their methods.
_watched: "list[weakref.ref[_Watch]]" = []
_launching: Any = _fsdp_collectives
_placing: Any = placement_types
_shard_dim_alltoall: Callable[..., torch.Tensor] = _placing.shard_dim_alltoall
_functional = {
    name: function for name in _OF_SPLIT_LAYERS if (function := vars(_functional_collectives).get(name)) is not None
}
_PHASES = {TrainingState.FORWARD: "forward", TrainingState.IDLE: "unshard()"}


def _replace_call(owner: Any, name: str, path: str, watch: _Watch) -> Callable[[], None]:
    """Note which unit works while a method of its state, or of one of its groups, runs."""
    method = getattr(owner, name)  # or another replacement of ours

    def call(*args: Any, **kwargs: Any) -> Any:
        outer = watch.unit, watch.phase
        watch.unit, watch.depth = path, watch.depth + 1
        watch.phase = _PHASES.get(owner._training_state, "backward") if name == "unshard" else "backward"
        try:
            return method(*args, **kwargs)
        finally:
            watch.unit, watch.phase = outer
            watch.depth -= 1

    return put_in_place(owner, name, call)


class _WatchedDistributed:
    """``torch.distributed`` as the module of fully_shard's collectives sees it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(dist, name)
        return functools.partial(_launch, value, _LAUNCHES[name]) if name in _LAUNCHES else value


def _live() -> list[_Watch]:
    return [watch for listed in _watched if (watch := listed()) is not None]


def _launch_of_split_layer(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """One of torch's functional collectives; see [Note: room before]."""
    if type(tensor) in (torch.Tensor, _functional_collectives.AsyncCollectiveTensor):  # no compiler traces it
        kind, group = _OF_SPLIT_LAYERS[name], kwargs.get("group")
        mesh, axis = group if isinstance(group, tuple) else (None, None)
        num_ranks = dist.get_world_size() if mesh is None else mesh.size(axis)
        copies = (1, num_ranks) if kind == "all-gather" else (1, 1)
        room = [torch.empty(copy * tensor.nbytes, dtype=torch.uint8, device=tensor.device) for copy in copies]
        del room
        announce(kind)
    return _functional[name](tensor, *args, **kwargs)


def _exchange_of_split_layer(
    tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """What DTensors call to move from one sharded dimension to another; on the CPU an all-gather, announced as such."""
    if mesh.device_type != "cpu" and type(tensor) in (torch.Tensor, _functional_collectives.AsyncCollectiveTensor):
        room = [torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device) for _ in range(3)]
        del room
        announce("all-to-all")
    return _shard_dim_alltoall(tensor, gather_dim, shard_dim, mesh, mesh_dim)


def _launch(function: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    watching = [watch for watch in _live() if watch.depth]
    announced = [InFlight(watch.unit, kind, watch.phase) for watch in watching]
    for watch, collective in zip(watching, announced, strict=True):
        watch.before(collective)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        for collective in dict.fromkeys(announced):  # several watches announce the same
            error.add_note(f"in {collective}")
        raise
