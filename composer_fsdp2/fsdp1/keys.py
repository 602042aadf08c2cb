"""THE TABLE: one row per key that an ``fsdp_config`` may hold, and what becomes of it under FSDP2.

The translation, the documentation and the tests read this table; a new key is a new row here and, if it decides
something, a line in ``translate.py``. Meanings and defaults: Composer 0.32.1 (``composer/utils/parallelism.py``,
``composer/distributed/dist_strategy.py``), and Composer's history for the legacy keys.
"""

import difflib
import enum
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.findings import Outcome

__all__ = ["KEYS", "KEYS_BY_NAME", "Key", "Kind", "Origin", "nearest_key"]


class Origin(enum.Enum):
    """Who gave a key its meaning."""

    FSDP1 = "Composer's FSDPConfig"
    FSDP2 = "Composer's FSDP2Config, or fully_shard itself"
    LEGACY = "a Composer release before 0.32"
    OURS = "composer_fsdp2"


class Kind(enum.Enum):
    """What values a key takes; checked before anything is translated."""

    BOOL = "true or false"
    INT = "a whole number"
    OPTIONAL_INT = "a whole number or null"
    BOOL_OR_INT = "true, false or a whole number"
    STR = "a string"
    OPTIONAL_STR = "a string or null"
    OPTIONAL_SECONDS = "a number of seconds, or null"
    ANY = "any value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row: what a key meant, and its usual fate. A value can have another fate; the finding says so."""

    name: str
    default: Any
    meaning: str
    outcome: Outcome
    target: str
    reason: str
    kind: Kind = Kind.ANY
    origin: Origin = Origin.FSDP1


_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED = (
    Outcome.EXACT,
    Outcome.APPROXIMATE,
    Outcome.UNNEEDED,
    Outcome.UNSUPPORTED,
)
_KEPT = "Composer reads it from the same configuration object, as before"

KEYS: tuple[Key, ...] = (
    Key(
        name="activation_checkpointing",
        kind=Kind.BOOL,
        default=False,
        meaning="recompute the activations of the modules that the model's hooks choose",
        outcome=_EXACT,
        target="checkpoint_wrapper, applied before fully_shard",
        reason="the same wrapper inside the unit, as FSDP1 had it: FSDP(AC(block))",
    ),
    Key(
        name="activation_checkpointing_reentrant",
        kind=Kind.BOOL,
        default=True,
        meaning="which of torch's two implementations recomputes",
        outcome=_EXACT,
        target="CheckpointImpl.REENTRANT or NO_REENTRANT",
        reason="both implementations run inside a fully_shard unit",
    ),
    Key(
        name="activation_cpu_offload",
        kind=Kind.BOOL,
        default=False,
        meaning="keep the chosen modules' saved activations in host memory",
        outcome=_EXACT,
        target="offload_wrapper, applied before fully_shard",
        reason="the same wrapper, around the checkpointing one",
    ),
    Key(
        name="auto_wrap",
        kind=Kind.BOOL,
        default=True,
        meaning="only gates load_monolith_rank0_only; wrapping itself never read it",
        outcome=_UNNEEDED,
        target="",
        reason=f"it decides nothing about sharding; {_KEPT}",
    ),
    Key(
        name="backward_prefetch",
        kind=Kind.STR,
        default="BACKWARD_POST",
        meaning="when backward gathers the next unit: NONE, BACKWARD_PRE or BACKWARD_POST",
        outcome=_APPROXIMATE,
        target="set_modules_to_backward_prefetch; BACKWARD_POST as BACKWARD_PRE",
        reason="FSDP2 gathers before the gradient computation (PRE) by itself; NONE is an explicit empty choice; "
        "nothing gathers after it (POST): one more unit in memory at the peak",
    ),
    Key(
        name="backward_prefetch_limit",
        kind=Kind.INT,
        default=1,
        meaning="how many units ahead backward gathers",
        outcome=_APPROXIMATE,
        target="set_modules_to_backward_prefetch, lists of that length",
        reason="the lists follow the order of registration; FSDP1 followed the order that it saw run",
    ),
    Key(
        name="cpu_offload",
        kind=Kind.ANY,
        default=False,
        meaning="keep parameters, gradients and optimizer state in host memory",
        outcome=_EXACT,
        target="CPUOffloadPolicy",
        reason="works here; Composer refused it under FSDP1 and dropped it under its own FSDP2",
    ),
    Key(
        name="data_parallel_shard_degree",
        kind=Kind.INT,
        default=-1,
        meaning="over how many ranks a parameter is sharded; -1 for what the world size leaves",
        outcome=_EXACT,
        target="the mesh's shard axis",
        reason="the same device mesh",
    ),
    Key(
        name="data_parallel_replicate_degree",
        kind=Kind.OPTIONAL_INT,
        default=None,
        meaning="how many replicas of the sharded model there are",
        outcome=_EXACT,
        target="the mesh's replicate axis (HSDP)",
        reason="the same device mesh",
    ),
    Key(
        name="forward_prefetch",
        kind=Kind.BOOL,
        default=False,
        meaning="gather the next unit explicitly during forward",
        outcome=_APPROXIMATE,
        target="set_modules_to_forward_prefetch",
        reason="the lists follow the order of registration; FSDP1 followed the order that it saw run",
    ),
    Key(
        name="forward_prefetch_limit",
        kind=Kind.INT,
        default=1,
        meaning="how many units ahead forward_prefetch gathers",
        outcome=_APPROXIMATE,
        target="set_modules_to_forward_prefetch, lists of that length",
        reason="the lists follow the order of registration; FSDP1 followed the order that it saw run",
    ),
    Key(
        name="ignored_modules",
        default=None,
        meaning="modules whose parameters and buffers FSDP leaves alone",
        outcome=_EXACT,
        target="ignored_params, for everything below them",
        reason="whole and untouched on every rank, gradients not averaged; clipping and gradient scaling include them",
    ),
    Key(
        name="keep_low_precision_grads",
        kind=Kind.BOOL,
        default=False,
        meaning="leave gradients in the dtype they were reduced in",
        outcome=_EXACT,
        target="parameters whose own dtype is reduce_dtype",
        reason="fully_shard casts gradients to the parameter's own dtype: where that is not the dtype they are reduced "
        "in, the plan raises and names the parameter",
    ),
    Key(
        name="limit_all_gathers",
        kind=Kind.BOOL,
        default=True,
        meaning="wait on the CPU so that too many gathers do not pile up in GPU memory",
        outcome=_UNNEEDED,
        target="",
        reason="FSDP2's memory is freed without that wait",
    ),
    Key(
        name="load_monolith_rank0_only",
        kind=Kind.BOOL,
        default=False,
        meaning="read a monolithic checkpoint on rank 0 and send it to the others",
        outcome=_EXACT,
        target="load_checkpoint, once the model is sharded",
        reason="each rank reads its own part of the file: no rank holds the whole model, and nothing is sent",
    ),
    Key(
        name="load_planner",
        default=None,
        meaning="the DCP planner for loading",
        outcome=_EXACT,
        target="",
        reason=_KEPT,
    ),
    Key(
        name="mixed_precision",
        default="DEFAULT",
        meaning="DEFAULT, PURE, FULL, or a dict of param_dtype, reduce_dtype, buffer_dtype",
        outcome=_EXACT,
        target="MixedPrecisionPolicy, and casts of the buffers",
        reason="same dtypes; inputs are cast at roots only, batch norms stay in fp32, as FSDP1 did",
    ),
    Key(
        name="process_group",
        default=None,
        meaning="which ranks share a unit, instead of the mesh: self, node, local_rank_across_nodes, setK, modK, "
        "ranks, a ProcessGroup, or a pair of these",
        outcome=_EXACT,
        target="a device mesh over each group of ranks",
        reason="gradients are averaged within a group only, as under FSDP1",
    ),
    Key(
        name="save_planner",
        default=None,
        meaning="the DCP planner for saving",
        outcome=_EXACT,
        target="",
        reason=_KEPT,
    ),
    Key(
        name="sharded_ckpt_prefix_dir",
        kind=Kind.OPTIONAL_STR,
        default="ep{epoch}-ba{batch}",
        meaning="the folder of each sharded checkpoint",
        outcome=_EXACT,
        target="",
        reason=_KEPT,
    ),
    Key(
        name="sharding_strategy",
        kind=Kind.STR,
        default="FULL_SHARD",
        meaning="FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2",
        outcome=_EXACT,
        target="the mesh and reshard_after_forward",
        reason="FULL_SHARD frees parameters after forward, SHARD_GRAD_OP keeps them, HYBRID is a 2-D mesh, NO_SHARD a "
        "2-D mesh with one rank on its shard axis",
    ),
    Key(
        name="state_dict_type",
        kind=Kind.OPTIONAL_STR,
        default="full",
        meaning="what a checkpoint is: full (one file) or sharded (a DCP folder)",
        outcome=_EXACT,
        target="",
        reason=f"{_KEPT}; FSDP1's default, full, stays",
    ),
    Key(
        name="sync_module_states",
        kind=Kind.BOOL,
        default=False,
        meaning="every rank begins with rank 0's parameters and buffers",
        outcome=_EXACT,
        target="a broadcast per unit before it is sharded",
        reason="parameters and buffers, non-persistent ones included, go out from rank 0",
    ),
    Key(
        name="te_checkpoint_wrapper",
        kind=Kind.BOOL,
        default=False,
        meaning="Transformer Engine's checkpointing, under amp_fp8 only",
        outcome=_UNNEEDED,
        target="",
        reason="FSDP1 read it under precision amp_fp8 only; there it is the same wrapper, of Transformer Engine",
    ),
    Key(
        name="te_shard_fp8_weight",
        kind=Kind.BOOL,
        default=False,
        meaning="shard Transformer Engine's fp8 weights, under amp_fp8 only",
        outcome=_UNNEEDED,
        target="",
        reason="FSDP1 read it under precision amp_fp8 only; there it is unsupported",
    ),
    Key(
        name="use_orig_params",
        kind=Kind.BOOL,
        default=True,
        meaning="show the original parameters (true) or one flat parameter per unit (false)",
        outcome=_UNNEEDED,
        target="",
        reason="fully_shard always keeps the parameters apart; what false forbade (parameter groups, subsets) works",
    ),
    Key(
        name="verbose",
        kind=Kind.BOOL,
        default=False,
        meaning="log what was done",
        outcome=_EXACT,
        target="",
        reason="logs the translation and the plan",
    ),
    # FSDP2's own words.
    Key(
        name="reshard_after_forward",
        kind=Kind.BOOL_OR_INT,
        default=True,
        origin=Origin.FSDP2,
        meaning="free a unit's parameters after forward: true, false, or the size of the group to keep them in",
        outcome=_EXACT,
        target="reshard_after_forward",
        reason="the same argument; a root keeps its parameters until backward, as under FSDP1",
    ),
    Key(
        name="device_mesh",
        default=None,
        origin=Origin.FSDP2,
        meaning="a DeviceMesh, 1-D or 2-D",
        outcome=_EXACT,
        target="the mesh",
        reason="the same ranks on the same axes",
    ),
    Key(
        name="mp_policy",
        default=None,
        origin=Origin.FSDP2,
        meaning="a MixedPrecisionPolicy",
        outcome=_EXACT,
        target="mp_policy",
        reason="the same argument",
    ),
    Key(
        name="offload_policy",
        default=None,
        origin=Origin.FSDP2,
        meaning="an OffloadPolicy",
        outcome=_EXACT,
        target="offload_policy",
        reason="the same argument; memory is pinned only where there is an accelerator",
    ),
    # What older Composer releases accepted.
    Key(
        name="min_params",
        default=None,
        origin=Origin.LEGACY,
        meaning="wrap modules above this size (until 0.15)",
        outcome=_UNNEEDED,
        target="",
        reason="Composer has ignored it since 0.16",
    ),
    Key(
        name="flatten_parameters",
        default=None,
        origin=Origin.LEGACY,
        meaning="flatten a unit's parameters (until 0.17)",
        outcome=_UNNEEDED,
        target="",
        reason="Composer has ignored it since; FSDP2 has no flat parameter",
    ),
    Key(
        name="load_fsdp_monolith_rank0_only",
        default=None,
        origin=Origin.LEGACY,
        meaning="the old name of load_monolith_rank0_only",
        outcome=_UNNEEDED,
        target="",
        reason="Composer ignores it since 0.24; say load_monolith_rank0_only to have the effect",
    ),
    # Ours.
    Key(
        name="async_save",
        kind=Kind.BOOL,
        default=False,
        origin=Origin.OURS,
        meaning="training goes on while a Trainer's checkpoint is written from a copy in host memory",
        outcome=_EXACT,
        target="a background thread with a gloo group of its own",
        reason="read by the Trainer's checkpoint saver; needs host memory for one more shard, pinned beside a GPU",
    ),
    Key(
        name="collective_guard",
        kind=Kind.OPTIONAL_SECONDS,
        default=None,
        origin=Origin.OURS,
        meaning="for how many seconds ranks wait for each other before each collective, where they compare what they "
        "are about to do",
        outcome=_EXACT,
        target="the connections of the votes: local sockets, and one gloo group of the nodes' first ranks",
        reason="ranks that run different modules raise on all of them and name the place, instead of hanging; each "
        "collective costs a small one more",
    ),
    Key(
        name="fsdp1_metric_names",
        kind=Kind.BOOL,
        default=False,
        origin=Origin.OURS,
        meaning="OptimizerMonitor and ActivationMonitor log under the names that they had in FSDP1's runs",
        outcome=_EXACT,
        target="_fsdp_wrapped_module and _checkpoint_wrapped_module in logged names",
        reason="for dashboards that compare old runs with new ones; the values are the whole parameters' either way",
    ),
    Key(
        name="gradient_sync",
        kind=Kind.STR,
        default="every",
        origin=Origin.OURS,
        meaning="in which microbatches of a batch gradients are communicated: every, last, or defer_replica (over "
        "replicas in the last one only)",
        outcome=_EXACT,
        target="set_requires_gradient_sync, set_requires_all_reduce",
        reason="every is what FSDP1 did under Composer; last keeps whole gradients in memory, defer_replica does not",
    ),
    Key(
        name="reshard_after_backward",
        kind=Kind.BOOL,
        default=True,
        origin=Origin.OURS,
        meaning="free a unit's parameters after each microbatch's backward (true), or after the last one's (false)",
        outcome=_EXACT,
        target="set_reshard_after_backward",
        reason="true is what FSDP1 did; false gathers less often and keeps the gathered parameters in memory",
    ),
    Key(
        name="strict",
        kind=Kind.BOOL,
        default=True,
        origin=Origin.OURS,
        meaning="refuse what cannot be carried over (true), or warn and go on (false)",
        outcome=_EXACT,
        target="",
        reason="true unless said otherwise",
    ),
    Key(
        name="trust_checkpoint",
        kind=Kind.BOOL,
        default=False,
        origin=Origin.OURS,
        meaning="load entries of a checkpoint that are more than plain data, by running their pickle",
        outcome=_EXACT,
        target="load_checkpoint(trust=True) for the Trainer's load_path",
        reason="such a pickle can run anything; each class that it names is in a warning",
    ),
)

KEYS_BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}


def nearest_key(name: str, known: tuple[str, ...] = tuple(KEYS_BY_NAME)) -> str | None:
    """The known key that ``name`` most likely stands for, or None if none is near."""
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return matches[0] if matches else None
