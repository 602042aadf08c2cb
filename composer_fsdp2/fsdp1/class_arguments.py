"""A table of the constructor arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``, one row per argument.

Arguments that are also keys of an ``fsdp_config`` reuse the rows of ``keys.py``, with the defaults of the class.
"""

from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.rows import Row, Takes, takes_if
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME
from composer_fsdp2.fsdp1.parsing import DTYPE_KEYS

# The default groups of a hybrid strategy without process_group: shard within a node, replicate across nodes.
BY_NODE = ("node", "local_rank_across_nodes")

_EXACT = Outcome.EXACT


def _as_key(name: str, default: Any, **changed: Any) -> Row:
    return replace(KEYS_BY_NAME[name], default=default, elsewhere="", **changed)


def _enum_values(name: str, text: str) -> Takes:
    """Return the accepted values of the key ``name``, with ``text`` as their description in documentation."""
    return replace(KEYS_BY_NAME[name].takes, text=text)


def _no_text(text: str) -> Takes:
    return takes_if(text, lambda value: not isinstance(value, str))


_PRECISION = (*DTYPE_KEYS, "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")


def _callable(text: str) -> Takes:
    return takes_if(f"{text}, or None", lambda value: value is None or callable(value))


CLASS_ARGUMENTS: tuple[Row, ...] = (
    _as_key("process_group", None, takes=_no_text("a ProcessGroup, or a pair of these"),
            meaning="the ranks that shard; a pair (shard, replicate) for hybrid strategies",
            reason="gradients are averaged within a group; all ranks call the constructor, each with its own group"),
    _as_key("sharding_strategy", None, takes=_enum_values("sharding_strategy", "a ShardingStrategy, or None"),
            reason="None is FULL_SHARD, which frees parameters after forward; SHARD_GRAD_OP "
            "does not; hybrid strategies shard within a node and replicate across nodes, unless process_group or "
            "device_mesh sets other ranks; NO_SHARD is a 2-D mesh with one rank on its shard axis"),
    _as_key("cpu_offload", None, takes=_no_text("a CPUOffload, or None"),
            reason="the same, with pinned memory on an accelerator"),
    Row(name="auto_wrap_policy", takes=_callable("a policy of torch.distributed.fsdp.wrap, or a function"),
        outcome=_EXACT, target="the modules that fully_shard is called on",
        meaning="which modules below the wrapped one are FSDP instances",
        reason="selected by torch's own code: the same modules, each one unit"),
    _as_key("backward_prefetch", "BACKWARD_PRE",
            takes=_enum_values("backward_prefetch", "a BackwardPrefetch, or None"),
            meaning="when backward gathers the next unit: BACKWARD_PRE, BACKWARD_POST, or None for no prefetching"),
    _as_key("mixed_precision", None, takes=_no_text("a MixedPrecision, or None"), nested=_PRECISION,
            meaning="dtypes of parameters, reductions and buffers; None is full precision",
            reason="the same dtypes, of parameters, reductions, buffers and inputs; keep_low_precision_grads is an "
            "error, unless parameters have that dtype"),
    _as_key("ignored_modules", None),
    Row(name="param_init_fn", takes=_callable("a function of a module"), outcome=_EXACT,
        target="called before a unit is sharded, with each module that owns a meta tensor",
        meaning="initialises parameters on the meta device, instead of their modules' reset_parameters",
        reason="the innermost instance's function; it must also materialise the module (to_empty)"),
    Row(name="device_id", outcome=_EXACT, target="the mesh's device type",
        meaning="the device that the module is moved to",
        reason="must be the current device; None is the device of the parameters, else the accelerator"),
    _as_key("sync_module_states", False, meaning="the first rank of each group broadcasts its values",
            reason="parameters and buffers of the first rank of each group"),
    _as_key("forward_prefetch", False),
    _as_key("limit_all_gathers", True),
    _as_key("use_orig_params", False, reason="parameters keep their names and shapes with either value; with False an "
            "optimizer gets the model's parameters, no flat ones, which is logged once"),
    Row(name="ignored_states", outcome=_EXACT, target="ignored_params",
        meaning="modules, or parameters, that FSDP neither shards nor reduces", reason="the same tensors"),
    _as_key("device_mesh", None, meaning="a DeviceMesh instead of process_group; 2-D (replicate, shard) for hybrid "
            "strategies"),
)  # fmt: skip
