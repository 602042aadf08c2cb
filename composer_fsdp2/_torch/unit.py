"""Subclasses of ``fully_shard``'s state, parameter group and parameter with FSDP1's behaviour."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import unserializable_hook

from composer_fsdp2._torch.collectives import (
    PendingCollective,
    Watch,
    all_reduce,
    collectives_of_unit,
    watch_functional_collectives,
)
from composer_fsdp2._torch.groups import groups_of, has_gradient, state_of
from composer_fsdp2._torch.identity import IdentityHook
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2._torch.tensor_tree import cast_floats, hidden_gradient, tensors_in
from composer_fsdp2.errors import CallError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOverride:
    """Parameters that replace the shards in a unit's modules while the unit is sharded.

    Args:
        options: The options of the caller, for comparison with those of a nested call.
        before_gather: Called before each all-gather of the unit; the argument is whether it belongs to a backward. An
            exception ends the forward or backward.
        after_reshard: Called after the shards are registered again.
    """

    options: object
    before_gather: Callable[[bool], None]
    after_reshard: Callable[[], None]


@dataclass(slots=True, eq=False)
class UnitHooks:
    """Callbacks at points of a unit's forward and backward at which torch calls no hook.

    Args:
        watches: Called before the unit's collectives. Each is paired with the path of the unit in the watched model.
        replicated: By mesh, the parameters that are replicated on all its ranks. Their gradients are averaged at the
            end of the backward.
        after_reduction: Called in order at the end of each backward that reduced gradients. An exception ends the
            backward.
        accumulates_in_backward_dtype: Accumulate unreduced gradients in the dtype of the backward, as FSDP1, not in
            ``reduce_dtype``.
        before_first_forward: Called once, before the unit's first forward as a root.
    """

    watches: list[tuple[Watch, str]] = field(default_factory=list)
    override: ParameterOverride | None = None
    replicated: Mapping[DeviceMesh, Sequence[nn.Parameter]] = field(default_factory=dict)
    after_reduction: list[Callable[[], None]] = field(default_factory=list)
    accumulates_in_backward_dtype: bool = False
    before_first_forward: Callable[[], None] | None = None


def hooks_of(unit: FSDPModule) -> UnitHooks:
    """The callbacks of a unit, to modify.

    Works for units that the script made with ``fully_shard``, too; their behaviour does not change.
    """
    state = state_of(unit)
    if not isinstance(state, State):
        _set_classes(state, State, Group)
    return state.hooks


def _set_classes(state: Any, state_class: type["State"], group_class: type["Group"]) -> None:
    state.__class__, state.hooks = state_class, UnitHooks()
    for group in groups_of(state):
        group.__class__, group.hooks = group_class, state.hooks
        for parameter in group.fsdp_params:
            parameter.__class__, parameter.hooks = Parameter, state.hooks


def watch_collectives(
    units: Mapping[str, FSDPModule],
    before: Callable[[PendingCollective], None],
    *,
    first: bool = False,
    between_units: bool = False,
) -> Callable[[], None]:
    """Call ``before`` for each collective of these units, after its buffers are allocated and before it is launched.

    An exception of ``before`` ends the forward or backward; call ``reset_after_error`` afterwards. An exception of the
    collective itself gets a note with the name of the unit.

    Args:
        units: By path; each unit once.
        first: Run before the watches that are already registered.
        between_units: Also for collectives of tensor, context and expert parallelism, of any model.
    Returns:
        A function that removes the watch. Until then each collective costs a few Python calls. The model is not kept
        alive; deleting it removes the watch too.
    """
    watch = Watch(before)
    of_units = [hooks_of(unit).watches for unit in units.values()]
    for watches, path in zip(of_units, units, strict=True):
        watches.insert(0 if first else len(watches), (watch, path))
    forget = watch_functional_collectives(watch, first=first) if between_units else None

    def stop() -> None:
        for watches in of_units:
            watches[:] = [each for each in watches if each[0] is not watch]
        if forget is not None:
            forget()

    return stop


class State(FSDPState):
    hooks: UnitHooks

    def _root_post_backward_final_callback(self) -> None:
        """Called at the end of a model's backward, on the unit where the backward began."""
        with collectives_of_unit(self.hooks.watches, "backward"):
            super()._root_post_backward_final_callback()
            hooks = self.hooks
            if not (hooks.replicated or hooks.after_reduction):
                return
            if self._state_ctx.is_last_backward and self._reduces_gradients():
                for mesh, parameters in hooks.replicated.items():
                    if trainable := [parameter for parameter in parameters if parameter.requires_grad]:
                        _average_gradients(trainable, mesh)
                for then in tuple(hooks.after_reduction):
                    then()

    def _reduces_gradients(self) -> bool:
        """Whether ``set_requires_gradient_sync`` and ``set_requires_all_reduce`` are on."""
        groups = (group for state in self._state_ctx.all_states for group in groups_of(state))
        return all(group.reduce_grads and group.all_reduce_grads for group in groups)


class Group(FSDPParamGroup):
    hooks: UnitHooks

    def unshard(self, async_op: bool = False) -> None:
        override, state = self.hooks.override, self._training_state
        if override is not None and self._all_gather_result is None and not self.is_unsharded:
            override.before_gather(state == TrainingState.PRE_BACKWARD)
        with collectives_of_unit(self.hooks.watches, _PHASES.get(state, "backward")):
            super().unshard(async_op)

    def post_backward(self, *unused: Any) -> None:
        with collectives_of_unit(self.hooks.watches, "backward"):
            super().post_backward(*unused)

    def reshard(self) -> None:
        if self.hooks.override is None:
            super().reshard()
        else:  # otherwise the root would stay unsharded after a forward, and other units resharded to fewer ranks
            self._to_sharded()

    def _to_sharded(self) -> None:
        """Called whenever shards replace the unsharded parameters: reshard, clipping, state dicts."""
        was_sharded = self.is_sharded
        super()._to_sharded()
        if self.hooks.override is not None and not was_sharded:
            self.hooks.override.after_reshard()


class Parameter(FSDPParam):
    hooks: UnitHooks

    def reset_sharded_param(self) -> None:
        """Called after ``load_state_dict`` and similar. torch makes the registered parameter the unit's shard."""
        if self.hooks.override is None:
            registered = getattr(self._module_info.module, self._module_info.param_name)
            if not isinstance(registered, DTensor):
                raise CallError(
                    f"{self._module_info.param_name} of a {type(self._module_info.module).__name__} was replaced by a "
                    f"plain tensor of shape {tuple(registered.shape)} after sharding; replace it within "
                    "summon_full_params, or write into it with copy_"
                )
            super().reset_sharded_param()

    def to_accumulated_grad_if_needed(self) -> None:
        """Called at the end of a backward without reduction."""
        if not self.hooks.accumulates_in_backward_dtype:
            super().to_accumulated_grad_if_needed()


_PHASES = {TrainingState.FORWARD: "forward", TrainingState.IDLE: "unshard()"}


def _average_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients over ``mesh`` in place. A missing gradient counts as zero, unless it is missing on all ranks.

    Averaging an averaged gradient does not change it, so gradients may accumulate. Called on all ranks of ``mesh`` in
    each backward that reduces the other gradients; all-reduces one buffer per mesh axis.
    """
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    # not from a list, which would be copied to the device
    is_there = torch.ones(len(parameters), dtype=dtype, device=parameters[0].device)
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            is_there[number].zero_()
    buffer = torch.cat([*(gradient.detach().flatten().to(dtype) for gradient in gradients), is_there])
    for axis in range(mesh.ndim):
        all_reduce(buffer, mesh.get_group(axis))
    # Only read if a gradient is missing: on a GPU it waits for the reduction.
    num_there = buffer[-len(parameters) :].tolist() if any(p.grad is None for p in parameters) else None
    averaged = (buffer[: -len(parameters)] / mesh.size()).split([p.numel() for p in parameters])
    for number, (parameter, gradient, average) in enumerate(zip(parameters, gradients, averaged, strict=True)):
        if num_there is None or num_there[number]:
            parameter.grad = gradient
            gradient.copy_(average.view_as(gradient))


def patch_unit(module: FSDPModule) -> None:
    """Add FSDP1's behaviour to a unit that ``fully_shard`` created: see ``UnitState`` and ``UnitGroup``."""
    _count_steps()
    state = state_of(module)
    _set_classes(state, UnitState, UnitGroup)
    state.own_policy = state._mp_policy
    # torch 2.7 casts with pytree, which would replace the caller's containers.
    state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False, output_dtype=None)
    for group in groups_of(state):
        group.unit_state = state
        for parameter in group.fsdp_params:
            _redistribute_gradients(parameter.sharded_param)
            info = parameter._module_info
            for owner in (info.module, *info.shared_modules):
                if isinstance(owner, nn.RNNBase):
                    owner.flatten_parameters = skip_flatten_parameters  # type: ignore[method-assign]


_num_steps = 0  # of all optimizers


@functools.cache
def _count_steps() -> None:
    def count(*unused: Any) -> None:
        global _num_steps
        _num_steps += 1

    register_optimizer_step_post_hook(count)


def _redistribute_gradients(shard: DTensor) -> None:
    """Redistribute a gradient that is computed on the shard itself, as by a penalty, to the shard's placements.

    autograd returns it with the placements of the operator's backward, for example replicated (``shard.sum()``). The
    unit's own gradient would be added to that, and the optimizer would get a full tensor. The unit's own gradients do
    not run this hook.
    """
    if not shard.requires_grad:
        return
    mesh, placements = shard.device_mesh, shard.placements  # not the shard, which its own hook would keep alive

    @unserializable_hook
    def redistribute_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(mesh, placements) if isinstance(gradient, DTensor) else gradient

    shard.register_hook(redistribute_gradient)


def skip_flatten_parameters() -> None:
    """Replaces ``flatten_parameters`` of an RNN in a unit; does nothing.

    torch's version moves the weights into one buffer for cuDNN. It also runs in the first forward after the weights
    changed, as after each all-gather. On a GPU the unsharded parameters would then be views of that buffer, which later
    all-gathers do not fill: the RNN would keep its first weights, without an error, while the optimizer updates the
    shards. Measured on torch 2.11.0 with ``fully_shard`` alone. Without the buffer, cuDNN copies the weights in each
    call.
    """


class UnitState(State):
    """Finds tensors in the same containers as FSDP1, and disables autocast's weight cache.

    torch searches inputs and outputs for tensors with pytree only (2.7), or with dataclasses but without sets (2.13).
    If it finds no tensor in an output, it registers no backward hook: a root then never trains, without an error, and
    another unit raises because its parameters are sharded.

    autocast caches a low-precision copy of each fp32 leaf that requires grad, until the outermost autocast ends. A
    unit's unsharded parameters are such leaves, and the copies outlive them: each rank would hold the whole model in
    low precision. FSDP1's unsharded parameters were views, which are not cached.
    """

    own_policy: MixedPrecisionPolicy
    _autocast_cached: bool | None = None  # the setting before a forward of this unit as the outermost
    _awaits_backward = False  # a forward has ended whose backward may leave gradients in unsharded parameters

    def _root_pre_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.refuse_lost_gradients()
        is_outermost = self._state_ctx.iter_forward_root is None
        args, kwargs = super()._root_pre_forward(module, args, kwargs)
        if is_outermost:
            if self.hooks.before_first_forward is not None:
                self.hooks.before_first_forward()
                self.hooks.before_first_forward = None
            self._autocast_cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
        return self._cast_forward_inputs(args, kwargs)

    def _cast_forward_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = self.own_policy
        if not (policy.cast_forward_inputs and policy.param_dtype):
            return args, kwargs
        return cast_floats((args, kwargs), policy.param_dtype)

    def _cast_output_dtype(self, output: Any) -> Any:
        dtype = self.own_policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    def _register_pre_backward_hook(self, output: Any) -> Any:
        """Called at the end of the unit's forward."""
        groups = groups_of(self)
        inputs: set[int] = set()  # a hook on an input would run after the unit's backward
        for group in reversed(groups):
            output, unwritten = group.restore_inputs(output)
            inputs |= unwritten
        if self._state_ctx.iter_forward_root is self:
            self.restore_autocast_cache()
        if not torch.is_grad_enabled():
            if self._state_ctx.iter_forward_root in (self, None):  # None if generate, for example, called the forward
                self._register_shards()
            return self._cast_output_dtype(output)
        if torch._C._are_functorch_transforms_active():
            return super()._register_pre_backward_hook(output)
        reached = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in reached:
            if id(tensor) not in inputs:
                _hookable(tensor).register_hook(self._pre_backward)
        if not reached and any(map(_needs_hook, groups)) and (where := hidden_gradient(output)):
            raise PlanError(_HIDDEN.format(unit=_name_of(self), output=type(output).__qualname__, where=where))
        self._awaits_backward = any(group.is_unsharded and not _has_gradients(group) for group in groups)
        return self._cast_output_dtype(output)

    def _register_shards(self) -> None:
        groups = [group for state in self._state_ctx.all_states for group in groups_of(state)]
        if not any(group.num_running_forwards for group in groups):
            for group in groups:
                group.register_shards()

    def _pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._awaits_backward = False
        return super()._pre_backward(gradient)

    def refuse_lost_gradients(self) -> None:
        """Raise if a backward computed gradients of the unit's parameters, but none of the unit's outputs.

        torch then never reduces these gradients. Called at the start of the next forward, and when the unit is
        resharded (clipping, state dicts). A unit that reshards after forward has its parameters sharded in such a
        backward, which therefore raises.
        """
        if self._awaits_backward and any(group.is_unsharded and _has_gradients(group) for group in groups_of(self)):
            raise PlanError(_LOST.format(unit=_name_of(self)))
        self._awaits_backward = False

    def restore_autocast_cache(self) -> None:
        if self._autocast_cached is not None:
            torch.set_autocast_cache_enabled(self._autocast_cached)
            self._autocast_cached = None


_WAY_OUT = (
    "Return tensors in a dataclass, tuple, list, dict or set, or register the class with "
    "torch.utils._pytree.register_pytree_node"
)
_HIDDEN = (
    "the forward of {unit} returned {output}, which has a tensor that requires grad in {where}, where no backward hook "
    "can be registered: the unit's gradients would not be reduced. " + _WAY_OUT
)
_LOST = (
    "the last backward computed gradients for parameters of {unit} without passing a tensor that its forward "
    "returned: they were not reduced, and the optimizer did not see them. " + _WAY_OUT + ", rather than keep them "
    "elsewhere, or compute the loss inside of the unit"
)


def _name_of(state: Any) -> str:
    path = next((group._module_fqn for group in groups_of(state) if group._module_fqn), None)
    kinds = " and ".join(type(module).__name__ for module in state._modules)
    return f"unit {path} ({kinds})" if path else f"the root unit ({kinds})"


def _needs_hook(group: Any) -> bool:
    """Whether a backward through the unit needs an all-gather, or computes gradients to reduce."""
    return not group.is_unsharded or any(each.sharded_param.requires_grad for each in group.fsdp_params)


def _has_gradients(group: Any) -> bool:
    return any(hasattr(each, "_unsharded_param") and has_gradient(each) for each in group.fsdp_params)


def _hookable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its base if it is a view: an in-place write to a view removes the view's hooks."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


class UnitGroup(Group):
    """Ends a unit's backward as FSDP1 did.

    Missing gradients: parameters without a gradient get zeros if any parameter of the unit has one, in this microbatch
    or, if its all-reduce over replicas is deferred, in an earlier one. FSDP1's flat parameter had one gradient for all.
    ``fully_shard`` reduces only existing gradients: ranks whose batches use different parameters (experts, branches)
    would add the gradients of different parameters, without an error. And if the last microbatch does not run a unit,
    its deferred gradients would never be reduced. torch 2.13 has an option for this, off by default. It also fills
    units without any gradient, for which FSDP1 left ``.grad`` None, so weight decay did not apply.

    Training state: the unit leaves its backward state here. torch leaves it until the model's backward ends. A
    recomputation that runs the unit again (in a checkpointed module that runs twice) would then not all-gather (torch
    2.7 raises) or not reduce (torch 2.13 loses a gradient, without an error).

    Offloaded gradients: on a GPU, torch 2.7 waits for the wrong copy to the host, or for none. The optimizer or a hook
    may then read the gradients of the previous batch, without an error. With replicas the copies run on the all-reduce
    stream, but the event was recorded on the reduce-scatter stream (pytorch#160291). Post-accumulate-grad hooks run
    before the copy has finished (pytorch#180666).

    In-place writes: the forward may write to the unit's inputs in place, as under FSDP1, whose hook was on the flat
    parameter.

    Between steps: the modules have the shards registered, as under FSDP1, even if the unit stays unsharded for the next
    forward (a root after an evaluation, all units with ``reshard_after_backward: false``). torch leaves the unsharded
    parameters registered. A penalty computed from them before the next forward would read memory that its backward
    frees (torch crashes with a segmentation fault), and its gradient would arrive after their reduction. An optimizer
    step in between is detected; torch would continue with the parameters from before the step, without an error.

    Attributes: attributes that a script sets on a parameter are copied to the unsharded parameter.
    """

    unit_state: UnitState
    num_running_forwards = 0  # more than one within generate, for example
    _identity_hook: IdentityHook | None = None
    # The sum of the shards' versions, while the shards are registered in the modules of an unsharded unit; else None.
    _registered_versions: int | None = None

    def pre_forward(self, *args: Any) -> Any:
        # torch 2.13 calls it for each module of a unit with several modules, but calls post_forward once.
        self.num_running_forwards = self.num_running_forwards + 1 if len(self.modules) == 1 else 1
        return super().pre_forward(*args)

    def post_forward(self, *args: Any) -> Any:
        self.num_running_forwards = max(0, self.num_running_forwards - 1)
        return super().post_forward(*args)

    def register_shards(self) -> None:
        """Register the shards in the unit's modules. The unit stays unsharded for the next forward or backward."""
        if self.is_unsharded and self._registered_versions is None:
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)
            self._registered_versions = self._versions()

    def _versions(self) -> int:
        """A number that increases with each write to the unit's shards. Equal on all ranks.

        DTensor operators and operators on the local tensor increment their version counters. ``foreach`` and fused
        operators, which optimizers use, increment neither, so optimizer steps are counted separately.
        """
        shards: list[Any] = [parameter.sharded_param for parameter in self.fsdp_params]
        return _num_steps + sum(shard._version + shard._local_tensor._version for shard in shards)

    def unshard(self, async_op: bool = False) -> None:
        if self._registered_versions is not None:
            if self._registered_versions == self._versions():
                self._to_unsharded()
            else:
                self._to_sharded()
        super().unshard(async_op)

    def _to_sharded(self) -> None:
        self.unit_state.refuse_lost_gradients()
        self._registered_versions = None
        super()._to_sharded()

    def _to_unsharded(self) -> None:
        if self._registered_versions is not None:
            self._registered_versions = None
            for parameter in self.fsdp_params:
                parameter.to_unsharded()
        super()._to_unsharded()
        for parameter in self.fsdp_params:
            if noted := vars(parameter.sharded_param):
                vars(parameter._unsharded_param).update(noted)

    def finalize_backward(self) -> None:
        super().finalize_backward()
        self.num_running_forwards = 0  # an error may have ended a forward
        self.register_shards()

    def _register_post_backward_hook(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super()._register_post_backward_hook(args, kwargs)
        # For a unit of several modules torch runs this at the end of the last module's forward: too late for in-place
        # writes.
        self._identity_hook = IdentityHook(self._end_backward, is_writable=len(self.modules) == 1)
        return self._identity_hook.apply((args, dict(kwargs)))  # other hooks may keep a reference to the dict

    def _end_backward(self) -> None:
        self.post_backward()

    def restore_inputs(self, output: Any) -> tuple[Any, set[int]]:
        """See ``IdentityHook.restore``."""
        if self._identity_hook is None:
            return output, set()
        identity_hook, self._identity_hook = self._identity_hook, None
        return identity_hook.restore(output)

    def post_backward(self, *unused: Any) -> None:
        """Called at the end of the unit's backward."""
        parameters = self.fsdp_params
        trainable = [
            parameter
            for parameter in parameters
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad
        ]
        missing = [parameter for parameter in trainable if not has_gradient(parameter)]
        if len(missing) < len(trainable) or self._is_reduction_due():
            for parameter in missing:
                unsharded = parameter._unsharded_param
                unsharded.grad = torch.zeros_like(unsharded)
        # the offload policy is the same for the whole unit
        is_offloaded = bool(parameters) and parameters[0].offload_to_cpu
        with _synchronous_offload(parameters) if is_offloaded else contextlib.nullcontext():
            super().post_backward(*unused)
        if is_offloaded:
            self._wait_for_offload()
        self.unit_state._training_state = TrainingState.IDLE

    def _is_reduction_due(self) -> bool:
        """Whether gradients of earlier microbatches are waiting for this microbatch's all-reduce over replicas."""
        return self.reduce_grads and self.all_reduce_grads and self._partial_reduce_output is not None

    def _wait_for_offload(self) -> None:
        """Make the optimizer wait for the event after the copies to the host, on the stream on which they run."""
        for parameter in self.fsdp_params:
            if parameter.grad_offload_event is not None and self._post_reduce_event is not None:
                parameter.grad_offload_event = self._post_reduce_event


@contextlib.contextmanager
def _synchronous_offload(parameters: Sequence[Any]) -> Iterator[None]:
    """Copy gradients that a post-accumulate-grad hook reads to the host synchronously."""
    hooked = [
        parameter
        for parameter in parameters
        if parameter.offload_to_cpu
        and parameter.pin_memory
        and getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
    ]
    with contextlib.ExitStack() as stack:
        for parameter in hooked:
            stack.enter_context(replaced(parameter, "pin_memory", False))
        yield
