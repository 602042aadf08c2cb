"""``idle_experts``: experts without tokens run all the same, on no rows, so that ranks gather them in one order.

[Note: idle experts] Where experts are units of their own, a rank gathers those that its tokens chose. Experts are of
equal size, so ranks that chose others gather those together with them: no error, and wrong gradients. Here every rank
runs each expert of a block once, in the order of registration. One that has no tokens gets no rows: that takes no
floating point work, gives gradients of exactly zero, and cannot be NaN. What it returns is made part of the block's
output, so that backward, which runs in the reversed order of forward, reaches it on every rank.

The order of hooks decides. An expert's runs before the one with which ``fully_shard`` gathers it; those of the block
run inside of its own, if it is a unit, too: backward gathers a unit once its output's gradient is there. Hence *after*
``fully_shard``.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.collectives import is_announced
from composer_fsdp2._torch.passing import tensors_in
from composer_fsdp2._torch.private_names import BatchNorm, untraced
from composer_fsdp2.config.parallel import ExpertBlock
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError
from composer_fsdp2.parallel.connecting import Arguments, connect_first, kept_without_rows, without_rows
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.training.control import Operation
from composer_fsdp2.training.out_of_memory import Ask, asking, is_out_of_memory

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
    """Raise for experts with batch norms, whose statistics no rows would make NaN.

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
    """Run the idle experts of a model that was just sharded, from now on. Called on all ranks.

    In the first forward of each block ranks ask each other before each expert whether it comes in order on all of them.

    Args:
        before: The modules by their paths, before wrappers of checkpointing were put around some: what is recomputed
            must run the block's hooks again, and not those of an expert that is recomputed by itself.
        limit_s: For how many seconds ranks wait for each other's answers; None: for as long as for other votes.
    """
    for block in blocks:
        experts = {path: at_path(model, path) for path in block.experts}
        outer = before[block.block]
        order = _Order(block.block, tuple(experts), asking(outer, _OPERATION, limit_s))
        _start(outer, list(experts.values()), order)


def run_idle_experts(block: nn.Module, experts: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Have every rank run each of ``experts`` once in a forward of ``block``, those without tokens on no rows.

    Where the experts are units of their own, call it for each block after ``fully_shard``::

        for layer in model.layers:
            for expert in layer.moe.experts:
                fully_shard(expert)
            fully_shard(layer)
        fully_shard(model)
        for layer in model.layers:
            run_idle_experts(layer.moe, layer.moe.experts)

    ``prepare_fully_shard`` does it for ``idle_experts: in_order``. See [Note: idle experts].

    Args:
        block: Calls the experts in its forward, in the order given here; it may pass over any of them.
        experts: Each takes tokens as rows of its first argument, and treats every row by itself.
    Returns:
        The hooks' handles; without the hooks all is as before.

    On all ranks alike; does not communicate.
    """
    kind = type(block).__name__
    return _start(
        block, list(experts), _Order(kind, tuple(f"{kind}'s expert {number}" for number in range(len(experts))))
    )


def _start(block: nn.Module, experts: Sequence[nn.Module], order: "_Order") -> list[RemovableHandle]:
    order.experts = experts
    order.were_units = [isinstance(expert, FSDPModule) for expert in experts]
    return [
        block.register_forward_pre_hook(order.begin, with_kwargs=True),
        *(
            expert.register_forward_pre_hook(order.before(number), prepend=True, with_kwargs=True)
            for number, expert in enumerate(experts)
        ),
        block.register_forward_hook(order.end, prepend=True),
    ]


class _Order:
    """One forward of a block after the other, and how far it is.

    Args:
        block: Its name.
        names: Those of the experts.
        ask: For the first forward; None: no other rank is told where an expert comes out of order.
    """

    def __init__(self, block: str, names: tuple[str, ...], ask: Ask | None = None) -> None:
        self._block, self._names, self._ask = block, names, ask
        self.experts: Sequence[nn.Module] = ()
        self.were_units: list[bool] = []
        self._next: int | None = None  # None: outside of the block's forward
        self._is_idle = False  # while one runs on no rows
        self._input: tuple[torch.Tensor, ...] = ()
        self._call: Arguments | None = None  # of the last that was no idle one
        self._of_before: Arguments | None = None  # the same of the last forward that had one, without rows
        self._outputs: list[torch.Tensor] = []
        self._checked: set[int] = set()

    @untraced
    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._next, self._call, self._outputs, self._is_idle = 0, None, [], False
        self._input = tuple(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())[:1]
        if self.were_units != [isinstance(expert, FSDPModule) for expert in self.experts]:
            raise PlanError(
                f"experts of {self._block} were sharded after run_idle_experts, so that each is gathered before the "
                "idle ones in front of it; call it after fully_shard"
            )

    def before(self, number: int) -> Callable[..., None]:
        """The hook of an expert."""

        @untraced
        def run_those_in_front(expert: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_idle:
                return
            if self._next is None:
                raise ComposerFSDP2Error(self._out_of_order(number))
            if number < self._next:
                self._agree(_Problem.OUT_OF_ORDER, number)
                raise ComposerFSDP2Error(self._out_of_order(number))
            self._run_idle(number, args, kwargs)
            self._agree()
            self._next, self._call = number + 1, (args, kwargs)

        return run_those_in_front

    @untraced
    def end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._call is not None:
            self._of_before = kept_without_rows(self._call)
        self._run_idle(len(self.experts), *(self._call or self._without_call()))
        self._agree()
        self._ask = None
        outputs = [each for each in self._outputs if each.requires_grad]
        self._next, self._call, self._outputs, self._input = None, None, [], ()
        # Also where none was idle: what is recomputed is recomputed before the last expert is gathered for backward.
        return connect_first(output, outputs) if torch.is_grad_enabled() else None

    def _without_call(self) -> Arguments:
        """What experts run on where no token of this rank goes to any: a part of the input, which gets a gradient, of
        zeros, and whatever else they were given before."""
        rows = tuple(each.reshape(-1, each.shape[-1])[:0] for each in self._input)
        if self._of_before is None or not rows:
            return rows, {}
        args, kwargs = self._of_before
        if args:
            return (*rows, *args[1:]), kwargs
        return args, kwargs | dict(zip(kwargs, rows, strict=False))

    def _run_idle(self, end: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the experts from the next one to that before ``end``, on no rows of these arguments."""
        assert self._next is not None
        if self._next == end:
            return
        args, kwargs = without_rows((args, kwargs))
        for number in range(self._next, end):
            self._agree()
            self._next, self._is_idle = number + 1, True
            try:
                self._outputs.extend(self._output_of(number, args, kwargs))
            except Exception as error:
                # Where ranks vote, the vote that the others come to next tells them of a rank that is out of memory.
                is_voted_on = is_out_of_memory(error) and is_announced()
                if not is_voted_on and not _has_units_below(self.experts[number]):
                    self._agree(_Problem.FAILS, number)
                error.add_note(
                    f"idle_experts: in_order ran {self._names[number]} on no rows, as no token of this rank chose it"
                    + (self._unknown if end == len(self.experts) and not (self._call or self._of_before) else "")
                )
                raise
            finally:
                self._is_idle = False

    def _agree(self, problem: "_Problem | None" = None, number: int = 0) -> None:
        """Ask the other ranks, each of which is at the same place, whether all is well.

        Args:
            problem: This rank's, with an expert of this number.
        Raises:
            ComposerFSDP2Error: another rank has one, and this one has none.
        """
        if self._ask is None:
            return
        assert self._next is not None
        place = (*self._names, f"the end of {self._block}")[self._next]
        kinds = len(_Problem)
        [found] = self._ask(place, [0 if problem is None else number * kinds + problem.value])
        if not found or problem is not None:
            return
        name, kind = self._names[(found - 1) // kinds], _Problem((found - 1) % kinds + 1)
        texts = {
            _Problem.OUT_OF_ORDER: f"{self._asked}; another rank called {name} twice, or after a later one. {_WAY_OUT}",
            _Problem.FAILS: f"{name} failed on no rows on another rank, whose error says how. {_LEAVE}",
        }
        raise ComposerFSDP2Error(texts[kind])

    def _output_of(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        expert, name = self.experts[number], self._names[number]
        if number in self._checked:
            return tensors_in(expert(*args, **kwargs))
        with _NoRows(name):
            output = expert(*args, **kwargs)
        if any(tensor.numel() for tensor in tensors_in(output)):
            raise ComposerFSDP2Error(f"{name} gives more than no rows for no rows: {_IS_NOT_TOKEN_WISE}")
        self._checked.add(number)
        return tensors_in(output)

    @property
    def _asked(self) -> str:
        return (
            f"idle_experts: in_order runs each expert of {self._block} once in a forward, in the order of registration"
        )

    @property
    def _unknown(self) -> str:
        return f" or another expert of {self._block} yet, whose arguments would tell what it takes. {_LEAVE}"

    def _out_of_order(self, number: int) -> str:
        asked = self._asked
        if self._next is None:
            return f"{asked}; {self._names[number]} was called outside of that module's forward. {_WAY_OUT}"
        is_last = self._next == number + 1 and self._call is not None
        how = "twice" if is_last else f"after {self._names[self._next - 1]}"
        return f"{asked}; {self._names[number]} was called {how}. {_WAY_OUT}"


class _Problem(enum.Enum):
    OUT_OF_ORDER = 1
    FAILS = 2


def _has_units_below(expert: nn.Module) -> bool:
    """Whether other ranks may be waiting inside of it, where this one failed."""
    return any(isinstance(each, FSDPModule) for each in expert.modules() if each is not expert)


class _NoRows(TorchFunctionMode):
    """Raises for a number that is made of no rows and not finite, as a mean over rows: gradients would be NaN."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
            is_of_no_rows = any(isinstance(each, torch.Tensor) and not each.numel() for each in args)
            if is_of_no_rows and not bool(result.isfinite().all()):
                raise ComposerFSDP2Error(f"{self._name} computes NaN or infinity of no rows: {_IS_NOT_TOKEN_WISE}")
        return result
