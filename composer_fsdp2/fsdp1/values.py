"""FSDP1's and FSDP2's values, one at a time: any spelling of a strategy, dtype, mesh or policy, parsed once."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

from composer_fsdp2.config import BackwardPrefetch, GroupRule, MeshSpec, RankGroups, ShardingStrategy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import Kind, nearest_key

__all__ = [
    "BACKWARD_POST_REASON",
    "DTYPES",
    "DTYPE_KEYS",
    "PRECISIONS",
    "UNREAD_DTYPE_KEY",
    "UNREAD_DTYPE_REASON",
    "Precision",
    "check_kind",
    "check_same_reshard",
    "mesh_of",
    "mesh_of_process_group",
    "parse_backward_prefetch",
    "parse_device_type",
    "parse_ignored_modules",
    "parse_mixed_precision",
    "parse_mp_policy",
    "parse_offload",
    "parse_precision",
    "parse_strategy",
    "short_repr",
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
BACKWARD_POST_REASON = (
    "FSDP2 gathers the next unit before a unit's gradients, not after: one more unit in memory at the peak"
)
# Composer's names of devices, and torch's.
DEVICE_TYPES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}


def check_kind(name: str, value: object, kind: Kind) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        Kind.BOOL: isinstance(value, bool),
        Kind.INT: is_int,
        Kind.OPTIONAL_INT: is_int or value is None,
        Kind.BOOL_OR_INT: isinstance(value, int),
        Kind.STR: isinstance(value, str),
        Kind.OPTIONAL_STR: isinstance(value, str) or value is None,
        Kind.OPTIONAL_SECONDS: is_int or isinstance(value, float) or value is None,
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


def parse_strategy(value: object) -> ShardingStrategy:
    """From Composer's string or torch's own ShardingStrategy, which spells its members the same way."""
    name = getattr(value, "name", value)
    return _choice("sharding_strategy", name, {strategy.value: strategy for strategy in ShardingStrategy})


def parse_backward_prefetch(value: object) -> BackwardPrefetch:
    name = "NONE" if value is None else getattr(value, "name", value)
    return _choice("backward_prefetch", name, {prefetch.value: prefetch for prefetch in BackwardPrefetch})


def parse_device_type(device: object) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    # Composer's Device has .name ('gpu', 'cpu'); a torch.device has .type; a string may carry an index.
    name = getattr(device, "type", None) or getattr(device, "name", None) or device
    if not isinstance(name, str) or name.split(":")[0].lower() not in DEVICE_TYPES:
        raise ConfigError(f"device is {device!r}; sharding runs on 'gpu' ('cuda') or 'cpu'")
    return DEVICE_TYPES[name.split(":")[0].lower()]


def parse_precision(precision: object, device: object) -> str:
    if precision is None:  # Composer's own default (dist_strategy.py, prepare_fsdp_module)
        return "amp_fp16" if parse_device_type(device) == "cuda" else "fp32"
    name = getattr(precision, "value", precision)
    if not isinstance(name, str) or name.lower() not in PRECISIONS:
        near = nearest_key(str(name), tuple(PRECISIONS))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"precision is {name!r}; it is one of {', '.join(PRECISIONS)}{hint}")
    return name.lower()


def mesh_of(mesh: object, device_type: str, key: str) -> MeshSpec:
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


def mesh_of_process_group(value: object, strategy: ShardingStrategy | None, device_type: str) -> MeshSpec:
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
        raise ConfigError(f"process_group is {short_repr(value)}; {_PROCESS_GROUPS}")
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


def check_same_reshard(of_strategy: bool | int | None, value: bool | int) -> None:
    """An integer refines a strategy that reshards; true and false must be the strategy's own."""
    if of_strategy is None:
        return
    if bool(value) != of_strategy:
        raise ConfigError(
            f"sharding_strategy says that parameters are {'freed' if of_strategy else 'kept'} after forward, "
            f"reshard_after_forward {value!r} says otherwise; keep one of the two"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    policy: MixedPrecisionPolicy
    cast_root_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False


def parse_mixed_precision(value: object, precision: str) -> Precision:
    """A ``mixed_precision`` setting in any of its forms, at one of Composer's precisions.

    FSDP1 cast inputs at roots only (torch's MixedPrecision: cast_root_forward_inputs); so do we.
    """
    _check_dtypes("mixed_precision", value)
    if isinstance(value, MixedPrecisionPolicy):
        return Precision(policy=value, cast_root_inputs=value.cast_forward_inputs)
    if isinstance(value, MixedPrecision):
        return Precision(
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
    return Precision(
        policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False),
        buffer_dtype=buffer,
    )


DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
# LLM Foundry writes this one into the dict (llmfoundry/utils/config_utils.py, 0.22.0).
UNREAD_DTYPE_KEY = "keep_low_precision_grads"
UNREAD_DTYPE_REASON = "Composer never read it inside this dict; beside mixed_precision it has an effect"


def _dtypes_of(value: Mapping[str, Any]) -> tuple[torch.dtype | None, ...]:
    for key in value:
        if key not in (*DTYPE_KEYS, UNREAD_DTYPE_KEY):
            near = nearest_key(str(key), DTYPE_KEYS)
            hint = f"; did you mean {near}?" if near else f"; it takes {', '.join(DTYPE_KEYS)}"
            raise ConfigError(f"unknown key mixed_precision.{key}{hint}")
    return tuple(_dtype(f"mixed_precision.{key}", value.get(key)) for key in DTYPE_KEYS)


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
        for part in (*DTYPE_KEYS, "output_dtype"):
            _floating(f"{name}.{part}", getattr(value, part, None))


def _floating(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"{name} is {dtype}, in which nothing can be trained; give a floating point dtype")
    return dtype


def parse_mp_policy(value: object) -> MixedPrecisionPolicy:
    if not isinstance(value, MixedPrecisionPolicy):
        raise ConfigError(f"mp_policy is {value!r}; give a MixedPrecisionPolicy")
    _check_dtypes("mp_policy", value)
    return value


def parse_offload(name: str, value: object) -> bool:
    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, OffloadPolicy):
        return isinstance(value, CPUOffloadPolicy)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"{name} is {value!r}; it is true, false, a CPUOffload or an OffloadPolicy")


def parse_ignored_modules(value: object) -> tuple[nn.Module, ...]:
    if value is None:
        return ()
    modules = tuple(value) if isinstance(value, list | tuple | set | frozenset | nn.ModuleList) else None
    if modules is None or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(
            f"ignored_modules is {short_repr(value)}; give a list of modules of the model (from a script)"
        )
    return modules


def short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
