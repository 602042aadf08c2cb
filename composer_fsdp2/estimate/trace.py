"""The activations of one microbatch, from a forward and a backward of a few blocks on tensors without data."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.fake import fake_tensors
from composer_fsdp2._torch.live import LiveStorages
from composer_fsdp2._torch.passing import cast_floats
from composer_fsdp2.estimate.blocks import BlockList, copy_with, find_blocks
from composer_fsdp2.estimate.events import MicrobatchTrace, Moment, StepEvent
from composer_fsdp2.estimate.expansion import Stretch, expand, stretches_of
from composer_fsdp2.estimate.moments import listen
from composer_fsdp2.sharding.activations import turn_off_caches, wrap_activations
from composer_fsdp2.sharding.dtypes import torch_dtype
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.sharding.plan import ShardingPlan

# Of a model (or of a copy with fewer blocks), a microbatch's rows, and the tokens of a row: the loss, or the loss and
# what else is held until backward has ended. It makes its own inputs. Its ``without_values()``, if it has one, is a
# context in which tensors without values answer what the model asks of them, such as which tokens go to an expert.
Loss = Callable[[nn.Module, int, int], Any]


def trace_microbatch(
    model: nn.Module,
    plan: ShardingPlan,
    loss: Loss,
    *,
    rows: int,
    tokens: int,
    precision: str = "fp32",
    num_blocks: int = 3,
) -> MicrobatchTrace:
    """One microbatch as FSDP2's hooks will see it, with what the model's own computation keeps and takes in between.

    A copy with the first three blocks of each kind runs forward and backward on tensors without data; what is found for
    these is carried over to the others, which is exact where equal blocks take equal memory.

    Args:
        model: On any device, the meta device too; it is left as it is.
        plan: The model's.
        loss: Computes the loss of ``rows`` rows of ``tokens`` tokens.
        precision: Composer's; ``amp_...`` runs forward and loss under autocast.
        num_blocks: How many of each kind are run; more of them take longer and give the same.

    Does not communicate, and needs neither a GPU nor a process group.
    """
    lists = find_blocks(model, plan, num_kept=num_blocks)
    mode = fake_tensors()
    buffer_dtype = torch_dtype(plan.config.mixed_precision.buffer_dtype)
    short = copy_with(model, lists, partial(_unsharded, _dtypes(plan), buffer_dtype, mode))
    with mode:
        events, stretches = run_traced(short, plan, loss, rows=rows, tokens=tokens, precision=precision, lists=lists)
    return MicrobatchTrace(
        events=tuple(expand(events, stretches, lists)),
        frozen=tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        buffer_bytes=_buffer_bytes(model, buffer_dtype),
    )


def _buffer_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    return sum(
        buffer.numel() * (dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype).itemsize
        for buffer in model.buffers()
    )


def run_traced(
    model: nn.Module,
    plan: ShardingPlan,
    loss: Loss,
    *,
    rows: int,
    tokens: int,
    precision: str,
    lists: Sequence[BlockList] = (),
) -> tuple[list[StepEvent], list[Stretch]]:
    """Forward and backward of ``model``, which is changed: recomputed as the plan says, gradients taken away.

    Works on real tensors as well.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a run will warn of, it will say itself
        return _run_traced(model, plan, loss, rows=rows, tokens=tokens, precision=precision, lists=lists)


def _run_traced(
    model: nn.Module,
    plan: ShardingPlan,
    loss: Loss,
    *,
    rows: int,
    tokens: int,
    precision: str,
    lists: Sequence[BlockList],
) -> tuple[list[StepEvent], list[Stretch]]:
    present = [path for path in plan.checkpointed if _is_there(model, path)]
    turn_off_caches(model, [path for path in plan.caching if _is_there(model, path)])
    wrap_activations(model, present, plan.config.activation_checkpointing)
    blocks = [each.block(name) for each in lists for name in each.present]
    recorder = _Recorder(model, plan)
    casts = _cast_at_units(model, plan)
    held: Any = None
    answers = getattr(loss, "without_values", nullcontext)
    with answers(), listen(model, plan, recorder.tell, blocks=blocks, tell_block=recorder.tell_block), recorder.live:
        with _autocast(precision):
            held = loss(model, rows, tokens)
        first = held[0] if isinstance(held, tuple) else held
        first.backward()
    recorder.close()
    for handle in casts:
        handle.remove()
    return recorder.events, stretches_of(recorder.events, recorder.markers)


class _Recorder:
    """Writes down each moment with what is alive, and what it came to until the next one."""

    def __init__(self, model: nn.Module, plan: ShardingPlan) -> None:
        self.events: list[StepEvent] = []
        self.markers: list[tuple[Moment, str, int]] = []
        # Autograd computes without recording; what is recorded in a backward is a forward for the second time.
        self.live = LiveStorages(
            is_marked=lambda: self._is_behind_blocks,
            is_recomputing=lambda: self._is_backward and torch.is_grad_enabled(),
        )
        self.live.know([*model.parameters(), *model.buffers()])
        self._is_behind_blocks = False
        self._is_backward = False
        self._backward_began = 0
        self._flops = self._recomputed = 0
        first = {name: spec.name for unit in plan.units for spec in unit.parameters for name in spec.names}
        self._parameters = {
            first.get(plain := name.replace("_checkpoint_wrapped_module.", ""), plain): parameter
            for name, parameter in model.named_parameters()
        }

    def tell(self, moment: Moment, unit: str, parameter: str | None) -> None:
        self.close()
        if moment is Moment.PRE_BACKWARD and not self._is_backward:
            self._is_backward, self._backward_began = True, self.live.num_made
        if moment is Moment.GRADIENT:
            self._take_away(self._parameters[parameter or ""])
        self.live.mark()
        self.events.append(StepEvent(moment=moment, unit=unit, parameter=parameter, live_bytes=self.live.now))

    def tell_block(self, moment: Moment, path: str, _: str | None) -> None:
        """What comes behind a block is written down as an event by itself."""
        self.markers.append((moment, path, len(self.events)))
        if moment is Moment.PRE_FORWARD:
            self.live.unmark()
        elif moment is Moment.PRE_BACKWARD:
            self.live.unmark(made_from=self._backward_began)  # the gradient that the block gets is its own
        self._is_behind_blocks = moment is Moment.POST_FORWARD
        if moment in (Moment.POST_FORWARD, Moment.POST_BACKWARD):
            self.tell(moment, path, None)

    def close(self) -> None:
        """What came since the last moment is that one's."""
        if self.events:
            self.events[-1] = replace(
                self.events[-1],
                peak_bytes=self.live.peak,
                loss_bytes=self.live.marked_at_peak,
                flops=self.live.flops - self._flops,
                recomputed_flops=self.live.recomputed_flops - self._recomputed,
            )
        self._flops, self._recomputed = self.live.flops, self.live.recomputed_flops

    def _take_away(self, parameter: nn.Parameter) -> None:
        """A gradient is state from here on."""
        if parameter.grad is not None:
            self.live.disregard(parameter.grad)
            parameter.grad = None


def _dtypes(plan: ShardingPlan) -> dict[str, str]:
    """By a parameter's name the dtype in which its unit computes."""
    return {
        name: unit.mixed_precision.param_dtype
        for unit in plan.units
        if unit.mixed_precision.param_dtype is not None
        for spec in unit.parameters
        for name in spec.names
    }


def _unsharded(
    dtypes: dict[str, str],
    buffer_dtype: torch.dtype | None,
    mode: AbstractContextManager[Any],
    name: str,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """A tensor without data in place of a module's own: a parameter as its unit gathers it."""
    dtype = tensor.dtype
    if isinstance(tensor, nn.Parameter):
        dtype = torch_dtype(dtypes.get(name)) or dtype
    elif buffer_dtype is not None and tensor.is_floating_point():
        dtype = buffer_dtype
    with mode:
        made = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _is_there(model: nn.Module, path: str) -> bool:
    try:
        at_path(model, path)
    except AttributeError:
        return False
    return True


def _cast_at_units(model: nn.Module, plan: ShardingPlan) -> list[Any]:
    """What ``fully_shard`` and this package cast at a unit: its inputs, or those of a root, and what it returns."""
    handles = []
    for unit in plan.units:
        precision = unit.mixed_precision
        casts_inputs = precision.cast_forward_inputs or (unit.is_root and precision.cast_root_inputs)
        for module in (at_path(model, path) for path in unit.modules if _is_there(model, path)):
            if casts_inputs and (dtype := torch_dtype(precision.param_dtype)) is not None:
                handles.append(module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True))
            if (dtype := torch_dtype(precision.output_dtype)) is not None:
                handles.append(module.register_forward_hook(partial(_cast_output, dtype)))
    return handles


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cast_floats((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_floats(output, dtype)


_AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16, "amp_fp8": torch.bfloat16}


def _autocast(precision: str) -> AbstractContextManager[Any]:
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
