"""Workarounds for defects of torch on the CPU. Each lists the versions on which it was observed.

``tests/_torch/test_torch.py`` fails if a supported version no longer needs a workaround, or needs it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A workaround for one defect of torch: a probe and a patch."""

    name: str
    seen_on: tuple[str, ...]
    not_on: tuple[str, ...]
    why: str
    is_needed: Callable[[], bool]
    apply: Callable[[], None]


def repair_cpu_collectives() -> None:
    """Make ``fully_shard`` average gradients over gloo, and run on a 2-D CPU mesh. CUDA is not affected.

    Called on all ranks before sharding on the CPU. Idempotent; does not communicate.
    """
    for repair in REPAIRS:
        if repair.is_needed():
            repair.apply()


# gloo's ReduceOp.AVG: in torch 2.7 reduce_scatter_tensor returns the sum and all_reduce raises (pytorch#162338), while
# fully_shard requests AVG for fp32 and bf16 gradients.

_MARK = "_composer_fsdp2_repair"


def _gloo_cannot_average() -> bool:
    """Whether gloo rejects AVG.

    gloo raises before it communicates, so a process group of this rank alone is sufficient. Its store is in memory, and
    no other rank takes part.
    """
    if hasattr(_fsdp_collectives._get_gradient_divide_factors, _MARK):
        return False
    c10d: Any = torch._C._distributed_c10d
    group = c10d.ProcessGroupGloo(c10d.HashStore(), 0, 1)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.AVG
    try:
        group.allreduce([torch.ones(1)], options).wait()
    except RuntimeError:
        return True
    return False


def _sum_then_divide() -> None:
    original = _fsdp_collectives._get_gradient_divide_factors

    def divide_factors(
        reduce_scatter_group: Any, all_reduce_group: Any, reduce_dtype: torch.dtype, device_type: str = "", **rest: Any
    ) -> Any:
        factors = original(reduce_scatter_group, all_reduce_group, reduce_dtype, device_type, **rest)
        if device_type != "cpu" or factors[0] is not None:
            return factors
        # A factor of 1 before the reduction makes fully_shard request SUM; the division follows the reduction.
        ranks = reduce_scatter_group.size() * (1 if all_reduce_group is None else all_reduce_group.size())
        return (1.0, float(ranks))

    setattr(divide_factors, _MARK, original)
    _fsdp_collectives._get_gradient_divide_factors = divide_factors


# torch.cpu.Stream is a stub whose record_event returns None; fully_shard on a 2-D mesh asserts that it returns an
# event.


def _cpu_events_are_missed() -> bool:
    """Whether ``fully_shard`` would raise on a 2-D CPU mesh because CPU streams do not record events.

    ``torch.cpu.Stream.record_event`` returns None, which the field ``event`` of ``AllReduceState`` does not accept. In
    other torch versions it does.
    """
    accepts_none = "None" in str(_fsdp_param_group.AllReduceState.__annotations__["event"])
    stream: Any = torch.cpu.Stream()
    return stream.record_event() is None and not accepts_none


def _record_cpu_events() -> None:
    def record_event(self: torch.cpu.Stream, event: Any = None) -> Any:
        return torch.cpu.Event() if event is None else event

    torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign]
    _forget_events_of_unused_gathers()


def _forget_events_of_unused_gathers() -> None:
    """Discard the event of an unused prefetch, which ``_record_cpu_events`` would otherwise add.

    A frozen unit whose inputs need no gradient runs no backward. At the end of the backward, torch waits for the unit's
    prefetch. If it has an event, torch waits on a stream of torch.accelerator, which does not exist on a machine
    without one.
    """
    original = _fsdp_param_group.FSDPParamGroup.finalize_backward

    def finalize_backward(self: Any) -> None:
        gather = self._all_gather_result
        if gather is not None and self.device.type == "cpu":
            # the collective itself is still waited for
            self._all_gather_result = gather._replace(all_gather_event=None)
        original(self)

    _fsdp_param_group.FSDPParamGroup.finalize_backward = finalize_backward  # type: ignore[method-assign]


REPAIRS = (
    Repair(
        name="gloo averages",
        seen_on=("2.7.0",),
        not_on=("2.13.0",),
        why="gradients on the CPU were the sum over ranks instead of the mean, and a 2-D mesh raised",
        is_needed=_gloo_cannot_average,
        apply=_sum_then_divide,
    ),
    Repair(
        name="CPU streams record events",
        seen_on=("2.7.0",),
        not_on=("2.13.0",),
        why="fully_shard on a 2-D CPU mesh fails an assertion without an event",
        is_needed=_cpu_events_are_missed,
        apply=_record_cpu_events,
    ),
)
