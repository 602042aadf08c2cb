"""From an FSDP1 configuration to a ``ShardingConfig``: pure, total, and with a finding for every key that was said."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

from composer_fsdp2.config import (
    ActivationCheckpointing,
    BackwardPrefetch,
    GroupRule,
    MeshSpec,
    Prefetch,
    RankGroups,
    ShardingConfig,
    ShardingStrategy,
    check_reshard_degree,
)
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError, UnsupportedError
from composer_fsdp2.findings import Finding, Outcome, format_findings
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME, Kind, nearest_key

__all__ = [
    "LegacyConfig",
    "Translation",
    "decides_dtypes",
    "decides_mesh",
    "translate",
    "translate_unit_settings",
    "unit_notes",
]

# The precisions of Composer (composer/core/precision.py) and the dtype that each trains in; fp8 trains in bf16.
PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "amp_fp16": torch.float16,
    "amp_bf16": torch.bfloat16,
    "amp_fp8": torch.bfloat16,
}
# Every spelling of a dtype that Composer accepted in a mixed_precision dict.
DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(("float32", "torch.float32", "fp32"), torch.float32),
    **dict.fromkeys(("float16", "torch.float16", "half", "fp16", "amp", "amp_fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bfloat", "torch.bfloat16", "bf16", "amp_bf16"), torch.bfloat16),
    **dict.fromkeys(("float8", "torch.float8", "fp8", "amp_fp8"), torch.bfloat16),
}
# What Composer's FSDP2 did without being told (composer/distributed, 0.32.1): it sent rank 0's values where some ranks
# had none, and its checkpointing was not reentrant.
FSDP2_DEFAULTS: dict[str, Any] = {"sync_module_states": None, "activation_checkpointing_reentrant": False}
_BACKWARD_POST_REASON = (
    "FSDP2 gathers the next unit before a unit's gradients, not after: one more unit in memory at the peak"
)
STATE_DICT_TYPES = (None, "full", "sharded")
# Composer's names of devices, and torch's.
DEVICE_TYPES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyConfig:
    """What a user said: a mapping, or a configuration object read by its attributes.

    ``said`` holds only what was set; a default of the object's class is not a statement, and lies in ``defaults``
    where it differs from FSDP1's.
    """

    said: Mapping[str, Any]
    defaults: Mapping[str, Any]
    mesh: DeviceMesh | None = None

    @classmethod
    def read(cls, source: object) -> "LegacyConfig":
        """Read a mapping (OmegaConf's too) or any object with FSDPConfig's or FSDP2Config's attributes.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(source, LegacyConfig):
            return source
        if isinstance(source, DictConfig):
            try:
                source = OmegaConf.to_container(source, resolve=True)
            except OmegaConfBaseException as error:
                raise ConfigError(f"fsdp_config cannot be resolved: {error}") from error
        if isinstance(source, Mapping):
            said = {str(key): value for key, value in source.items()}
            return cls(said=said, defaults={}, mesh=said.get("device_mesh"))
        if not hasattr(source, "__dict__") or isinstance(source, str | type) or callable(source):
            raise ConfigError(
                f"fsdp_config is a {type(source).__name__}; give a mapping, a composer FSDPConfig or an FSDP2Config"
            )
        return cls._read_object(source)

    @classmethod
    def _read_object(cls, source: object) -> "LegacyConfig":
        # Composer's State puts the mesh that it built from the degrees into device_mesh; it restates them.
        set_here = {key: value for key, value in vars(source).items() if key[0] != "_" and key != "device_mesh"}
        said = set_here
        fields = dataclasses.fields(source) if dataclasses.is_dataclass(source) else ()
        if fields and all(field.name in vars(source) for field in fields if field.init):
            # A generated __init__ sets every field; what equals the class's default was not said.
            said = {
                key: value for key, value in set_here.items() if not _same(value, getattr(type(source), key, _ABSENT))
            }
        defaults = {
            key.name: getattr(source, key.name)
            for key in KEYS
            if key.name not in said and hasattr(source, key.name) and key.name != "device_mesh"
        }
        if not hasattr(source, "sharding_strategy"):
            defaults |= {name: defaults.get(name) or default for name, default in FSDP2_DEFAULTS.items()}
        return cls(said=said, defaults=defaults, mesh=getattr(source, "device_mesh", None))

    def __getitem__(self, name: str) -> Any:
        if name in self.said:
            return self.said[name]
        return self.defaults.get(name, KEYS_BY_NAME[name].default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The FSDP2 configuration (None if something stands in the way) and what became of each key that was said."""

    config: ShardingConfig | None
    findings: tuple[Finding, ...]

    def explain(self) -> str:
        """The report that a user reads."""
        head = "fsdp_config -> fully_shard" if self.config else "fsdp_config -> fully_shard: not possible as it stands"
        lines = [head, format_findings(self.findings)]
        if self.config is not None:
            config = self.config
            policy = config.mixed_precision
            lines.append(
                f"  mesh: {config.mesh}; reshard_after_forward: {config.reshard_after_forward}; "
                f"param dtype: {policy.param_dtype or 'as they are'}, reduced in: "
                f"{policy.reduce_dtype or policy.param_dtype or 'as they are'}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, object]:
        return {"possible": self.config is not None, "findings": [finding.to_json() for finding in self.findings]}

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)


def translate(
    fsdp_config: object,
    *,
    precision: object = None,
    device: object = None,
    world_size: int | None = None,
    strict: bool = True,
) -> Translation:
    """What an FSDP1 (or FSDP2, or mixed) configuration asks of ``fully_shard``.

    Args:
        fsdp_config: A mapping, or an object with the attributes of Composer's FSDPConfig or FSDP2Config.
        precision: Composer's Precision or its string; None is Composer's default for the device.
        device: Composer's Device, a torch.device or a string; None is the mesh's, or CUDA where there is one.
        world_size: Number of ranks; None leaves a degree of -1 open.
        strict: Whether what cannot be carried over gives no configuration (True) or only a finding. The key
            ``strict`` in the configuration itself goes first.
    Raises:
        ConfigError: unknown keys, wrong types, values that contradict each other; all of them in one message.

    It reads its arguments only (and LOCAL_WORLD_SIZE, for a process_group by nodes), and does not communicate.
    """
    legacy = LegacyConfig.read(fsdp_config)
    _refuse_bad_keys(legacy)
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(f"world_size is {_short_repr(world_size)}; give the number of ranks, or None")
    if device is None and isinstance(legacy.mesh, DeviceMesh):
        device = legacy.mesh.device_type
    problems = _Problems()
    precision_name = problems.catch(_precision_name, precision, device)
    device_type = problems.catch(_device_type, device)
    mesh = problems.catch(_mesh, legacy, device_type or "cpu", world_size)
    reshard = problems.catch(_reshard_after_forward, legacy)
    policy = problems.catch(_mixed_precision, legacy, precision_name or "fp32")
    offload = problems.catch(_cpu_offload, legacy)
    prefetch = problems.catch(_prefetch, legacy)
    ignored = problems.catch(_ignored_modules, legacy["ignored_modules"])
    checkpointing = problems.catch(_activation_checkpointing, legacy, precision_name)
    problems.catch(_state_dict_type, legacy)
    problems.catch(_contradictions, legacy)
    if mesh is not None and reshard is not None:
        problems.catch(check_reshard_degree, reshard, mesh)
    problems.raise_all()

    findings = tuple(_findings(legacy, precision_name, mesh, policy))
    is_strict = legacy.said.get("strict", strict)
    if is_strict and any(finding.outcome.blocks for finding in findings):
        return Translation(config=None, findings=findings)
    config = ShardingConfig(
        mesh=mesh,
        reshard_after_forward=reshard,
        mixed_precision=policy.policy,
        cast_root_inputs=policy.cast_root_inputs,
        buffer_dtype=policy.buffer_dtype,
        cpu_offload=offload,
        activation_checkpointing=checkpointing,
        prefetch=prefetch,
        sync_module_states=_sync_module_states(legacy),
        ignored_modules=ignored,
        keep_low_precision_grads=policy.keep_low_precision_grads or legacy["keep_low_precision_grads"],
        strict=is_strict,
        precision=precision_name,
        verbose=legacy["verbose"],
    )
    return Translation(config=config, findings=findings)


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
            raise ConfigError(f"unknown key {key!r} in the wrap settings of module {path!r}{hint}")
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
    if isinstance(said.get("mixed_precision"), Mapping) and _UNREAD_DTYPE_KEY in said["mixed_precision"]:
        yield f"mixed_precision.{_UNREAD_DTYPE_KEY} is not needed: {_UNREAD_DTYPE_REASON}"
    if "backward_prefetch" in said and _backward_prefetch(said["backward_prefetch"]) is BackwardPrefetch.BACKWARD_POST:
        yield f"backward_prefetch BACKWARD_POST is BACKWARD_PRE here: {_BACKWARD_POST_REASON}"


def _unit_config(said: Mapping[str, Any], config: ShardingConfig) -> ShardingConfig:
    for first, second in _UNIT_SYNONYMS:
        if first in said and second in said:
            raise ConfigError(f"{first} and {second} are both given; keep one")
    changes: dict[str, Any] = {"mesh": _unit_mesh(said, config.mesh)}
    if "sharding_strategy" in said:
        changes["reshard_after_forward"] = _strategy(said["sharding_strategy"]).reshards_after_forward
    if "reshard_after_forward" in said:
        _check_kind("reshard_after_forward", said["reshard_after_forward"], Kind.BOOL_OR_INT)
        _same_reshard(changes.get("reshard_after_forward"), said["reshard_after_forward"])
        changes["reshard_after_forward"] = said["reshard_after_forward"]
    if "mixed_precision" in said:
        precision = parse_mixed_precision(said["mixed_precision"], config.precision)
        changes |= {
            "mixed_precision": precision.policy,
            "buffer_dtype": precision.buffer_dtype,
            "keep_low_precision_grads": precision.keep_low_precision_grads,
        }
    if "mp_policy" in said:  # which knows no buffers, so theirs stays the model's
        changes["mixed_precision"] = _mp_policy(said["mp_policy"])
    for key in ("cpu_offload", "offload_policy"):
        if key in said:
            changes["cpu_offload"] = _offload_value(key, said[key])
    return dataclasses.replace(config, prefetch=_unit_prefetch(said, config.prefetch), **changes)


def _unit_mesh(said: Mapping[str, Any], of_model: MeshSpec) -> MeshSpec:
    """The unit's own ranks: a process_group or a mesh, else the model's; each rank for itself under NO_SHARD."""
    spec = of_model
    strategy = _strategy(said["sharding_strategy"]) if "sharding_strategy" in said else None
    for key in ("device_mesh", "mesh"):
        if said.get(key) is not None:
            spec = _mesh_of(said[key], of_model.device_type, key)
    if said.get("process_group") is not None:
        spec = _mesh_of_process_group(said["process_group"], strategy, of_model.device_type)
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
        _check_kind("forward_prefetch", said["forward_prefetch"], Kind.BOOL)
        forward = (forward or 1) if said["forward_prefetch"] else None
    if "backward_prefetch" in said:
        is_off = _backward_prefetch(said["backward_prefetch"]) is BackwardPrefetch.NONE
        backward = 0 if is_off else (backward or None)
    return Prefetch(forward=forward, backward=backward)


# ---------------------------------------------------------------------------------------------------------------------
# Reading values


class _Absent:
    """Equal to nothing that a user can say."""


_ABSENT = _Absent()


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)


class _Problems:
    """Collects what is wrong, so that one error names all of it."""

    def __init__(self) -> None:
        self.errors: list[ComposerFSDP2Error] = []

    def catch(self, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except ConfigError as error:
            self.errors.append(error)
            return None

    def raise_all(self) -> None:
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError("\n".join(dict.fromkeys(str(error) for error in self.errors)))


def _refuse_bad_keys(legacy: LegacyConfig) -> None:
    problems = []
    for name, value in legacy.said.items():
        if name not in KEYS_BY_NAME:
            near = nearest_key(name)
            way_out = f"did you mean {near}?" if near else "no version of Composer knew it; remove it"
            problems.append(f"unknown key fsdp_config.{name}; {way_out}")
            continue
        try:
            _check_kind(name, value, KEYS_BY_NAME[name].kind)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_kind(name: str, value: object, kind: Kind) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        Kind.BOOL: isinstance(value, bool),
        Kind.INT: is_int,
        Kind.OPTIONAL_INT: is_int or value is None,
        Kind.BOOL_OR_INT: isinstance(value, int),
        Kind.STR: isinstance(value, str),
        Kind.OPTIONAL_STR: isinstance(value, str) or value is None,
        Kind.ANY: True,
    }[kind]
    if not fits:
        raise ConfigError(f"fsdp_config.{name} is {value!r} ({type(value).__name__}); it takes {kind.value}")


def _choice(name: str, value: object, choices: Mapping[str, Any]) -> Any:
    """Parse one of FSDP1's words, in any case; the error names the nearest."""
    text = str(value).upper()
    if text not in choices:
        near = nearest_key(text.lower(), tuple(choice.lower() for choice in choices))
        hint = f"; did you mean {near.upper()}?" if near else ""
        raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(choices)}{hint}")
    return choices[text]


def _strategy(value: object) -> ShardingStrategy:
    """From Composer's string or torch's own ShardingStrategy, which spells its members the same way."""
    name = getattr(value, "name", value)
    return _choice("sharding_strategy", name, {strategy.value: strategy for strategy in ShardingStrategy})


def _backward_prefetch(value: object) -> BackwardPrefetch:
    name = "NONE" if value is None else getattr(value, "name", value)
    return _choice("backward_prefetch", name, {prefetch.value: prefetch for prefetch in BackwardPrefetch})


def _device_type(device: object) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    # Composer's Device has .name ('gpu', 'cpu'); a torch.device has .type; a string may carry an index.
    name = getattr(device, "type", None) or getattr(device, "name", None) or device
    if not isinstance(name, str) or name.split(":")[0].lower() not in DEVICE_TYPES:
        raise ConfigError(f"device is {device!r}; sharding runs on 'gpu' ('cuda') or 'cpu'")
    return DEVICE_TYPES[name.split(":")[0].lower()]


def _precision_name(precision: object, device: object) -> str:
    if precision is None:  # Composer's own default (dist_strategy.py, prepare_fsdp_module)
        return "amp_fp16" if _device_type(device) == "cuda" else "fp32"
    name = getattr(precision, "value", precision)
    if not isinstance(name, str) or name.lower() not in PRECISIONS:
        near = nearest_key(str(name), tuple(PRECISIONS))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"precision is {name!r}; it is one of {', '.join(PRECISIONS)}{hint}")
    return name.lower()


def _mesh(legacy: LegacyConfig, device_type: str, world_size: int | None) -> MeshSpec:
    strategy = _strategy(legacy["sharding_strategy"])
    if legacy["process_group"] is not None:  # Composer then ignored the mesh (dist_strategy.py)
        spec = _mesh_of_process_group(legacy["process_group"], strategy, device_type)
    elif legacy.mesh is not None:
        spec = _mesh_of(legacy.mesh, device_type, "device_mesh")
    else:
        spec = MeshSpec(
            shard=legacy["data_parallel_shard_degree"],
            replicate=legacy["data_parallel_replicate_degree"],
            device_type=device_type,
        )
    if world_size is not None:
        spec = spec.resolve(world_size)
    if strategy is not ShardingStrategy.NO_SHARD:
        return spec
    if not spec.is_grouped and spec.replicate is not None and spec.shard != 1 and (spec.is_resolved or spec.shard > 1):
        raise ConfigError(
            "sharding_strategy NO_SHARD contradicts data_parallel_replicate_degree "
            f"{spec.replicate} with data_parallel_shard_degree {spec.shard} (FSDP1 averaged gradients over the first "
            "of the two axes only, and the replicas drifted apart); leave the degrees out"
        )
    return spec.without_shards()


def _mesh_of(mesh: object, device_type: str, key: str) -> MeshSpec:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"{key} is {mesh!r}; give a DeviceMesh (Composer stopped taking lists in 0.24), or say "
            "data_parallel_shard_degree and data_parallel_replicate_degree for the whole model instead"
        )
    if mesh.ndim > 2:
        raise ConfigError(f"{key} has {mesh.ndim} axes; sharding takes one, or two (replicate, shard)")
    if mesh.device_type != device_type:
        raise ConfigError(f"{key} lies on {mesh.device_type}, but the model's device is {device_type}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"{key} {mesh} does not hold this rank, {dist.get_rank()}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        replicate = mesh.size(0) if mesh.ndim == 2 else None
        return MeshSpec(shard=mesh.size(mesh.ndim - 1), replicate=replicate, device_type=device_type)
    groups = [_given(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in range(mesh.ndim)]
    return MeshSpec.of_groups(groups[-1], groups[0] if mesh.ndim == 2 else None, device_type=device_type)


_LOCAL_GROUPS = {"node": GroupRule.CONSECUTIVE, "local_rank_across_nodes": GroupRule.STRIDED}
_PROCESS_GROUPS = (
    "it is 'self', 'node', 'local_rank_across_nodes', 'setK' (groups of K ranks in a row), 'modK' (K groups of every "
    "K-th rank), a list of ranks, a ProcessGroup, or a pair of these (shard, replicate) for HYBRID_SHARD"
)


def _mesh_of_process_group(value: object, strategy: ShardingStrategy | None, device_type: str) -> MeshSpec:
    """FSDP1's process_group in any of Composer's forms (composer/distributed/mosaic_parallelism.py)."""
    pair = value if isinstance(value, list | tuple) and not all(isinstance(rank, int) for rank in value) else None
    if strategy is not None and strategy.is_hybrid != (pair is not None):
        wanted = "a pair, (shard, replicate)," if strategy.is_hybrid else "one group of ranks"
        raise ConfigError(f"sharding_strategy {strategy.value} takes {wanted} as process_group; it is {value!r}")
    if pair is None:
        return MeshSpec.of_groups(_rank_groups(value), device_type=device_type)
    if len(pair) != 2:
        raise ConfigError(f"process_group {value!r} has {len(pair)} parts; a pair has two: (shard, replicate)")
    shard, replicate = map(_rank_groups, pair)
    return MeshSpec.of_groups(shard, replicate, device_type=device_type)


def _rank_groups(value: object) -> RankGroups:
    if isinstance(value, dist.ProcessGroup):
        return _given(dist.get_process_group_ranks(value))
    if isinstance(value, list | tuple) and value and all(type(rank) is int for rank in value):
        return _given(value)
    word = value if isinstance(value, str) else ""
    if word == "self":
        return RankGroups(rule=GroupRule.CONSECUTIVE, number=1)
    if word in _LOCAL_GROUPS:
        return RankGroups(rule=_LOCAL_GROUPS[word], number=_local_world_size(word))
    matched = re.fullmatch(r"(set|mod)(\d{1,9})", word)
    if matched is None:
        raise ConfigError(f"process_group is {_short_repr(value)}; {_PROCESS_GROUPS}")
    return RankGroups(rule=GroupRule(matched[1]), number=int(matched[2]))


def _given(ranks: Iterable[int]) -> RankGroups:
    return RankGroups(rule=GroupRule.GIVEN, ranks=tuple(ranks))


def _local_world_size(word: str) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal():
        raise ConfigError(
            f"process_group {word!r} needs to know how many ranks a node has: start the script with `composer` or "
            "torchrun, which set LOCAL_WORLD_SIZE, or say setK or modK"
        )
    return int(text)


def _reshard_after_forward(legacy: LegacyConfig) -> bool | int:
    strategy = _strategy(legacy["sharding_strategy"])
    if "reshard_after_forward" not in legacy.said:
        of_class: bool | int | None = legacy.defaults.get("reshard_after_forward")
        return strategy.reshards_after_forward if of_class is None or "sharding_strategy" in legacy.said else of_class
    value: bool | int = legacy["reshard_after_forward"]
    if "sharding_strategy" in legacy.said:
        _same_reshard(strategy.reshards_after_forward, value)
    return value


def _same_reshard(of_strategy: bool | int | None, value: bool | int) -> None:
    """An integer refines a strategy that reshards; true and false must be the strategy's own."""
    if of_strategy is None:
        return
    if bool(value) != of_strategy:
        raise ConfigError(
            f"sharding_strategy says that parameters are {'freed' if of_strategy else 'kept'} after forward, "
            f"reshard_after_forward {value!r} says otherwise; keep one of the two"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Precision:
    policy: MixedPrecisionPolicy
    cast_root_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False


def parse_mixed_precision(value: object, precision: str) -> _Precision:
    """A ``mixed_precision`` setting in any of its forms, at one of Composer's precisions.

    FSDP1 cast inputs at roots only (torch's MixedPrecision: cast_root_forward_inputs); so do we.
    """
    _check_dtypes("mixed_precision", value)
    if isinstance(value, MixedPrecisionPolicy):
        return _Precision(policy=value, cast_root_inputs=value.cast_forward_inputs)
    if isinstance(value, MixedPrecision):
        return _Precision(
            policy=MixedPrecisionPolicy(
                param_dtype=value.param_dtype,
                reduce_dtype=value.reduce_dtype,
                cast_forward_inputs=value.cast_forward_inputs,
            ),
            cast_root_inputs=value.cast_root_forward_inputs,
            buffer_dtype=value.buffer_dtype,
            keep_low_precision_grads=value.keep_low_precision_grads,
        )
    if isinstance(value, Mapping):
        param, reduce, buffer = _dtypes_of(value)
    elif isinstance(value, str):
        low = PRECISIONS[precision]
        param, reduce, buffer = _choice(
            "mixed_precision",
            value,
            {"FULL": (None, None, None), "DEFAULT": (low, torch.float32, low), "PURE": (low, low, low)},
        )
    else:
        raise ConfigError(
            f"mixed_precision is {value!r}; it is FULL, DEFAULT, PURE, a dict of param_dtype, reduce_dtype and "
            "buffer_dtype, a MixedPrecision or a MixedPrecisionPolicy"
        )
    return _Precision(
        policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False),
        buffer_dtype=buffer,
    )


_DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
# LLM Foundry writes this one into the dict (llmfoundry/utils/config_utils.py, 0.22.0).
_UNREAD_DTYPE_KEY = "keep_low_precision_grads"
_UNREAD_DTYPE_REASON = "Composer never read it inside this dict; beside mixed_precision it has an effect"


def _dtypes_of(value: Mapping[str, Any]) -> tuple[torch.dtype | None, ...]:
    for key in value:
        if key not in (*_DTYPE_KEYS, _UNREAD_DTYPE_KEY):
            near = nearest_key(str(key), _DTYPE_KEYS)
            hint = f"; did you mean {near}?" if near else f"; it takes {', '.join(_DTYPE_KEYS)}"
            raise ConfigError(f"unknown key mixed_precision.{key}{hint}")
    return tuple(_dtype(f"mixed_precision.{key}", value.get(key)) for key in _DTYPE_KEYS)


def _dtype(name: str, value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return _floating(name, value)
    text = getattr(value, "value", value)
    if not isinstance(text, str) or text not in DTYPES:
        near = nearest_key(str(text), tuple(DTYPES))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{name} is {value!r}, which is no dtype{hint}")
    return DTYPES[text]


def _check_dtypes(name: str, value: object) -> None:
    if isinstance(value, MixedPrecisionPolicy | MixedPrecision):
        for part in (*_DTYPE_KEYS, "output_dtype"):
            _floating(f"{name}.{part}", getattr(value, part, None))


def _floating(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"{name} is {dtype}, in which nothing can be trained; give a floating point dtype")
    return dtype


def _mixed_precision(legacy: LegacyConfig, precision: str) -> _Precision:
    if "mp_policy" in legacy.said and legacy["mp_policy"] is not None:
        return parse_mixed_precision(_mp_policy(legacy["mp_policy"]), precision)
    return parse_mixed_precision(legacy["mixed_precision"], precision)


def _mp_policy(value: object) -> MixedPrecisionPolicy:
    if not isinstance(value, MixedPrecisionPolicy):
        raise ConfigError(f"mp_policy is {value!r}; give a MixedPrecisionPolicy")
    _check_dtypes("mp_policy", value)
    return value


def _cpu_offload(legacy: LegacyConfig) -> bool:
    if legacy.said.get("offload_policy") is not None:
        return _offload_value("offload_policy", legacy["offload_policy"])
    return _offload_value("cpu_offload", legacy["cpu_offload"])


def _offload_value(name: str, value: object) -> bool:
    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, OffloadPolicy):
        return isinstance(value, CPUOffloadPolicy)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"{name} is {value!r}; it is true, false, a CPUOffload or an OffloadPolicy")


def _prefetch(legacy: LegacyConfig) -> Prefetch:
    for name in ("backward_prefetch_limit", "forward_prefetch_limit"):
        if legacy[name] < 1:
            raise ConfigError(f"{name} is {legacy[name]}; give 1 or more")
    backward: int | None = legacy["backward_prefetch_limit"]
    if _backward_prefetch(legacy["backward_prefetch"]) is BackwardPrefetch.NONE:
        backward = 0
    elif backward == 1:
        backward = None  # FSDP2's own: one ahead, in the order that forward ran in
    return Prefetch(forward=legacy["forward_prefetch_limit"] if legacy["forward_prefetch"] else None, backward=backward)


def _ignored_modules(value: object) -> tuple[nn.Module, ...]:
    if value is None:
        return ()
    modules = tuple(value) if isinstance(value, list | tuple | set | frozenset | nn.ModuleList) else None
    if modules is None or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(
            f"ignored_modules is {_short_repr(value)}; give a list of modules of the model (from a script)"
        )
    return modules


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _activation_checkpointing(legacy: LegacyConfig, precision: str) -> ActivationCheckpointing:
    checkpointing = ActivationCheckpointing(
        checkpoint=legacy["activation_checkpointing"],
        cpu_offload=legacy["activation_cpu_offload"],
        reentrant=legacy["activation_checkpointing_reentrant"],
        transformer_engine=legacy["te_checkpoint_wrapper"] and precision == "amp_fp8",
    )
    if checkpointing.transformer_engine and checkpointing.enabled:
        if checkpointing.reentrant:
            raise ConfigError(
                "te_checkpoint_wrapper needs activation_checkpointing_reentrant: false (Transformer Engine's "
                "checkpointing works with the non-reentrant implementation only, as under FSDP1)"
            )
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "te_checkpoint_wrapper under precision amp_fp8 needs Transformer Engine, which is not installed: "
                "install transformer-engine, or set te_checkpoint_wrapper to false"
            )
    return checkpointing


def _sync_module_states(legacy: LegacyConfig) -> bool | None:
    """Rank 0 alone reads a monolithic checkpoint, so the others need what it read."""
    if "sync_module_states" not in legacy.said and legacy["load_monolith_rank0_only"]:
        return True
    value: bool | None = legacy["sync_module_states"]
    return value


def _state_dict_type(legacy: LegacyConfig) -> None:
    value = legacy["state_dict_type"]
    if value == "local":
        raise UnsupportedError(
            "state_dict_type 'local' is gone from Composer (since 0.19) and torch; use 'sharded', which every world "
            "size can load, or 'full'"
        )
    if value not in STATE_DICT_TYPES:
        raise ConfigError(f"state_dict_type is {value!r}; it is 'full' or 'sharded'")


# Two words for one thing; said together they would have to agree, and only one can be meant.
_SYNONYMS = (
    ("mixed_precision", "mp_policy"),
    ("cpu_offload", "offload_policy"),
    ("data_parallel_shard_degree", "device_mesh"),
    ("data_parallel_replicate_degree", "device_mesh"),
)


def _contradictions(legacy: LegacyConfig) -> None:
    problems = [
        f"fsdp_config.{first} and fsdp_config.{second} are two ways to say one thing; keep one"
        for first, second in _SYNONYMS
        if legacy.said.get(first) is not None and legacy.said.get(second) is not None
    ]
    if legacy["activation_cpu_offload"] and not legacy["use_orig_params"]:
        # Composer's State refuses it as well (composer/core/state.py); kept, so that both paths say the same.
        problems.append("activation_cpu_offload: true contradicts use_orig_params: false; leave use_orig_params out")
    if problems:
        raise ConfigError("\n".join(problems))


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _findings(legacy: LegacyConfig, precision: str, mesh: MeshSpec, mixed_precision: _Precision) -> Iterator[Finding]:
    """One finding per key that was said: the table's row, unless the value has another fate."""
    exceptions = {
        "sharding_strategy": lambda: _strategy_finding(legacy, mesh),
        "backward_prefetch": lambda: _backward_prefetch_finding(legacy),
        "backward_prefetch_limit": lambda: _same_as_fsdp2(legacy, "backward_prefetch_limit", 1),
        "forward_prefetch": lambda: _same_as_fsdp2(legacy, "forward_prefetch", False),
        "forward_prefetch_limit": lambda: _same_as_fsdp2(legacy, "forward_prefetch_limit", 1),
        "keep_low_precision_grads": lambda: _low_precision_grads_finding(legacy, mixed_precision),
        "ignored_modules": lambda: None if legacy["ignored_modules"] else _neutral_finding(legacy, "ignored_modules"),
        "process_group": lambda: _neutral_finding(legacy, "process_group") if legacy["process_group"] is None else None,
        "data_parallel_shard_degree": lambda: _degree_finding(legacy, "data_parallel_shard_degree"),
        "data_parallel_replicate_degree": lambda: _degree_finding(legacy, "data_parallel_replicate_degree"),
        "te_checkpoint_wrapper": lambda: _te_checkpoint_finding(legacy, precision),
        "te_shard_fp8_weight": lambda: _te_weight_finding(legacy, precision),
    }
    for name in legacy.said:
        special = exceptions.get(name, lambda: None)()
        yield special or _finding(legacy, name)
    if mixed_precision.keep_low_precision_grads and "keep_low_precision_grads" not in legacy.said:
        yield _low_precision_grads_finding(legacy, mixed_precision)
    if isinstance(legacy["mixed_precision"], Mapping) and _UNREAD_DTYPE_KEY in legacy["mixed_precision"]:
        yield Finding(
            key=f"mixed_precision.{_UNREAD_DTYPE_KEY}",
            value=legacy["mixed_precision"][_UNREAD_DTYPE_KEY],
            outcome=Outcome.UNNEEDED,
            target="",
            reason=_UNREAD_DTYPE_REASON,
            where=f"$.fsdp_config.mixed_precision.{_UNREAD_DTYPE_KEY}",
        )


def _finding(legacy: LegacyConfig, name: str, **changes: Any) -> Finding:
    row = KEYS_BY_NAME[name]
    is_off = row.kind is Kind.BOOL and row.default is False and legacy[name] is False
    fields: dict[str, Any] = {
        "key": name,
        "value": legacy[name],
        "outcome": row.outcome,
        "target": "" if is_off else row.target,
        "reason": "off, as by default" if is_off else row.reason,
        "where": f"$.fsdp_config.{name}",
    }
    return Finding(**(fields | changes))


def _same_as_fsdp2(legacy: LegacyConfig, name: str, neutral: object) -> Finding | None:
    return _neutral_finding(legacy, name) if legacy[name] == neutral else None


def _neutral_finding(legacy: LegacyConfig, name: str) -> Finding:
    return _finding(legacy, name, outcome=Outcome.EXACT, target="", reason="this value asks for nothing")


def _low_precision_grads_finding(legacy: LegacyConfig, mixed_precision: _Precision) -> Finding:
    """A MixedPrecision object carries the key as well, and was what FSDP1 read whatever stood beside it."""
    name = "keep_low_precision_grads"
    asked = mixed_precision.keep_low_precision_grads or legacy[name]
    return _finding(legacy, name, value=True) if asked else _neutral_finding(legacy, name)


def _strategy_finding(legacy: LegacyConfig, mesh: MeshSpec) -> Finding:
    strategy = _strategy(legacy["sharding_strategy"])
    if strategy is ShardingStrategy.NO_SHARD:
        return _finding(
            legacy,
            "sharding_strategy",
            target="2-D mesh with one rank on its shard axis",
            reason="every rank keeps whole parameters, gradients are averaged by one all-reduce",
        )
    reshard = f"reshard_after_forward={legacy.said.get('reshard_after_forward', strategy.reshards_after_forward)}"
    if strategy.is_hybrid and mesh.replicate is None:
        return _finding(
            legacy,
            "sharding_strategy",
            outcome=Outcome.APPROXIMATE,
            target=f"{reshard} on a 1-D mesh",
            reason="without a replicate degree Composer itself trained this as "
            + ("FULL_SHARD" if strategy.reshards_after_forward else "SHARD_GRAD_OP"),
            hint="set data_parallel_replicate_degree for replicas",
        )
    return _finding(
        legacy,
        "sharding_strategy",
        target=f"{reshard} on a {'2-D' if mesh.replicate is not None else '1-D'} mesh",
        reason="parameters are " + ("freed" if strategy.reshards_after_forward else "kept") + " after forward",
    )


def _backward_prefetch_finding(legacy: LegacyConfig) -> Finding:
    said = _backward_prefetch(legacy["backward_prefetch"])
    if said is BackwardPrefetch.BACKWARD_POST:
        target, reason = "FSDP2's own prefetch (as BACKWARD_PRE)", _BACKWARD_POST_REASON
        hint = "NONE has the lower peak"
        return _finding(legacy, "backward_prefetch", target=target, reason=reason, hint=hint)
    if said is BackwardPrefetch.NONE:
        target, reason = "set_modules_to_backward_prefetch", "each unit names itself, so that nothing is gathered ahead"
    else:
        target, reason = "FSDP2's own prefetch", "FSDP2 gathers the next unit before a unit's gradients by itself"
    return _finding(legacy, "backward_prefetch", outcome=Outcome.EXACT, target=target, reason=reason)


def _degree_finding(legacy: LegacyConfig, name: str) -> Finding | None:
    if legacy["process_group"] is None or legacy[name] == KEYS_BY_NAME[name].default:
        return None
    return _finding(
        legacy,
        name,
        outcome=Outcome.UNNEEDED,
        target="",
        reason="process_group goes before the degrees, as it did in Composer",
        hint="leave one of the two out",
    )


def _te_checkpoint_finding(legacy: LegacyConfig, precision: str) -> Finding | None:
    if not legacy["te_checkpoint_wrapper"] or precision != "amp_fp8":
        return None
    return _finding(
        legacy,
        "te_checkpoint_wrapper",
        outcome=Outcome.EXACT,
        target="transformer_engine.pytorch.distributed.checkpoint, applied before fully_shard",
        reason="the same wrapper inside the unit; it does nothing without activation_checkpointing",
    )


def _te_weight_finding(legacy: LegacyConfig, precision: str) -> Finding | None:
    if not legacy["te_shard_fp8_weight"] or precision != "amp_fp8":
        return None
    return _finding(
        legacy,
        "te_shard_fp8_weight",
        outcome=Outcome.UNSUPPORTED,
        reason="Transformer Engine's prepare_te_modules_for_fsdp knows FSDP1's wrapper only",
        hint="set it to false: fully_shard gathers these weights in param_dtype",
    )
