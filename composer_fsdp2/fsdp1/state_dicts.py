"""FSDP1's state dict methods for models sharded by ``fully_shard``: full or sharded, for model and optimizer.

The functions have the names, arguments and results of the static methods of ``FullyShardedDataParallel``. After
``install()``, FSDP1's class calls them for models sharded by ``fully_shard``.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import local_tensor, with_local_tensor
from composer_fsdp2._torch.private_names import ShardedTensor, gather_sharded_tensor, without_wrappers
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CallError, UnsupportedError
from composer_fsdp2.sharding.agree import agree, device_of_group
from composer_fsdp2.sharding.full_values import gather_full_tensor, local_shard
from composer_fsdp2.sharding.placements import shard_axes
from composer_fsdp2.sharding.sharded import sharded_roots

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class _ActiveType:
    """The state dict type that a script set for one unit, and the handle of the hook that applies it.

    Args:
        keeps: Whether this rank returns full values (False on the other ranks with ``rank0_only``).
    """

    def __init__(self, unit: nn.Module, settings: StateDictSettings, keeps: bool) -> None:
        self.settings, self.keeps = settings, keeps
        self.hook = unit.register_state_dict_post_hook(_convert_state_dict)


# By unit. Units without an entry return DTensors, as torch's own functions expect.
_ACTIVE_TYPES: WeakKeyDictionary[nn.Module, _ActiveType] = WeakKeyDictionary()


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """The units of ``module``, or its roots."""
    if root_only:
        return [root for _, root in sharded_roots(module)]
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Make ``state_dict()`` of the units below ``module`` return full values or shards; return the previous settings.

    Raises:
        UnsupportedError: ``LOCAL_STATE_DICT``.
        CallError: a config is not of the class that belongs to ``state_dict_type``.

    Does not communicate; ``state_dict()`` must then be called on all ranks.
    """
    if state_dict_type not in _CONFIGS:
        raise UnsupportedError(
            f"{state_dict_type}: flat parameters, which fully_shard does not have; write "
            "StateDictType.SHARDED_STATE_DICT with ShardedStateDictConfig, where each rank saves its own shards too"
        )
    of_model, of_optimizer = _CONFIGS[state_dict_type]
    for config, expected in ((state_dict_config, of_model), (optim_state_dict_config, of_optimizer)):
        if config is not None and type(config) is not expected:
            raise CallError(f"{state_dict_type} takes a {expected.__name__}, and got a {type(config).__name__}")
    settings = StateDictSettings(
        state_dict_type, state_dict_config or of_model(), optim_state_dict_config or of_optimizer()
    )
    before = get_state_dict_type(module)
    keeps = _keeps_full_values(module, settings.state_dict_config)
    for unit in fsdp_modules(module):
        _set_type(unit, settings, keeps)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the state dict settings of the units below ``module``; full values if none were set, as in FSDP1.

    Raises:
        CallError: units have different settings.
    """
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    found = [_ACTIVE_TYPES[unit].settings if unit in _ACTIVE_TYPES else default for unit in fsdp_modules(module)]
    if other := next((each for each in found if each != found[0]), None):
        raise CallError(f"units below one module have different state dict types: {found[0]} and {other}")
    return found[0] if found else default


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` within a with block, restored also on an exception."""
    before = {unit: _ACTIVE_TYPES.get(unit) for unit in fsdp_modules(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, earlier in before.items():
            _set_type(unit, None if earlier is None else earlier.settings, earlier is None or earlier.keeps)


def returns_full_values(unit: nn.Module) -> bool:
    """Whether ``state_dict()`` of this unit returns full values on every rank, because a script set that type."""
    found = _ACTIVE_TYPES.get(unit)
    return found is not None and found.settings.state_dict_config == FullStateDictConfig(
        offload_to_cpu=found.settings.state_dict_config.offload_to_cpu
    )


def _set_type(unit: nn.Module, settings: StateDictSettings | None, keeps: bool) -> None:
    if earlier := _ACTIVE_TYPES.pop(unit, None):
        earlier.hook.remove()
    if settings is not None:
        _ACTIVE_TYPES[unit] = _ActiveType(unit, settings, keeps)


# Callers that need the DTensors of a state dict, whatever type a script has set.
_NEED_SHARDS = ("torch.distributed.checkpoint.state_dict", "composer_fsdp2.checkpoint.target")


def _called_for_shards() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _NEED_SHARDS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _convert_state_dict(unit: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Convert the state dict of a unit to the active type. A ``state_dict`` post-hook.

    Called on all ranks; with FULL, all-gathers one tensor at a time. Ranks that do not return full values still return
    entries of modules outside of all units, as under FSDP1.
    """
    found = _ACTIVE_TYPES.get(unit)  # None for a copy of a unit, which copies hooks only
    if found is None or _called_for_shards():
        return
    config, is_full, keeps = found.settings.state_dict_config, found.settings.state_dict_type is FULL, found.keeps
    parameters = {without_wrappers(name): each for name, each in unit.named_parameters(remove_duplicate=False)}
    tied: dict[nn.Parameter, torch.Tensor] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict[key]
        if not isinstance(value, torch.Tensor):
            continue
        parameter = parameters.get(without_wrappers(key.removeprefix(prefix)))
        if parameter in tied:
            state_dict[key] = tied[parameter]
        elif is_full and isinstance(value, DTensor):
            state_dict[key] = _full_copy(value, to_cpu=config.offload_to_cpu, keeps=keeps)
            if parameter is not None:
                tied[parameter] = state_dict[key]
        elif config.offload_to_cpu:
            state_dict[key] = _on_cpu(value)
        if not keeps:
            del state_dict[key]


def _keeps_full_values(model: nn.Module, config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Whether this rank returns full values.

    With ``rank0_only``, only the first rank of each replica does, as under FSDP1.
    """
    if not getattr(config, "rank0_only", False):
        return True
    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
    axes = {(each.device_mesh, axis) for each in sharded for axis in shard_axes(each)}
    return not any(mesh.get_local_rank(axis) for mesh, axis in axes) if axes else dist.get_rank() == 0


def _full_copy(value: DTensor, *, to_cpu: bool, keeps: bool = True) -> torch.Tensor:
    """All-gather the full tensor, into memory that is not shared with the shard. Called on all ranks of the mesh."""
    full = gather_full_tensor(value)
    if not keeps:
        return full
    moved = full.to("cpu") if to_cpu else full
    is_own = moved.untyped_storage().data_ptr() != local_tensor(value).untyped_storage().data_ptr()
    return moved if is_own else moved.clone()


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Move to the CPU; a DTensor preserves its mesh and placements."""
    return with_local_tensor(value, local_tensor(value).detach().to("cpu"))


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer state


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Return the optimizer's state dict with parameter names as keys, full or sharded as ``model``'s state dict type.

    Args:
        optim_state_dict: A state dict to convert; None: ``optim.state_dict()``.
        group: Ignored, because DTensors have a mesh.
    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``; with ``rank0_only`` an empty dict
            on the other ranks.

    Called on all ranks; all-gathers one tensor at a time for full values.
    """
    settings = get_state_dict_type(model)
    return _named_state(model, optim, optim_state_dict, settings.state_dict_type, settings.optim_state_dict_config)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Return ``optim_state_dict`` with full values, regardless of the type set by ``set_state_dict_type``.

    Called on all ranks; all-gathers one tensor at a time.
    """
    return _named_state(model, optim, None, FULL, FullOptimStateDictConfig(rank0_only=rank0_only))


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """``optim_state_dict`` with shards, regardless of the active type."""
    return _named_state(model, optim, None, SHARDED, ShardedOptimStateDictConfig())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Convert a state dict with parameter names to the form of ``optim.load_state_dict``: positions, and this rank's
    shards.

    Args:
        optim_state_dict: Values may be full tensors, DTensors of this mesh, or ShardedTensors from
            ``load_sharded_optimizer_state_dict``.
        load_directly: Also load the result into ``optim``.
    Raises:
        CallError: the state dict has parameters that are not in ``optim``; names them.

    Called on all ranks. With ``rank0_only`` set, rank 0 broadcasts its state dict. ShardedTensors are all-gathered.
    Otherwise does not communicate.
    """
    if is_named_optimizer:
        raise UnsupportedError("is_named_optimizer=True: torchrec's optimizers do not know DTensors; pass False")
    rank0_only = getattr(get_state_dict_type(model).optim_state_dict_config, "rank0_only", False)
    found = _state_by_position(model, _parameters_of(optim), optim_state_dict, rank0_only=rank0_only)
    if load_directly:
        optim.load_state_dict(found)
    return found


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """``optim_state_dict_to_load`` for full values that each rank has.

    Without ``optim``, positions are those of all parameters.
    """
    return _state_by_position(model, _parameters_of(optim, model, optim_input), full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """``shard_full_optim_state_dict`` for full values that only rank 0 has.

    Called on all ranks; broadcasts one tensor at a time from rank 0.
    """
    parameters = _parameters_of(optim, model, optim_input)
    return _state_by_position(model, parameters, full_optim_state_dict, rank0_only=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """``optim_state_dict_to_load`` for shards."""
    return _state_by_position(model, _parameters_of(optim), sharded_optim_state_dict)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: Enum,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert the keys of an optimizer state dict from parameter names to positions, or vice versa.

    Args:
        optim_state_key_type: The keys of the result, as torch's ``OptimStateKeyType``: ``PARAM_NAME`` or ``PARAM_ID``
            (positions).
        model: The model, sharded or not, whose parameter names are used.
        optim: The optimizer whose parameter order defines the positions; None: the order of ``model.parameters()``.

    Does not communicate.
    """
    names = {each: without_wrappers(name) for name, each in model.named_parameters()}
    by_position = [names[each] for each in _parameters_of(optim, model, optim_input)]
    new: dict[Any, Any] = dict(enumerate(by_position))
    if optim_state_key_type.name == "PARAM_ID":
        new = {name: place for place, name in new.items()}
    return {
        "state": {new.get(key, key): values for key, values in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(new.get(key, key) for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }


def _parameters_of(
    optim: torch.optim.Optimizer | None, model: nn.Module | None = None, optim_input: Any = None
) -> list[nn.Parameter]:
    """The parameters in the order of ``optim.state_dict()``."""
    if optim is not None:
        return [parameter for group in optim.param_groups for parameter in group["params"]]
    own = list(() if model is None else model.parameters())
    if optim_input is None:
        return own
    given = [each for item in optim_input for each in (item["params"] if isinstance(item, dict) else [item])]
    if not set(own).issuperset(given):
        raise UnsupportedError("optim_input lists parameters from before sharding; pass optim=optimizer instead")
    return given


def _named_state(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any] | None,
    kind: StateDictType,
    config: OptimStateDictConfig,
) -> dict[str, Any]:
    given = optim.state_dict() if given is None else given
    parameters = _parameters_of(optim)
    by_parameter = {each: without_wrappers(name) for name, each in model.named_parameters()}
    if num_foreign := sum(each not in by_parameter for each in parameters):
        raise CallError(f"{num_foreign} parameters of the {type(optim).__name__} are not the model's; pass its model")
    names = [by_parameter[each] for each in parameters]
    if any(isinstance(place, str) for place in given["state"]):
        raise UnsupportedError(f"optimizer state by name, of a {type(optim).__name__}: pass a torch.optim.Optimizer's")
    # The same on ranks whose groups differ
    order = {parameter: number for number, parameter in enumerate(by_parameter)}
    places = sorted(range(len(names)), key=lambda place: order[parameters[place]])
    state = {place: given["state"][place] for place in places if place in given["state"]}
    if kind is FULL:
        # If a rank had no state for a parameter, the others would hang in its all-gather.
        agree(
            lambda: [(names[place], key) for place, of in state.items() for key in of if isinstance(of[key], DTensor)],
            lambda gathered: f"optimizer state of {gathered}",
            CallError,
        )
    keeps = _keeps_full_values(model, config)
    named: dict[str, dict[str, Any]] = {}
    for place, values in state.items():
        of_parameter = named[names[place]] = {}
        for key, value in values.items():
            _refuse_unknown_shard(names[place], key, value, parameters[place])
            if kind is FULL and isinstance(value, DTensor):
                value = _full_copy(value, to_cpu=config.offload_to_cpu, keeps=keeps)
            elif isinstance(value, torch.Tensor) and config.offload_to_cpu:
                value = _on_cpu(value)
            if keeps:
                of_parameter[key] = value
    if not keeps:
        return {}
    if "param_groups" not in given:
        return {"state": named}
    groups = [
        {
            **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
            "params": [names[i] for i in group["params"]],
        }
        for group in given["param_groups"]
    ]
    return {"state": named, "param_groups": groups}


def _refuse_unknown_shard(name: str, key: str, value: Any, parameter: nn.Parameter) -> None:
    """Raise UnsupportedError for a plain tensor with the shape of the shard: its offset in the full tensor is
    unknown."""
    if (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.dim()
        and shard_axes(parameter)
        and value.shape == local_tensor(parameter).shape
    ):
        raise UnsupportedError(
            f"{key} of {name} is a plain tensor of this rank's shard; let the optimizer make its state with "
            "torch.zeros_like(parameter), which is a DTensor"
        )


def _state_by_position(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    given: Mapping[str, Any] | None,
    *,
    rank0_only: bool = False,
) -> dict[str, Any]:
    by_name = {without_wrappers(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    places = {parameter: place for place, parameter in enumerate(parameters)}
    groups, entries = _broadcast_from_rank_0(given) if rank0_only else _entries(given or {})
    of_groups = [without_wrappers(name) for group in groups for name in group["params"]]
    if unknown := [name for name in of_groups if by_name.get(name) not in places]:
        raise CallError(f"optimizer state of parameters that this optimizer does not have: {and_more(unknown, 5)}")
    state: dict[int, dict[str, Any]] = {}
    for name, key, value in entries:
        parameter = by_name.get(without_wrappers(name))
        if parameter in places:
            state.setdefault(places[parameter], {})[key] = _shard_like(parameter, value)
    by_place = [
        {**group, "params": sorted(places[by_name[without_wrappers(name)]] for name in group["params"])}
        for group in groups
    ]
    return {"state": state, "param_groups": by_place} if by_place else {"state": state}


def _shard_like(parameter: nn.Parameter, value: Any) -> Any:
    """Return this rank's shard of ``value``, copied, because optimizers update loaded tensors in place.

    A ShardedTensor is all-gathered on all ranks; other values are not communicated.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedTensor):  # FSDP1's shards, in any layout
        value = gather_sharded_tensor(value, value._process_group)
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
        return with_local_tensor(parameter, local_shard(parameter, value.detach()).clone())
    return value.detach().clone()


# A named state dict's groups, and its state as (name, key, value).
_Entries = tuple[Sequence[Mapping[str, Any]], Iterator[tuple[str, str, Any]]]


def _entries(given: Mapping[str, Any]) -> _Entries:
    state = given.get("state", {})
    return given.get("param_groups", ()), (
        (name, key, value) for name, values in state.items() for key, value in values.items()
    )


def _broadcast_from_rank_0(given: Mapping[str, Any] | None) -> _Entries:
    """Return rank 0's state on all ranks. Called on all ranks.

    Broadcasts the names and plain values at once, and each tensor when the caller iterates to it.
    """
    is_first, device = dist.get_rank() == 0, device_of_group()
    groups, entries = _entries(given if is_first and given else {})
    own = list(entries)
    sent: list[Any] = [groups, [(name, key, _metadata_of(value)) for name, key, value in own]]
    dist.broadcast_object_list(sent, src=0)

    def values() -> Iterator[tuple[str, str, Any]]:
        for place, (name, key, value) in enumerate(sent[1]):
            if isinstance(value, _Tensor):
                full = (
                    own[place][2].to(device) if is_first else torch.empty(value.shape, dtype=value.dtype, device=device)
                )
                dist.broadcast(full, src=0)
                yield name, key, full
            else:
                yield name, key, value

    return sent[0], values()


class _Tensor(NamedTuple):
    """The metadata of a tensor that is broadcast separately."""

    shape: torch.Size
    dtype: torch.dtype


def _metadata_of(value: Any) -> Any:
    return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) and value.dim() else value


_OPTIONS = "StateDictOptions(full_state_dict=True, cpu_offload=True))` of torch.distributed.checkpoint.state_dict"
_MODEL = f"write `get_model_state_dict(model, options={_OPTIONS}"
_SAVES = f"write `get_optimizer_state_dict(model, optim, options={_OPTIONS}"
_LOADS = f"write `set_optimizer_state_dict(model, optim, state, options={_OPTIONS}"

# FSDP1's static methods, called on the class or on a unit, and the replacement to show in the log.
STATIC_METHODS: dict[str, tuple[Callable[..., Any], str]] = {
    "fsdp_modules": (fsdp_modules, "write `[m for m in model.modules() if isinstance(m, FSDPModule)]`"),
    "set_state_dict_type": (set_state_dict_type, _MODEL),
    "get_state_dict_type": (get_state_dict_type, _MODEL),
    "state_dict_type": (state_dict_type, _MODEL),
    "optim_state_dict": (optim_state_dict, _SAVES),
    "full_optim_state_dict": (full_optim_state_dict, _SAVES),
    "sharded_optim_state_dict": (sharded_optim_state_dict, _SAVES),
    "optim_state_dict_to_load": (optim_state_dict_to_load, _LOADS),
    "shard_full_optim_state_dict": (shard_full_optim_state_dict, _LOADS),
    "scatter_full_optim_state_dict": (scatter_full_optim_state_dict, _LOADS),
    "flatten_sharded_optim_state_dict": (flatten_sharded_optim_state_dict, _LOADS),
}
