"""Model the allocations, frees and collectives of ``fully_shard``'s hooks, in the order in which the CPU issues them.

FSDP2 keeps tensors alive by references, not by ``record_stream``, so CPU order determines the allocator's peak. This
follows torch/distributed/fsdp/_fully_shard of torch 2.7 to 2.13 and uses its names: ``ParamGroup`` is
``FSDPParamGroup``, and ``CommContext`` combines ``FSDPCommContext`` and ``FSDPStateContext``, which the groups of a
root share. A tensor is modelled by its number of bytes. Local variables that keep a tensor alive until a function
returns are modelled, and so are the additions of ``_torch/unit.py``.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from composer_fsdp2._torch.capabilities import keeps_unsharded_in_recompute, skips_single_rank_groups
from composer_fsdp2.estimate.allocated import AllocatedBytes
from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.estimate.unit_sizes import ParameterSizes, UnitSizes

# op, unit, bytes of the full buffer, ranks
Send = Callable[[str, str, int, Sequence[int]], None]


class ShardedState(enum.Enum):
    SHARDED = enum.auto()
    SHARDED_POST_FORWARD = enum.auto()
    UNSHARDED = enum.auto()


class TrainingState(enum.Enum):
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()
    IDLE = enum.auto()


@dataclass(slots=True, eq=False)
class CommContext:
    """The state that the units below one root share.

    Args:
        order: All units in the order of ``named_modules``: parents before children.
        send: Called for each collective.
    """

    order: Sequence[UnitSizes]
    allocated: AllocatedBytes
    send: Send
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    all_gather_state: int = 0
    reduce_scatter_state: int = 0
    iter_forward_root: "ParamGroup | None" = None
    is_backward: bool = False
    post_forward_order: "list[ParamGroup]" = field(default_factory=list)
    groups: "Mapping[str, ParamGroup]" = field(init=False)

    def __post_init__(self) -> None:
        self.groups = {sizes.name: ParamGroup(sizes, self) for sizes in self.order}

    def root_post_backward_final_callback(self) -> None:
        for group in self.groups.values():
            if group.training_state is not TrainingState.POST_BACKWARD:
                group.post_backward_now()  # the unit's inputs needed no gradient
            group.training_state = TrainingState.IDLE
            group.finalize_backward()
        self.post_forward_order.clear()
        self.free_reduce_scatter_state()
        self.is_backward = False

    def free_all_gather_state(self) -> None:
        self.allocated.free(Kind.COMMUNICATION, self.all_gather_state)
        self.all_gather_state = 0

    def free_reduce_scatter_state(self) -> None:
        self.allocated.free(Kind.COMMUNICATION, self.reduce_scatter_state)
        self.reduce_scatter_state = 0


@dataclass(slots=True, eq=False)
class ParamGroup:
    """The state of one unit during a step, with the names of ``FSDPParamGroup``.

    Attributes:
        was_unsharded: Whether its parameters have been unsharded at least once in this step.
        unsharded_grads: Bytes of unsharded gradients in the parameter dtype, by parameter name.
        unsharded_accumulated_grads: Bytes of unsharded gradients in the reduce dtype, by parameter name.
        partial_reduce_output: Bytes of gradients that are reduce-scattered, and not yet all-reduced over replicas.
        all_reduce_state: Bytes of the all-reduce buffer, which stays alive until the unit's next reduction or the end
            of backward.
        sharded_grads: The names of parameters that have a sharded gradient.
    """

    sizes: UnitSizes
    context: CommContext
    sharded_state: ShardedState = ShardedState.SHARDED
    training_state: TrainingState = TrainingState.IDLE
    all_gather_result: int | None = None
    was_unsharded: bool = False
    post_forward_indices: list[int] = field(default_factory=list)
    unsharded_grads: dict[str, int] = field(default_factory=dict)
    unsharded_accumulated_grads: dict[str, int] = field(default_factory=dict)
    partial_reduce_output: int = 0
    all_reduce_state: int = 0
    sharded_grads: set[str] = field(default_factory=set)

    # The hooks

    def pre_forward(self) -> None:
        if self.context.iter_forward_root is None:
            self.context.iter_forward_root = self
        self.training_state = TrainingState.FORWARD
        self._unshard()
        self._wait_for_unshard()
        self._prefetch(self.sizes.forward_prefetch)

    def post_forward(self) -> None:
        context = self.context
        if not (context.is_backward and keeps_unsharded_in_recompute()):
            self._reshard_after_forward()
            self.post_forward_indices.append(len(context.post_forward_order))
            context.post_forward_order.append(self)
        self.training_state = TrainingState.IDLE
        if context.iter_forward_root is self:
            context.free_all_gather_state()
            context.iter_forward_root = None

    def pre_backward(self) -> None:
        self.context.is_backward = True
        if self.training_state is not TrainingState.PRE_BACKWARD:
            self.training_state = TrainingState.PRE_BACKWARD
            self._unshard()
            self._wait_for_unshard()
            if self.sizes.backward_prefetch is None and self.post_forward_indices:
                index = self.post_forward_indices.pop()
                if index:
                    self.context.post_forward_order[index - 1]._unshard()
        self._prefetch(self.sizes.backward_prefetch or ())

    def accumulate_grad(self, parameter: str) -> None:
        """Called when autograd accumulates the unsharded gradient of ``parameter``. Only the first one is allocated."""
        if parameter not in self.unsharded_grads:
            self._alloc_unsharded_grad(next(each for each in self.sizes.parameters if each.name == parameter))

    def post_backward(self) -> None:
        self.post_backward_now()
        self.training_state = TrainingState.POST_BACKWARD

    def post_backward_now(self) -> None:
        self._fill_missing_grads()
        self._accumulate_unsharded_grads()
        if self.context.reshard_after_backward:
            self._to_sharded()
        if self.context.reduce_grads:
            self._reduce()
        else:
            self._to_accumulated_grads()

    def finalize_backward(self) -> None:
        self._free_all_reduce_state()
        if self.all_gather_result is not None:  # prefetched, and not used
            self.context.allocated.free(Kind.COMMUNICATION, self.all_gather_result)
            self.all_gather_result = None
        self.post_forward_indices.clear()

    # Parameters

    def _prefetch(self, names: Sequence[str]) -> None:
        for name in names:
            self.context.groups[name]._unshard()

    def _unshard(self) -> None:
        sizes, allocated = self.sizes, self.context.allocated
        is_there = self.all_gather_result is not None or self.sharded_state is ShardedState.UNSHARDED
        if is_there or not sizes.parameters:
            return
        if sizes.num_ranks == 1 and skips_single_rank_groups():
            self.all_gather_result = 0
            return
        num_bytes = sizes.gathered_elements * sizes.param_bytes
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            # The sizes are the same for any consecutive ranks of the shard group.
            ranks = sizes.shard_ranks[: sizes.ranks_after_forward]
            all_gather_input = num_bytes // len(ranks) * sizes.is_cast
        else:
            ranks = sizes.shard_ranks
            is_copied = sizes.is_cast or sizes.is_offloaded
            all_gather_input = sizes.shard_elements * sizes.param_bytes * is_copied
        # An all-to-all's buffer includes its input, about as large as its output.
        op, all_gather_output = ("all_to_all", 2 * num_bytes) if sizes.exchanges else ("all_gather", num_bytes)
        allocated.alloc(Kind.COMMUNICATION, all_gather_input)
        allocated.alloc(Kind.COMMUNICATION, all_gather_output)
        allocated.free(Kind.COMMUNICATION, all_gather_input)
        self.context.send(op, sizes.name, num_bytes, ranks)
        self.all_gather_result = all_gather_output

    def _wait_for_unshard(self) -> None:
        if self.all_gather_result is None:
            return
        context, all_gather_result = self.context, self.all_gather_result
        is_forward = self.training_state is TrainingState.FORWARD
        # A local variable keeps the previous state alive until the function returns.
        prev_all_gather_state = context.all_gather_state if is_forward else 0
        context.allocated.alloc(Kind.GATHERED, self._unsharded_bytes())
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            context.allocated.free(Kind.GATHERED, self._post_forward_bytes())
        self.sharded_state, self.was_unsharded, self.all_gather_result = ShardedState.UNSHARDED, True, None
        if is_forward:
            context.all_gather_state = all_gather_result
        else:
            context.allocated.free(Kind.COMMUNICATION, all_gather_result)
        context.allocated.free(Kind.COMMUNICATION, prev_all_gather_state)

    def _reshard_after_forward(self) -> None:
        sizes, allocated = self.sizes, self.context.allocated
        if sizes.stays_gathered:
            return
        if sizes.ranks_after_forward == sizes.num_ranks:
            self._to_sharded()
            return
        for each in sizes.parameters:
            num_bytes = sizes.gathered(each) * sizes.param_bytes
            allocated.alloc(Kind.GATHERED, num_bytes // sizes.ranks_after_forward)
            allocated.free(Kind.GATHERED, num_bytes)
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    def _to_sharded(self) -> None:
        if self.sharded_state is ShardedState.UNSHARDED:
            self.context.allocated.free(Kind.GATHERED, self._unsharded_bytes())
        elif self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            self.context.allocated.free(Kind.GATHERED, self._post_forward_bytes())
        self.sharded_state = ShardedState.SHARDED

    def _unsharded_bytes(self) -> int:
        return self.sizes.gathered_elements * self.sizes.param_bytes

    def _post_forward_bytes(self) -> int:
        sizes = self.sizes
        each = (sizes.gathered(each) * sizes.param_bytes for each in sizes.parameters)
        return sum(num_bytes // sizes.ranks_after_forward for num_bytes in each)

    # Gradients

    def _alloc_unsharded_grad(self, parameter: ParameterSizes) -> None:
        num_bytes = parameter.part * self.sizes.param_bytes
        self.unsharded_grads[parameter.name] = num_bytes
        self.context.allocated.alloc(Kind.UNSHARDED_GRADIENTS, num_bytes)

    def _fill_missing_grads(self) -> None:
        """Zero-fill gradients of parameters that backward did not reach, as ``UnitGroup`` does."""
        trained = [each for each in self.sizes.parameters if each.is_trained] if self.was_unsharded else []
        there = self.unsharded_grads.keys() | self.unsharded_accumulated_grads.keys()
        missing = [each for each in trained if each.name not in there]
        is_due = self.partial_reduce_output and self.context.reduce_grads and self.context.all_reduce_grads
        if len(missing) < len(trained) or is_due:
            for each in missing:
                self._alloc_unsharded_grad(each)

    def _accumulate_unsharded_grads(self) -> None:
        for name in self.unsharded_accumulated_grads:
            self.context.allocated.free(Kind.UNSHARDED_GRADIENTS, self.unsharded_grads.pop(name, 0))

    def _to_accumulated_grads(self) -> None:
        sizes, allocated = self.sizes, self.context.allocated
        if sizes.reduce_bytes == sizes.param_bytes:
            return
        for name, num_bytes in self.unsharded_grads.items():
            accumulated = num_bytes // sizes.param_bytes * sizes.reduce_bytes
            self.unsharded_accumulated_grads[name] = accumulated
            allocated.alloc(Kind.UNSHARDED_GRADIENTS, accumulated)
            allocated.free(Kind.UNSHARDED_GRADIENTS, num_bytes)
        self.unsharded_grads.clear()

    def _reduce(self) -> None:
        unsharded_grads = {**self.unsharded_grads, **self.unsharded_accumulated_grads}
        self.unsharded_grads.clear()
        self.unsharded_accumulated_grads.clear()
        if unsharded_grads or skips_single_rank_groups():  # 2.13 frees before it returns
            self.context.free_reduce_scatter_state()
        if unsharded_grads:
            self._free_all_reduce_state()
            self._foreach_reduce(unsharded_grads)

    def _foreach_reduce(self, unsharded_grads: Mapping[str, int]) -> None:
        sizes, allocated = self.sizes, self.context.allocated
        reduced = [each for each in sizes.parameters if each.name in unsharded_grads]
        if sizes.exchanges:
            unsharded_grads = self._exchange(reduced, unsharded_grads)
        elements, num_ranks = sum(each.padded_shard for each in reduced), 1 if sizes.exchanges else sizes.num_ranks
        reduce_scatter_input = elements * num_ranks * sizes.reduce_bytes
        allocated.alloc(Kind.COMMUNICATION, reduce_scatter_input)
        # The loop variable keeps the last gradient alive until the function returns.
        is_looped = num_ranks > 1 or not skips_single_rank_groups()
        last = unsharded_grads[reduced[-1].name] if is_looped else 0
        allocated.free(Kind.UNSHARDED_GRADIENTS, sum(unsharded_grads.values()) - last)
        reduce_output = elements * sizes.reduce_bytes
        allocated.alloc(Kind.COMMUNICATION, reduce_output)
        if is_looped and not sizes.exchanges:
            self.context.send("reduce_scatter", sizes.name, reduce_scatter_input, sizes.shard_ranks)
        self.context.reduce_scatter_state = reduce_scatter_input
        if not sizes.replica_ranks:
            self._to_sharded_grads(reduced, reduce_output)
        elif self.context.all_reduce_grads:
            self.context.send("all_reduce", sizes.name, reduce_output, sizes.replica_ranks)
            self._to_sharded_grads(reduced, reduce_output)
            allocated.free(Kind.COMMUNICATION, self.partial_reduce_output)
            self.partial_reduce_output = 0
        elif self.partial_reduce_output:
            allocated.free(Kind.COMMUNICATION, reduce_output)
        else:
            self.partial_reduce_output = reduce_output
        allocated.free(Kind.UNSHARDED_GRADIENTS, last)

    def _exchange(self, reduced: Sequence[ParameterSizes], unsharded_grads: Mapping[str, int]) -> dict[str, int]:
        """Model the gradient reduction of experts if each rank all-gathered only a part of them: an all-to-all, then
        local sums.

        Returns:
            The bytes of the sums, in fp32 or wider, by parameter name. The sums replace the unsharded gradients.
        """
        sizes, allocated = self.sizes, self.context.allocated
        num_bytes = sum(each.part for each in reduced) * sizes.reduce_bytes
        allocated.alloc(Kind.COMMUNICATION, num_bytes)
        allocated.free(Kind.UNSHARDED_GRADIENTS, sum(unsharded_grads.values()))
        allocated.alloc(Kind.COMMUNICATION, num_bytes)
        self.context.send("all_to_all", sizes.name, num_bytes, sizes.shard_ranks)
        sums = {each.name: each.padded_shard * max(sizes.reduce_bytes, 4) for each in reduced}
        allocated.alloc(Kind.UNSHARDED_GRADIENTS, sum(sums.values()))
        allocated.free(Kind.COMMUNICATION, 2 * num_bytes)
        return sums

    def _to_sharded_grads(self, reduced: Sequence[ParameterSizes], reduce_output: int) -> None:
        """Store the reduced gradients as sharded gradients, or accumulate into existing ones."""
        sizes, allocated = self.sizes, self.context.allocated
        own = sum(each.padded_shard for each in reduced) * sizes.own_bytes
        is_cast = sizes.reduce_bytes != sizes.own_bytes
        is_kept = not sizes.is_offloaded and any(each.name not in self.sharded_grads for each in reduced)
        self.sharded_grads.update(each.name for each in reduced)
        if is_cast:
            allocated.alloc(Kind.GRADIENTS, own)
            allocated.free(Kind.GRADIENTS, 0 if is_kept else own)
        if sizes.replica_ranks and (is_cast or not is_kept):
            self.all_reduce_state = reduce_output
            return
        allocated.free(Kind.COMMUNICATION, reduce_output)
        if is_kept and not is_cast:  # the output is the gradient
            allocated.alloc(Kind.GRADIENTS, own)

    def _free_all_reduce_state(self) -> None:
        self.context.allocated.free(Kind.COMMUNICATION, self.all_reduce_state)
        self.all_reduce_state = 0
