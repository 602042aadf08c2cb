"""``idle_experts``: run experts without tokens on zero rows, to all-gather all experts in one order on all ranks.

[Note: idle experts] If experts are separate FSDP units, a rank all-gathers only those that its tokens chose. All
experts have the same size, so the all-gathers of different experts on different ranks match: no error, but wrong
gradients. With idle experts, every rank runs each expert of a block once, in registration order. An expert without
tokens runs on zero rows: no floating point work, gradients of exactly zero, never NaN. Its output is connected to the
block's output, so backward, in the reverse order of forward, reaches it on every rank.

Another unit of the block, such as a shared expert, is all-gathered on every rank either before all experts or after
them. A rank that reaches it without having called an expert does not know which. If another rank is at an expert, the
unit comes after them. The ranks compare their positions in the first forward in which a token chose an expert.

The order of hooks matters. An expert's pre-hook must run before the hook with which ``fully_shard`` all-gathers it. If
the block is a unit, its hooks must run inside FSDP's: in backward that unit is all-gathered once the gradient of its
output is computed. Register them *after* ``fully_shard``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.collectives import is_announced
from composer_fsdp2._torch.private_names import BatchNorm, untraced
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2._torch.tensor_tree import tensors_in
from composer_fsdp2.config.parallel import ExpertBlock
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError
from composer_fsdp2.parallel.connecting import Arguments, connect_first, detached_with_zero_rows, with_zero_rows
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.training.control import Operation
from composer_fsdp2.training.out_of_memory import AllReduceMax, forward_all_reduce_max, is_out_of_memory

_WAY_OUT = (
    "Leave the experts in the unit of their layer, which is exact too; or, if every rank calls all of them in one "
    "order, set runs_every_expert = True on the module that holds them"
)

_OPERATION = Operation(
    "idle_experts",
    "In their first forward ranks must run the same blocks of experts in the same order: look for a branch on the rank "
    "or on the data, or a forward on some ranks only",
)

_LEAVE = "Leave experts in the unit of their layer, which is exact"
_IS_NOT_TOKEN_WISE = (
    f"it does not treat each token by itself, so idle_experts cannot run it where it has no token. {_LEAVE}"
)


def refuse_experts_of_batches(model: nn.Module, blocks: Sequence[ExpertBlock]) -> None:
    """Raise if an expert contains a batch norm: zero rows would make its statistics NaN.

    Raises:
        PlanError: names the batch norm.
    """
    for path in (path for block in blocks for path in block.experts):
        for inner, module in at_path(model, path).named_modules(prefix=path):
            if isinstance(module, BatchNorm):
                raise PlanError(f"{inner} is a {type(module).__name__}: {_IS_NOT_TOKEN_WISE}")


def start_idle_experts(
    model: nn.Module,
    blocks: Sequence[ExpertBlock],
    before: Mapping[str, nn.Module],
    limit_s: float | None = None,
) -> None:
    """Register the hooks that run idle experts of a sharded model. Called on all ranks.

    In the first forward of each block, the ranks check before each expert that all of them call experts in order.

    Args:
        before: The modules by path, without checkpoint wrappers. The recomputation of a block must run its hooks again;
            the recomputation of a single expert must not.
        limit_s: The timeout of these comparisons in seconds; None means that of other votes.
    """
    for block in blocks:
        outer, experts = before[block.block], {path: at_path(model, path) for path in block.experts}
        other_units = _other_units(outer, experts.values())
        _IdleExperts(block.block, experts, other_units, forward_all_reduce_max(outer, _OPERATION, limit_s)).start(outer)


def run_idle_experts(block: nn.Module, experts: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Make every rank run each of ``experts`` once in a forward of ``block``. Experts without tokens run on zero rows.

    If the experts are separate units, call it for each block after ``fully_shard``::

        for layer in model.layers:
            for expert in layer.moe.experts:
                fully_shard(expert)
            fully_shard(layer)
        fully_shard(model)
        for layer in model.layers:
            run_idle_experts(layer.moe, layer.moe.experts)

    ``prepare_fully_shard`` does it for ``idle_experts: in_order``. See [Note: idle experts].

    Args:
        block: Calls the experts in its forward, in this order; it may skip any of them.
        experts: Each takes tokens as rows of its first argument, and computes every row independently.
    Returns:
        The hooks' handles; removing the hooks undoes it.
    Raises:
        PlanError: the block contains units other than the experts.

    Called on all ranks alike; does not communicate.
    """
    kind = type(block).__name__
    if other_units := _other_units(block, experts):
        raise PlanError(
            f"{kind} has units beside its experts ({and_more([*other_units])}), and ranks that do not ask each other "
            "cannot tell whether these are gathered before the experts or after; leave them in the unit of the layer, "
            "or have prepare_fully_shard start idle_experts: in_order"
        )
    named = {f"{kind}'s expert {number}": expert for number, expert in enumerate(experts)}
    return _IdleExperts(kind, named, {}, None).start(block)


def _other_units(block: nn.Module, experts: Iterable[nn.Module]) -> dict[str, Any]:
    """The FSDP units in a block outside of its experts, by their paths in the block."""
    expert_modules = {each for expert in experts for each in expert.modules()}
    below = [(path, module) for path, module in block.named_modules() if path and module not in expert_modules]
    return {path: module for path, module in below if isinstance(module, FSDPModule)}


class _IdleExperts:
    """The state of a block's forward: which experts have run, and the arguments for the idle ones.

    Args:
        block: The name of the block.
        experts: By their names, in order.
        other_units: The units in the block outside of its experts, by their paths.
        all_reduce_max: Compares integers across ranks in the first forward. If None, errors stay on their rank.
    """

    def __init__(
        self,
        block: str,
        experts: Mapping[str, nn.Module],
        other_units: Mapping[str, nn.Module],
        all_reduce_max: AllReduceMax | None,
    ) -> None:
        self._block, self._other_units, self._all_reduce_max = block, other_units, all_reduce_max
        self._names, self._experts = [*experts], [*experts.values()]
        self._requirement = (
            f"idle_experts: in_order runs each expert of {block} once in a forward, in the order of registration"
        )
        self._were_units = [isinstance(expert, FSDPModule) for expert in self._experts]
        # For each other unit of the block: whether it runs after the experts; None if that is not known yet.
        self._is_after: dict[str, bool | None] = dict.fromkeys(other_units)
        self._is_any_chosen = False  # in this forward, by a token of any rank
        self._units_before_experts: list[str] = []  # other units that ran before any expert in this forward
        self._next: int | None = None  # None: outside of the block's forward
        self._is_idle = False  # while an expert runs on zero rows
        self._input: tuple[torch.Tensor, ...] = ()
        self._call: Arguments | None = None  # this forward's latest arguments with tokens
        self._previous_call: Arguments | None = None  # of the latest forward with tokens, without rows
        self._outputs: list[torch.Tensor] = []
        self._checked: set[int] = set()

    def start(self, block: nn.Module) -> list[RemovableHandle]:
        """Register the hooks. Those on units run before FSDP's own hooks."""
        return [
            block.register_forward_pre_hook(self.begin, with_kwargs=True),
            *(
                unit.register_forward_pre_hook(partial(self.before_unit, path), prepend=True)
                for path, unit in self._other_units.items()
            ),
            *(
                expert.register_forward_pre_hook(partial(self.before_expert, number), prepend=True, with_kwargs=True)
                for number, expert in enumerate(self._experts)
            ),
            block.register_forward_hook(self.end, prepend=True),
        ]

    @untraced
    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._next, self._call, self._outputs, self._is_idle = 0, None, [], False
        self._is_any_chosen, self._units_before_experts = False, []
        self._input = tuple(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())[:1]
        if self._were_units != [isinstance(expert, FSDPModule) for expert in self._experts]:
            raise PlanError(
                f"experts of {self._block} were sharded after run_idle_experts, so that each is gathered before the "
                "idle ones in front of it; call it after fully_shard"
            )

    @untraced
    def before_expert(self, number: int, expert: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_idle:
            return
        if self._next is None or number < self._next:
            how = "outside of that module's forward"
            if self._next is not None:
                is_last = self._next == number + 1 and self._call is not None
                how = "twice" if is_last else f"after {self._names[self._next - 1]}"
                self._agree(out_of_order=number + 1)
            raise ComposerFSDP2Error(f"{self._requirement}; {self._names[number]} was called {how}. {_WAY_OUT}")
        self._run_idle(number, args, kwargs)
        self._agree(is_chosen=True)
        self._next, self._call = number + 1, (args, kwargs)

    @untraced
    def before_unit(self, path: str, unit: nn.Module, args: tuple[Any, ...]) -> None:
        if self._next is None:
            return
        has_compared = self._is_after[path] is None and self._next == 0
        if has_compared and not self._agree(is_at_expert=False):
            self._units_before_experts.append(path)
        elif self._is_after[path] is not False:
            self._is_after[path] = True
            self._run_remaining(has_compared=has_compared)
        elif self._next:
            last = self._names[self._next - 1]
            self._run_remaining()  # the other ranks run them too, before they reach this unit
            raise ComposerFSDP2Error(
                f"idle_experts: in_order gathers {path} of {self._block} before the experts, as in its first "
                f"forward; now it was called after {last}. {_WAY_OUT}"
            )

    @untraced
    def end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._call is not None:
            self._previous_call = detached_with_zero_rows(self._call)
        self._run_remaining()
        self._agree()
        if self._is_any_chosen:
            self._is_after |= dict.fromkeys(self._units_before_experts, False)
        if None not in self._is_after.values():
            self._all_reduce_max = None
        outputs = [each for each in self._outputs if each.requires_grad]
        self._next, self._call, self._outputs, self._input = None, None, [], ()
        # Also without idle experts: a checkpoint must recompute before backward all-gathers the last expert.
        return connect_first(output, outputs) if torch.is_grad_enabled() else None

    def _default_call(self) -> Arguments:
        """The arguments of the experts if no token of this rank chose any expert in this forward.

        Zero rows of the block's input, and the other arguments of the latest forward with tokens.
        """
        rows = tuple(each.reshape(-1, each.shape[-1])[:0] for each in self._input)
        if self._previous_call is None or not rows:
            return rows, {}
        args, kwargs = self._previous_call
        if args:
            return (*rows, *args[1:]), kwargs
        return args, kwargs | dict(zip(kwargs, rows, strict=False))

    def _run_remaining(self, *, has_compared: bool = False) -> None:
        self._run_idle(len(self._experts), *(self._call or self._default_call()), has_compared=has_compared)

    def _run_idle(self, end: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_compared: bool = False) -> None:
        """Run the experts from the next one up to ``end`` (exclusive) on zero rows of these arguments.

        Args:
            has_compared: Whether the ranks have already compared before the first of these experts.
        """
        assert self._next is not None
        first = self._next
        if first < end:
            args, kwargs = with_zero_rows((args, kwargs))
        for number in range(first, end):
            if number > first or not has_compared:
                self._agree()
            self._next = number + 1
            try:
                with replaced(self, "_is_idle", True):
                    self._outputs.extend(self._output_of(number, args, kwargs))
            except Exception as error:
                # If ranks vote, the next vote reports a rank that is out of memory. And if the expert contains units,
                # the other ranks may be waiting at one of these.
                expert = self._experts[number]
                has_units = any(isinstance(each, FSDPModule) for each in expert.modules() if each is not expert)
                if not has_units and not (is_out_of_memory(error) and is_announced()):
                    self._agree(failed=number + 1)
                note = f"idle_experts: in_order ran {self._names[number]} on no rows, as no token of this rank chose it"
                if end == len(self._experts) and not (self._call or self._previous_call):
                    others = f"another expert of {self._block}"
                    note += f" or {others} yet, whose arguments would tell what it takes. {_LEAVE}"
                error.add_note(note)
                raise

    def _agree(
        self, *, out_of_order: int = 0, failed: int = 0, is_at_expert: bool = True, is_chosen: bool = False
    ) -> bool:
        """Compare across ranks, all of which are at the same position. Called on all ranks.

        Args:
            out_of_order: 1 + the index of an expert that this rank called out of order; 0 for none.
            failed: 1 + the index of an expert that raised on zero rows; 0 for none.
            is_at_expert: Whether this rank is at an expert or at the end of the block, not at another unit.
            is_chosen: Whether a token of this rank chose the expert.
        Returns:
            Whether any rank is at an expert.
        Raises:
            ComposerFSDP2Error: another rank called an expert out of order or failed, and this rank did not.
        """
        if self._all_reduce_max is None:
            return is_at_expert
        assert self._next is not None
        place = (*self._names, f"the end of {self._block}")[self._next]
        answers = self._all_reduce_max(place, [out_of_order, failed, is_at_expert, is_chosen])
        self._is_any_chosen |= bool(answers[3])
        if out_of_order or failed:
            return is_at_expert
        if found := answers[0]:
            raise ComposerFSDP2Error(
                f"{self._requirement}; another rank called {self._names[found - 1]} twice, or after a later one. "
                f"{_WAY_OUT}"
            )
        if found := answers[1]:
            raise ComposerFSDP2Error(
                f"{self._names[found - 1]} failed on no rows on another rank, whose error says how. {_LEAVE}"
            )
        return bool(answers[2])

    def _output_of(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        name = self._names[number]
        with nullcontext() if number in self._checked else _FiniteOnZeroRows(name):
            outputs = tensors_in(self._experts[number](*args, **kwargs))
        if any(tensor.numel() for tensor in outputs):
            raise ComposerFSDP2Error(f"{name} gives more than no rows for no rows: {_IS_NOT_TOKEN_WISE}")
        self._checked.add(number)
        return outputs


class _FiniteOnZeroRows(TorchFunctionMode):
    """Raises for a non-finite number that is computed from zero rows, such as a mean: gradients would be NaN."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
            has_zero_row_input = any(isinstance(each, torch.Tensor) and not each.numel() for each in args)
            if has_zero_row_input and not bool(result.isfinite().all()):
                raise ComposerFSDP2Error(f"{self._name} computes NaN or infinity of no rows: {_IS_NOT_TOKEN_WISE}")
        return result
