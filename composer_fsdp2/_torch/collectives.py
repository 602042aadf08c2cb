"""``fully_shard``'s collectives, announced before they are launched."""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composer_fsdp2._torch.groups import groups_of, put_in_place, state_of

# In the module that launches them, by the names that torch 2.7 and 2.13 call.
_LAUNCHES = {
    "all_gather_into_tensor": "all-gather",
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
        kind: all-gather, reduce-scatter or all-reduce.
        phase: forward, backward, or unshard() where a script called it.
    """

    unit: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"the {self.kind} of {self.unit or 'the model'} in {self.phase}"


def watch_collectives(
    units: Mapping[str, FSDPModule], before: Callable[[InFlight], None], *, first: bool = False
) -> Callable[[], None]:
    """Call ``before`` for each collective of these units, between the allocation of its buffers and its launch.

    What ``before`` raises ends the forward or backward; ``reset_after_error`` then. An error of the collective itself
    gets a note that names the unit.

    Args:
        units: By path; each unit once.
        first: Ahead of those that watch already.
    Returns:
        A function that ends it. Until then each collective costs a few Python calls more. A watch ends with its model,
        too, which it does not keep alive.
    """
    watch = _Watch(before)
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

    def stop() -> None:
        _forget(listed)
        for put_back in reversed(undo):
            put_back()

    return stop


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce ``tensor``, announced to the watches like a unit's own collective."""
    _launching.dist.all_reduce(tensor, group=group)


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


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Watch:
    before: Callable[[InFlight], None]
    unit: str = ""
    phase: str = ""
    depth: int = 0


# Weakly: the units hold their watch, in what replaces their methods.
_watched: "list[weakref.ref[_Watch]]" = []
_launching: Any = _fsdp_collectives
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


def _launch(function: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    watching = [watch for listed in _watched if (watch := listed()) is not None and watch.depth]
    announced = [InFlight(watch.unit, kind, watch.phase) for watch in watching]
    for watch, collective in zip(watching, announced, strict=True):
        watch.before(collective)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        for collective in dict.fromkeys(announced):  # several watches announce the same
            error.add_note(f"in {collective}")
        raise
