"""The one file that knows torch's private API and what differs between its versions.

Differences are found by probes, not by comparing versions. Each entry of ``REPAIRS`` names the versions on which it
was seen; ``tests/engine/test_torch.py`` fails when a version that we support no longer needs one, or needs it again.
"""

import functools
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "REPAIRS",
    "ActivationWrapper",
    "BatchNorm",
    "CheckpointImpl",
    "InFlight",
    "Repair",
    "ShardedGradScaler",
    "UnitParameter",
    "average_after_backward",
    "checkpoint_wrapper",
    "default_store",
    "distinct_units",
    "has_accelerator",
    "has_unreduced_gradients",
    "is_compiled",
    "is_in_pass",
    "is_inside_unit",
    "keep_class_name",
    "local_box",
    "mesh_of",
    "note_mesh",
    "offload_wrapper",
    "own_buffers",
    "own_parameters",
    "parameters_of_unit",
    "pending_reduction",
    "rebuild_tensor",
    "rebuild_untyped_tensor",
    "repair_cpu_collectives",
    "repair_unit_backward",
    "replicated_parameters",
    "reset_after_error",
    "show_instead_of_shards",
    "storage_class",
    "storage_info",
    "transformer_engine_checkpoint_wrapper",
    "watch_collectives",
]

# The base of all batch norms, which FSDP1 kept out of mixed precision.
BatchNorm = nn.modules.batchnorm._BatchNorm


# What torch.save calls to rebuild a tensor.
rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_untyped_tensor = torch._utils._rebuild_tensor_v3


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One defect of torch that we work around: how to see it, and what to do."""

    name: str
    seen_on: tuple[str, ...]
    not_on: tuple[str, ...]
    why: str
    is_needed: Callable[[], bool]
    apply: Callable[[], None]


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returned; ``module.compile()`` leaves the module as it is.

    Does not import the compiler, which takes a second, and of which there is nothing to find if nobody imported it.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the module itself registers, under each of their names.

    ``named_parameters(recurse=False, remove_duplicate=False)``, without what that spends on finding out that a module
    has none, as most have: a set-up reads every module several times.
    """
    registered = module._parameters
    return [(name, parameter) for name, parameter in registered.items() if parameter is not None] if registered else []


def own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that the module itself registers, under each of their names; see ``own_parameters``."""
    registered = module._buffers
    return [(name, buffer) for name, buffer in registered.items() if buffer is not None] if registered else []


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which box of the whole tensor this rank holds: (sizes, offsets), in elements."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def pending_reduction(placement: Any) -> tuple[str, float] | None:
    """How a DTensor's local values still have to be put together along one axis of its mesh, if they have to.

    ``("norm", p)``: they are p-norms of parts (torch's ``_NormPartial``, which also has its parts for p = inf, as a
    maximum). ``(op, 1.0)``: by torch's own word for the reduction, ``sum``, ``avg``, ``max`` ... None: they are whole
    along this axis, or parts of a larger tensor.
    """
    if not isinstance(placement, Partial):
        return None
    power = getattr(placement, "norm_type", None)
    if power is not None and placement.reduce_op == "sum":
        return "norm", float(power)
    return placement.reduce_op, 1.0


def storage_class(dtype: torch.dtype) -> tuple[type, bool]:
    """The class that ``torch.save`` names for a tensor's storage, and whether it implies the dtype.

    One that does goes with ``rebuild_tensor``; else ``rebuild_untyped_tensor`` gets the dtype as a further argument.
    """
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return (torch.storage.UntypedStorage, False) if name is None else (getattr(torch, name), True)


def storage_info(file_name: str, offset: int, num_bytes: int) -> Any:
    """Where an entry of a checkpoint folder lies, as its ``.metadata`` says it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import, and only for writing

    return _StorageInfo(file_name, offset, num_bytes)


def has_accelerator() -> bool:
    """Whether host memory can be pinned for an accelerator."""
    return torch.accelerator.is_available()


def keep_class_name(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` put on ``module`` its original name.

    Hugging Face writes the class's name into ``architectures``, Composer into its checkpoints' metadata, and user code
    asks ``type(m).__name__``. ``fully_shard`` keeps one class per original class, so this is done once for each.
    """
    cls = type(module)
    if not issubclass(cls, FSDPModule):
        return
    original = cls.__mro__[2]  # 0 is the class that fully_shard made, 1 is FSDPModule
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(cls, attribute, getattr(original, attribute))


def transformer_engine_checkpoint_wrapper(seed: int) -> Callable[[nn.Module], nn.Module]:
    """A wrapper that recomputes with Transformer Engine's checkpoint, as Composer set it up under amp_fp8.

    One tracker of random states serves all modules (composer/distributed/dist_strategy.py, 0.32.1).

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    te: Any = importlib.import_module("transformer_engine.pytorch")
    tracker = te.distributed.CudaRNGStatesTracker()
    tracker.add("fsdp-rng", seed)
    return functools.partial(
        checkpoint_wrapper,
        context_fn=te.distributed.get_activation_recompute_contexts,
        checkpoint_fn=te.distributed.checkpoint,
        use_reentrant=False,
        get_rng_state_tracker=lambda: tracker,
    )


def note_mesh(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Keep the mesh that a unit was sharded over, also where the unit holds no parameter that could say it."""
    module._get_fsdp_state()._composer_fsdp2_mesh = mesh  # type: ignore[attr-defined]


def mesh_of(module: nn.Module) -> DeviceMesh:
    """The mesh of a unit that ``apply_plan`` sharded."""
    assert isinstance(module, FSDPModule)
    mesh: DeviceMesh = module._get_fsdp_state()._composer_fsdp2_mesh  # type: ignore[attr-defined]
    return mesh


def average_after_backward(module: FSDPModule, parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of ``parameters``, which lie whole on every rank of the unit's mesh, where a backward ends.

    Call it for every unit of a model, also for those without such parameters: torch ends a backward in the unit where
    it began. A gradient that has been averaged stays the same when it is averaged again, so gradients may accumulate.
    The ranks of the mesh all-reduce one buffer of these gradients in each backward that reduces the others.
    """
    state: Any = module._get_fsdp_state()
    state._composer_fsdp2_replicated = tuple(parameters)
    state._root_post_backward_final_callback = _FinishThenAverage(state)


def replicated_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Those of the unit that lie whole on every rank of its mesh, with averaged gradients; see above."""
    assert isinstance(module, FSDPModule)
    return getattr(module._get_fsdp_state(), "_composer_fsdp2_replicated", ())


class _FinishThenAverage:
    """In place of the bound method, on one state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self) -> None:
        type(self.state)._root_post_backward_final_callback(self.state)
        if not self.state._state_ctx.is_last_backward or not _reduces_gradients(self.state._state_ctx.all_states):
            return
        by_mesh: dict[DeviceMesh, dict[nn.Parameter, None]] = {}
        for state in self.state._state_ctx.all_states:
            trainable = [p for p in getattr(state, "_composer_fsdp2_replicated", ()) if p.requires_grad]
            if trainable:
                by_mesh.setdefault(state._composer_fsdp2_mesh, {}).update(dict.fromkeys(trainable))
        for mesh, found in by_mesh.items():
            _average_gradients(list(found), mesh)


def _reduces_gradients(states: Sequence[Any]) -> bool:
    """Whether ``set_requires_gradient_sync`` and ``set_requires_all_reduce`` are on."""
    return all(group.reduce_grads and group.all_reduce_grads for state in states for group in _groups_of(state))


def _average_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """In place, in one buffer. A gradient missing here counts as zero, and stays missing if no rank has it."""
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    is_there = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=parameters[0].device)
    buffer = torch.cat([*(gradient.detach().flatten().to(dtype) for gradient in gradients), is_there])
    for axis in range(mesh.ndim):
        _launching.dist.all_reduce(buffer, group=mesh.get_group(axis))  # watched like the units' own
    # Read only where something is missing: on a GPU it waits for the reduction.
    num_there = buffer[-len(parameters) :].tolist() if any(p.grad is None for p in parameters) else None
    averaged = (buffer[: -len(parameters)] / mesh.size()).split([p.numel() for p in parameters])
    for number, (parameter, gradient, average) in enumerate(zip(parameters, gradients, averaged, strict=True)):
        if num_there is None or num_there[number]:
            parameter.grad = gradient
            gradient.copy_(average.view_as(gradient))


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a unit; none without parameters of its own."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def repair_unit_backward(module: FSDPModule) -> None:
    """Two things that ``fully_shard`` leaves undone where the backward of one unit ends.

    Parameters that the backward did not reach get gradients of zero, once any of the unit has one, in this microbatch
    or, where their reduction over replicas was put off, in one before. FSDP1's flat parameter had its gradient whole.
    ``fully_shard`` reduces those that are there: ranks whose batches read different parameters (experts, branches)
    would then add up the gradients of different ones, without an error; and a unit that the last microbatch does not
    run would keep what was put off until then to itself. torch 2.13 has a switch for it, off by default, that fills
    units without any gradient as well, on which FSDP1 left the optimizer nothing to decay.

    And the unit is no longer in its backward. Left so until the whole backward ends, a recomputation that runs the unit
    once more (it lies inside a checkpointed module that runs twice) would neither gather (2.7 raises) nor reduce its
    parameters (2.13 loses a gradient, without an error).
    """
    state: Any = module._get_fsdp_state()
    for group in _groups_of(state):
        group.post_backward = _EndUnitBackward(group, state)


class _EndUnitBackward:
    """In place of the bound method, on one group; torch calls it wherever a unit's backward ends."""

    def __init__(self, group: Any, state: Any) -> None:
        self.group = group
        self.state = state

    def __call__(self, *unused: Any) -> None:
        trainable = [
            parameter
            for parameter in self.group.fsdp_params
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad
        ]
        missing = [parameter for parameter in trainable if not _has_gradient(parameter)]
        if len(missing) < len(trainable) or self._is_reduction_due():
            for parameter in missing:
                unsharded = parameter._unsharded_param
                unsharded.grad = torch.zeros_like(unsharded)
        type(self.group).post_backward(self.group, *unused)
        self.state._training_state = TrainingState.IDLE

    def _is_reduction_due(self) -> bool:
        """Whether earlier microbatches left gradients that wait for this one's all-reduce over replicas."""
        group = self.group
        return group.reduce_grads and group.all_reduce_grads and group._partial_reduce_output is not None


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None


# ---------------------------------------------------------------------------------------------------------------------
# A forward or backward that an error ended.


def reset_after_error(unit: FSDPModule) -> None:
    """Put what a forward began with, and all units below it, into the state that they have between steps.

    Drops unfinished gradients, and waits for collectives that are on their way. ``.grad`` of the sharded parameters is
    the optimizer's to clear. Of a unit that no forward began with nothing is changed. torch 2.13 has
    ``reset_iter_state`` for it (without the gradients of microbatches that were not communicated).
    """
    root, state = unit, _state_of(unit)
    if not state._is_root:
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(state)
    for each in state._state_ctx.all_states:
        for group in _groups_of(each):
            group.lazy_init()  # idempotent; the error may have come in the midst of the first one
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
                    parameter.free_unsharded_param()


def _reset_iteration(root: Any) -> None:
    stream, shared = root._device_handle.current_stream(), root._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        if (held := getattr(shared, name)) is not None:
            _wait(stream, held.event)
            setattr(shared, name, None)
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in _groups_of(state):
            if group._all_gather_result is not None:
                _wait(stream, group._all_gather_result.all_gather_event)
                if isinstance(work := group._all_gather_result.all_gather_work, dist.distributed_c10d.Work):
                    work.wait()
            for event in (group._post_reduce_event, group._reshard_after_forward_event):
                _wait(stream, event)
            if group._all_reduce_state is not None:
                _wait(stream, group._all_reduce_state.event)
            group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
            group._all_reduce_state = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)


# ---------------------------------------------------------------------------------------------------------------------
# What stands in the modules of a unit while it is not gathered.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitParameter:
    """One sharded parameter of a unit, and each module and name under which it is registered."""

    sharded: nn.Parameter  # a DTensor
    places: tuple[tuple[nn.Module, str], ...]

    def standing(self) -> list[nn.Parameter]:
        """What is registered now, in the order of the places."""
        found = [module._parameters.get(name) for module, name in self.places]
        return [parameter for parameter in found if parameter is not None]

    def place(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter
            else:
                setattr(module, name, parameter)


def distinct_units(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """The units among ``modules``; of one unit that ``fully_shard`` made of several modules, the first."""
    found: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), module)
    return list(found.values())


def is_inside_unit(module: nn.Module) -> bool:
    """Whether a unit manages this module; also of the unit itself."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parameters_of_unit(unit: FSDPModule) -> list[UnitParameter]:
    """The parameters that a unit shards, with their places, also those outside of ``unit`` (ties, grouped modules).

    Makes the unit ready for its first forward, as ``unit.unshard`` does; does not communicate.
    """
    found = []
    for group in _groups_of(_state_of(unit)):
        group.lazy_init()
        for parameter in group.fsdp_params:
            info = parameter._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            places = ((info.module, info.param_name), *shared)
            found.append(UnitParameter(sharded=parameter.sharded_param, places=places))
    return found


def has_unreduced_gradients(unit: FSDPModule) -> bool:
    """Whether gradients of the unit wait for a later microbatch to be communicated."""
    return any(
        group._partial_reduce_output is not None or any(map(_has_gradient_unreduced, group.fsdp_params))
        for group in _groups_of(_state_of(unit))
    )


def _has_gradient_unreduced(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param") and _has_gradient(parameter)


def is_in_pass(unit: FSDPModule) -> bool:
    """Whether a forward or backward of the unit, or of its root, is under way (or was ended by an error)."""
    state = _state_of(unit)
    working = [state._training_state, *(group._training_state for group in _groups_of(state))]
    return state._state_ctx.iter_forward_root is not None or any(each != TrainingState.IDLE for each in working)


def show_instead_of_shards(
    unit: FSDPModule, *, before_gather: Callable[[bool], None], after_reshard: Callable[[], None]
) -> Callable[[], None]:
    """Have a caller register other parameters than the shards in a unit's modules while it is not gathered.

    Forward and backward work as ever: they gather the shards, and free what was gathered afterwards, the root's too.

    Args:
        unit: Not gathered now.
        before_gather: Called ahead of each all-gather of the unit, with whether it is backward's; what it raises ends
            the forward or backward.
        after_reshard: Called once the shards are registered again.
    Returns:
        A function that ends it. A forward or backward that an error left under way is over then, too.
    """
    state = _state_of(unit)
    groups = _groups_of(state)
    shown = [_ShownInstead(group, before_gather, after_reshard) for group in groups]

    def end() -> None:
        for each in shown:
            each.end()
        if is_in_pass(unit):
            reset_after_error(_root_of(state)._modules[0])
        for group in groups:
            group._to_sharded()

    return end


def _root_of(state: Any) -> Any:
    """The state that began the forward or backward which this one is part of."""
    context = state._state_ctx
    return context.iter_forward_root or next((each for each in context.all_states if each._is_root), state)


class _ShownInstead:
    """Takes the place of some bound methods of one group and its parameters."""

    def __init__(self, group: Any, before_gather: Callable[[bool], None], after_reshard: Callable[[], None]) -> None:
        self.group = group
        self.before_gather = before_gather
        self.after_reshard = after_reshard
        self.is_over = False
        self._undo = [
            self._override(group, "unshard", self._unshard),
            self._override(group, "_to_sharded", self._to_sharded),
            # The root would stay gathered after a forward, and others as shards on fewer ranks.
            self._override(group, "reshard", lambda original: group._to_sharded()),
            # After load_state_dict and the like: it takes what is registered for the shards.
            *(self._override(each, "reset_sharded_param", lambda original: None) for each in group.fsdp_params),
        ]

    def end(self) -> None:
        self.is_over = True
        for undo in self._undo:
            undo()

    def _unshard(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.group._all_gather_result is None and not self.group.is_unsharded:
            self.before_gather(self.group._training_state == TrainingState.PRE_BACKWARD)
        original(*args, **kwargs)

    def _to_sharded(self, original: Callable[..., Any]) -> None:
        was_sharded = self.group.is_sharded
        original()
        if not was_sharded:
            self.after_reshard()

    def _override(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
        original = getattr(owner, name)  # or another replacement of ours

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.is_over else replacement(original, *args, **kwargs)

        return _put_in_place(owner, name, call)


def _state_of(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


# ---------------------------------------------------------------------------------------------------------------------
# fully_shard's collectives, announced before they are launched.

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


def default_store() -> Any:
    """The store that the default process group was made with, under a prefix of ours."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore("composer_fsdp2", c10d._get_default_store())


def watch_collectives(
    units: Mapping[str, FSDPModule], before: Callable[[InFlight], None], *, first: bool = False
) -> Callable[[], None]:
    """Call ``before`` ahead of each collective of these units, between the allocation of its buffers and its launch.

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
        state = _state_of(module)
        # The end of a backward averages what lies whole on every rank.
        undo.append(_replace_call(state, "_root_post_backward_final_callback", path, watch))
        for group in _groups_of(state):
            undo.extend(_replace_call(group, name, path, watch) for name in ("unshard", "post_backward"))
    listed = weakref.ref(watch, _forget)
    _watched.insert(0 if first else len(_watched), listed)
    _launching.dist = _WatchedDistributed()

    def stop() -> None:
        _forget(listed)
        for put_back in reversed(undo):
            put_back()

    return stop


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

    return _put_in_place(owner, name, call)


def _put_in_place(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Set an attribute of one object; returns what takes it away, unless another replacement lies above it by then."""
    before = vars(owner).get(name)
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return put_back


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


class ShardedGradScaler(FSDP1GradScaler):
    """A gradient scaler for a model in which some gradients are sharded and some are whole, on one mesh or several.

    torch's scalers unscale all gradients of an optimizer in one call, which raises for a mix of DTensors and plain
    tensors. Use it as ``torch.amp.GradScaler``, whose arguments it takes; the shim gives it to Composer's State.

    ``unscale_`` and ``step`` are called on all ranks: they all-reduce one number, so that a step is skipped by all.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        shards = [
            _shard_with_gradient(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        stand_in: Any = types.SimpleNamespace(param_groups=[{"params": shards}])
        by_device = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)
        # One number: which devices gradients lie on may differ between ranks, and each entry is one all-reduce.
        return {found_inf.device: torch.stack([each.to(found_inf.device) for each in by_device.values()]).sum(dim=0)}


def _shard_with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is this rank's part of ``gradient``."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    holder = local.detach()
    holder.grad = local
    return holder


def repair_cpu_collectives() -> None:
    """Make ``fully_shard`` average gradients over gloo, and run on a 2-D mesh there; CUDA is not touched.

    Called on all ranks before sharding on the CPU; idempotent, and local: it communicates nothing.
    """
    for repair in REPAIRS:
        if repair.is_needed():
            repair.apply()


# ---------------------------------------------------------------------------------------------------------------------
# gloo's ReduceOp.AVG: torch 2.7's reduce_scatter_tensor returns the sum and its all_reduce raises (pytorch#162338),
# while fully_shard asks for AVG with fp32 and bf16 gradients.

_MARK = "_composer_fsdp2_repair"


def _gloo_cannot_average() -> bool:
    """gloo refuses AVG before it communicates, so a group of this one rank shows what any group would do.

    The store lies in memory and the group is known to nobody else.
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
        # A factor of 1 before the reduction makes fully_shard ask for SUM; the whole division comes after it.
        ranks = reduce_scatter_group.size() * (1 if all_reduce_group is None else all_reduce_group.size())
        return (1.0, float(ranks))

    setattr(divide_factors, _MARK, original)
    _fsdp_collectives._get_gradient_divide_factors = divide_factors


# ---------------------------------------------------------------------------------------------------------------------
# torch.cpu.Stream is a stub whose record_event returns None; fully_shard on a 2-D mesh asserts that it got an event.


def _cpu_events_are_missed() -> bool:
    """Versions that accept no event on the CPU declare the field of ``AllReduceState`` as optional."""
    accepts_none = "None" in str(_fsdp_param_group.AllReduceState.__annotations__["event"])
    stream: Any = torch.cpu.Stream()
    return stream.record_event() is None and not accepts_none


def _record_cpu_events() -> None:
    def record_event(self: torch.cpu.Stream, event: Any = None) -> Any:
        return torch.cpu.Event() if event is None else event

    torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign]
    _forget_events_of_unused_gathers()


def _forget_events_of_unused_gathers() -> None:
    """Undo for one caller what the event above does.

    A gather ahead for a unit whose backward never runs (frozen, and its inputs need no gradient) is waited for at the
    end of backward: by its event, if it has one, on a stream of torch.accelerator, which a machine without one lacks.
    """
    original = _fsdp_param_group.FSDPParamGroup.finalize_backward

    def finalize_backward(self: Any) -> None:
        gather = self._all_gather_result
        if gather is not None and self.device.type == "cpu":
            self._all_gather_result = gather._replace(all_gather_event=None)  # the work itself is waited for
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
