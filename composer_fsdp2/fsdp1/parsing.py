"""Parse values of FSDP1's and FSDP2's keys, as strings or torch objects: strategies, dtypes, meshes, policies.

Does not import torch. If torch is already imported, a value may be a torch object, which ``objects.py`` parses. Each
error message begins with the value; callers prepend the key.
"""

import enum
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.config.sharding import GradientSync, MixedPrecision
from composer_fsdp2.config.text import did_you_mean, short
from composer_fsdp2.errors import ConfigError, UnsupportedError


class ShardingStrategy(enum.Enum):
    """FSDP1's five sharding strategies, in Composer's spelling."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "_HYBRID_SHARD_ZERO2"

    @property
    def reshards_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """When FSDP1 all-gathers the next unit in backward."""

    NONE = "NONE"
    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"


# Composer's precisions (composer/core/precision.py) and the dtype of each; fp8 trains in bf16.
PRECISIONS: dict[str, str] = {
    "fp32": "float32",
    "amp_fp16": "float16",
    "amp_bf16": "bfloat16",
    "amp_fp8": "bfloat16",
}
# All spellings of dtypes that Composer accepts in a mixed_precision dict.
DTYPES: dict[str, str] = {
    **dict.fromkeys(("float32", "torch.float32", "fp32"), "float32"),
    **dict.fromkeys(("float16", "torch.float16", "half", "fp16", "amp", "amp_fp16"), "float16"),
    **dict.fromkeys(("bfloat16", "bfloat", "torch.bfloat16", "bf16", "amp_bf16"), "bfloat16"),
    **dict.fromkeys(("float8", "torch.float8", "fp8", "amp_fp8"), "bfloat16"),
}
DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
# LLM Foundry adds this key to the dict (llmfoundry/utils/config_utils.py, 0.22.0).
UNREAD_DTYPE_KEY = "keep_low_precision_grads"
STATE_DICT_TYPES = (None, "full", "sharded")
# Device names of Composer and torch.
_DEVICE_TYPES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}


def _read_torch_object(reading: str, value: object, *args: Any) -> Any:
    """Parse a torch object by the function ``reading`` of ``objects.py``; return None for any other value."""
    # None: a test or a user has blocked the import of torch.
    return None if sys.modules.get("torch") is None else getattr(_objects(), reading)(value, *args)


def _objects() -> ModuleType:
    from composer_fsdp2.fsdp1 import objects

    return objects


def _choice(value: object, choices: Mapping[str, Any]) -> Any:
    """Return the value that ``choices`` has for a name in any letter case. The error suggests the closest name."""
    text = value.upper() if isinstance(value, str) else ""
    if text not in choices:
        raise ConfigError(f"{value!r}; expected one of {', '.join(choices)}{did_you_mean(text, choices)}")
    return choices[text]


def parse_strategy(value: object) -> ShardingStrategy:
    """Parse a sharding strategy: a string as in Composer, or torch's ShardingStrategy."""
    name = getattr(value, "name", value)
    return _choice(name, {strategy.value: strategy for strategy in ShardingStrategy})


def parse_backward_prefetch(value: object) -> BackwardPrefetch:
    name = getattr(value, "name", value)
    return _choice(name, {prefetch.value: prefetch for prefetch in BackwardPrefetch})


def parse_gradient_sync(value: object) -> GradientSync:
    modes = [mode.value for mode in GradientSync]
    if not isinstance(value, str) or value not in modes:
        raise ConfigError(f"{value!r}; expected one of {', '.join(modes)}")
    return GradientSync(value)


def parse_state_dict_type(value: object) -> str:
    if isinstance(value, str) and value == "local":
        raise UnsupportedError(
            "'local', which is gone from Composer (since 0.19) and torch; use 'sharded', which every world size can "
            "load, or 'full'"
        )
    if not isinstance(value, str | None) or value not in STATE_DICT_TYPES:
        raise ConfigError(f"{value!r}; it is 'full' or 'sharded'")
    return str(value or "full")


def parse_seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (is_number and 0 < value < math.inf):  # type: ignore[operator]
        return None if value is None else float(value)  # type: ignore[arg-type]
    raise ConfigError(f"{value!r} ({type(value).__name__}); give a number of seconds above 0, or null")


def parse_device_type(device: object) -> str:
    if device is None:
        default: str = _objects().default_device_type()
        return default
    # Composer's Device has .name ('gpu', 'cpu'), a torch.device has .type, and a string may end with an index.
    name = getattr(device, "type", None) or getattr(device, "name", None) or device
    if not isinstance(name, str) or name.split(":")[0].lower() not in _DEVICE_TYPES:
        raise ConfigError(f"device is {device!r}; sharding runs on 'gpu' ('cuda') or 'cpu'")
    return _DEVICE_TYPES[name.split(":")[0].lower()]


def parse_precision(precision: object, device: object) -> str:
    if precision is None:  # Composer's default (dist_strategy.py, prepare_fsdp_module)
        return "amp_fp16" if parse_device_type(device) == "cuda" else "fp32"
    name = getattr(precision, "value", precision)
    if not isinstance(name, str) or name.lower() not in PRECISIONS:
        raise ConfigError(
            f"precision is {name!r}; expected one of {', '.join(PRECISIONS)}{did_you_mean(name, PRECISIONS)}"
        )
    return name.lower()


# ---------------------------------------------------------------------------------------------------------------------
# Meshes and groups


def mesh_of(mesh: object, device_type: str, key: str, tensor_degree: int = 1) -> MeshSpec:
    """Convert a DeviceMesh, and append a tensor axis if ``tensor_degree`` > 1. Error messages begin with ``key``."""
    try:
        spec: MeshSpec | None = _read_torch_object("device_mesh", mesh, device_type, tensor_degree)
    except ConfigError as error:
        raise ConfigError(f"{key} is {error}", keys=(key,)) from error
    if spec is None:
        raise ConfigError(
            f"{key} is {mesh!r}; give a DeviceMesh (Composer stopped taking lists in 0.24), or set "
            "data_parallel_shard_degree and data_parallel_replicate_degree for the whole model instead",
            keys=(key,),
        )
    return spec


_PROCESS_GROUPS = (
    "it is 'self', 'node', 'local_rank_across_nodes', 'setK' (groups of K ranks in a row), 'modK' (K groups of every "
    "K-th rank), a list of ranks, a ProcessGroup, or a pair of these (shard, replicate) for HYBRID_SHARD"
)
Groups = RankGroups | tuple[RankGroups, RankGroups] | None


def parse_groups(value: object) -> Groups:
    """Parse FSDP1's process_group in any of Composer's forms (composer/distributed/mosaic_parallelism.py)."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or all(isinstance(rank, int) for rank in value):
        return _rank_groups(value)
    if len(value) != 2:
        raise ConfigError(f"{value!r}; a pair has two parts, (shard, replicate), and this has {len(value)}")
    return (_rank_groups(value[0]), _rank_groups(value[1]))


def mesh_of_groups(groups: Groups, strategy: ShardingStrategy | None, device_type: str) -> MeshSpec:
    """Return the mesh for a parsed ``process_group``.

    Raises:
        ConfigError: a pair of groups without a hybrid strategy, or one group with a hybrid strategy.
    """
    pair = groups if isinstance(groups, tuple) else (groups,)
    if strategy is not None and strategy.is_hybrid != (len(pair) == 2):
        wanted = "a pair, (shard, replicate)," if strategy.is_hybrid else "one group of ranks"
        given = ", ".join(map(str, pair))
        raise ConfigError(
            f"sharding_strategy {strategy.value} takes {wanted} as process_group; it is {given}",
            keys=("sharding_strategy", "process_group"),
        )
    return MeshSpec.of_groups(*pair, device_type=device_type)


def without_shards(mesh: MeshSpec) -> MeshSpec:
    """The mesh for NO_SHARD."""
    try:
        return mesh.without_shards()
    except ConfigError as error:
        text = f"sharding_strategy NO_SHARD takes one process_group, not a pair of them: {error}"
        raise ConfigError(text, keys=("sharding_strategy", "process_group")) from error


def _rank_groups(value: object) -> RankGroups:
    given: RankGroups | None = _read_torch_object("process_group", value)
    if given is not None:
        return given
    if isinstance(value, list | tuple) and value and all(type(rank) is int for rank in value):
        return RankGroups(rule=GroupRule.GIVEN, ranks=tuple(value))
    word = value if isinstance(value, str) else ""
    if word == "self":
        return RankGroups(rule=GroupRule.CONSECUTIVE, number=1)
    if word in (GroupRule.NODE.value, GroupRule.ACROSS_NODES.value):
        return RankGroups(rule=GroupRule(word))
    matched = re.fullmatch(r"(set|mod)(\d{1,9})", word)
    if matched is None:
        raise ConfigError(f"{short(value)}; {_PROCESS_GROUPS}")
    return RankGroups(rule=GroupRule(matched[1]), number=int(matched[2]))


def check_same_reshard(of_strategy: bool | int | None, value: bool | int) -> None:
    """Raise ConfigError if ``reshard_after_forward`` contradicts the strategy.

    An integer agrees with a strategy that reshards.
    """
    if of_strategy is None:
        return
    if bool(value) != of_strategy:
        raise ConfigError(
            f"sharding_strategy specifies that parameters are {'freed' if of_strategy else 'kept'} after forward, "
            f"reshard_after_forward {value!r} contradicts it; keep one of the two",
            keys=("sharding_strategy", "reshard_after_forward"),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


@dataclass(frozen=True, slots=True)
class NamedPrecision:
    """A ``mixed_precision`` name of Composer, whose dtypes depend on Composer's precision."""

    name: str


_DTYPE_KEYS_BY_NAME = {"FULL": (), "DEFAULT": ("param_dtype", "buffer_dtype"), "PURE": DTYPE_KEYS}


def parse_mixed_precision(value: object) -> NamedPrecision | MixedPrecision:
    """Parse ``mixed_precision``: FULL, DEFAULT, PURE, a dict of dtypes, or torch's MixedPrecision.

    By default FSDP1 casts the forward inputs of root units only (``cast_root_forward_inputs``), and so does this
    package.
    """
    policy: MixedPrecision | None = _read_torch_object("mixed_precision", value)
    if policy is not None:
        return policy
    if isinstance(value, Mapping):
        return _dtypes_of(value)
    if isinstance(value, str):
        return NamedPrecision(_choice(value, {name: name for name in _DTYPE_KEYS_BY_NAME}))
    raise ConfigError(
        f"{value!r}; it is FULL, DEFAULT, PURE, a dict of param_dtype, reduce_dtype and buffer_dtype, a MixedPrecision "
        "or a MixedPrecisionPolicy"
    )


def mixed_precision_of(given: NamedPrecision | MixedPrecision, precision: str) -> MixedPrecision:
    """Return the dtypes for Composer's ``precision``.

    DEFAULT reduces gradients in float32, PURE in the low-precision dtype.
    """
    if isinstance(given, MixedPrecision):
        return given
    low = dict.fromkeys(_DTYPE_KEYS_BY_NAME[given.name], PRECISIONS[precision])
    return MixedPrecision(**({"reduce_dtype": "float32"} | low if low else {}))  # type: ignore[arg-type]


def parse_mp_policy(value: object) -> MixedPrecision | None:
    policy: MixedPrecision | None = _read_torch_object("mp_policy", value)
    if value is not None and policy is None:
        raise ConfigError(f"{value!r}; give a MixedPrecisionPolicy")
    return policy


def _dtypes_of(value: Mapping[str, Any]) -> MixedPrecision:
    known = (*DTYPE_KEYS, UNREAD_DTYPE_KEY)
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        way_out = did_you_mean(unknown, DTYPE_KEYS, f"it takes {', '.join(DTYPE_KEYS)}")
        raise ConfigError(f"{dict(value)!r}, with the unknown key {unknown}{way_out}")
    return MixedPrecision(**{key: _dtype(value, key) for key in DTYPE_KEYS})  # type: ignore[arg-type]


def _dtype(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is None:
        return None
    try:
        name: str | None = _read_torch_object("dtype", value)
    except ConfigError as error:
        raise ConfigError(f"{dict(given)!r}, in which {key} is {error}") from error
    text = getattr(value, "value", value)
    if name is None and (not isinstance(text, str) or text not in DTYPES):
        raise ConfigError(
            f"{dict(given)!r}, in which {key} is {value!r}, which is not a dtype{did_you_mean(text, DTYPES)}"
        )
    return name or DTYPES[text]


def parse_offload(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    offloads: bool | None = _read_torch_object("offloads", value)
    if offloads is None:
        raise ConfigError(f"{value!r}; it is true, false, a CPUOffload or an OffloadPolicy")
    return offloads


def parse_modules(value: object) -> tuple[Any, ...]:
    if value is None or (isinstance(value, list | tuple) and not value):
        return ()
    modules: Iterable[Any] | None = _read_torch_object("modules", value)
    if modules is None:
        raise ConfigError(f"{short(value)}; give a list of modules of the model (from a script)")
    return tuple(modules)
