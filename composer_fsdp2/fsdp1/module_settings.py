"""Parse the dict that ``fsdp_wrap_fn`` returns for one module: settings that override the model's for its unit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from composer_fsdp2.config.choices import UnitOverrides
from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import MixedPrecision, Prefetch, ShardingConfig, check_reshard_degree
from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.errors import ConfigError, UnknownKeyError, UnsupportedError
from composer_fsdp2.fsdp1.keys import BACKWARD_POST_REASON, KEYS_OF_MODULES, UNREAD_DTYPE_REASON
from composer_fsdp2.fsdp1.parsing import (
    UNREAD_DTYPE_KEY,
    BackwardPrefetch,
    NamedPrecision,
    ShardingStrategy,
    check_same_reshard,
    mesh_of,
    mesh_of_groups,
    mixed_precision_of,
    without_shards,
)

# In Composer, a model's process_group takes precedence over its mesh; for a single module, neither does.
_MESH_KEYS = ("process_group", "device_mesh", "mesh")


def read_overrides(
    given: Mapping[str, Any], path: str, *, config: ShardingConfig, precision: str | None = None
) -> UnitOverrides:
    """Parse the settings of one module, with keys of FSDP1 or FSDP2.

    Args:
        given: The dict that ``fsdp_wrap_fn`` returned for the module.
        path: The module's path, for error messages.
    Raises:
        ConfigError: an unknown key, an invalid value or a contradiction; names ``path`` and the key.
        UnsupportedError: a key that cannot differ between modules.
    """
    for key in given:
        if key not in KEYS_OF_MODULES:
            way_out = did_you_mean(key, KEYS_OF_MODULES, f"known: {', '.join(KEYS_OF_MODULES)}")
            raise UnknownKeyError(f"unknown key {key!r} in the wrap settings of module {path!r}{way_out}", keys=(key,))
        if KEYS_OF_MODULES[key].of_modules is Outcome.UNSUPPORTED:
            raise UnsupportedError(
                f"{key} for one module ({path!r}) is not supported yet; set it for the whole model, or leave it out",
                keys=(key,),
            )
    try:
        for first, second in _synonyms(given):
            raise ConfigError(f"{first} and {second} are both given; keep one", keys=(first, second))
        values = {key: KEYS_OF_MODULES[key].parse(value) for key, value in _values_in_effect(given)}
        mesh, reshard = _unit_mesh(given, values, config.mesh), _unit_reshard(values)
        check_reshard_degree(config.reshard_after_forward if reshard is None else reshard, mesh or config.mesh)
        return UnitOverrides(
            mesh=mesh,
            reshard_after_forward=reshard,
            mixed_precision=_unit_precision(values, config.mixed_precision, precision),
            cpu_offload=values.get("cpu_offload", values.get("offload_policy")),
            prefetch=_unit_prefetch(values, config.prefetch),
            given=given,
            notes=tuple(_notes(given, values)),
        )
    except ConfigError as error:
        raise type(error)(f"wrap settings of module {path!r}: {error}", keys=error.keys) from error


def _synonyms(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of keys with the same meaning."""
    yield from ((other, key) for key in given for other in KEYS_OF_MODULES[key].instead_of if other in given)
    yield from combinations([key for key in _MESH_KEYS if key in given], 2)


def _values_in_effect(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries that have an effect.

    ``backward_prefetch`` None is parsed as NONE (no prefetch), as in torch's FSDP1.
    """
    for key, value in given.items():
        if KEYS_OF_MODULES[key].of_modules is not Outcome.UNNEEDED:
            yield key, BackwardPrefetch.NONE if key == "backward_prefetch" and value is None else value


def _unit_mesh(given: Mapping[str, Any], values: Mapping[str, Any], of_model: MeshSpec) -> MeshSpec | None:
    """Return the mesh that the settings specify, with a shard axis of size 1 under NO_SHARD; None if they specify
    none."""
    strategy: ShardingStrategy | None = values.get("sharding_strategy")
    spec = None
    for key in ("device_mesh", "mesh"):
        if given.get(key) is not None:
            spec = mesh_of(given[key], of_model.device_type, key)
    if values.get("process_group") is not None:
        spec = mesh_of_groups(values["process_group"], strategy, of_model.device_type)
    if spec is not None and of_model.is_resolved and not of_model.is_grouped:
        spec = spec.resolve(of_model.size)
    if strategy is ShardingStrategy.NO_SHARD:
        return without_shards(spec or of_model)
    if strategy is not None and strategy.is_hybrid and not (spec or of_model).has_replicas:
        raise ConfigError(
            f"sharding_strategy {strategy.value} needs replicas, and the mesh has none: set "
            "data_parallel_replicate_degree, or a pair of process groups for this module",
            keys=("sharding_strategy",),
        )
    return spec


def _unit_reshard(values: Mapping[str, Any]) -> bool | int | None:
    strategy: ShardingStrategy | None = values.get("sharding_strategy")
    of_strategy = None if strategy is None else strategy.reshards_after_forward
    if "reshard_after_forward" not in values:
        return of_strategy
    value: bool | int = values["reshard_after_forward"]
    check_same_reshard(of_strategy, value)
    return value


def _unit_precision(
    values: Mapping[str, Any], of_model: MixedPrecision, precision: str | None
) -> MixedPrecision | None:
    """Return the unit's mixed precision; None for the model's.

    Options that ``mp_policy`` does not have, and the cast of root inputs, are those of the model.
    """
    casts = of_model.cast_root_inputs
    if (policy := values.get("mp_policy")) is not None:
        return replace(policy, cast_root_inputs=casts, buffer_dtype=of_model.buffer_dtype, gradients=of_model.gradients)
    given: NamedPrecision | MixedPrecision | None = values.get("mixed_precision")
    if given is None:
        return None
    if precision is None and isinstance(given, NamedPrecision) and given.name != "FULL":
        text = f"mixed_precision {given.name} stands for dtypes that depend on the precision; set precision=..."
        raise ConfigError(text, keys=("mixed_precision",))
    return replace(mixed_precision_of(given, precision or "fp32"), cast_root_inputs=casts)


def _unit_prefetch(values: Mapping[str, Any], of_model: Prefetch) -> Prefetch | None:
    """Return the unit's prefetching; None for the model's.

    A module's settings only enable or disable it. The number of units is the model's, because FSDP1 has no such setting
    per module.
    """
    forward, backward = of_model.forward, of_model.backward
    if "forward_prefetch" in values:
        forward = (forward or 1) if values["forward_prefetch"] else None
    if "backward_prefetch" in values:
        backward = 0 if values["backward_prefetch"] is BackwardPrefetch.NONE else (backward or None)
    own = Prefetch(forward=forward, backward=backward)
    return None if own == of_model else own


def _notes(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the report on keys that FSDP2 does not need, or approximates."""
    rows = (KEYS_OF_MODULES[key] for key in given)
    yield from (f"{row.name} is not needed: {row.reason}" for row in rows if row.of_modules is Outcome.UNNEEDED)
    if isinstance(given.get("mixed_precision"), Mapping) and UNREAD_DTYPE_KEY in given["mixed_precision"]:
        yield f"mixed_precision.{UNREAD_DTYPE_KEY} is not needed: {UNREAD_DTYPE_REASON}"
    if values.get("backward_prefetch") is BackwardPrefetch.BACKWARD_POST:
        yield f"backward_prefetch BACKWARD_POST is BACKWARD_PRE here: {BACKWARD_POST_REASON}"
