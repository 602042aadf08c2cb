"""Trace the activations of one microbatch: run forward and backward of a few blocks on fake tensors."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import without_wrappers
from composer_fsdp2._torch.tensor_tree import cast_floats
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.estimate._torch.emulate_cuda import emulate_cuda
from composer_fsdp2.estimate._torch.fake import fake_tensors, lists_of_zeros
from composer_fsdp2.estimate._torch.live import LiveStorages
from composer_fsdp2.estimate._torch.sent import Sent
from composer_fsdp2.estimate.blocks import BlockList, copy_with, find_blocks
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace, StepEvent
from composer_fsdp2.estimate.expansion import BlockSpan, backward_begin, check_representatives, expand
from composer_fsdp2.estimate.hooks import module_at, record_hooks
from composer_fsdp2.estimate.parallelized import as_rank_0, without_parallelism
from composer_fsdp2.estimate.sequential import SequentialBlocks
from composer_fsdp2.sharding.activations import turn_off_caches, wrap_activations
from composer_fsdp2.sharding.dtypes import torch_dtype
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan

# (model or a copy with fewer blocks, rows of a microbatch, tokens per row) -> the loss, or a tuple of the loss and
# objects that stay alive until the next forward ends. It creates its own inputs.
Loss = Callable[[nn.Module, int, int], Any]


def trace_microbatch(
    model: nn.Module,
    plan: ShardingPlan,
    loss: Loss,
    *,
    rows: int,
    tokens: int,
    precision: str = "fp32",
    num_blocks: int | None = 3,
) -> MicrobatchTrace:
    """Trace one microbatch: the order of FSDP2's hooks, and the model's activation memory between them.

    Runs forward and backward of a copy with the first three blocks of each kind on fake tensors, and extends the result
    to the other blocks. This is exact if equal blocks need equal memory. A model whose blocks are not sequential is
    traced with all blocks.

    If the plan is for GPUs, autocast uses CUDA's operator list, attention applies dropout without storing a mask, and
    offloaded activations count as host memory. This models a GPU and was not measured on one.

    Args:
        model: The model on any device, including meta. It is not modified.
        plan: The model's plan.
        loss: Called with (model, rows, tokens); computes the loss of ``rows`` rows of ``tokens`` tokens. Tensors that
            it stores stay alive in backward.
        precision: The name of a Composer precision; with ``amp_...``, forward and loss run under autocast.
        num_blocks: How many blocks of each kind to run; more take longer, with the same result. None: all.
    Raises:
        ConfigError: the precision is unknown.

    Does not communicate, and needs neither a GPU nor a process group.
    """
    autocast = _autocast(precision)

    def compute(copied: nn.Module) -> Any:
        with autocast:
            return loss(copied, rows, tokens)

    def traced(planned: ShardingPlan, blocks: tuple[BlockList, ...]) -> MicrobatchTrace:
        trace = _trace(model, planned, blocks, compute)
        notes = (_FP8,) * (precision == "amp_fp8") + (_UNPARALLELIZED,) * (planned is not plan)
        return replace(trace, notes=(*trace.notes, *notes))

    few, every = (find_blocks(model, plan, num_per_kind=number) for number in (num_blocks, None))
    # A model may access an omitted block, so a failure is retried with all blocks.
    lists = [few, every] if any(each.is_short for each in few) else [every]
    whole = without_parallelism(plan)
    *attempts, last = itertools.product([plan] if plan == whole else [plan, whole], lists)
    for attempt in attempts:
        with contextlib.suppress(Exception):
            return traced(*attempt)
    return traced(*last)


def _trace(
    model: nn.Module, plan: ShardingPlan, lists: tuple[BlockList, ...], compute: Callable[[nn.Module], Any]
) -> MicrobatchTrace:
    mode, dtype_of = fake_tensors(), _dtypes(plan)

    def unsharded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty(tensor.shape, dtype=dtype_of(name, tensor), device="cpu")
            is_trained = tensor.requires_grad and name not in plan.frozen
            return nn.Parameter(made, requires_grad=is_trained) if isinstance(tensor, nn.Parameter) else made

    short = copy_with(model, lists, unsharded)
    with mode, lists_of_zeros():
        traced = run_traced(short, plan, compute, lists)
    check_representatives(lists, traced.unfinished.keys(), traced.sequential.broken)
    events = tuple(add_previous_outputs(expand(traced.events, traced.spans, lists), plan, traced.held_bytes))
    return MicrobatchTrace(
        events=events,
        host_bytes=max(event.host_bytes for event in events),
        buffer_bytes=sum(each.numel() * dtype_of(name, each).itemsize for name, each in model.named_buffers()),
        notes=tuple(_notes(plan, has_experts=traced.live.unknown.has_shared_out or num_experts(model) > 1)),
    )


def add_previous_outputs(events: Sequence[StepEvent], plan: ShardingPlan, held: int) -> Iterator[StepEvent]:
    """Add the outputs of the previous microbatch: ``held`` bytes, which are alive until the forward of this
    microbatch ends."""
    roots = {unit.name for unit in plan.roots}
    backward = next(place for place, each in enumerate(events) if each.hook is Hook.PRE_BACKWARD)
    ends = (place for place in range(backward) if events[place].hook is Hook.POST_FORWARD)
    end = max((place for place in ends if events[place].unit in roots), default=0)
    for place, each in enumerate(events):
        live = held if each.hook is Hook.END else each.live_bytes + held * (place <= end)
        yield replace(each, live_bytes=live, peak_bytes=max(each.peak_bytes + held * (place < end), live))


def run_traced(
    model: nn.Module, plan: ShardingPlan, compute: Callable[[nn.Module], Any], lists: Sequence[BlockList] = ()
) -> "Recorder":
    """Run forward and backward of ``model`` with the plan's activation checkpointing, and return the recorded events.

    Modifies ``model`` and removes its gradients. Tensors may also be real.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the real run emits them
        finish = stack.enter_context(as_rank_0(model, plan))
        turn_off_caches(model, [path for path in plan.caching if module_at(model, path)])
        present = [path for path in plan.checkpointed if module_at(model, path)]
        wrap_activations(model, present, plan.config.activation_checkpointing)
        finish()
        recorder = Recorder(model, plan, lists)
        blocks = [each.block(name) for each in lists for name in each.present]
        stack.enter_context(_casts_at_units(model, plan))
        stack.enter_context(recorder.sequential.watch(model))
        stack.enter_context(
            record_hooks(model, plan, recorder.record, blocks=blocks, record_block=recorder.record_block)
        )
        for unit in plan.units:
            recorder.show(Hook.POST_BACKWARD, unit.name)
        if plan.mesh.device_type == "cuda":
            stack.enter_context(emulate_cuda(recorder.live))
        stack.enter_context(recorder.live)
        held = compute(model)
        first = held[0] if isinstance(held, tuple) else held
        # Tensor.backward() disables function modes, so recomputed attention would run as a CPU's.
        torch.autograd.backward(first)
        recorder.held_bytes = recorder.live.now
    recorder.close()
    return recorder


class Recorder:
    """Records each hook with the live bytes at the hook, and the peak and FLOPs until the next hook.

    Attributes:
        spans: The event ranges of the blocks' forwards and backwards.
        unfinished: Path -> first event, of blocks whose backward has no recorded end.
        held_bytes: Bytes that stay alive until the next forward ends, such as the loss's outputs.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan, lists: Sequence[BlockList] = ()) -> None:
        self.events: list[StepEvent] = []
        self.spans: list[BlockSpan] = []
        self.unfinished: dict[str, int] = {}
        self.sequential = SequentialBlocks(lists)
        self.held_bytes = 0
        # Autograd runs backward with grad mode off, so grad mode on in backward means a recomputed forward.
        self.live = LiveStorages(
            is_marked=lambda: self._is_behind_blocks,
            is_recomputing=lambda: self._is_backward and torch.is_grad_enabled(),
            num_experts=num_experts(model),
        )
        self.show = ShownParameters(model, plan)
        self.live.know([*model.parameters(), *model.buffers()])
        self._is_behind_blocks = False
        self._is_backward = False
        self._backward_began = 0
        self._flops = self._recomputed = 0
        specs = [spec for unit in plan.units for spec in unit.parameters]
        first = {without_wrappers(name): spec.name for spec in specs for name in spec.names}
        self._parameters = {
            first.get(plain := without_wrappers(name), plain): parameter for name, parameter in model.named_parameters()
        }

    def record(self, hook: Hook, unit: str, parameter: str | None) -> None:
        self.close()
        self.show(hook, unit)
        if hook is Hook.PRE_BACKWARD and not self._is_backward:
            self._is_backward, self._backward_began = True, self.live.num_made
        if hook is Hook.GRADIENT:
            self._remove_gradient(self._parameters[parameter or ""])
        self.live.mark()
        live, host = self.live.now, self.live.on_host
        self.events.append(StepEvent(hook=hook, unit=unit, parameter=parameter, live_bytes=live, host_live_bytes=host))

    def record_block(self, hook: Hook, path: str, _: str | None) -> None:
        """Record a hook of a block. The computation after a block is recorded as a separate event."""
        self._is_behind_blocks = hook is Hook.POST_FORWARD
        if hook is Hook.PRE_FORWARD:
            self.live.unmark()
            self.unfinished[path] = len(self.events)
        elif hook is Hook.PRE_BACKWARD:
            self.live.unmark(made_from=self._backward_began)  # the gradient of its outputs belongs to the block
            self.unfinished[path] = backward_begin(self.events, path)
        else:
            if (begin := self.unfinished.pop(path, None)) is not None:
                is_backward = hook is Hook.POST_BACKWARD
                self.spans.append(BlockSpan(path=path, begin=begin, end=len(self.events), is_backward=is_backward))
            self.record(hook, path, None)

    def close(self) -> None:
        """Attribute the computation since the last hook to that hook's event."""
        if self.events:
            self.events[-1] = replace(
                self.events[-1],
                peak_bytes=self.live.peak,
                loss_bytes=self.live.marked_at_peak,
                host_bytes=self.live.host_peak,
                flops=self.live.flops - self._flops,
                recomputed_flops=self.live.recomputed_flops - self._recomputed,
                sent=tuple((each.op, each.num_bytes, each.members) for each in self.live.sent if each.op),
            )
        self.live.sent.clear()
        self._flops, self._recomputed = self.live.flops, self.live.recomputed_flops

    def _remove_gradient(self, parameter: nn.Parameter) -> None:
        """Remove the gradient of a parameter, so it is not counted as an activation: the replay counts gradients."""
        gradient = parameter.grad
        if gradient is None:
            return
        if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
            # The unit all-reduces partial gradients over tensor-parallel ranks, before it reduces over shards.
            members = tuple(dist.get_process_group_ranks(gradient.device_mesh.get_group()))
            self.live.sent.append(Sent("all_reduce", gradient.nbytes, "", len(members), members))
        self.live.disregard(gradient)
        parameter.grad = None


class ShownParameters:
    """Replaces a unit's parameters when its hooks run: by ones in ``param_dtype`` while the unit is unsharded, else in
    the original dtype.

    PEFT depends on this: it casts the input of an adapter to the adapter's dtype before the unit is unsharded.

    Args:
        model: The model with all parameters unsharded.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan) -> None:
        modules = {without_wrappers(path): module for path, module in model.named_modules(remove_duplicate=False)}
        self._staying = {unit.name for unit in plan.units if unit.is_root or unit.reshard_after_forward is not True}
        self._places: dict[str, list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]] = {}
        for unit in plan.units:
            places = self._places[unit.name] = []
            for spec in unit.parameters:
                for path, _, name in (without_wrappers(each).rpartition(".") for each in spec.names):
                    gathered = modules[path]._parameters[name] if path in modules else None
                    if gathered is not None and gathered.dtype != (dtype := torch_dtype(spec.dtype)):
                        sharded = nn.Parameter(torch.empty(spec.shape, dtype=dtype), gathered.requires_grad)
                        places.append((modules[path], name, sharded, gathered))

    def __call__(self, hook: Hook, unit: str) -> None:
        if hook is Hook.GRADIENT or (hook is Hook.POST_FORWARD and unit in self._staying):
            return
        is_gathered = hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD)
        for module, name, sharded, gathered in self._places.get(unit, ()):
            module._parameters[name] = gathered if is_gathered else sharded


# In configurations of mixtures of experts, of transformers and of LLM Foundry.
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")


def num_experts(model: nn.Module) -> int:
    """Return the number of experts in a layer of the model, from its configuration; 1 if it has no experts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    for part in (part for config in configs for part in (config, getattr(config, "ffn_config", None))):
        for name in _EXPERTS:
            number = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if isinstance(number, int) and number > 0:
                return number
    return 1


def _dtypes(plan: ShardingPlan) -> Callable[[str, torch.Tensor], torch.dtype]:
    """Return a function that maps a name and tensor to its dtype in the run: of the unsharded parameter, or of the
    buffer."""
    of_parameters = {
        name: unit.mixed_precision.param_dtype for unit in plan.units for spec in unit.parameters for name in spec.names
    }
    of_buffers = {path: unit.mixed_precision.buffer_dtype for unit in plan.units for path in unit.modules}

    def dtype_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        dtype = None
        if isinstance(tensor, nn.Parameter):
            dtype = of_parameters.get(name)
        elif tensor.is_floating_point():
            dtype = next((of_buffers[path] for path in ancestors_or_self(name) if path in of_buffers), None)
        return torch_dtype(dtype) or tensor.dtype

    return dtype_of


@contextlib.contextmanager
def _casts_at_units(model: nn.Module, plan: ShardingPlan) -> Iterator[None]:
    """In the block, cast the units' inputs and outputs as ``fully_shard`` does with mixed precision."""
    with contextlib.ExitStack() as handles:
        for unit in plan.units:
            precision = unit.mixed_precision
            for module in filter(None, (module_at(model, path) for path in unit.modules)):
                if precision.cast_forward_inputs and (dtype := torch_dtype(precision.param_dtype)) is not None:
                    cast_inputs = partial(_cast_inputs, dtype)
                    handles.enter_context(module.register_forward_pre_hook(cast_inputs, with_kwargs=True))
                if (dtype := torch_dtype(precision.output_dtype)) is not None:
                    handles.enter_context(module.register_forward_hook(partial(_cast_output, dtype)))
        yield


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cast_floats((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_floats(output, dtype)


_AUTOCAST = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "amp_fp8": torch.bfloat16,
}


def _autocast(precision: str) -> AbstractContextManager[Any]:
    if precision not in _AUTOCAST:
        raise ConfigError(f"precision {precision!r} is none of Composer's; use {', '.join(_AUTOCAST)}")
    dtype = _AUTOCAST[precision]
    # The units disable autocast's weight cache.
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)


_FP8 = "fp8 is counted as bf16: what Transformer Engine keeps in fp8 takes less."
_UNPARALLELIZED = (
    "Layers, sequences and experts that ranks divide, and MLPs in pieces, cannot be traced here, and are counted as if "
    "each rank computed all of them."
)


def _notes(plan: ShardingPlan, *, has_experts: bool) -> Iterator[str]:
    if has_experts:
        yield "Every expert is assumed to get as many tokens as the others."
    if any(each.parallelize is None for each in plan.split) or any(each.is_split for each in plan.split_experts):
        yield "Layers and experts that the script itself split are counted as if each rank computed them in full."
