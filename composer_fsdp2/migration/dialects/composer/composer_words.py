"""The values of a run's fields in the words of an ``fsdp_config``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.config.sharding import MixedPrecision, ShardingConfig
from composer_fsdp2.fsdp1.keys import KEYS, KeyGroup
from composer_fsdp2.fsdp1.parallel_words import idle_towers_words, tiled_words
from composer_fsdp2.fsdp1.parsing import GivenPrecision, mixed_precision_of
from composer_fsdp2.fsdp1.policy_words import checkpointed_words, freeze_words, wrap_policy_words
from composer_fsdp2.migration.run import RunConfig


def mesh_words(mesh: MeshSpec) -> Iterator[tuple[str, Any]]:
    axes = [mesh.axes[number] for role in (AxisRole.SHARD, AxisRole.REPLICATE) for number in mesh.axes_of(role)]
    if mesh.is_grouped:
        groups = [list(axis.groups.ranks) or str(axis.groups) for axis in axes if axis.groups is not None]
        yield "process_group", groups if len(groups) > 1 else groups[0]
        return
    for axis in axes:
        if axis.size != -1 or axis.role is AxisRole.REPLICATE:
            yield axis.key, axis.size


def precision_words(run: RunConfig) -> str | dict[str, str]:
    """Composer's word where there is one, else the dtypes."""
    asked = run.config.mixed_precision
    dtypes = {name: getattr(asked, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    for word in ("FULL", "DEFAULT", "PURE"):
        if mixed_precision_of(GivenPrecision(word), run.precision) == MixedPrecision(**dtypes):
            return word
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


# What these keys' fields are in a file; other systems have words for them, too.
WORDS: Mapping[str, Callable[[Any], Any]] = {
    "wrap_policy": wrap_policy_words,
    "activation_checkpointing_policy": checkpointed_words,
    "freeze": freeze_words,
    "tiled_mlp": tiled_words,
    "idle_towers": idle_towers_words,
}


def _as_it_is(value: Any) -> Any:
    return value


def fields_of_our_own(config: ShardingConfig) -> Iterator[tuple[str, Any, bool]]:
    """The keys of composer_fsdp2 that set a field, its value, and whether a configuration without the key lacks it.

    Experts are units only where idle ones run as well.
    """
    if config.idle_experts is None:
        config = replace(config, wrap=replace(config.wrap, experts=()))
    for row in KEYS:
        if row.group == KeyGroup.OURS and row.sets:
            field = attrgetter(row.sets)(config)
            value = field.value if isinstance(field, Enum) else WORDS.get(row.name, _as_it_is)(field)
            yield row.name, value, value != row.default
