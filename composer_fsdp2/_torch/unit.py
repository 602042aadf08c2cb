"""The steps that ``fully_shard`` leaves out at the beginning and end of a unit's forward and backward."""

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
    """Other parameters than the shards stand in a unit's modules while it is not gathered.

    Args:
        options: What the caller shows them with.
        before_gather: Called before each all-gather of the unit, with whether it is backward's; what it raises ends the
            forward or backward.
        after_reshard: Called once the shards are registered again.
    """

    options: object
    before_gather: Callable[[bool], None]
    after_reshard: Callable[[], None]


@dataclass(slots=True, eq=False)
class UnitHooks:
    """What is done at places of a unit's forward and backward for which torch has no hooks.

    Args:
        watches: Called before the unit's collectives, with the path that each knows the unit by.
        replicated: By mesh, parameters that lie unsharded on every rank of it; their gradients are averaged where the
            backward ends.
        after_reduction: Called in turn where a backward that reduced gradients ends; what one raises ends it.
        accumulates_in_backward_dtype: Unreduced gradients are accumulated in the dtype of the backward, as under FSDP1,
            not in ``reduce_dtype``.
    """

    watches: list[tuple[Watch, str]] = field(default_factory=list)
    override: ParameterOverride | None = None
    replicated: Mapping[DeviceMesh, Sequence[nn.Parameter]] = field(default_factory=dict)
    after_reduction: list[Callable[[], None]] = field(default_factory=list)
    accumulates_in_backward_dtype: bool = False


def hooks_of(unit: FSDPModule) -> UnitHooks:
    """Of a unit, also of one that ``fully_shard`` made without us, which otherwise stays as it is."""
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
    """Call ``before`` for each collective of these units, between the allocation of its buffers and its launch.

    What ``before`` raises ends the forward or backward; ``reset_after_error`` then. An error of the collective itself
    gets a note that names the unit.

    Args:
        units: By path; each unit once.
        first: Ahead of those that watch already.
        between_units: Also for collectives of tensor, context and expert parallelism, by whatever model.
    Returns:
        A function that ends it. Until then each collective costs a few Python calls more. A watch ends with its model,
        too, which it does not keep alive.
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
        """Called where the backward of a model ends, on the unit where it began."""
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
        else:  # the root would stay gathered after a forward, and others as shards on fewer ranks
            self._to_sharded()

    def _to_sharded(self) -> None:
        """Called wherever the unit's shards take the place of its full parameters: reshard, clipping, state dicts."""
        was_sharded = self.is_sharded
        super()._to_sharded()
        if self.hooks.override is not None and not was_sharded:
            self.hooks.override.after_reshard()


class Parameter(FSDPParam):
    hooks: UnitHooks

    def reset_sharded_param(self) -> None:
        """Called after load_state_dict and the like; takes what is registered for the shard."""
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
        """Called where a backward ends that does not reduce."""
        if not self.hooks.accumulates_in_backward_dtype:
            super().to_accumulated_grad_if_needed()


_PHASES = {TrainingState.FORWARD: "forward", TrainingState.IDLE: "unshard()"}


def _average_gradients(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients in place, in one buffer. A missing one counts as zero, and stays missing if no rank has it.

    A gradient that has been averaged stays the same when it is averaged again, so gradients may accumulate. The ranks
    of a mesh all-reduce one buffer of these gradients in each backward that reduces the others.
    """
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    is_there = torch.ones(len(parameters), dtype=dtype, device=parameters[0].device)  # a list would be copied there
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            is_there[number].zero_()
    buffer = torch.cat([*(gradient.detach().flatten().to(dtype) for gradient in gradients), is_there])
    for axis in range(mesh.ndim):
        all_reduce(buffer, mesh.get_group(axis))
    # Read only where something is missing: on a GPU it waits for the reduction.
    num_there = buffer[-len(parameters) :].tolist() if any(p.grad is None for p in parameters) else None
    averaged = (buffer[: -len(parameters)] / mesh.size()).split([p.numel() for p in parameters])
    for number, (parameter, gradient, average) in enumerate(zip(parameters, gradients, averaged, strict=True)):
        if num_there is None or num_there[number]:
            parameter.grad = gradient
            gradient.copy_(average.view_as(gradient))


def repair_unit(module: FSDPModule) -> None:
    """Have a unit that ``fully_shard`` made do the rest: see ``UnitState`` and ``UnitGroup``."""
    _count_steps()
    state = state_of(module)
    _set_classes(state, UnitState, UnitGroup)
    state.own_policy = state._mp_policy
    # torch 2.7 casts by pytree, which would make other containers of the caller's.
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
    """A gradient that reaches the shard itself, as from a penalty, is laid out as the shard.

    autograd leaves it as the operator's backward made it, replicated for one (``shard.sum()``): the unit's own gradient
    would be added to that, and the optimizer would get a full tensor. The unit's own gradients do not pass this hook.
    """
    if not shard.requires_grad:
        return
    mesh, placements = shard.device_mesh, shard.placements  # not the shard, which would be kept alive by its own hook

    @unserializable_hook
    def redistribute_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(mesh, placements) if isinstance(gradient, DTensor) else gradient

    shard.register_hook(redistribute_gradient)


def skip_flatten_parameters() -> None:
    """``flatten_parameters`` of an RNN in a unit.

    torch's moves the weights into one buffer for cuDNN, also unasked: in the first forward that finds other weights
    than the last, as after each all-gather. On a GPU the full parameters would then be views of that buffer, which no
    later all-gather fills: the RNN would go on with its first weights, without an error, while the optimizer trains the
    shards. Measured on torch 2.11.0; ``fully_shard`` alone does it. Without it cuDNN copies the weights in each call.
    """


class UnitState(State):
    """Finds tensors wherever FSDP1 found them, and leaves no copies of weights in autocast's cache.

    torch looks for the tensors of inputs and outputs with pytree alone (2.7), or with dataclasses, and without sets
    (2.13). On an output whose tensors it does not find it registers no backward hook: a root then never trains, without
    an error, and another unit fails for want of its parameters.

    autocast caches a copy in low precision of each leaf in fp32 that requires grad, until the outermost autocast ends.
    A unit's full parameters are such leaves, and the copies outlive them: every rank would have the whole model in low
    precision. FSDP1's full parameters were views, which are not cached.
    """

    own_policy: MixedPrecisionPolicy
    _autocast_cached: bool | None = None  # before the forward of which this is the outermost unit
    _awaits_backward = False  # a forward has ended whose backward would leave gradients in full parameters

    def _root_pre_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.refuse_lost_gradients()
        is_outermost = self._state_ctx.iter_forward_root is None
        args, kwargs = super()._root_pre_forward(module, args, kwargs)
        if is_outermost:
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
        """Called where the unit's forward ends."""
        groups = groups_of(self)
        inputs: set[int] = set()  # a hook on one would come after the unit's backward
        for group in reversed(groups):
            output, unwritten = group.restore_inputs(output)
            inputs |= unwritten
        if self._state_ctx.iter_forward_root is self:
            self.restore_autocast_cache()
        if not torch.is_grad_enabled():
            if self._state_ctx.iter_forward_root in (self, None):  # None where generate, say, called the forward
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
        """Raise where a backward reached parameters of the unit without passing its outputs.

        Called where the next forward begins, and where the unit is resharded (clipping, state dicts). The parameters of
        a unit that reshards after forward are not there in such a backward, which fails.
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
    """Whether a backward through the unit needs parameters that are not there, or leaves gradients to reduce."""
    return not group.is_unsharded or any(each.sharded_param.requires_grad for each in group.fsdp_params)


def _has_gradients(group: Any) -> bool:
    return any(hasattr(each, "_unsharded_param") and has_gradient(each) for each in group.fsdp_params)


def _hookable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or that of which it is a view: a hook on a view is lost when the view is written to in place."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


class UnitGroup(Group):
    """Ends a unit's backward as FSDP1 did.

    Parameters that the backward did not reach get gradients of zero, once any of the unit has one, in this microbatch
    or, where their reduction over replicas was put off, in one before. FSDP1's flat parameter had one gradient for all.
    ``fully_shard`` reduces those that are there: ranks whose batches read different parameters (experts, branches)
    would then add up the gradients of different ones, without an error; and of a unit that the last microbatch does
    not run, the gradients that were put off until then would never be reduced. torch 2.13 has a switch for it, off by
    default, that fills units without any gradient as well, on which FSDP1 left the optimizer nothing to decay.

    And the unit is no longer in its backward. Left so until the model's backward ends, a recomputation that runs the
    unit once more (inside a checkpointed module that runs twice) would neither gather (2.7 raises) nor reduce
    its parameters (2.13 loses a gradient, without an error).

    On a GPU with gradients offloaded, torch 2.7 waits for the wrong copies, or for none: the gradients that the
    optimizer, or a hook, reads in the host's memory may be those of the batch before, without an error. With replicas
    the copies run on the all-reduce's stream, but the event to wait for was recorded on the reduce-scatter's
    (pytorch#160291); and a hook after accumulation runs while its gradient is on its way (pytorch#180666).

    The unit may write to its inputs in place, as it could where FSDP1's hook was on the flat parameter.

    Between steps its modules show the shards, as under FSDP1, also where it stays gathered for the next forward (a root
    after an evaluation, all units with ``reshard_after_backward: false``). torch shows the full parameters then: a
    penalty computed from them before the next forward would read memory that is freed by its backward (torch ends with
    a segmentation fault), and its gradient would come after their reduction. And a step of the optimizer in between is
    seen: torch would go on with the parameters from before it, without an error.

    What a script noted on a parameter is on the full parameter, too.
    """

    unit_state: UnitState
    num_running_forwards = 0  # forwards that are under way, as within generate
    _identity_hook: IdentityHook | None = None
    # The sum of the shards' versions, while the modules of an unsharded unit have the shards registered.
    _registered_versions: int | None = None

    def pre_forward(self, *args: Any) -> Any:
        # torch 2.13 calls it for each of a unit's several modules, and post_forward once.
        self.num_running_forwards = self.num_running_forwards + 1 if len(self.modules) == 1 else 1
        return super().pre_forward(*args)

    def post_forward(self, *args: Any) -> Any:
        self.num_running_forwards = max(0, self.num_running_forwards - 1)
        return super().post_forward(*args)

    def register_shards(self) -> None:
        """Register the shards in the unit's modules; what is gathered stays for the next forward or backward."""
        if self.is_unsharded and self._registered_versions is None:
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)
            self._registered_versions = self._versions()

    def _versions(self) -> int:
        """Grows with each write into a shard, on all ranks alike.

        Of the DTensor's operators and of those on its local tensor; ``foreach`` and fused ones, which optimizers use,
        count for neither.
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
        # torch calls a unit of several modules at the end of the last one's forward: too late to adopt.
        self._identity_hook = IdentityHook(self._end_backward, is_writable=len(self.modules) == 1)
        return self._identity_hook.apply((args, dict(kwargs)))  # other hooks may keep the mapping

    def _end_backward(self) -> None:
        self.post_backward()

    def restore_inputs(self, output: Any) -> tuple[Any, set[int]]:
        """See ``IdentityHook.restore``."""
        if self._identity_hook is None:
            return output, set()
        identity_hook, self._identity_hook = self._identity_hook, None
        return identity_hook.restore(output)

    def post_backward(self, *unused: Any) -> None:
        """torch calls it wherever the unit's backward ends."""
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
        is_offloaded = bool(parameters) and parameters[0].offload_to_cpu  # a policy is all of the unit's
        with _synchronous_offload(parameters) if is_offloaded else contextlib.nullcontext():
            super().post_backward(*unused)
        if is_offloaded:
            self._wait_for_offload()
        self.unit_state._training_state = TrainingState.IDLE

    def _is_reduction_due(self) -> bool:
        """Whether earlier microbatches left gradients that wait for this one's all-reduce over replicas."""
        return self.reduce_grads and self.all_reduce_grads and self._partial_reduce_output is not None

    def _wait_for_offload(self) -> None:
        """The optimizer waits for the event after the copies to the host, on the stream that they run on."""
        for parameter in self.fsdp_params:
            if parameter.grad_offload_event is not None and self._post_reduce_event is not None:
                parameter.grad_offload_event = self._post_reduce_event


@contextlib.contextmanager
def _synchronous_offload(parameters: Sequence[Any]) -> Iterator[None]:
    """Gradients that a hook reads where they are accumulated are copied to the host at once, without overlap."""
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
