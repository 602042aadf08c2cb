"""The table of keys of an ``fsdp_config``. Each row has the parser of a key's value and its outcome under FSDP2.

The translation, the documentation and the tests read this table; to add a key, add a row. ``fields`` names the
configuration field that the key sets. Meanings and defaults are those of Composer 0.32.1
(``composer/utils/parallelism.py``, ``composer/distributed/dist_strategy.py``), and of earlier Composer releases for
legacy keys.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts
from composer_fsdp2.config.rows import BOOL, INT, POSITIVE_INT, Row, idle, takes_by, takes_if
from composer_fsdp2.config.sharding import GradientDtype, GradientSync, MixedPrecision
from composer_fsdp2.fsdp1.parallel_values import (
    TILED_KEYS,
    parse_broadcast_batch,
    parse_check_data,
    parse_idle_experts,
    parse_idle_towers,
    parse_tiled_mlp,
)
from composer_fsdp2.fsdp1.parsing import (
    DTYPE_KEYS,
    STATE_DICT_TYPES,
    UNREAD_DTYPE_KEY,
    BackwardPrefetch,
    ShardingStrategy,
    parse_backward_prefetch,
    parse_gradient_sync,
    parse_groups,
    parse_mixed_precision,
    parse_modules,
    parse_mp_policy,
    parse_offload,
    parse_seconds,
    parse_state_dict_type,
    parse_strategy,
)
from composer_fsdp2.fsdp1.policy_values import (
    AUTO,
    WRAP_KEYS,
    parse_checkpointed_classes,
    parse_freeze,
    parse_train_only,
    parse_wrap_policy,
)


class KeyGroup(enum.StrEnum):
    """The origin of a key."""

    FSDP1 = "Composer's FSDPConfig"
    FSDP2 = "Composer's FSDP2Config, or fully_shard itself"
    LEGACY = "a Composer release before 0.32"
    OURS = "composer_fsdp2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Row):
    """A key of an ``fsdp_config``.

    Args:
        defaults: Defaults for other readers than FSDP1, such as FSDP2Config.
        sets: Whether the parsed value is assigned to the ``ShardingConfig`` field without further translation.
        instead_of: Synonyms; only one of them may be set.
        of_modules: The outcome if the key is in the dict that a hook returns for one module; None if it is not allowed
            there.
        rewrite: Called with (row, value, section); returns the entries with FSDP2's keys that replace the key. None
            copies it unchanged.
    """

    defaults: Mapping[Any, Any] = field(default_factory=dict)
    sets: bool = False
    instead_of: tuple[str, ...] = ()
    of_modules: Outcome | None = None
    rewrite: Callable[[Row, Any, Mapping[str, Any]], list[tuple[str, Any]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parsed configuration that ``Row.decide`` gets.

    Args:
        values: The parsed value of every key, including defaults.
        given: The keys that the user set, with their values.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    precision: str
    mesh: MeshSpec
    mixed_precision: MixedPrecision


# A reader in ``Row.defaults``. By default, Composer's FSDP2 broadcasts rank 0's values if some ranks have none, and its
# activation checkpointing is not reentrant (composer/distributed, 0.32.1).
FSDP2_READER = "FSDP2Config"


# ---------------------------------------------------------------------------------------------------------------------
# Outcomes that depend on the value

BACKWARD_POST_REASON = (
    "FSDP2 gathers the next unit before a unit's gradients, not after: one more unit in memory at the peak"
)
UNREAD_DTYPE_REASON = "Composer never read it inside this dict; beside mixed_precision it has an effect"


def _neutral(finding: Finding) -> Finding:
    """A value that requests FSDP2's default behavior."""
    return replace(idle(finding, "FSDP2 does the same by default"), outcome=Outcome.EXACT)


def _strategy(finding: Finding, context: Context) -> Finding:
    strategy: ShardingStrategy = context.values["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return replace(
            finding,
            target="2-D mesh with one rank on its shard axis",
            reason="every rank keeps full parameters, gradients are averaged by one all-reduce",
        )
    freed = "freed" if strategy.reshards_after_forward else "kept"
    target = f"reshard_after_forward={context.given.get('reshard_after_forward', strategy.reshards_after_forward)}"
    if strategy.is_hybrid and not context.mesh.has_replicas:
        same = ShardingStrategy.FULL_SHARD if strategy.reshards_after_forward else ShardingStrategy.SHARD_GRAD_OP
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            target=f"{target} on a 1-D mesh",
            reason=f"without a replicate degree Composer itself trained this as {same.value}",
            hint="set data_parallel_replicate_degree for replicas",
        )
    mesh = "2-D" if context.mesh.has_replicas else "1-D"
    return replace(finding, target=f"{target} on a {mesh} mesh", reason=f"parameters are {freed} after forward")


def _backward_prefetch(finding: Finding, context: Context) -> Finding:
    given: BackwardPrefetch = context.values["backward_prefetch"]
    if given is BackwardPrefetch.BACKWARD_POST:
        return replace(
            finding,
            target="FSDP2's own prefetch (as BACKWARD_PRE)",
            reason=BACKWARD_POST_REASON,
            hint="NONE has the lower peak",
        )
    if given is BackwardPrefetch.NONE:
        target, reason = "set_modules_to_backward_prefetch", "each unit lists itself, so nothing is prefetched"
    else:
        target = "FSDP2's own prefetch"
        reason = "FSDP2's default: the next unit is gathered before a unit's gradients are computed"
    return replace(finding, outcome=Outcome.EXACT, target=target, reason=reason)


def _degree(finding: Finding, context: Context) -> Finding:
    if context.values["process_group"] is None or finding.value == KEYS_BY_NAME[finding.key].default:
        return finding
    return replace(
        finding,
        outcome=Outcome.UNNEEDED,
        target="",
        reason="process_group takes precedence over the degrees, as it did in Composer",
        hint="leave one of the two out",
    )


def _ignored_modules(finding: Finding, context: Context) -> Finding:
    return finding if context.values["ignored_modules"] else _neutral(finding)


def _low_precision_grads(finding: Finding, context: Context) -> Finding:
    """Decide the finding from the parsed mixed precision: FSDP1 ignored this key if a MixedPrecision object was set."""
    is_requested = context.mixed_precision.gradients is not GradientDtype.OF_PARAMETER
    return replace(finding, value=True) if is_requested else _neutral(finding)


def _gradient_sync(finding: Finding, context: Context) -> Finding:
    given: GradientSync = context.values["gradient_sync"]
    if given is GradientSync.EVERY:
        return replace(finding, target="", reason="as under FSDP1 in Composer")
    if given is GradientSync.DEFER_REPLICA and not context.mesh.has_replicas:
        return replace(
            finding,
            outcome=Outcome.UNNEEDED,
            target="",
            reason="this mesh has no replicas, so nothing can be deferred",
            hint="set data_parallel_replicate_degree, or gradient_sync: last",
        )
    return finding


def _metric_names(finding: Finding, context: Context) -> Finding:
    if context.values["use_orig_params"] or not finding.value:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="with use_orig_params: false FSDP1 logged one _flat_param for each unit; here each parameter has a name",
    )


def _te_checkpoint(finding: Finding, context: Context) -> Finding:
    if not finding.value or context.precision != "amp_fp8":
        return finding
    return replace(
        finding,
        outcome=Outcome.EXACT,
        target="transformer_engine.pytorch.distributed.checkpoint, applied before fully_shard",
        reason="the same wrapper inside the unit; it does nothing without activation_checkpointing",
    )


def _te_weight(finding: Finding, context: Context) -> Finding:
    if not finding.value or context.precision != "amp_fp8":
        return finding
    return replace(
        finding,
        outcome=Outcome.UNSUPPORTED,
        reason="Transformer Engine's prepare_te_modules_for_fsdp knows FSDP1's wrapper only",
        hint="set it to false: fully_shard gathers these weights in param_dtype",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rewriting to FSDP2's keys

Entries = list[tuple[str, Any]]


def _removed(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    return []


def _unless_default(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    return [] if value == row.default else [(row.name, value)]


def _rewrite_strategy(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    strategy = parse_strategy(value)
    reshard: Entries = (
        [] if "reshard_after_forward" in given else [("reshard_after_forward", strategy.reshards_after_forward)]
    )
    if strategy is not ShardingStrategy.NO_SHARD:
        return reshard
    if given.get("process_group") is not None:
        return [(row.name, value)]
    degrees = (given.get("data_parallel_shard_degree", -1), given.get("data_parallel_replicate_degree"))
    mesh = MeshSpec.of_degrees(*degrees).without_shards()
    return [*((axis.key, axis.size) for axis in reversed(mesh.axes)), *reshard]


def _rewrite_degree(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    if parse_strategy(given.get("sharding_strategy", "FULL_SHARD")) is ShardingStrategy.NO_SHARD:
        return [(row.name, value)] if given.get("process_group") is not None else []
    return _unless_default(row, value, given)


def _rewrite_sync(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    # Without this key, load_monolith_rank0_only implies it.
    return [(row.name, value)] if value or given.get("load_monolith_rank0_only") else []


def _rewrite_backward_prefetch(row: Row, value: Any, given: Mapping[str, Any]) -> Entries:
    return [(row.name, value)] if parse_backward_prefetch(value) is BackwardPrefetch.NONE else []


# ---------------------------------------------------------------------------------------------------------------------
# The table

_OPTIONAL_INT = takes_if("an integer or null", lambda value: value is None or INT.fits(value))
_OPTIONAL_TEXT = takes_if("a string or null", lambda value: isinstance(value, str | None))
_RESHARD = takes_if("true, false or an integer", lambda value: isinstance(value, int))
_STRATEGY = takes_by("a string", parse_strategy, tuple(each.value for each in ShardingStrategy))
_BACKWARD_PREFETCH = takes_by("a string", parse_backward_prefetch, tuple(each.value for each in BackwardPrefetch))
_GRADIENT_SYNC = takes_by("a string", parse_gradient_sync, tuple(each.value for each in GradientSync))
_STATE_DICT_TYPE = takes_by("a string or null", parse_state_dict_type, (*filter(None, STATE_DICT_TYPES), "local"))
_BROADCAST_BATCH = takes_by("false, first, gather or null", parse_broadcast_batch, (False, "first", "gather"))
_CHECK_DATA = takes_by("true, false or null", parse_check_data, (True, False))
_SECONDS = takes_by("a number of seconds, or null", parse_seconds)
_MIXED_PRECISION = takes_by(
    "FULL, DEFAULT, PURE, a dict of dtypes, a MixedPrecision or a MixedPrecisionPolicy", parse_mixed_precision
)
_MP_POLICY = takes_by("a MixedPrecisionPolicy", parse_mp_policy)
_OFFLOAD = takes_by("true, false, a CPUOffload or an OffloadPolicy", parse_offload)
_GROUPS = takes_by("a name such as node or set8, a list of ranks, a ProcessGroup, or a pair of these", parse_groups)
_MODULES = takes_by("a list of modules", parse_modules)
_AUTO_UNITS = {"transformer_layer_cls_to_wrap": AUTO}
_WRAP_POLICY = takes_by("a mapping of which modules are units, or null", parse_wrap_policy, (_AUTO_UNITS,))
_CHECKPOINTED = takes_by("a list of class names, auto, or null", parse_checkpointed_classes, (AUTO,))
_TILED_MLP = takes_by("a mapping of classes and chunks, or null", parse_tiled_mlp)
_IDLE_EXPERTS = takes_by("in_order, or null", parse_idle_experts, tuple(each.value for each in IdleExperts))
_IDLE_TOWERS = takes_by("auto, a list of modules' paths, or null", parse_idle_towers, (AUTO,))
_PREFIXES = takes_by("a list of prefixes of parameters' names, or null", parse_freeze)
_PATTERNS = takes_by("a list of regular expressions of parameters' names, or null", parse_train_only)

_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_READ_BY_COMPOSER = "Composer reads it from the same configuration object, as before"
# Composer's FSDP2Config has few keys (composer/utils/parallelism.py), and drops all others.
IGNORED_BY_COMPOSER = _IGNORED = "plain Composer 0.32.1 ignores it under FSDP2, with a warning"
_READ = "plain Composer 0.32.1 reads it as well, under FSDP_VERSION=2"

# fmt: off
_ROWS: tuple[Key, ...] = (
    Key(name="activation_checkpointing", takes=BOOL, default=False, outcome=_EXACT,
        target="checkpoint_wrapper, applied before fully_shard", fields=("activation_checkpointing.checkpoint",),
        sets=True, meaning="recompute the activations of the modules that the model's hooks choose",
        reason="the same wrapper inside the unit, as in FSDP1: FSDP(AC(block))",
        elsewhere=f"{_READ}, and wraps in the opposite order: AC(FSDP(block))"),
    Key(name="activation_checkpointing_reentrant", takes=BOOL, default=True,
        outcome=_EXACT,
        target="CheckpointImpl.REENTRANT or NO_REENTRANT", fields=("activation_checkpointing.reentrant",), sets=True,
        meaning="which of torch's two implementations recomputes",
        reason="both implementations run inside a fully_shard unit", elsewhere=f"{_IGNORED}: it never reenters",
        defaults={FSDP2_READER: False}),
    Key(name="activation_cpu_offload", takes=BOOL, default=False, outcome=_EXACT,
        target="offload_wrapper, applied before fully_shard", fields=("activation_checkpointing.cpu_offload",),
        sets=True, meaning="keep the chosen modules' saved activations in host memory",
        reason="the same wrapper, around the checkpointing one", elsewhere=_READ),
    Key(name="auto_wrap", takes=BOOL, default=True, outcome=_UNNEEDED, target="", rewrite=_unless_default,
        meaning="only gates load_monolith_rank0_only; wrapping itself never read it",
        reason=f"it does not affect sharding; {_READ_BY_COMPOSER}"),
    Key(name="backward_prefetch", fields=("prefetch.backward",), default="BACKWARD_POST", outcome=_APPROXIMATE,
        target="set_modules_to_backward_prefetch; BACKWARD_POST as BACKWARD_PRE", takes=_BACKWARD_PREFETCH,
        decide=_backward_prefetch, rewrite=_rewrite_backward_prefetch,
        of_modules=_EXACT,
        meaning="when backward gathers the next unit: NONE, BACKWARD_PRE or BACKWARD_POST",
        reason="FSDP2's default gathers before the gradient computation (PRE); NONE is an explicit empty list; it "
        "cannot gather after it (POST): one more unit in memory at the peak"),
    Key(name="backward_prefetch_limit", fields=("prefetch.backward",), default=1, outcome=_APPROXIMATE,
        target="set_modules_to_backward_prefetch, lists of that length", takes=POSITIVE_INT, neutral=(1,),
        rewrite=_unless_default, meaning="how many units backward prefetches",
        reason="the lists follow the order of registration; FSDP1 followed the order of execution that it recorded"),
    Key(name="cpu_offload", fields=("cpu_offload",), default=False, outcome=_EXACT, target="CPUOffloadPolicy",
        takes=_OFFLOAD, rewrite=_unless_default, of_modules=_EXACT,
        meaning="keep parameters, gradients and optimizer state in host memory",
        reason="supported here; Composer rejects it under FSDP1 and ignores it under its own FSDP2",
        elsewhere=f"{_IGNORED}: parameters stay on the GPU"),
    Key(name="data_parallel_shard_degree", fields=("mesh",), takes=INT, default=-1, outcome=_EXACT,
        target="the mesh's shard axis", decide=_degree, rewrite=_rewrite_degree,
        meaning="number of ranks over which a parameter is sharded; -1 for the rest of the world size",
        reason="the same device mesh", elsewhere=f"{_IGNORED}: it shards over all ranks"),
    Key(name="data_parallel_replicate_degree", fields=("mesh",), takes=_OPTIONAL_INT, default=None, outcome=_EXACT,
        target="the mesh's replicate axis (HSDP)", decide=_degree, rewrite=_rewrite_degree,
        meaning="number of replicas of the sharded model", reason="the same device mesh",
        elsewhere=f"{_IGNORED}: it shards over all ranks, without replicas"),
    Key(name="forward_prefetch", fields=("prefetch.forward",), takes=BOOL, default=False, outcome=_APPROXIMATE,
        target="set_modules_to_forward_prefetch", neutral=(False,),
        rewrite=_unless_default, of_modules=_EXACT, meaning="gather the next unit explicitly during forward",
        reason="the lists follow the order of registration; FSDP1 followed the order of execution that it recorded"),
    Key(name="forward_prefetch_limit", fields=("prefetch.forward",), default=1, outcome=_APPROXIMATE,
        target="set_modules_to_forward_prefetch, lists of that length", takes=POSITIVE_INT, neutral=(1,),
        rewrite=_unless_default, meaning="how many units forward_prefetch prefetches",
        reason="the lists follow the order of registration; FSDP1 followed the order of execution that it recorded"),
    Key(name="ignored_modules", default=None, outcome=_EXACT, target="ignored_params, for everything below them",
        takes=_MODULES, fields=("ignored_modules",), sets=True, decide=_ignored_modules, rewrite=_unless_default,
        of_modules=_UNSUPPORTED,
        meaning="modules whose parameters and buffers FSDP leaves alone",
        reason="unsharded and left alone on all ranks, gradients not averaged; clipping and loss scaling include them",
        elsewhere=f"{_IGNORED}: all modules are sharded"),
    Key(name="keep_low_precision_grads", fields=("mixed_precision.gradients",), takes=BOOL, default=False,
        outcome=_EXACT, target="parameters whose own dtype is reduce_dtype", decide=_low_precision_grads,
        rewrite=_unless_default, meaning="leave gradients in the dtype they were reduced in",
        reason="fully_shard casts gradients to the parameter's own dtype: where that is not the dtype they are reduced "
        "in, the plan raises and names the parameter", elsewhere=f"{_IGNORED}: gradients have their parameters' dtype"),
    Key(name="limit_all_gathers", takes=BOOL, default=True, outcome=_UNNEEDED, target="", rewrite=_removed,
        of_modules=_UNNEEDED,
        meaning="block the CPU to limit the memory of all-gathers in flight",
        reason="FSDP2 frees memory without blocking the CPU"),
    Key(name="load_monolith_rank0_only", takes=BOOL, default=False, outcome=_EXACT,
        target="load_checkpoint, once the model is sharded",
        meaning="read a monolithic checkpoint on rank 0 and send it to the others",
        reason="each rank reads its own shards from the file: no rank loads the full model, and nothing is sent",
        elsewhere=_READ),
    Key(name="load_planner", default=None, outcome=_EXACT, target="", meaning="the DCP planner for loading",
        reason=_READ_BY_COMPOSER),
    Key(name="mixed_precision", fields=("mixed_precision",), default="DEFAULT", outcome=_EXACT,
        target="MixedPrecisionPolicy, and casts of the buffers", takes=_MIXED_PRECISION,
        nested=(*DTYPE_KEYS, UNREAD_DTYPE_KEY), of_modules=_EXACT,
        meaning="DEFAULT, PURE, FULL, or a dict of param_dtype, reduce_dtype, buffer_dtype",
        reason="same dtypes; inputs are cast at roots only, batch norms stay in fp32, as FSDP1 did",
        elsewhere=f"{_READ}, without the buffers, and casts the inputs of all units"),
    Key(name="process_group", fields=("mesh",), default=None, outcome=_EXACT,
        target="a device mesh over each group of ranks", takes=_GROUPS, neutral=(None,), rewrite=_unless_default,
        of_modules=_EXACT,
        meaning="which ranks share a unit, instead of the mesh: self, node, local_rank_across_nodes, setK, modK, "
        "ranks, a ProcessGroup, or a pair of these",
        reason="gradients are averaged within a group only, as under FSDP1",
        elsewhere=f"{_IGNORED}: it shards over all ranks"),
    Key(name="save_planner", default=None, outcome=_EXACT, target="", meaning="the DCP planner for saving",
        reason=_READ_BY_COMPOSER),
    Key(name="sharded_ckpt_prefix_dir", takes=_OPTIONAL_TEXT, default="ep{epoch}-ba{batch}", outcome=_EXACT, target="",
        meaning="the folder of each sharded checkpoint", reason=_READ_BY_COMPOSER),
    Key(name="sharding_strategy", fields=("reshard_after_forward", "mesh"), default="FULL_SHARD", outcome=_EXACT,
        target="the mesh and reshard_after_forward", takes=_STRATEGY, decide=_strategy, rewrite=_rewrite_strategy,
        of_modules=_EXACT, meaning="FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2",
        reason="FULL_SHARD frees parameters after forward, SHARD_GRAD_OP keeps them, HYBRID is a 2-D mesh, NO_SHARD a "
        "2-D mesh with one rank on its shard axis", elsewhere=f"{_IGNORED}: it shards fully"),
    Key(name="state_dict_type", fields=("state_dict_type",), default="full", outcome=_EXACT, target="",
        takes=_STATE_DICT_TYPE, meaning="the form of a checkpoint: full (one file) or sharded (a DCP folder)",
        reason="the same form of checkpoint as before; FSDP1's default, full, stays",
        elsewhere=f"{_READ}; its own default is sharded"),
    Key(name="sync_module_states", fields=("sync_module_states",), takes=BOOL, default=False, outcome=_EXACT,
        target="a broadcast per unit before it is sharded", rewrite=_rewrite_sync,
        defaults={FSDP2_READER: None}, of_modules=_UNSUPPORTED,
        meaning="broadcast rank 0's parameters and buffers to all ranks",
        reason="rank 0 broadcasts parameters and buffers, including non-persistent ones",
        elsewhere=f"{_IGNORED}: ranks that were initialized differently train different models"),
    Key(name="te_checkpoint_wrapper", fields=("activation_checkpointing.transformer_engine",), takes=BOOL,
        default=False, outcome=_UNNEEDED, target="", decide=_te_checkpoint, rewrite=_unless_default,
        meaning="Transformer Engine's checkpointing, under amp_fp8 only",
        reason="FSDP1 read it under precision amp_fp8 only; there it is the same wrapper, of Transformer Engine"),
    Key(name="te_shard_fp8_weight", takes=BOOL, default=False, outcome=_UNNEEDED, target="", decide=_te_weight,
        rewrite=_unless_default, meaning="shard Transformer Engine's fp8 weights, under amp_fp8 only",
        reason="FSDP1 read it under precision amp_fp8 only; there it is unsupported"),
    Key(name="use_orig_params", takes=BOOL, default=True, outcome=_UNNEEDED, target="", rewrite=_removed,
        of_modules=_UNNEEDED,
        meaning="show the original parameters (true) or one flat parameter per unit (false)",
        reason="fully_shard always has separate parameters; parameter groups and subsets, which false did not allow, "
        "work"),
    Key(name="verbose", fields=("verbose",), takes=BOOL, default=False, outcome=_EXACT, target="",
        meaning="log how the model is sharded", reason="logs the translation and the plan", elsewhere=_READ),
    # FSDP2's own keys.
    Key(name="reshard_after_forward", fields=("reshard_after_forward",), takes=_RESHARD, default=True,
        group=KeyGroup.FSDP2, outcome=_EXACT, target="reshard_after_forward", of_modules=_EXACT,
        meaning="free a unit's parameters after forward: true, false, or the size of the group to keep them in",
        reason="the same argument; a root keeps its parameters until backward, as under FSDP1", elsewhere=_READ),
    Key(name="device_mesh", fields=("mesh",), default=None, group=KeyGroup.FSDP2, outcome=_EXACT, target="the mesh",
        of_modules=_EXACT, instead_of=("data_parallel_shard_degree", "data_parallel_replicate_degree"),
        meaning="a DeviceMesh, 1-D or 2-D", reason="the same ranks on the same axes"),
    Key(name="mp_policy", fields=("mixed_precision",), default=None, group=KeyGroup.FSDP2, outcome=_EXACT,
        target="mp_policy", takes=_MP_POLICY, of_modules=_EXACT, instead_of=("mixed_precision",),
        meaning="a MixedPrecisionPolicy", reason="the same argument"),
    Key(name="offload_policy", fields=("cpu_offload",), default=None, group=KeyGroup.FSDP2, outcome=_EXACT,
        target="offload_policy", takes=_OFFLOAD, of_modules=_EXACT, instead_of=("cpu_offload",),
        meaning="an OffloadPolicy", reason="the same argument; memory is pinned only with an accelerator"),
    # Keys of older Composer releases.
    Key(name="min_params", default=None, group=KeyGroup.LEGACY, outcome=_UNNEEDED, target="", rewrite=_removed,
        meaning="wrap modules above this size (until 0.15)", reason="Composer has ignored it since 0.16"),
    Key(name="flatten_parameters", default=None, group=KeyGroup.LEGACY, outcome=_UNNEEDED, target="", rewrite=_removed,
        meaning="flatten a unit's parameters (until 0.17)",
        reason="Composer has ignored it since; FSDP2 has no flat parameter"),
    Key(name="load_fsdp_monolith_rank0_only", default=None, group=KeyGroup.LEGACY, outcome=_UNNEEDED, target="",
        rewrite=_removed, meaning="the old name of load_monolith_rank0_only",
        reason="Composer ignores it since 0.24; set load_monolith_rank0_only instead"),
    # Keys of composer_fsdp2.
    Key(name="activation_checkpointing_policy", default=None, group=KeyGroup.OURS,
        outcome=_EXACT, target="checkpoint_wrapper on each module of these classes", takes=_CHECKPOINTED,
        neutral=(None,), fields=("activation_checkpointing.classes",), sets=True,
        meaning="the classes of the modules to recompute or offload (activation_checkpointing, "
        "activation_cpu_offload), instead of the model's activation_checkpointing_fn; auto: the model's "
        "_no_split_modules, or else those of wrap_policy",
        reason="modules are selected by class name"),
    Key(name="async_save", fields=("async_save",), takes=BOOL, default=False, group=KeyGroup.OURS, outcome=_EXACT,
        target="a background thread with a separate gloo group",
        meaning="training continues while a Trainer's checkpoint is written from a copy in host memory",
        reason="read by the Trainer's checkpoint saver; needs host memory for one more shard, pinned beside a GPU"),
    Key(name="broadcast_batch", takes=_BROADCAST_BATCH, default=None, group=KeyGroup.OURS, outcome=_EXACT,
        target="a broadcast or a gather of each batch, over gloo", neutral=(None,), fields=("broadcast_batch",),
        sets=True,
        meaning="how ranks that share a batch (a tensor or context axis above 1) obtain it: false (each rank's loader "
        "returns the same batch), first (the first rank broadcasts its batch), gather (the rows of all ranks); "
        "default: gather with context parallelism, else false",
        reason="false is Composer's behavior; with first, the other ranks' samples are read but not trained on; with "
        "gather, no sample is lost"),
    Key(name="check_data", takes=_CHECK_DATA, default=None, group=KeyGroup.OURS, outcome=_EXACT,
        target="a hash of the first batch of each epoch and evaluation", neutral=(None,), fields=("check_data",),
        sets=True,
        meaning="whether ranks that share a batch compare it, and raise where it differs, and whether ranks that split "
        "layers compare the gradients of what they do not split in the first backward; without the key they do",
        reason="under FSDP1 such ranks trained on parts of different samples, with finite losses and no error"),
    Key(name="collective_guard", default=None, group=KeyGroup.OURS, outcome=_EXACT,
        target="the connections of the votes: local sockets, and one gloo group of the nodes' first ranks",
        takes=_SECONDS, neutral=(None,), fields=("collective_guard",), sets=True,
        meaning="for how many seconds ranks wait for each other before each collective, where they compare what they "
        "are about to do",
        reason="ranks that run different modules raise on all of them and name the place, instead of hanging; each "
        "collective costs a small one more"),
    Key(name="context_parallel_degree", takes=POSITIVE_INT, default=1,
        group=KeyGroup.OURS, outcome=_EXACT, target="attention that exchanges heads for sequence (Ulysses)",
        neutral=(1,), fields=("context_parallel_degree",), sets=True,
        meaning="number of ranks over which the sequences of a batch are sharded; these ranks share one batch",
        reason="each rank computes everything except attention on its part of the sequence; parameters are sharded "
        "over all ranks, as without the key"),
    Key(name="expert_parallel_degree", takes=POSITIVE_INT, default=1,
        group=KeyGroup.OURS, outcome=_EXACT, target="experts on different ranks, with an all-to-all of tokens",
        neutral=(1,), fields=("expert_parallel_degree",), sets=True,
        meaning="number of consecutive ranks over which the experts of a layer are distributed (Hugging Face's "
        "mixtures, LLM Foundry's torch_dmoe): each gathers only its own experts",
        reason="tokens are sent to the ranks of their experts and back; all parameters are sharded over all ranks, as "
        "without the key, and each rank has its own batch"),
    Key(name="freeze", default=None, group=KeyGroup.OURS, outcome=_EXACT, target="requires_grad_(False), before the "
        "model is sharded", takes=_PREFIXES, neutral=(None,), fields=("freeze",), sets=True,
        meaning="prefixes of the names of parameters that are not trained; they end at dots",
        reason="frozen before the units are planned; the optimizer leaves them as they are"),
    Key(name="fsdp1_metric_names", takes=BOOL, default=False, group=KeyGroup.OURS, outcome=_EXACT,
        target="_fsdp_wrapped_module and _checkpoint_wrapped_module in logged names", decide=_metric_names,
        meaning="OptimizerMonitor and ActivationMonitor log under the names of FSDP1's runs",
        reason="for dashboards that compare old runs with new ones; the values are the full parameters' either way"),
    Key(name="gradient_sync", default="every", group=KeyGroup.OURS, outcome=_EXACT,
        target="set_requires_gradient_sync, set_requires_all_reduce", takes=_GRADIENT_SYNC,
        fields=("accumulation.gradient_sync",), sets=True, decide=_gradient_sync,
        meaning="in which microbatches of a batch gradients are communicated: every, last, or defer_replica (over "
        "replicas in the last one only)",
        reason="every is what FSDP1 did under Composer; last keeps unsharded gradients in memory, defer_replica does "
        "not"),
    Key(name="idle_experts", default=None,
        group=KeyGroup.OURS, outcome=_EXACT, fields=("idle_experts",), sets=True, takes=_IDLE_EXPERTS, neutral=(None,),
        target="hooks on each block of experts, after the model is sharded",
        meaning="in_order: if experts are separate units, every rank runs each of them once per forward, in "
        "registration order, on zero rows if none of its tokens chose it",
        reason="all ranks gather the same experts in the same order; zero rows cost no FLOPs, and their gradients are "
        "exactly zero"),
    Key(name="idle_towers", default=None, group=KeyGroup.OURS, outcome=_EXACT,
        target="hooks on each tower and beside it, after the model is sharded", takes=_IDLE_TOWERS, neutral=(None,),
        fields=("idle_towers",), sets=True,
        meaning="towers with units that some batches do not use, such as a vision tower: auto for those of "
        "transformers' models, or a list of modules' paths; a rank without an input for a tower runs it on an example "
        "if another rank uses it",
        reason="ranks exchange small messages between their hosts before each part that all ranks run; the example's "
        "gradients are exactly zero"),
    Key(name="reshard_after_backward", takes=BOOL, default=True, group=KeyGroup.OURS, outcome=_EXACT,
        target="set_reshard_after_backward", fields=("accumulation.reshard_after_backward",), sets=True,
        meaning="free a unit's parameters after each microbatch's backward (true), or after the last one's (false)",
        reason="true is what FSDP1 did; false gathers less often and keeps the gathered parameters in memory"),
    Key(name="strict", takes=BOOL, default=True, group=KeyGroup.OURS, outcome=_UNNEEDED, target="",
        meaning="reject unsupported settings (true), or warn and continue (false)", rewrite=_removed,
        reason="deprecated: unsupported settings are rejected regardless of this key; the error names the key to "
        "change"),
    Key(name="tiled_mlp", default=None, group=KeyGroup.OURS, outcome=_EXACT, target="tile_mlp, before the model is "
        "sharded", takes=_TILED_MLP, neutral=(None,), nested=TILED_KEYS, fields=("tiled_mlp",), sets=True,
        meaning="the MLPs (classes: a list) that are computed in pieces of the sequence (chunks: how many)",
        reason="one piece's activations are in memory at a time; each piece is computed once more in backward"),
    Key(name="train_only", default=None, group=KeyGroup.OURS, outcome=_EXACT, target="requires_grad_(False) on all "
        "other parameters, before the model is sharded", takes=_PATTERNS, neutral=(None,), fields=("train_only",),
        sets=True,
        meaning="regular expressions of the names of the parameters that are trained, matched from a name's beginning; "
        "all others are frozen",
        reason="frozen before the units are planned; the optimizer leaves them as they are"),
    Key(name="trust_checkpoint", takes=BOOL, default=False, group=KeyGroup.OURS, outcome=_EXACT,
        target="load_checkpoint(trust=True) for the Trainer's load_path",
        meaning="unpickle entries of a checkpoint that are not plain data",
        reason="such a pickle can run any code; a warning lists the classes that it names"),
    Key(name="wrap_policy", default=None, group=KeyGroup.OURS, outcome=_EXACT, target="fully_shard on each of these "
        "modules", takes=_WRAP_POLICY, neutral=(None,), nested=WRAP_KEYS, fields=("wrap",), sets=True,
        meaning="which modules below the roots are units, instead of the model's fsdp_wrap_fn: by class "
        "(transformer_layer_cls_to_wrap: a list, auto for the model's _no_split_modules, or [] for none; "
        "wrap_embeddings, wrap_lm_output; moe_experts: a list, or auto for modules named as experts), or by size "
        "(min_num_params), as with FSDP1's policies",
        reason="each selected module is a unit; _fsdp_wrap on a module takes precedence"),
)
# fmt: on

KEYS: tuple[Key, ...] = tuple(
    replace(row, elsewhere=_IGNORED) if row.group == KeyGroup.FSDP1 and not row.elsewhere else row
    for row in (replace(row, group=row.group or KeyGroup.FSDP1) for row in _ROWS)
)
KEYS_BY_NAME: dict[str, Key] = {row.name: row for row in KEYS}
# Keys in the settings of a single module: arguments of FSDP1 and fully_shard, including three that are not model keys.
KEYS_OF_MODULES: dict[str, Key] = {
    row.name: row
    for row in (
        *(row for row in KEYS if row.of_modules is not None),
        Key(name="mesh", outcome=_EXACT, of_modules=_EXACT),
        Key(name="param_init_fn", outcome=_UNSUPPORTED, of_modules=_UNSUPPORTED),
        Key(name="device_id", outcome=_UNSUPPORTED, of_modules=_UNSUPPORTED),
    )
}
