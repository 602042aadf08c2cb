"""Translate the arguments of FSDP1's constructor, with the table that also translates an ``fsdp_config``."""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.errors import ConfigError, PlanError, UnsupportedError
from composer_fsdp2.fsdp1.class_arguments import BY_NODE
from composer_fsdp2.fsdp1.translate import Translation, translate

log = logging.getLogger(__name__)


def translate_arguments(
    module: nn.Module,
    *,
    process_group: Any,
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: Any,
    backward_prefetch: BackwardPrefetch | None,
    mixed_precision: Any,
    device_id: int | str | torch.device | None,
    sync_module_states: bool,
    forward_prefetch: bool,
    limit_all_gathers: bool,
    use_orig_params: bool,
    device_mesh: DeviceMesh | None,
) -> Translation:
    """Return the FSDP2 configuration for the arguments of one ``FullyShardedDataParallel`` call.

    Raises:
        ConfigError: contradictory arguments or wrong types, all in one message.
        UnsupportedError: an argument that ``fully_shard`` does not support; names the alternative.

    Called by the constructor on all ranks; does not communicate or modify the module.
    """
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    given = {
        "sharding_strategy": strategy,
        "cpu_offload": cpu_offload,
        "backward_prefetch": backward_prefetch or "NONE",
        "mixed_precision": mixed_precision or "FULL",
        "sync_module_states": sync_module_states,
        "forward_prefetch": forward_prefetch,
        "limit_all_gathers": limit_all_gathers,
        "use_orig_params": use_orig_params,
        **_ranks(strategy, process_group, device_mesh),
    }
    device_type = _device_type(module, device_id, device_mesh)
    translation = translate(given, precision="fp32", device=device_type, world_size=dist.get_world_size())
    if blocking := translation.blocking:
        raise UnsupportedError("\n".join(map(str, blocking)), keys=tuple(each.key for each in blocking))
    return translation


def report(translation: Translation, *, use_orig_params: bool) -> None:
    """Log approximated arguments on rank 0, each once per process."""
    if dist.get_rank() != 0:
        return
    for finding in translation.findings:
        if finding.outcome is Outcome.APPROXIMATE:
            _warn_once(f"FullyShardedDataParallel: {finding}")
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        _warn_once(
            "FSDP_USE_FULL_PREC_IN_EVAL=1 is FSDP1's alone: in eval() modules compute in param_dtype too; evaluate an "
            "unwrapped model that loads the full state dict"
        )
    if not use_orig_params:
        _warn_once(
            "use_orig_params=False: parameters keep their names and shapes, as with use_orig_params=True. An optimizer "
            "gets the model's parameters, no flat ones; build its groups by name or by shape"
        )


# The user may intend the ranks of a subgroup to call the constructor alone.
_PATIENCE_S = 60.0


@contextlib.contextmanager
def warns_of_absent_ranks(process_group: Any) -> Iterator[None]:
    """In the block, warn if ranks outside of ``process_group`` do not call the constructor within a minute.

    The constructor waits for all ranks of the default group; FSDP1 waited only for those in ``process_group``.
    """
    if not isinstance(process_group, dist.ProcessGroup) or process_group.size() == dist.get_world_size():
        yield
        return
    text = (
        f"FullyShardedDataParallel: rank {dist.get_rank()} has waited {_PATIENCE_S:g} s for other ranks. All of them "
        "call the constructor, each with its own process_group; FSDP1 let one group call it alone"
    )
    timer = threading.Timer(_PATIENCE_S, log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _ranks(strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None) -> dict[str, Any]:
    is_hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if mesh is not None:
        if process_group is not None:
            raise ConfigError("process_group and device_mesh are both given; keep one", keys=("process_group",))
        if mesh.ndim != 1 + is_hybrid:
            wanted = "two axes, (replicate, shard)" if is_hybrid else "one axis"
            raise ConfigError(f"{strategy} takes a device_mesh with {wanted}; it is {mesh}", keys=("device_mesh",))
        return {"device_mesh": mesh}
    if is_hybrid:
        return {"process_group": BY_NODE if process_group is None else process_group}
    if isinstance(process_group, dist.ProcessGroup) and process_group.size() == dist.get_world_size():
        return {}
    return {} if process_group is None else {"process_group": process_group}


def _device_type(module: nn.Module, device_id: int | str | torch.device | None, mesh: DeviceMesh | None) -> str:
    """Return the device type to train on: that of ``device_id``, else of the parameters, else the accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        device_id = torch.device(accelerator.type if accelerator is not None else "cpu", device_id)
    if device_id is not None:
        device_id = torch.device(device_id)
        if device_id.type != "cpu" and device_id.index not in (None, torch.accelerator.current_device_index()):
            raise ConfigError(
                f"device_id is {device_id}, and the current device {torch.accelerator.current_device_index()}; call "
                f"torch.accelerator.set_device_index({device_id.index}) first",
                keys=("device_id",),
            )
        return device_id.type
    if mesh is not None:
        return mesh.device_type
    moved = (each.device.type for each in module.parameters() if each.device.type not in ("cpu", "meta"))
    return next(moved, "cpu" if accelerator is None else accelerator.type)


def ignored_states(
    module: nn.Module, ignored_modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the ignored modules with all submodules, and the ignored parameters with those of ignored modules.

    Args:
        states: FSDP1's ``ignored_states``: modules, or parameters.
    Raises:
        ConfigError: both arguments are set, or one contains an FSDP instance or an object of the wrong type.
        PlanError: the wrapped module itself is ignored.
    """
    given, others = list(ignored_modules or ()), list(states or ())
    if given and others:
        raise ConfigError("ignored_modules and ignored_states are both given; keep one", keys=("ignored_states",))
    kinds = {"ignored_modules": (given, nn.Module), "ignored_states": (others, nn.Module | nn.Parameter)}
    for key, (values, kind) in kinds.items():
        if wrong := [each for each in values if isinstance(each, FSDPModule) or not isinstance(each, kind)]:
            allowed = "modules, or parameters" if values is others else "modules"
            raise ConfigError(f"{key} holds a {type(wrong[0]).__name__}; give {allowed}", keys=(key,))
    roots = [each for each in (*given, *others) if isinstance(each, nn.Module)]
    if module in roots:
        raise PlanError("the wrapped module itself is ignored; leave it unwrapped, or ignore parts of it")
    modules = {below for root in roots for below in root.modules()}
    parameters = {each for each in others if isinstance(each, nn.Parameter)}
    return modules, parameters.union(*(each.parameters(recurse=False) for each in modules))


def outermost(root: nn.Module, modules: Collection[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost of ``modules`` below ``root``."""
    found: list[nn.Module] = []
    waiting = list(root.children())
    while waiting:
        module = waiting.pop(0)
        if module in modules:
            found.append(module)
        else:
            waiting.extend(module.children())
    return tuple(dict.fromkeys(found))
