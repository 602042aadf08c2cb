"""Count collectives and memory in one batch of a run of ``compare``, and record its inputs for a prediction."""

import contextlib
from typing import Any

import torch
from composer.core import State
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in
from composer_fsdp2.comparing.counted_batch import CountedBatch, counted
from composer_fsdp2.comparing.job import Options
from composer_fsdp2.comparing.run_record import CollectiveCount
from composer_fsdp2.estimate._torch.counting import Collectives, StateBytes
from composer_fsdp2.estimate.blocks import copy_with
from composer_fsdp2.sharding.plan import ShardingPlan


class Counting:
    """Counts the collectives of a batch from ``begin`` to ``end_backward``, and its memory from ``begin`` to ``end``.

    Collectives are counted on all ranks, except those of clipping and callbacks. The memory of FSDP2's state is
    measured on rank 0 only, because measuring dispatches every operator in Python. It includes allocations of the
    optimizer's step.
    """

    def __init__(self) -> None:
        self.num_microbatches = 0
        self.state_bytes = self.peak_bytes = 0
        self._collectives = Collectives()
        self._state: StateBytes | None = None
        self._counters = contextlib.ExitStack()
        self._of_backward = contextlib.ExitStack()
        self._unsharded: nn.Module | None = None
        self._first: Any = None
        self._shapes: list[list[torch.Size]] = []

    @property
    def counts(self) -> tuple[CollectiveCount, ...]:
        return counted(self._collectives.calls)

    def note_unsharded(self, model: nn.Module) -> None:
        """Copy the model without data before it is sharded, for the prediction.

        Without a copy there is no prediction.
        """
        with contextlib.suppress(Exception):
            self._unsharded = copy_with(model, (), _without_values)

    def begin(self, state: State, *, counts_state: bool) -> None:
        has_state = bool(state.optimizers and state.optimizers[0].state)  # none in the first batch
        if counts_state and has_state and not _is_offloaded(state.model):
            self._state = self._counters.enter_context(StateBytes(state.model, state.optimizers[0]))
        self._of_backward.enter_context(self._collectives)

    def note_microbatch(self, batch: Any) -> None:
        """Called before each microbatch's forward."""
        self.num_microbatches += 1
        with contextlib.suppress(Exception):  # tensors that the meta device does not support, such as sparse ones
            on_meta = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="meta"))
            self._first = on_meta if self._first is None else self._first
            self._shapes.append([tensor.shape for tensor in tensors_in(on_meta)])

    def end_backward(self) -> None:
        self._of_backward.close()

    def end(self, model: nn.Module) -> None:
        self._counters.close()
        if self._state is not None:
            buffers = {id(each.untyped_storage()): each.untyped_storage().nbytes() for each in model.buffers()}
            self.state_bytes = self._state.peak + sum(buffers.values())
            self.peak_bytes = self._state.peak_of_all + sum(buffers.values())
            self._state = None

    def batch(
        self, options: Options, state: State, plan: ShardingPlan, *, num_ranks: int, is_auto: bool
    ) -> CountedBatch:
        """The counts, and the inputs of a prediction."""
        return CountedBatch(
            options=options,
            plan=plan.resolve(num_ranks),
            model=None if self._first is None else self._unsharded,
            microbatch=self._first,
            is_uniform=all(shapes == self._shapes[0] for shapes in self._shapes),
            is_auto=is_auto,
            num_microbatches=self.num_microbatches,
            num_ranks=num_ranks,
            precision=state.precision.value,
            optimizers=tuple(state.optimizers),
            counted=self.counts,
        )


def _is_offloaded(model: nn.Module) -> bool:
    """Whether shards are on another device than the mesh.

    They are not counted: host and device memory would be added up.
    """
    return any(
        isinstance(each, DTensor) and local_tensor(each).device.type != each.device_mesh.device_type
        for each in model.parameters()
    )


def _without_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(local_tensor(tensor), device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
