"""TorchTitan up to v0.2.2: the tables of its TOML that shard, cast, recompute, save and compile.

Later releases have no TOML but a registry in Python. Meanings and defaults: v0.2.2 (``job_config.py``, the models'
``parallelize.py``); names of earlier releases are aliases. TorchTitan trains with FSDP2 already.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.compat.dialects.base import (
    Entry,
    Expression,
    Frame,
    MappingEdit,
    Part,
    Path,
    Reading,
    Run,
    Section,
    Wrap,
    WrapKind,
)
from composer_fsdp2.compat.dialects.rows import (
    BOOL,
    POSITIVE_INT,
    Gap,
    Row,
    Takes,
    as_it_is,
    deciding,
    finding_of,
    gaps,
    one_of,
    unknown_key,
)
from composer_fsdp2.config import ActivationCheckpointing, GradientSync, MeshSpec, ShardingConfig
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["ROWS", "TorchTitanDialect", "tables_of"]

TABLES = ("parallelism", "training", "activation_checkpoint", "checkpoint", "compile")

_EXACT, _APPROXIMATE, _UNNEEDED = Outcome.EXACT, Outcome.APPROXIMATE, Outcome.UNNEEDED
_UNSUPPORTED, _NEEDS_DECISION = Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# ---------------------------------------------------------------------------------------------------------------------
# The table

_NUMBER = Takes("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
_INT = Takes("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
_SHARD = Takes("a whole number from 1 on, or -1 for the rest", lambda value: value == -1 or POSITIVE_INT.fits(value))
_SELECTIVE = Takes(
    "'op', or a whole number from 1 on as a string",
    lambda value: isinstance(value, str) and (value == "op" or (value.isdecimal() and int(value) > 0)),
)
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"


def _belonging(only_with: str, *names: str, reason: str) -> tuple[Row, ...]:
    """Keys that say more about a feature, and nothing without it."""
    return tuple(
        Row(
            name=name,
            default=None,
            meaning=f"a detail of {only_with}",
            outcome=_UNSUPPORTED,
            target="",
            reason=reason,
            only_with=only_with,
        )
        for name in names
    )


ROWS: tuple[Row, ...] = (
    Row(
        name="parallelism.data_parallel_shard_degree",
        default=-1,
        meaning="over how many ranks a parameter is sharded; -1: all that are left",
        outcome=_EXACT,
        target="data_parallel_shard_degree",
        reason="the shard axis of the mesh",
        takes=_SHARD,
        part=Part.MESH,
        aliases=("training.data_parallel_shard_degree", "training.data_parallel_degree"),
    ),
    Row(
        name="parallelism.data_parallel_replicate_degree",
        default=1,
        meaning="how many replicas there are",
        outcome=_EXACT,
        target="data_parallel_replicate_degree",
        reason="the replica axis of the mesh; 1 is none",
        takes=POSITIVE_INT,
        part=Part.MESH,
        aliases=("training.data_parallel_replicate_degree",),
    ),
    Row(
        name="parallelism.fsdp_reshard_after_forward",
        default="default",
        meaning="whether parameters are freed between forward and backward; default: unless there is a pipeline",
        outcome=_EXACT,
        target="reshard_after_forward",
        reason="the same argument of fully_shard",
        takes=one_of("default", "always", "never"),
        part=Part.RESHARD,
    ),
    Row(
        name="parallelism.tensor_parallel_degree",
        default=1,
        meaning="tensor parallelism",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; parameters are sharded, layers are not",
        hint="tensor_parallel_degree = 1 and a larger data_parallel_shard_degree, if a layer fits one rank",
        takes=POSITIVE_INT,
        neutral=(1,),
        aliases=("training.tensor_parallel_degree",),
    ),
    *_belonging(
        "parallelism.tensor_parallel_degree",
        "parallelism.disable_loss_parallel",
        "parallelism.enable_async_tensor_parallel",
        reason="belongs to tensor parallelism",
    ),
    Row(
        name="parallelism.pipeline_parallel_degree",
        default=1,
        meaning="pipeline parallelism",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; each rank runs the whole model",
        hint="pipeline_parallel_degree = 1 and a larger data_parallel_shard_degree",
        takes=POSITIVE_INT,
        neutral=(1,),
        aliases=("experimental.pipeline_parallel_degree",),
    ),
    *_belonging(
        "parallelism.pipeline_parallel_degree",
        "parallelism.pipeline_parallel_split_points",
        "parallelism.module_fqns_per_model_part",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_schedule_csv",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        reason="belongs to pipeline parallelism",
    ),
    Row(
        name="parallelism.context_parallel_degree",
        default=1,
        meaning="context parallelism, whose ranks shard parameters as well",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; a whole sequence must fit one rank",
        hint="context_parallel_degree = 1, with full activation checkpointing or a shorter seq_len",
        takes=POSITIVE_INT,
        neutral=(1,),
        aliases=("experimental.context_parallel_degree",),
    ),
    *_belonging(
        "parallelism.context_parallel_degree",
        "parallelism.context_parallel_rotate_method",
        "parallelism.context_parallel_load_balancer",
        reason="belongs to context parallelism",
    ),
    Row(
        name="parallelism.expert_parallel_degree",
        default=1,
        meaning="expert parallelism; without experts in the model it does nothing",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; experts are sharded like all other parameters",
        hint="expert_parallel_degree = 1, which gathers all of a layer's experts",
        takes=POSITIVE_INT,
        neutral=(1,),
    ),
    *_belonging(
        "parallelism.expert_parallel_degree",
        "parallelism.expert_tensor_parallel_degree",
        "parallelism.expert_parallel_comm_backend",
        reason="belongs to expert parallelism",
    ),
    Row(
        name="parallelism.enable_compiled_autograd",
        default=False,
        meaning="compiling the backward",
        outcome=_UNSUPPORTED,
        target="",
        reason="composer_fsdp2 does not compile the backward",
        hint="set it to false: it changes no numbers",
        takes=BOOL,
        neutral=(False,),
        aliases=("experimental.enable_compiled_autograd",),
    ),
    Row(
        name="parallelism.enable_fsdp_symm_mem",
        default=False,
        meaning="symmetric memory for FSDP's collectives",
        outcome=_APPROXIMATE,
        target="",
        reason="torch has it later than 2.7 only, on the newest GPUs; without it collectives take longer",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="training.enable_cpu_offload",
        default=False,
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        outcome=_EXACT,
        target="CPUOffloadPolicy",
        reason="the same policy of fully_shard",
        takes=BOOL,
        neutral=(False,),
        part=Part.OFFLOAD,
        aliases=("experimental.enable_cpu_offload",),
    ),
    Row(
        name="training.mixed_precision_param",
        default="bfloat16",
        meaning="the dtype in which parameters are gathered and computed with",
        outcome=_EXACT,
        target="MixedPrecisionPolicy(param_dtype)",
        reason="the same argument of fully_shard",
        takes=one_of(*_DTYPES),
        part=Part.PRECISION,
    ),
    Row(
        name="training.mixed_precision_reduce",
        default="float32",
        meaning="the dtype in which gradients are reduced",
        outcome=_EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        reason="the same argument of fully_shard",
        takes=one_of("float32"),
        part=Part.PRECISION,
    ),
    Row(
        name="training.dtype",
        default="float32",
        meaning="the dtype of parameters, gradients and optimizer state",
        outcome=_APPROXIMATE,
        target="the dtype that the model is created in",
        reason="sharding keeps the dtype that parameters are created in",
        hint="create the model in bfloat16",
        takes=one_of(*_DTYPES),
        neutral=("float32",),
    ),
    Row(
        name="training.max_norm",
        default=1.0,
        meaning="clipping gradients by their norm",
        outcome=_APPROXIMATE,
        target="algorithms.gradient_clipping",
        reason="clipping stands outside of the sharding section",
        hint="in Composer: algorithms.gradient_clipping: {clipping_type: norm, clipping_threshold: max_norm}",
        takes=_NUMBER,
    ),
    Row(
        name="activation_checkpoint.mode",
        default="selective",
        meaning="which activations are recomputed",
        outcome=_EXACT,
        target="activation_checkpointing",
        reason="each block's activations are kept or recomputed, by torch's implementation without reentering",
        takes=one_of("none", "selective", "full", "memory_budget"),
        part=Part.CHECKPOINTING,
    ),
    Row(
        name="activation_checkpoint.selective_ac_option",
        default="2",
        meaning="under selective: every n-th block, or by operator",
        outcome=_APPROXIMATE,
        target="activation_checkpointing",
        reason="which blocks are recomputed is the model's activation_checkpointing_fn's choice",
        takes=_SELECTIVE,
        only_with="activation_checkpoint.mode = selective",
    ),
    Row(
        name="activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        default=["moe.router.gate"],
        meaning="which matrix products are recomputed by operator",
        outcome=_APPROXIMATE,
        target="",
        reason="whole blocks are recomputed, these products among them",
        only_with="activation_checkpoint.mode = selective",
    ),
    Row(
        name="activation_checkpoint.memory_budget",
        default=0.5,
        meaning="how much the compiler keeps",
        outcome=_UNSUPPORTED,
        target="",
        reason="belongs to activation_checkpoint.mode = memory_budget",
        takes=_NUMBER,
        only_with="activation_checkpoint.mode = memory_budget",
    ),
    Row(
        name="activation_checkpoint.visualize_memory_budget_pareto",
        default=False,
        meaning="a picture of memory budgets",
        outcome=_UNSUPPORTED,
        target="",
        reason="belongs to activation_checkpoint.mode = memory_budget",
        takes=BOOL,
        only_with="activation_checkpoint.mode = memory_budget",
    ),
    Row(
        name="activation_checkpoint.preserve_rng_state",
        default=False,
        meaning="whether dropout is the same when activations are recomputed",
        outcome=_EXACT,
        target="",
        reason="it always is here, which costs little",
        takes=BOOL,
        only_with="activation_checkpoint.mode = full",
    ),
    Row(
        name="activation_checkpoint.early_stop",
        default=False,
        meaning="ending recomputation with the last activation that is needed",
        outcome=_APPROXIMATE,
        target="",
        reason="torch's default, true, holds here: less computation, the same numbers",
        takes=BOOL,
        only_with="activation_checkpoint.mode = full",
    ),
    Row(
        name="activation_checkpoint.determinism_check",
        default="default",
        meaning="how recomputed activations are compared with the first ones",
        outcome=_APPROXIMATE,
        target="",
        reason="torch's default check holds here: it sees shapes, dtypes and devices",
        only_with="activation_checkpoint.mode = full",
        neutral=("default",),
    ),
    Row(
        name="activation_checkpoint.debug",
        default=False,
        meaning="recording what is recomputed",
        outcome=_UNNEEDED,
        target="",
        reason="an aid for debugging, no part of a run",
        takes=BOOL,
    ),
    Row(
        name="checkpoint.enable",
        default=False,
        meaning="saving checkpoints",
        outcome=_APPROXIMATE,
        target="save_folder of the Trainer",
        reason="where and how often is saved stands outside of the sharding section",
        hint="set save_folder and save_interval",
        takes=BOOL,
        neutral=(False,),
        part=Part.ASYNC_SAVE,
        aliases=("checkpoint.enable_checkpoint",),
    ),
    Row(
        name="checkpoint.async_mode",
        default="disabled",
        meaning="writing checkpoints in the background",
        outcome=_EXACT,
        target="async_save",
        reason="the checkpoint is staged and written while training goes on",
        takes=one_of("disabled", "async", "async_with_pinned_mem"),
        neutral=("disabled",),
        part=Part.ASYNC_SAVE,
        only_with="checkpoint.enable",
    ),
    Row(
        name="checkpoint.keep_latest_k",
        default=10,
        meaning="how many checkpoints are kept; 0: all",
        outcome=_APPROXIMATE,
        target="save_num_checkpoints_to_keep of the Trainer",
        reason="the same number, outside of the sharding section; all is -1 there",
        hint="set save_num_checkpoints_to_keep",
        takes=_INT,
        only_with="checkpoint.enable",
    ),
    Row(
        name="checkpoint.last_save_model_only",
        default=True,
        meaning="the last checkpoint without the optimizer",
        outcome=_APPROXIMATE,
        target="",
        reason="Composer's last checkpoint is like the others: the optimizer is in it",
        hint="a model alone is taken from it with checkpoint convert",
        takes=BOOL,
        neutral=(False,),
        only_with="checkpoint.enable",
    ),
    Row(
        name="checkpoint.last_save_in_hf",
        default=False,
        meaning="the last checkpoint in Hugging Face's format",
        outcome=_APPROXIMATE,
        target="checkpoint convert",
        reason="an export after training",
        hint="convert the last checkpoint, or use LLM Foundry's hf_checkpointer",
        takes=BOOL,
        neutral=(False,),
        only_with="checkpoint.enable",
    ),
    Row(
        name="checkpoint.export_dtype",
        default="float32",
        meaning="the dtype of the last checkpoint, if it is of the model alone",
        outcome=_APPROXIMATE,
        target="checkpoint convert",
        reason="an export after training",
        takes=one_of("float16", "bfloat16", "float32"),
        neutral=("float32",),
        only_with="checkpoint.enable",
    ),
    Row(
        name="compile.enable",
        default=False,
        meaning="compiling each block",
        outcome=_NEEDS_DECISION,
        target="compile_config of the Trainer",
        reason="TorchTitan compiles block by block, inside of units; Composer's compile_config takes the whole model",
        hint="compile the blocks where the model is made (block.compile()), or train without: the same up to rounding",
        takes=BOOL,
        neutral=(False,),
        aliases=("training.compile",),
    ),
    *_belonging("compile.enable", "compile.components", "compile.backend", reason="belongs to compile.enable"),
    Row(
        name="quantize.linear.float8.enable_fsdp_float8_all_gather",
        default=False,
        meaning="gathering parameters in float8",
        outcome=_UNSUPPORTED,
        target="",
        reason="composer_fsdp2 gathers parameters in the dtype of mixed_precision_param",
        hint="set it to false: more communication, finer values",
        takes=BOOL,
        neutral=(False,),
        aliases=("float8.enable_fsdp_float8_all_gather", "quantize.linear.fp8.enable_fsdp_float8_all_gather"),
    ),
    Row(
        name="fault_tolerance.enable",
        default=False,
        meaning="replicas that come and go while training goes on",
        outcome=_UNSUPPORTED,
        target="",
        reason="composer_fsdp2's mesh is of one size for the whole run",
        hint="data_parallel_replicate_degree gives a fixed number of replicas",
        takes=BOOL,
        neutral=(False,),
    ),
)
_BY_NAME = {row.name: row for row in ROWS}
_NAMES = {name: row for row in ROWS for name in (row.name, *row.aliases)}
_UNKNOWN = "no release of TorchTitan up to v0.2.2 knows this key; it refuses such a file"

_UNSAID = (
    (
        "(unsaid) units",
        _APPROXIMATE,
        "TorchTitan's units are the token embedding, each block, and the last norm with the output; here the model's "
        "own hooks choose, and what they leave is the root's",
        "let the model's fsdp_wrap_fn choose the blocks and the token embedding",
    ),
    (
        "(unsaid) autocast",
        _APPROXIMATE,
        "TorchTitan's FSDP casts parameters and the inputs of units, and uses no torch.autocast",
        "precision: fp32 in Composer leaves casting to FSDP2; amp_bf16 casts by operator as well",
    ),
    (
        "(unsaid) scale of the loss",
        _APPROXIMATE,
        "TorchTitan sums the loss over tokens and divides by those of the whole batch, and FSDP2 divides no gradients; "
        "in Composer they are averaged over ranks and microbatches",
        "accumulate_train_batch_on_tokens weighs microbatches by their tokens",
    ),
    (
        "(unsaid) state dict",
        _APPROXIMATE,
        "TorchTitan's checkpoints are sharded, in the format of torch.distributed.checkpoint",
        "state_dict_type: sharded",
    ),
)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class TorchTitanDialect:
    """See the module."""

    name = "torchtitan"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        """One for the whole file: [parallelism], or else the first of the tables that there is."""
        present = [name for name in TABLES if isinstance(values.get(name), Mapping)]
        return [(present[0],)] if present and _is_torchtitan(values) else []

    def read(self, section: Section) -> Reading:
        file = _File.of(section)
        findings = (*_findings(file), *_unsaid(file))
        return Reading(
            run=None if any(_is_bad(file, row) for row in ROWS) else _run(file),
            findings=findings,
            parts=deciding({file.short(key): row.part for key, row in file.rows()}, findings),
        )

    def express(self, run: Run) -> Expression:
        """As tables of TOML; an entry's key is its table and its name (``tables_of`` parts them)."""
        return Expression(entries=tuple(_entries(run)), findings=(*_mesh_gaps(run), *gaps(_GAPS, run)))

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Names of earlier releases become those of v0.2.2; nothing else, for TorchTitan's words are FSDP2's."""
        file = _File.of(section)
        gone: dict[str, dict[str, list[tuple[str, Any]]]] = {}
        come: dict[str, list[tuple[str, Any]]] = {}
        said = {key for key, _ in file.rows()}
        for key, row in file.rows():
            if key == row.name:
                continue
            old, _, old_name = key.rpartition(".")
            new, _, new_name = row.name.rpartition(".")
            is_first = row.name not in said
            said.add(row.name)
            gone.setdefault(old, {})[old_name] = [(new_name, file.said[key])] if is_first and old == new else []
            if is_first and old != new:
                come.setdefault(new, []).append((new_name, file.said[key]))
        return [
            MappingEdit(path=tuple(table.split(".")), replacements=gone.get(table, {}), additions=come.get(table, ()))
            for table in dict.fromkeys((*gone, *come))
        ]

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """Nothing becomes something else, since TorchTitan's words are FSDP2's."""
        return tuple(as_it_is(reading.findings, "TorchTitan", _UNKNOWN))

    def frame(self, section: Section) -> Frame:
        """Its table; another system's section is written to a file of its own."""
        return Frame(entry=section.path, inner=section.path)


def tables_of(expression: Expression) -> dict[Path, dict[str, Any]]:
    """For ``toml_edit.edit_tables``."""
    tables: dict[Path, dict[str, Any]] = {}
    for entry in expression.entries:
        table, _, name = entry.key.rpartition(".")
        tables.setdefault(tuple(table.split(".")), {})[name] = entry.value
    return tables


def _is_torchtitan(values: Mapping[str, Any]) -> bool:
    """By keys that no other system has; ``training`` and ``checkpoint`` alone are common names."""
    return any(_at(values, name) is not None for name in _OWN_WORDS)


_OWN_WORDS = (
    "model.flavor",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.local_batch_size",
    "activation_checkpoint.mode",
    *(name for name in _NAMES if name.startswith("parallelism.")),
)


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What a file says, by table and name.

    Args:
        own: The table that is the section; its keys are named without it in the report.
    """

    said: Mapping[str, Any]
    own: str

    @classmethod
    def of(cls, section: Section) -> "_File":
        own = ".".join(map(str, section.path))
        values = dict(section.around)
        said = {f"{own}.{key}": value for key, value in section.said.items()}
        for name in _NAMES:
            table = name.rpartition(".")[0]
            if (
                table != own
                and isinstance(_at(values, table), Mapping)
                and name.rpartition(".")[2] in _at(values, table)
            ):
                said[name] = _at(values, name)
        for table in TABLES:  # misspelt keys of the other tables; their many other keys are none of ours
            others = values.get(table)
            for key, value in others.items() if table != own and isinstance(others, Mapping) else ():
                name = f"{table}.{key}"
                if name not in said and name not in _OTHERS and _near(name):
                    said[name] = value
        return cls(said=said, own=own)

    def __getitem__(self, name: str) -> Any:
        row = _BY_NAME[name]
        return next((self.said[each] for each in (name, *row.aliases) if each in self.said), row.default)

    def rows(self) -> Iterator[tuple[str, Row]]:
        yield from ((key, _NAMES[key]) for key in self.said if key in _NAMES)

    def is_on(self, condition: str) -> bool:
        name, _, value = condition.partition(" = ")
        return self[name] == value if value else not _BY_NAME[name].is_neutral(self[name])

    def short(self, name: str) -> str:
        return name.removeprefix(f"{self.own}.")


# Keys of the five tables that have to do with neither sharding nor memory, in any release up to v0.2.2.
_OTHERS = frozenset(
    f"{table}.{name}"
    for table, names in {
        "training": "dataset dataset_path local_batch_size global_batch_size batch_size seq_len steps gc_freq gc_debug "
        "seed deterministic debug_moe_force_load_balance dataloader warmup_steps",
        "checkpoint": "folder interval interval_type initial_load_path initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized load_step exclude_from_loading enable_first_step_checkpoint load_only "
        "create_seed_checkpoint enable_ft_dataloader_checkpoints model_weights_only",
    }.items()
    for name in names.split()
)


def _near(name: str) -> list[str]:
    return difflib.get_close_matches(name, list(_NAMES), n=1, cutoff=0.85)


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _is_bad(file: _File, row: Row) -> bool:
    is_said = any(name in file.said for name in (row.name, *row.aliases))
    is_read = not row.only_with or file.is_on(row.only_with)
    return is_said and is_read and not row.takes.fits(file[row.name])


def _findings(file: _File) -> Iterator[Finding]:
    for key, value in file.said.items():
        row = _NAMES.get(key)
        if row is None:
            yield _foreign(file, key, value)
            continue
        if key != row.name and row.name in file.said:
            reason = f"{row.name} says it, too, and goes first"
            yield Finding(key=file.short(key), value=value, outcome=_UNNEEDED, target="", reason=reason)
            continue
        yield _fate(file, row, file.short(key), value)


def _foreign(file: _File, key: str, value: Any) -> Finding:
    if key in _OTHERS:
        reason = "it has to do with neither sharding nor memory"
        return Finding(key=file.short(key), value=value, outcome=_UNNEEDED, target="", reason=reason)
    table, _, name = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in _BY_NAME if each.rpartition(".")[0] == table]
    return replace(unknown_key(name, value, known, _UNKNOWN), key=file.short(key))


def _fate(file: _File, row: Row, key: str, value: Any) -> Finding:
    is_read = not row.only_with or file.is_on(row.only_with)
    finding = finding_of(row, key, value, is_read=is_read)
    if is_read and row.takes.fits(value) and row.name in _DECIDED:
        return _DECIDED[row.name](file, finding)
    return finding


# Keys whose default asks for something, so that a file without them says something all the same.
_TELLING_DEFAULTS = (
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.max_norm",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
)


def _unsaid(file: _File) -> Iterator[Finding]:
    said = {row.name for _, row in file.rows()}
    for name in _TELLING_DEFAULTS:
        row = _BY_NAME[name]
        if name not in said and (not row.only_with or file.is_on(row.only_with)):
            yield _fate(file, row, f"(unsaid) {name}", row.default)
    for key, outcome, reason, hint in _UNSAID:
        yield Finding(key=key, value="", outcome=outcome, target="", reason=reason, hint=hint)


def _shard_degree(file: _File, finding: Finding) -> Finding:
    if finding.value != 1:
        return finding
    return replace(
        finding,
        outcome=_APPROXIMATE,
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision; here FSDP2 replicates "
        "whole parameters and casts them",
        hint="leave it: the numbers differ by what is cast",
    )


def _reshard(file: _File, finding: Finding) -> Finding:
    if finding.value == "default" and file.is_on("parallelism.pipeline_parallel_degree"):
        return replace(finding, target="reshard_after_forward: false", reason="not freed, as there is a pipeline")
    if finding.value == "always":
        return replace(
            finding,
            outcome=_APPROXIMATE,
            reason="all units but the last norm and the output, which stay in the root and gathered here",
        )
    return finding


def _mode(file: _File, finding: Finding) -> Finding:
    if finding.value == "none":
        return replace(finding, outcome=_UNNEEDED, target="", reason="activations are kept")
    if finding.value == "memory_budget":
        return replace(
            finding,
            outcome=_NEEDS_DECISION,
            target="",
            reason="the compiler chooses what is recomputed, which needs torch.compile",
            hint="full recomputes more and needs less memory, none the other way round; the numbers stay the same",
        )
    if finding.value == "selective" and file["activation_checkpoint.selective_ac_option"] != "1":
        return replace(
            finding,
            outcome=_APPROXIMATE,
            reason="all blocks are recomputed instead of some: less memory, more computation, the same numbers",
            hint="the model's activation_checkpointing_fn may choose every n-th block",
        )
    return finding


def _option(file: _File, finding: Finding) -> Finding:
    return replace(finding, outcome=_EXACT, reason="all blocks") if finding.value == "1" else finding


def _async_mode(file: _File, finding: Finding) -> Finding:
    if finding.value == "async_with_pinned_mem":
        return replace(finding, outcome=_APPROXIMATE, reason="written in the background, without a process of its own")
    return finding


_DECIDED = {
    "parallelism.data_parallel_shard_degree": _shard_degree,
    "parallelism.fsdp_reshard_after_forward": _reshard,
    "activation_checkpoint.mode": _mode,
    "activation_checkpoint.selective_ac_option": _option,
    "checkpoint.async_mode": _async_mode,
}


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(file: _File) -> Run:
    reshard = file["parallelism.fsdp_reshard_after_forward"]
    mode = file["activation_checkpoint.mode"]
    has_pipeline = file.is_on("parallelism.pipeline_parallel_degree")
    replicas = file["parallelism.data_parallel_replicate_degree"]
    shards = file["parallelism.data_parallel_shard_degree"]
    return Run(
        config=ShardingConfig(
            # DDP is what TorchTitan does with replicas of one rank each.
            mesh=MeshSpec(shard=shards, replicate=replicas if replicas > 1 else None),
            reshard_after_forward=reshard == "always" or (reshard == "default" and not has_pipeline),
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=_DTYPES[file["training.mixed_precision_param"]],
                reduce_dtype=_DTYPES[file["training.mixed_precision_reduce"]],
                cast_forward_inputs=True,
            ),
            cpu_offload=file["training.enable_cpu_offload"],
            activation_checkpointing=_recomputing(mode),
        ),
        wrap=Wrap(
            kind=WrapKind.CLASSES, classes=("TransformerBlock",), others=(("embeddings", True), ("output", True))
        ),
        state_dict_type="sharded",
        extras=_extras(file),
    )


def _recomputing(mode: str) -> ActivationCheckpointing:
    return (
        ActivationCheckpointing(checkpoint=True, reentrant=False)
        if mode in ("selective", "full")
        else ActivationCheckpointing()
    )


def _extras(file: _File) -> dict[str, Any]:
    extras = {name: file[key] for key, name in _EXTRAS.items() if file.is_on(key)}
    extras["max_grad_norm"] = file["training.max_norm"]
    extras["async_save"] = file.is_on("checkpoint.enable") and file.is_on("checkpoint.async_mode")
    option = file["activation_checkpoint.selective_ac_option"]
    if file["activation_checkpoint.mode"] == "selective" and option != "1":
        extras["selective_checkpointing"] = option
    return extras


_EXTRAS = {
    "parallelism.context_parallel_degree": "context_parallel",
    "parallelism.expert_parallel_degree": "expert_parallel",
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel",
    "compile.enable": "compile",
}


# ---------------------------------------------------------------------------------------------------------------------
# As a target


def _entries(run: Run) -> Iterator[Entry]:
    config, policy = run.config, run.config.mixed_precision
    if not config.mesh.is_grouped and config.mesh.replicate != -1:
        yield _entry("parallelism.data_parallel_replicate_degree", config.mesh.replicate or 1)
        yield _entry("parallelism.data_parallel_shard_degree", config.mesh.shard)
    has_pipeline = "pipeline_parallel" in run.extras
    freed = "always" if has_pipeline else "default"
    yield _entry("parallelism.fsdp_reshard_after_forward", freed if config.reshard_after_forward else "never")
    for key, name in _EXTRAS.items():
        if name in run.extras:
            yield _entry(key, run.extras[name])
    yield _entry("training.mixed_precision_param", "bfloat16" if policy.param_dtype in _LOW else "float32")
    yield _entry("training.mixed_precision_reduce", "float32")
    yield _entry("training.enable_cpu_offload", config.cpu_offload)
    if "max_grad_norm" in run.extras:
        yield _entry("training.max_norm", run.extras["max_grad_norm"])
    selective = run.extras.get("selective_checkpointing")
    mode = "none" if not config.activation_checkpointing.checkpoint else "selective" if selective else "full"
    yield _entry("activation_checkpoint.mode", mode)
    if mode == "selective":
        yield _entry("activation_checkpoint.selective_ac_option", str(selective))
    if run.extras.get("async_save"):
        yield _entry("checkpoint.enable", True)
        yield _entry("checkpoint.async_mode", "async")


_LOW = (torch.bfloat16, torch.float16)


def _entry(name: str, value: Any) -> Entry:
    return Entry(part=_BY_NAME[name].part, key=name, value=value)


def _mesh_gaps(run: Run) -> Iterator[Finding]:
    mesh = run.config.mesh
    if mesh.is_grouped:
        outcome, target = _UNSUPPORTED, ""
        reason, hint = "TorchTitan has one mesh of all ranks, no groups that do not meet", "choose two degrees"
    elif mesh.replicate == -1:
        outcome, target = _NEEDS_DECISION, "parallelism.data_parallel_replicate_degree"
        reason = "TorchTitan leaves the shards open, never the replicas"
        hint = f"set it to the number of ranks divided by {mesh.shard}, and data_parallel_shard_degree to {mesh.shard}"
    elif mesh.shard == 1:
        outcome, target = _APPROXIMATE, "parallelism.data_parallel_shard_degree = 1"
        reason = "without shards TorchTitan uses DDP, and torch.autocast for mixed precision"
        hint = ""
    else:
        return
    yield Finding(key="(mesh)", value=str(mesh), outcome=outcome, target=target, reason=reason, hint=hint)


def _if(value: Any, condition: bool) -> Any:
    return value if condition else None


def _is_of_type(config: ShardingConfig, name: str, *known: torch.dtype) -> bool:
    return getattr(config.mixed_precision, name) in known


_GAPS: tuple[Gap, ...] = (
    Gap(
        key="(units)",
        said=lambda run: _if(
            ", ".join(run.wrap.classes) or run.wrap.kind.value, run.wrap.classes != ("TransformerBlock",)
        ),
        outcome=_APPROXIMATE,
        target="parallelize.py of the model",
        reason="TorchTitan's models choose their units in code: the token embedding, each block, the last norm with "
        "the output; the numbers do not depend on it",
    ),
    Gap(
        key="(reshard_after_forward)",
        said=lambda run: _if(run.config.reshard_after_forward, not isinstance(run.config.reshard_after_forward, bool)),
        outcome=_UNSUPPORTED,
        target="parallelism.fsdp_reshard_after_forward",
        reason="TorchTitan frees parameters wholly or not at all, and does not keep them in groups of {value} ranks",
        hint="default needs less memory, never less communication",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            str(run.config.mixed_precision.param_dtype),
            not _is_of_type(run.config, "param_dtype", torch.float32, torch.bfloat16),
        ),
        outcome=_NEEDS_DECISION,
        target="training.mixed_precision_param",
        reason="TorchTitan computes in bfloat16 or float32",
        hint="bfloat16 has a wider range than float16 and needs no scaling of gradients; float32 is exact",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            str(run.config.mixed_precision.reduce_dtype),
            not _is_of_type(run.config, "reduce_dtype", torch.float32),
        ),
        outcome=_APPROXIMATE,
        target="training.mixed_precision_reduce",
        reason="TorchTitan reduces in float32 only: finer, and more communication",
    ),
    Gap(
        key="(precision)",
        said=lambda run: run.config.mixed_precision.output_dtype,
        outcome=_UNSUPPORTED,
        reason="TorchTitan has no key for the dtype of outputs",
    ),
    Gap(
        key="(autocast)",
        said=lambda run: _if(run.config.precision, run.config.precision != "fp32"),
        outcome=_APPROXIMATE,
        target="training.mixed_precision_param",
        reason="TorchTitan's FSDP casts parameters and inputs of units, and uses no torch.autocast",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at roots only", not run.config.mixed_precision.cast_forward_inputs),
        outcome=_APPROXIMATE,
        reason="TorchTitan up to v0.2.2 casts the inputs of each unit",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if(
            "not at the root", not run.config.cast_root_inputs and not run.config.mixed_precision.cast_forward_inputs
        ),
        outcome=_APPROXIMATE,
        reason="TorchTitan casts the root's inputs, too; token ids are not cast anyway",
    ),
    Gap(
        key="(buffers)",
        said=lambda run: run.config.buffer_dtype,
        outcome=_APPROXIMATE,
        reason="TorchTitan leaves buffers in the dtype that they have",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(
            "reentrant",
            run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.reentrant,
        ),
        outcome=_APPROXIMATE,
        target="activation_checkpoint.mode",
        reason="TorchTitan recomputes without reentering: the same numbers",
    ),
    Gap(
        key="(activation offloading)",
        said=lambda run: _if(True, run.config.activation_checkpointing.cpu_offload),
        outcome=_UNSUPPORTED,
        reason="TorchTitan does not keep activations in CPU memory",
    ),
    Gap(
        key="(Transformer Engine)",
        said=lambda run: _if(True, run.config.activation_checkpointing.transformer_engine),
        outcome=_UNSUPPORTED,
        reason="TorchTitan recomputes with torch's implementation only",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch != type(run.config.prefetch)()),
        outcome=_APPROXIMATE,
        reason="TorchTitan leaves the order of gathers to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(gradient_sync)",
        said=lambda run: _if(
            run.config.accumulation.gradient_sync.value,
            run.config.accumulation.gradient_sync is not GradientSync.EVERY,
        ),
        outcome=_APPROXIMATE,
        reason="TorchTitan reduces gradients in every microbatch: less memory, more communication",
    ),
    Gap(
        key="(reshard_after_backward)",
        said=lambda run: _if("no", not run.config.accumulation.reshard_after_backward),
        outcome=_APPROXIMATE,
        reason="TorchTitan frees parameters after each backward: less memory, more communication",
    ),
    Gap(
        key="(collective_guard)",
        said=lambda run: run.config.collective_guard,
        outcome=_APPROXIMATE,
        target="comm.train_timeout_seconds",
        reason="TorchTitan does not compare where ranks stand, but ends a run that hangs, after a time",
        hint="comm.train_timeout_seconds is 100 unless it is set",
    ),
    Gap(
        key="(sync_module_states)",
        said=lambda run: _if(str(run.config.sync_module_states), run.config.sync_module_states is not False),
        outcome=_APPROXIMATE,
        reason="TorchTitan creates the model's values sharded, on each rank its part, and broadcasts none",
    ),
    Gap(
        key="(ignored_modules)",
        said=lambda run: run.config.ignored_modules or None,
        outcome=_UNSUPPORTED,
        reason="TorchTitan shards all modules",
    ),
    Gap(
        key="(keep_low_precision_grads)",
        said=lambda run: _if(True, run.config.keep_low_precision_grads),
        outcome=_APPROXIMATE,
        target="training.dtype",
        reason="TorchTitan keeps gradients in the dtype of the parameters",
        hint="training.dtype = 'bfloat16' stores parameters and gradients in it",
    ),
    Gap(
        key="(state_dict_type)",
        said=lambda run: _if(run.state_dict_type, run.state_dict_type != "sharded"),
        outcome=_APPROXIMATE,
        target="checkpoint",
        reason="TorchTitan's checkpoints are sharded",
        hint="last_save_in_hf = true writes the last one whole, for Hugging Face",
    ),
    Gap(
        key="(gradient clipping)",
        said=lambda run: _if("off", "max_grad_norm" not in run.extras),
        outcome=_APPROXIMATE,
        target="training.max_norm",
        reason="TorchTitan clips gradients to a norm of 1 unless told otherwise",
        hint="set max_norm to the run's own, or to a large number for none",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=_UNSUPPORTED,
        reason="TorchTitan trains all parameters",
        hint="freeze them in the model's code",
    ),
    Gap(
        key="(expert patch)",
        said=lambda run: run.extras.get("expert_patch"),
        outcome=_UNNEEDED,
        reason="TorchTitan runs all experts of a layer in one grouped product, so that ranks do not part",
    ),
    Gap(
        key="(tiled MLP)",
        said=lambda run: run.extras.get("tiled_mlp"),
        outcome=_UNSUPPORTED,
        reason="TorchTitan computes MLPs in one piece",
    ),
    Gap(
        key="(model only)",
        said=lambda run: run.extras.get("save_only_model"),
        outcome=_APPROXIMATE,
        target="checkpoint.last_save_model_only",
        reason="TorchTitan leaves the optimizer out of the last checkpoint only",
    ),
    Gap(
        key="(verbose)",
        said=lambda run: _if(True, run.config.verbose),
        outcome=_UNNEEDED,
        reason="TorchTitan has its own words for its log",
    ),
    Gap(
        key="(strict)",
        said=lambda run: _if(False, not run.config.strict),
        outcome=_UNNEEDED,
        reason="composer_fsdp2's own word",
    ),
)
