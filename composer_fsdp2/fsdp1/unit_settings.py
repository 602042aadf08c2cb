"""What one module's own settings, the dict that its wrap function gave, make of the model's configuration."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from composer_fsdp2.config import BackwardPrefetch, MeshSpec, Prefetch, ShardingConfig, ShardingStrategy
from composer_fsdp2.errors import ConfigError, UnknownKeyError, UnsupportedError
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME, Kind, nearest_key
from composer_fsdp2.fsdp1.values import (
    BACKWARD_POST_REASON,
    UNREAD_DTYPE_KEY,
    UNREAD_DTYPE_REASON,
    check_kind,
    check_same_reshard,
    mesh_of,
    mesh_of_process_group,
    parse_backward_prefetch,
    parse_mixed_precision,
    parse_mp_policy,
    parse_offload,
    parse_strategy,
)

__all__ = ["UNIT_KEYS", "decides_dtypes", "decides_mesh", "translate_unit_settings", "unit_notes"]

# What a fsdp_wrap_fn dict may hold, and the part of a ShardingConfig that each key decides; "" for nothing that FSDP2
# needs (unit_notes says why), "unsupported" for what cannot differ between modules yet.
UNIT_KEYS: dict[str, str] = {
    "sharding_strategy": "mesh, reshard_after_forward",
    "reshard_after_forward": "reshard_after_forward",
    "mixed_precision": "mixed_precision, buffer_dtype",
    "mp_policy": "mixed_precision",
    "backward_prefetch": "prefetch",
    "forward_prefetch": "prefetch",
    "cpu_offload": "cpu_offload",
    "offload_policy": "cpu_offload",
    "limit_all_gathers": "",
    "use_orig_params": "",
    "process_group": "mesh",
    "device_mesh": "mesh",
    "mesh": "mesh",
    "sync_module_states": "unsupported",
    "param_init_fn": "unsupported",
    "device_id": "unsupported",
    "ignored_modules": "unsupported",
}
_UNIT_SYNONYMS = (
    ("mixed_precision", "mp_policy"),
    ("cpu_offload", "offload_policy"),
    ("device_mesh", "mesh"),
    ("process_group", "mesh"),
    ("process_group", "device_mesh"),
)


def translate_unit_settings(said: Mapping[str, Any], path: str, config: ShardingConfig) -> ShardingConfig:
    """What one module's own settings, in FSDP1's or FSDP2's words, make of the model's configuration for its unit.

    Args:
        said: The dict that the module's wrap function gave.
        path: The module's, for the errors.
        config: The model's; what ``said`` does not name stays.
    Raises:
        ConfigError: an unknown key, a wrong value or two that contradict each other; names ``path`` and the key.
        UnsupportedError: a key that cannot differ between modules yet.
    """
    for key in said:
        if key not in UNIT_KEYS:
            near = nearest_key(str(key), tuple(UNIT_KEYS))
            hint = f"; did you mean {near}?" if near else f"; known: {', '.join(UNIT_KEYS)}"
            raise UnknownKeyError(f"unknown key {key!r} in the wrap settings of module {path!r}{hint}")
        if UNIT_KEYS[key] == "unsupported":
            raise UnsupportedError(
                f"{key} for one module ({path!r}) is not supported yet; set it for the whole model, or leave it out"
            )
    try:
        return _unit_config(said, config)
    except ConfigError as error:
        raise type(error)(f"wrap settings of module {path!r}: {error}") from error


def decides_dtypes(said: Mapping[str, Any]) -> bool:
    """Whether one module's settings give its unit a mixed precision of its own."""
    return any("mixed_precision" in UNIT_KEYS.get(key, "") for key in said)


def decides_mesh(said: Mapping[str, Any]) -> bool:
    """Whether one module's settings give its unit other ranks than the model's."""
    strategy = said.get("sharding_strategy")
    is_whole = str(getattr(strategy, "name", strategy)).upper() == ShardingStrategy.NO_SHARD.value
    return is_whole or any(said.get(key) is not None for key, part in UNIT_KEYS.items() if part == "mesh")


def unit_notes(said: Mapping[str, Any]) -> Iterator[str]:
    """What a report must say of one module's settings: the keys that FSDP2 does not need, or follows nearly."""
    for key in said:
        if not UNIT_KEYS[key]:
            yield f"{key} is not needed: {KEYS_BY_NAME[key].reason}"
    if isinstance(said.get("mixed_precision"), Mapping) and UNREAD_DTYPE_KEY in said["mixed_precision"]:
        yield f"mixed_precision.{UNREAD_DTYPE_KEY} is not needed: {UNREAD_DTYPE_REASON}"
    if (
        "backward_prefetch" in said
        and parse_backward_prefetch(said["backward_prefetch"]) is BackwardPrefetch.BACKWARD_POST
    ):
        yield f"backward_prefetch BACKWARD_POST is BACKWARD_PRE here: {BACKWARD_POST_REASON}"


def _unit_config(said: Mapping[str, Any], config: ShardingConfig) -> ShardingConfig:
    for first, second in _UNIT_SYNONYMS:
        if first in said and second in said:
            raise ConfigError(f"{first} and {second} are both given; keep one")
    changes: dict[str, Any] = {"mesh": _unit_mesh(said, config.mesh)}
    if "sharding_strategy" in said:
        changes["reshard_after_forward"] = parse_strategy(said["sharding_strategy"]).reshards_after_forward
    if "reshard_after_forward" in said:
        check_kind("reshard_after_forward", said["reshard_after_forward"], Kind.BOOL_OR_INT)
        check_same_reshard(changes.get("reshard_after_forward"), said["reshard_after_forward"])
        changes["reshard_after_forward"] = said["reshard_after_forward"]
    if "mixed_precision" in said:
        precision = parse_mixed_precision(said["mixed_precision"], config.precision)
        changes |= {
            "mixed_precision": precision.policy,
            "buffer_dtype": precision.buffer_dtype,
            "keep_low_precision_grads": precision.keep_low_precision_grads,
        }
    if "mp_policy" in said:  # which knows no buffers, so theirs stays the model's
        changes["mixed_precision"] = parse_mp_policy(said["mp_policy"])
    for key in ("cpu_offload", "offload_policy"):
        if key in said:
            changes["cpu_offload"] = parse_offload(key, said[key])
    return dataclasses.replace(config, prefetch=_unit_prefetch(said, config.prefetch), **changes)


def _unit_mesh(said: Mapping[str, Any], of_model: MeshSpec) -> MeshSpec:
    """The unit's own ranks: a process_group or a mesh, else the model's; each rank for itself under NO_SHARD."""
    spec = of_model
    strategy = parse_strategy(said["sharding_strategy"]) if "sharding_strategy" in said else None
    for key in ("device_mesh", "mesh"):
        if said.get(key) is not None:
            spec = mesh_of(said[key], of_model.device_type, key)
    if said.get("process_group") is not None:
        spec = mesh_of_process_group(said["process_group"], strategy, of_model.device_type)
    if of_model.is_resolved and not of_model.is_grouped:
        spec = spec.resolve(of_model.size)
    if strategy is ShardingStrategy.NO_SHARD:
        return spec.without_shards()
    if strategy is not None and strategy.is_hybrid and spec.replicate is None:
        raise ConfigError(
            f"sharding_strategy {strategy.value} needs replicas, and the mesh has none: set "
            "data_parallel_replicate_degree, or a pair of process groups for this module"
        )
    return spec


def _unit_prefetch(said: Mapping[str, Any], of_model: Prefetch) -> Prefetch:
    """The unit's own switches; how many units ahead stays the model's, whose limits had no form for one module."""
    forward, backward = of_model.forward, of_model.backward
    if "forward_prefetch" in said:
        check_kind("forward_prefetch", said["forward_prefetch"], Kind.BOOL)
        forward = (forward or 1) if said["forward_prefetch"] else None
    if "backward_prefetch" in said:
        is_off = parse_backward_prefetch(said["backward_prefetch"]) is BackwardPrefetch.NONE
        backward = 0 if is_off else (backward or None)
    return Prefetch(forward=forward, backward=backward)
