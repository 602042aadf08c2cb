"""``FullyShardedDataParallel``: FSDP1's class, implemented with ``fully_shard``."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.private_names import (
    FSDP_WRAPPED,
    ActivationWrapper,
    FSDP1Wrapper,
    parent_mesh,
    without_wrappers,
)
from composer_fsdp2._torch.unit import UnitHooks, hooks_of
from composer_fsdp2._torch.wrappers import (
    auto_wrap,
    group_of_unit,
    nest_unit,
    register_unit_class,
    reset_root,
    shards_of,
    write_assigned_data,
)
from composer_fsdp2.errors import CallError, ConfigError, PlanError, UnsupportedError
from composer_fsdp2.fsdp.arguments import ignored_states as read_ignored
from composer_fsdp2.fsdp.arguments import report, translate_arguments, warns_of_absent_ranks
from composer_fsdp2.fsdp.dcp import patch_dcp
from composer_fsdp2.fsdp.flat import REPLACEMENT, FlatView
from composer_fsdp2.fsdp.lightning import patch_lightning
from composer_fsdp2.fsdp.optimizers import (
    clear_accumulated,
    mark_replaced,
    note_accumulation,
    optimizer_rebindings,
    refuse_accumulated,
)
from composer_fsdp2.fsdp.planning import initializers_of, plan_instances
from composer_fsdp2.fsdp1.state_dicts import FULL, STATIC_METHODS, rekey_optim_state_dict, set_state_dict_type
from composer_fsdp2.parallel.order import execute_plan
from composer_fsdp2.sharding.agree import agree, require_process_group
from composer_fsdp2.sharding.confirmation import confirm, lists_units, summary_line
from composer_fsdp2.sharding.modules import parameter_at
from composer_fsdp2.sharding.plan import ShardingPlan
from composer_fsdp2.training.clipping import clip_grad_norm_
from composer_fsdp2.training.full_params import summon_full_params

_PREFIX = f"{FSDP_WRAPPED}."

_Ignored = tuple[set[nn.Module], set[nn.Parameter]]
# Instances made by the auto_wrap_policy of the constructor in progress, which shards them together with its own.
_made_by_policy: ContextVar[list["FullyShardedDataParallel"] | None] = ContextVar("_made_by_policy", default=None)


class FullyShardedDataParallel(FSDPModule, nn.Module):
    """``torch.distributed.fsdp.FullyShardedDataParallel`` on FSDP2, with the same arguments, methods, names and
    results.

    Each instance is one FSDP2 unit: the parameters below ``module``, except those of nested instances. An optimizer
    created before wrapping is rebound to the sharded parameters.

    Args:
        module: The module to wrap. Parameters may be on the meta device.
        process_group: The group over which parameters are sharded; a pair (shard, replicate) for the hybrid strategies,
            by default within and across nodes. All ranks must call the constructor, each with its own group.
        sharding_strategy: Default FULL_SHARD.
        cpu_offload: Store parameters, gradients and optimizer state in host memory.
        auto_wrap_policy: Selects submodules to wrap, in any of torch's forms.
        backward_prefetch: BACKWARD_POST has the effect of BACKWARD_PRE; None disables prefetching.
        mixed_precision: FSDP1's ``MixedPrecision``. ``keep_low_precision_grads`` is an error unless parameters have the
            low-precision dtype.
        ignored_modules, ignored_states: Modules or parameters that are neither sharded nor reduced.
        param_init_fn: Called with each module that owns a meta tensor, instead of its ``reset_parameters``; it must
            also materialise the module (``to_empty``).
        device_id: The device to which the module is moved; default the device of its parameters, else the accelerator.
        sync_module_states: Broadcast parameters and buffers from the first rank of each group.
        forward_prefetch, limit_all_gathers: As in FSDP1; FSDP2 always limits all-gathers.
        use_orig_params: False has the effect of True; logged once.
        device_mesh: Instead of process_group; 2-D (replicate, shard) for the hybrid strategies.
    Raises:
        ConfigError: contradictory or invalid arguments, or no process group. Also a ValueError.
        UnsupportedError: an unsupported argument. Also a NotImplementedError.
        PlanError: the module cannot be sharded, for example because two instances share a parameter. Also a ValueError.

    Called on all ranks: it compares plans, creates process groups, and may broadcast. On an error, the module is
    unchanged.
    """

    _fsdp_hooks: UnitHooks | None = None  # None until it is sharded
    _fsdp_ignored: _Ignored = (set(), set())
    _fsdp_in_no_sync = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "FullyShardedDataParallel":
        return nn.Module.__new__(cls)  # FSDPModule.__new__ would create an instance of cls.__mro__[2]

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        nn.Module.__init__(self)
        require_process_group("FullyShardedDataParallel")
        arguments: dict[str, Any] = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.cpu_offload, self.mixed_precision = cpu_offload or CPUOffload(), mixed_precision or MixedPrecision()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._fsdp_param_init_fn = param_init_fn
        made_by_policy = _made_by_policy.get()
        self._fsdp_is_nested = made_by_policy is not None
        if made_by_policy is not None:
            self._fsdp_translation = translate_arguments(module, **arguments)
            self._fsdp_wrapped_module = module
            made_by_policy.append(self)
            return
        made = [self]

        def decide() -> ShardingPlan:
            self._fsdp_translation = translate_arguments(module, **arguments)
            if param_init_fn is not None and not callable(param_init_fn):
                raise ConfigError(f"param_init_fn is {param_init_fn!r}; give a function of a module")
            self._fsdp_ignored = _ignored(module, ignored_modules, ignored_states)
            if auto_wrap_policy is not None:
                options = {**arguments, "param_init_fn": param_init_fn, "ignored_states": self._fsdp_ignored[1]}
                _wrap_by_policy(made, module, auto_wrap_policy, options)
            self._fsdp_wrapped_module = module
            return _plan(made)

        try:
            with warns_of_absent_ranks(process_group):
                plan = agree(decide, lambda plan: plan.fingerprint)
            report(self._fsdp_translation, use_orig_params=use_orig_params)
            _shard(made, plan, device_mesh)
        except BaseException:
            _unwrap(module, made)
            raise

    @property
    def module(self) -> nn.Module:
        """The wrapped module, also inside a checkpointing wrapper."""
        inner: nn.Module = self._fsdp_wrapped_module
        return inner._checkpoint_wrapped_module if isinstance(inner, ActivationWrapper) else inner

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group over which parameters are sharded; under NO_SHARD, the group over which they are replicated."""
        found = group_of_unit(self, replicas=self.sharding_strategy is ShardingStrategy.NO_SHARD)
        return found or cast(dist.ProcessGroup, dist.group.WORLD)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        """The group over which this unit's shards are replicated; None without one.

        Composer and others read it with hybrid strategies.
        """
        return group_of_unit(self, replicas=True)

    @property
    def rank(self) -> int:
        """In ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Of ``process_group``."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """Where its parameters are gathered, also with ``cpu_offload``."""
        meshes = (each.device_mesh for each in self.parameters() if isinstance(each, DTensor))
        kind = next((mesh.device_type for mesh in meshes), "cpu")
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED:
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError:
            if name not in _FLAT:
                raise
            raise AttributeError(f"{name}: fully_shard has no flat parameters; {REPLACEMENT}") from None

    @property
    def _has_params(self) -> bool:
        return bool(shards_of(self))

    @property
    def _flat_param(self) -> FlatView | None:
        return FlatView(self) if self._has_params else None

    _handle = _flat_param

    def __getitem__(self, key: int) -> Any:
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CallError("copy.deepcopy of an FSDP instance; copy the module before wrapping it, or load a state dict")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)

    def check_is_root(self) -> bool:
        """Whether no other instance contains this one."""
        return not self._fsdp_is_nested

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """``nn.Module.apply`` on full parameters. Called on all ranks; all-gathers them."""
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in ``nn.Module``. Within ``summon_full_params``, names have no wrapper prefixes, as under FSDP1."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._shown_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``named_parameters``."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._shown_name(name), buffer

    def _shown_name(self, name: str) -> str:
        is_summoned = self._fsdp_hooks is not None and self._fsdp_hooks.override is not None
        return name.replace(_PREFIX, "") if is_summoned else name

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the total norm of all gradients to ``max_norm``; return the norm before clipping as a scalar tensor.

        The result has the dtype of the gradients, as in FSDP1.

        Raises:
            CallError: this instance is not the root, or gradients accumulated under ``no_sync`` are not reduced yet.

        Called on all ranks; all-reduces one number.
        """
        self._require_root("clip_grad_norm_")
        refuse_accumulated(self.parameters(), "clip_grad_norm_")
        norm = clip_grad_norm_(self, max_norm, norm_type)[""]
        dtypes = {each.grad.dtype for each in self.parameters() if each.grad is not None}
        return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those accumulated under ``no_sync``. Does not communicate."""
        super().zero_grad(set_to_none)
        clear_accumulated(self.parameters())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients in all backwards of the block.

        The first backward after the block reduces them.

        Raises:
            CallError: this instance is not the root.
        """
        self._require_root("no_sync")
        note_accumulation(self)
        self.set_requires_gradient_sync(False)
        self._fsdp_in_no_sync = True
        try:
            yield
        finally:
            self._fsdp_in_no_sync = False
            self.set_requires_gradient_sync(True)

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: ``fully_shard`` reduces gradients itself."""
        raise UnsupportedError(
            "register_comm_hook: fully_shard reduces gradients itself; set reduce_dtype in mixed_precision for a "
            "reduction in low precision, and change reduced gradients in a hook of the optimizer's step"
        )

    @staticmethod
    def summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """``composer_fsdp2.summon_full_params``, with FSDP1's arguments."""
        return summon_full_params(module, *args, **kwargs)

    # The static methods for state dicts; see fsdp1/state_dicts.py.
    fsdp_modules = staticmethod(STATIC_METHODS["fsdp_modules"][0])
    set_state_dict_type = staticmethod(STATIC_METHODS["set_state_dict_type"][0])
    get_state_dict_type = staticmethod(STATIC_METHODS["get_state_dict_type"][0])
    state_dict_type = staticmethod(STATIC_METHODS["state_dict_type"][0])
    optim_state_dict = staticmethod(STATIC_METHODS["optim_state_dict"][0])
    optim_state_dict_to_load = staticmethod(STATIC_METHODS["optim_state_dict_to_load"][0])
    full_optim_state_dict = staticmethod(STATIC_METHODS["full_optim_state_dict"][0])
    sharded_optim_state_dict = staticmethod(STATIC_METHODS["sharded_optim_state_dict"][0])
    shard_full_optim_state_dict = staticmethod(STATIC_METHODS["shard_full_optim_state_dict"][0])
    scatter_full_optim_state_dict = staticmethod(STATIC_METHODS["scatter_full_optim_state_dict"][0])
    flatten_sharded_optim_state_dict = staticmethod(STATIC_METHODS["flatten_sharded_optim_state_dict"][0])
    rekey_optim_state_dict = staticmethod(rekey_optim_state_dict)

    def _require_root(self, method: str) -> None:
        if self._fsdp_is_nested:
            raise CallError(f"{method} of an FSDP instance inside another one (FSDP1 refused it too); call the root's")


# FSDP1's attributes for flat parameters, other than those in ``flat.py``.
_FLAT = ("_handles", "_all_handles", "_fully_sharded_module_to_handle", "params")

# FSDP1's methods look up these static methods by the class's name, which ``install_fsdp`` rebinds.
for _name, _value in vars(FSDP1Wrapper).items():
    if isinstance(_value, staticmethod) and _name.startswith("_"):
        setattr(FullyShardedDataParallel, _name, _value)


def _instances(module: nn.Module) -> list[FullyShardedDataParallel]:
    return [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]


def _ignored(module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> _Ignored:
    """Return the ignored modules and parameters of an instance, including those of nested instances, as under FSDP1."""
    found = [read_ignored(module, modules, states), *(each._fsdp_ignored for each in _instances(module))]
    return set().union(*(each[0] for each in found)), set().union(*(each[1] for each in found))


def _wrap_by_policy(
    made: list[FullyShardedDataParallel], module: nn.Module, policy: Any, arguments: dict[str, Any]
) -> None:
    """Wrap the modules below ``module`` that the policy selects, and append the new instances to ``made``.

    The new instances are not sharded yet. Does not communicate.
    """
    if _instances(module):
        raise PlanError("auto_wrap_policy: module contains an FSDP instance already; wrap all of them by hand")
    token, root = _made_by_policy.set(made), made[0]
    try:
        with warnings.catch_warnings():
            # A warning about flat parameters.
            warnings.filterwarnings("ignore", ".*both parameters with requires_grad=True and False")
            auto_wrap(module, policy, *root._fsdp_ignored, {**arguments, "use_orig_params": True}, type(root))
    finally:
        _made_by_policy.reset(token)


def _unwrap(module: nn.Module, made: Collection[nn.Module]) -> None:
    """Undo wrapping after an error: put the wrapped modules back instead of the instances in ``made``."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if child in made:
                setattr(parent, name, child._fsdp_wrapped_module)


def _earlier(made: list[FullyShardedDataParallel]) -> list[FullyShardedDataParallel]:
    return [each for each in _instances(made[0]) if each not in made]


def _plan(made: list[FullyShardedDataParallel]) -> ShardingPlan:
    root = made[0]
    return plan_instances(
        root,
        {each: each._fsdp_translation.config for each in made},
        sharded=set(_earlier(made)),
        ignored_modules=root._fsdp_ignored[0],
        ignored_parameters=root._fsdp_ignored[1],
    )


def _shard(made: list[FullyShardedDataParallel], plan: ShardingPlan, mesh: DeviceMesh | None) -> None:
    """Apply the plan to the instances in ``made``, then rebind optimizers.

    Called on all ranks, after they have compared their plans.
    """
    root = made[0]
    follow = optimizer_rebindings(root)
    names = [spec.name for unit in plan.units for spec in unit.parameters]
    replaced = [(name, parameter_at(root, name)) for name in names]
    patch_dcp(FullyShardedDataParallel)
    patch_lightning(FullyShardedDataParallel)
    write_assigned_data()
    for cls in {type(each) for each in made}:
        register_unit_class(cls)
    present = () if mesh is None else (mesh, parent_mesh(mesh))
    initializers = initializers_of(root, {each: each._fsdp_param_init_fn for each in made})
    for instance in _earlier(made):
        instance.reshard()  # unsharded after a forward without backward
    run = execute_plan(root, plan, initializers, existing_meshes=present)
    for name in names:
        parameter_at(root, name)._fsdp_flattened = True  # type: ignore[attr-defined]
    translation = root._fsdp_translation
    run.report, run.findings = translation.explain(), translation.findings
    for each in follow:
        each()
    mark_replaced(replaced)
    for instance in _earlier(made):
        reset_root(instance)
        if instance._fsdp_is_nested:
            continue
        config = instance._fsdp_translation.config
        instance._fsdp_is_nested = True
        hooks_of(instance).before_first_forward = None
        nest_unit(
            instance,
            reshard_after_forward=config.reshard_after_forward,
            cast_forward_inputs=config.mixed_precision.cast_forward_inputs,
        )
    for instance in made:
        instance._fsdp_hooks = hooks_of(instance)
        instance._fsdp_hooks.accumulates_in_backward_dtype = True
        instance.register_state_dict_post_hook(_remove_prefix)
        instance.register_load_state_dict_pre_hook(_add_prefix)
        instance.register_load_state_dict_post_hook(_clean_keys)
        set_state_dict_type(instance, FULL)
    # Only now: scripts that wrap by hand wrap the units before the root.
    hooks_of(root).before_first_forward = functools.partial(_confirm, root, plan, lists_units())


def _confirm(root: FullyShardedDataParallel, plan: ShardingPlan, with_units: bool) -> None:
    units = [name for name, each in root.named_modules() if isinstance(each, FullyShardedDataParallel)]
    summary = summary_line(len(units), plan.mesh.size, plan.strategy)
    confirm(summary, (f"  {without_wrappers(name) or 'root'}" for name in units), with_units=with_units)


def _remove_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook after ``state_dict``: use the names of the unwrapped module."""
    inner = prefix + _PREFIX
    for key in [key for key in state_dict if key.startswith(inner)]:
        state_dict[prefix + key.removeprefix(inner)] = state_dict.pop(key)


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    inner = prefix + _PREFIX
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


def _clean_keys(module: nn.Module, incompatible_keys: Iterable[list[str]]) -> None:
    """Remove wrapper prefixes from the keys that ``load_state_dict`` returns or names in its error."""
    for keys in incompatible_keys:
        keys[:] = map(without_wrappers, keys)
