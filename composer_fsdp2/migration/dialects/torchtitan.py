"""TorchTitan up to v0.2.2: the tables of its TOML that shard, cast, recompute, save and compile.

Later releases have no TOML but a registry in Python. Meanings and defaults: v0.2.2 (``job_config.py``, the models'
``parallelize.py``); names of earlier releases are aliases. Each name was looked up in the sources of v0.1.0
(``config_manager.py``), v0.2.0, v0.2.1 and v0.2.2 (``config/job_config.py``). TorchTitan trains with FSDP2 already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import (
    BOOL,
    INT,
    POSITIVE_INT,
    Aspect,
    Row,
    finding_of,
    idle,
    one_of,
    takes_if,
    unknown_key,
)
from composer_fsdp2.config.sharding import LOW_PRECISION, ActivationCheckpointing, MixedPrecision, ShardingConfig
from composer_fsdp2.config.text import nearest_names
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    MappingEdit,
    Question,
    Reading,
    Section,
    Setting,
    deciding,
    implicit,
)
from composer_fsdp2.migration.paths import Path, merged, nested
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

_TABLES = ("parallelism", "training", "activation_checkpoint", "checkpoint", "compile")
_DTYPES = ("float32", "bfloat16")


# ---------------------------------------------------------------------------------------------------------------------
# Where the value decides


def _shard_degree(finding: Finding, file: File) -> Finding:
    if finding.value != 1 or file.is_on("parallelism.context_parallel_degree"):
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision; here FSDP2 replicates "
        "full parameters and casts them",
        hint="leave it: the numbers differ by what is cast",
    )


def _reshard(finding: Finding, file: File) -> Finding:
    if finding.value == "default" and file.is_on("parallelism.pipeline_parallel_degree"):
        return replace(finding, target="reshard_after_forward: false", reason="not freed, as there is a pipeline")
    if finding.value == "always":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all units but the last norm, which is the root's here and stays gathered",
        )
    return finding


def _mode(finding: Finding, file: File) -> Finding:
    if finding.value == "none":
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    if finding.value == "memory_budget":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="the compiler chose what is recomputed; here each block is: less memory, more computation, the same "
            "numbers",
            hint="none keeps all activations instead",
        )
    if _is_partly_selective(file):
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all blocks are recomputed instead of some: less memory, more computation, the same numbers",
            hint="the model's activation_checkpointing_fn may choose every n-th block, if no policy names classes",
        )
    return finding


def _is_partly_selective(file: File) -> bool:
    return bool(file["activation_checkpoint.mode"] == "selective" and file[_OPTION] != "1")


def _option(finding: Finding, file: File) -> Finding:
    return replace(finding, outcome=Outcome.EXACT, reason="all blocks") if finding.value == "1" else finding


def _compile(finding: Finding, file: File) -> Finding:
    if file["compile.components"] == ["loss"]:
        return replace(finding, reason="only the loss was compiled, which computes the same numbers uncompiled")
    return finding


def _converters(finding: Finding, file: File) -> Finding:
    names = file["model.converters"]
    names = [names] if isinstance(names, str) else names
    if not finding.asks or any("float8" in name or "mx" in name for name in names):
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="what a converter makes of the model is the model's, and no part of sharding",
        hint="convert the model where it is made",
    )


def _async_mode(finding: Finding, file: File) -> Finding:
    if finding.value == "async_with_pinned_mem":
        return replace(
            finding, outcome=Outcome.APPROXIMATE, reason="written in the background, without a process of its own"
        )
    return finding


# ---------------------------------------------------------------------------------------------------------------------
# The table

_NUMBER = takes_if("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
_SHARD = takes_if("an integer from 1 on, or -1 for the rest", lambda value: value == -1 or POSITIVE_INT.fits(value))
_SELECTIVE = takes_if(
    "'op', or an integer from 1 on as a string",
    lambda value: isinstance(value, str) and (value == "op" or (value.isdecimal() and int(value) > 0)),
)
_CONVERTERS = takes_if(
    "a list of names",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value)),
)
_OPTION = "activation_checkpoint.selective_ac_option"
_RECOMPUTES = "activation_checkpoint.mode = selective or full"
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"


def _belonging(only_with: str, *names: str, reason: str, outcome: Outcome = Outcome.UNSUPPORTED) -> tuple[Row, ...]:
    """Keys that say more about a feature, and nothing without it."""
    return tuple(
        Row(
            name=name,
            meaning=f"a detail of {only_with}",
            outcome=outcome,
            reason=reason,
            only_with=only_with,
        )
        for name in names
    )


# fmt: off
_ROWS: tuple[Row, ...] = (
    Row(name="parallelism.data_parallel_shard_degree", tells_default=True, default=-1, outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", takes=_SHARD, aspect=Aspect.MESH,
        aliases=("training.data_parallel_shard_degree", "training.data_parallel_degree"), decide=_shard_degree,
        meaning="over how many ranks a parameter is sharded; -1: all that are left",
        reason="the shard axis of the mesh"),
    Row(name="parallelism.data_parallel_replicate_degree", default=1, outcome=Outcome.EXACT,
        target="data_parallel_replicate_degree", takes=POSITIVE_INT, aspect=Aspect.MESH,
        aliases=("training.data_parallel_replicate_degree",), meaning="how many replicas there are",
        reason="the replica axis of the mesh; 1 is none"),
    Row(name="parallelism.fsdp_reshard_after_forward", tells_default=True, default="default", outcome=Outcome.EXACT,
        target="reshard_after_forward", takes=one_of("default", "always", "never"), aspect=Aspect.RESHARD,
        decide=_reshard,
        meaning="whether parameters are freed between forward and backward; default: unless there is a pipeline",
        reason="the same argument of fully_shard"),
    Row(name="parallelism.tensor_parallel_degree", default=1, outcome=Outcome.NEEDS_DECISION, takes=POSITIVE_INT,
        capability="tensor parallelism", target="tp_config",
        neutral=(1,), aliases=("training.tensor_parallel_degree",), meaning="tensor parallelism",
        reason="which layers are split, and how, is a layer plan, which TorchTitan has in the code of its models",
        hint="hand the plan to Composer's Trainer in parallelism_config['tp'], or set tensor_parallel_degree = 1"),
    *_belonging("parallelism.tensor_parallel_degree", "parallelism.disable_loss_parallel",
        "parallelism.enable_async_tensor_parallel", reason="belongs to tensor parallelism"),
    Row(name="parallelism.pipeline_parallel_degree", default=1, outcome=Outcome.UNSUPPORTED, takes=POSITIVE_INT,
        capability="pipeline parallelism",
        neutral=(1,), aliases=("experimental.pipeline_parallel_degree",), meaning="pipeline parallelism",
        reason=f"{_ONE_MESH}; each rank runs the whole model",
        hint="pipeline_parallel_degree = 1 and a larger data_parallel_shard_degree"),
    *_belonging("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_split_points",
        "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers", "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
        "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_expert_parallel_overlap",
        reason="belongs to pipeline parallelism"),
    Row(name="parallelism.context_parallel_degree", default=1, outcome=Outcome.APPROXIMATE, takes=POSITIVE_INT,
        capability="context parallelism", target="context_parallel_degree", aspect=Aspect.CONTEXT,
        neutral=(1,), aliases=("experimental.context_parallel_degree",),
        meaning="context parallelism, whose ranks shard parameters as well",
        reason="keys and values go around a ring there; here attention exchanges heads for sequence (Ulysses): the "
        "same numbers up to rounding, and the degree must divide the number of heads"),
    *_belonging("parallelism.context_parallel_degree", "parallelism.context_parallel_rotate_method",
        "parallelism.context_parallel_load_balancer", outcome=Outcome.APPROXIMATE,
        reason="belongs to context parallelism by a ring, which is even without it by heads"),
    Row(name="parallelism.expert_parallel_degree", default=1, outcome=Outcome.UNSUPPORTED, takes=POSITIVE_INT,
        capability="expert parallelism",
        neutral=(1,), meaning="expert parallelism; without experts in the model it does nothing",
        reason=f"{_ONE_MESH}; experts are sharded like all other parameters",
        hint="expert_parallel_degree = 1, which gathers all of a layer's experts"),
    *_belonging("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree",
        "parallelism.expert_parallel_comm_backend", reason="belongs to expert parallelism"),
    Row(name="parallelism.enable_compiled_autograd", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL,
        neutral=(False,), aliases=("experimental.enable_compiled_autograd",),
        meaning="compiling the backward; up to v0.2.0",
        reason="composer_fsdp2 does not compile the backward: slower, the same numbers up to rounding"),
    Row(name="training.enable_cpu_offload", default=False, outcome=Outcome.EXACT, target="CPUOffloadPolicy", takes=BOOL,
        neutral=(False,), aspect=Aspect.OFFLOAD, aliases=("experimental.enable_cpu_offload",),
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        reason="the same policy of fully_shard"),
    Row(name="training.mixed_precision_param", tells_default=True, default="bfloat16", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(param_dtype)", takes=one_of(*_DTYPES), aspect=Aspect.PRECISION,
        meaning="the dtype in which parameters are gathered and computed with",
        reason="the same argument of fully_shard"),
    Row(name="training.mixed_precision_reduce", tells_default=True, default="float32", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)", takes=one_of("float32"), aspect=Aspect.PRECISION,
        meaning="the dtype in which gradients are reduced", reason="the same argument of fully_shard"),
    Row(name="training.dtype", default="float32", outcome=Outcome.APPROXIMATE,
        target="the dtype that the model is created in", takes=one_of(*_DTYPES), neutral=("float32",),
        meaning="the dtype of parameters, gradients and optimizer state",
        reason="sharding keeps the dtype that parameters are created in", hint="create the model in bfloat16"),
    Row(name="training.max_norm", tells_default=True, default=1.0, outcome=Outcome.APPROXIMATE,
        target="algorithms.gradient_clipping", capability="gradient clipping",
        takes=_NUMBER, meaning="clipping gradients by their norm",
        reason="clipping stands outside of the sharding section",
        hint="in Composer: algorithms.gradient_clipping: {clipping_type: norm, clipping_threshold: max_norm}"),
    Row(name="activation_checkpoint.mode", tells_default=True, default="selective", outcome=Outcome.EXACT,
        target="activation_checkpointing", takes=one_of("none", "selective", "full", "memory_budget"),
        aspect=Aspect.CHECKPOINTING, decide=_mode, meaning="which activations are recomputed",
        reason="each block's activations are kept or recomputed, by torch's implementation without reentering"),
    Row(name="activation_checkpoint.selective_ac_option", tells_default=True, default="2", outcome=Outcome.APPROXIMATE,
        target="activation_checkpointing", takes=_SELECTIVE, only_with="activation_checkpoint.mode = selective",
        capability="selective checkpointing",
        decide=_option, meaning="under selective: every n-th block, or by operator",
        reason="which blocks are recomputed is the model's activation_checkpointing_fn's choice"),
    Row(name="activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", default=["moe.router.gate"],
        outcome=Outcome.APPROXIMATE, only_with="activation_checkpoint.mode = selective",
        meaning="which matrix products are recomputed by operator",
        reason="whole blocks are recomputed, these products among them"),
    Row(name="activation_checkpoint.memory_budget", default=0.5, outcome=Outcome.APPROXIMATE, takes=_NUMBER,
        only_with="activation_checkpoint.mode = memory_budget", meaning="how much the compiler keeps; from v0.2.0 on",
        reason="a detail of activation_checkpoint.mode = memory_budget: here nothing inside of a block is kept"),
    Row(name="activation_checkpoint.visualize_memory_budget_pareto", default=False, outcome=Outcome.UNNEEDED,
        takes=BOOL, only_with="activation_checkpoint.mode = memory_budget", meaning="a picture of memory budgets",
        reason="an aid for choosing memory_budget, no part of a run"),
    Row(name="activation_checkpoint.preserve_rng_state", default=True, outcome=Outcome.EXACT, takes=BOOL,
        only_with=_RECOMPUTES,
        meaning="whether dropout is the same when activations are recomputed; false up to v0.2.1, true in v0.2.2",
        reason="it always is here, which costs little"),
    Row(name="activation_checkpoint.early_stop", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL,
        only_with=_RECOMPUTES,
        meaning="ending recomputation with the last activation that is needed; from v0.2.0 on",
        reason="torch's default, true, holds here: less computation, the same numbers"),
    Row(name="activation_checkpoint.determinism_check", default="default", outcome=Outcome.APPROXIMATE,
        only_with=_RECOMPUTES, neutral=("default",),
        meaning="how recomputed activations are compared with the first ones; from v0.2.1 on",
        reason="torch's default check holds here: it sees shapes, dtypes and devices"),
    Row(name="activation_checkpoint.debug", default=False, outcome=Outcome.UNNEEDED, takes=BOOL,
        meaning="recording what is recomputed", reason="an aid for debugging, no part of a run"),
    Row(name="checkpoint.enable", default=False, outcome=Outcome.APPROXIMATE, target="save_folder of the Trainer",
        takes=BOOL, neutral=(False,), aspect=Aspect.ASYNC_SAVE, aliases=("checkpoint.enable_checkpoint",),
        meaning="saving checkpoints", reason="where and how often is saved stands outside of the sharding section",
        hint="set save_folder and save_interval"),
    Row(name="checkpoint.async_mode", default="disabled", outcome=Outcome.EXACT, target="async_save",
        takes=one_of("disabled", "async", "async_with_pinned_mem"), neutral=("disabled",), aspect=Aspect.ASYNC_SAVE,
        only_with="checkpoint.enable", decide=_async_mode, meaning="writing checkpoints in the background",
        reason="the checkpoint is staged and written while training goes on"),
    Row(name="checkpoint.keep_latest_k", default=10, outcome=Outcome.APPROXIMATE,
        target="save_num_checkpoints_to_keep of the Trainer", takes=INT, only_with="checkpoint.enable",
        meaning="how many checkpoints are kept; 0: all",
        reason="the same number, outside of the sharding section; all is -1 there",
        hint="set save_num_checkpoints_to_keep"),
    Row(name="checkpoint.last_save_model_only", default=True, outcome=Outcome.APPROXIMATE, takes=BOOL, neutral=(False,),
        only_with="checkpoint.enable",
        aliases=("checkpoint.last_save_model_weights_only", "checkpoint.model_weights_only"),
        meaning="the last checkpoint without the optimizer; v0.1.0 has the first alias, and false as its default",
        reason="Composer's last checkpoint is like the others: the optimizer is in it",
        hint="a model alone is taken from it with checkpoint convert"),
    Row(name="checkpoint.initial_load_model_only", default=True, outcome=Outcome.APPROXIMATE, takes=BOOL,
        target="load_weights_only of the Trainer", only_with="checkpoint.enable",
        aliases=("checkpoint.initial_load_model_weights_only",),
        meaning="whether initial_load_path gives the model alone; v0.1.0 has the alias",
        reason="what a run begins with stands outside of the sharding section", hint="set load_path"),
    Row(name="checkpoint.last_save_in_hf", default=False, outcome=Outcome.APPROXIMATE, target="checkpoint convert",
        takes=BOOL, neutral=(False,), only_with="checkpoint.enable",
        meaning="the last checkpoint in Hugging Face's format", reason="an export after training",
        hint="convert the last checkpoint, or use LLM Foundry's hf_checkpointer"),
    Row(name="checkpoint.export_dtype", default="float32", outcome=Outcome.APPROXIMATE, target="checkpoint convert",
        takes=one_of("float16", "bfloat16", "float32"), neutral=("float32",), only_with="checkpoint.enable",
        meaning="the dtype of the last checkpoint, if it is of the model alone", reason="an export after training"),
    Row(name="compile.enable", default=False, outcome=Outcome.APPROXIMATE, target="compile_config of the Trainer",
        takes=BOOL, neutral=(False,), aliases=("training.compile",), capability="compile", decide=_compile,
        meaning="compiling each block, and the loss",
        reason="TorchTitan compiles block by block, inside of units; without it training is slower, and the numbers "
        "are the same up to rounding",
        hint="compile the blocks where the model is made (block.compile()); Composer's compile_config takes the whole "
        "model"),
    Row(name="compile.components", default=["model", "loss"], outcome=Outcome.APPROXIMATE, only_with="compile.enable",
        meaning="whether the model, the loss or both are compiled; from v0.2.0 on",
        reason="a detail of compile.enable"),
    Row(name="compile.backend", default="inductor", outcome=Outcome.APPROXIMATE, only_with="compile.enable",
        meaning="the backend of torch.compile; from v0.2.0 on", reason="a detail of compile.enable"),
    Row(name="model.converters", default=[], outcome=Outcome.UNSUPPORTED, takes=_CONVERTERS, neutral=([], ""),
        decide=_converters, meaning="what is made of the model before it is sharded, such as float8 layers",
        reason="the linear layers compute in float8 or MX, and composer_fsdp2 converts no model",
        hint="convert the model with torchao where it is made, or remove the converter: the run computes in bfloat16"),
    Row(name="quantize.linear.float8.enable_fsdp_float8_all_gather", default=False, outcome=Outcome.UNSUPPORTED,
        takes=BOOL, neutral=(False,), only_with="model.converters",
        aliases=("float8.enable_fsdp_float8_all_gather", "quantize.linear.fp8.enable_fsdp_float8_all_gather"),
        meaning="gathering parameters in float8",
        reason="composer_fsdp2 gathers parameters in the dtype of mixed_precision_param",
        hint="set it to false: more communication, finer values"),
    Row(name="fault_tolerance.enable", default=False, outcome=Outcome.UNSUPPORTED, takes=BOOL, neutral=(False,),
        meaning="replicas that come and go while training goes on",
        reason="composer_fsdp2's mesh is of one size for the whole run",
        hint="data_parallel_replicate_degree gives a fixed number of replicas"),
)
# fmt: on
_BY_NAME = {row.name: row for row in _ROWS}
_NAMES = {name: row for row in _ROWS for name in (row.name, *row.aliases)}

_UNKNOWN = (
    "no release of TorchTitan from v0.1.0 to v0.2.2 knows this key: v0.1.0 passes over it, the others refuse such a "
    "file"
)
# fmt: off
_IMPLICIT = (
    implicit("autocast", Outcome.APPROXIMATE,
        "TorchTitan's FSDP casts parameters and the inputs of units, and uses no torch.autocast",
        "precision: fp32 in Composer leaves casting to FSDP2; amp_bf16 casts by operator as well"),
    implicit("scale of the loss", Outcome.APPROXIMATE,
        "v0.2.2 sums the loss over tokens and divides by those of the whole batch; here, as in earlier releases, it is "
        "averaged over ranks and microbatches",
        "accumulate_train_batch_on_tokens weighs microbatches by their tokens"),
    implicit("state dict", Outcome.APPROXIMATE,
        "TorchTitan's checkpoints are sharded, in the format of torch.distributed.checkpoint",
        "state_dict_type: sharded"),
)
# fmt: on

# ---------------------------------------------------------------------------------------------------------------------
# Which modules are units: the models' parallelize.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """A model's units, as a run asks for them, and in words."""

    wrap: Wrap
    told: str


_CLASSES = ("TransformerBlock",)
_USUAL_WRAP = Wrap(kind=WrapKind.CLASSES, classes=_CLASSES, embeddings=True, output=True)
_USUAL_UNITS = (
    "the token embedding, each block, the last norm together with the output (which default leaves gathered; here it "
    "is freed like the others), and the rest (in v0.1.0 each block, and the rest)"
)
_OWN_UNITS = {
    "flux": Units(
        wrap=Wrap(kind=WrapKind.CLASSES, classes=("DoubleStreamBlock", "SingleStreamBlock")),
        told="each block, the four layers before them, the last one, and the rest; the four and the last one stay with "
        "the rest here",
    ),
    "llama3-siglip2": Units(
        wrap=replace(_USUAL_WRAP, classes=(*_CLASSES, "TransformerLayer")),
        told=f"each layer of the encoder, {_USUAL_UNITS}",
    ),
    "transformers_modeling_backend": Units(
        wrap=replace(_USUAL_WRAP, classes=()), told=f"{_USUAL_UNITS}; blocks are the layers of transformers' model"
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# What a file says

_OWN_WORDS = (
    "model.flavor",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.local_batch_size",
    "activation_checkpoint.mode",
    *(name for name in _NAMES if name.startswith("parallelism.")),
)
# Keys of the five tables that have to do with neither sharding nor memory, in any release up to v0.2.2.
_OTHERS = frozenset(
    f"{table}.{name}"
    for table, names in {
        "training": "dataset dataset_path local_batch_size global_batch_size batch_size seq_len steps gc_freq gc_debug "
        "seed deterministic debug_moe_force_load_balance dataloader warmup_steps",
        "checkpoint": "folder interval interval_type initial_load_path initial_load_in_hf "
        "initial_load_in_hf_quantized load_step exclude_from_loading enable_first_step_checkpoint load_only "
        "create_seed_checkpoint enable_ft_dataloader_checkpoints",
    }.items()
    for name in names.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What a file says, by table and name.

    Args:
        own: The table that is the section; its keys are named without it in the report.
        model: The name of the model, which has its own units.
        extension: A module with keys of its own; "" if the file names none.
    """

    given: Mapping[str, Any]
    own: str
    model: str
    extension: str

    @classmethod
    def of(cls, section: Section) -> File:
        own = ".".join(map(str, section.path))
        given = {f"{own}.{key}": value for key, value in section.given.items()}
        for name in _NAMES:
            table, _, key = name.rpartition(".")
            others = _at(section.around, table)
            if table != own and isinstance(others, Mapping) and key in others:
                given[name] = others[key]
        for table in _TABLES:  # misspelt keys of the other tables; their other keys have nothing to do with sharding
            others = section.around.get(table)
            if others is not None and not isinstance(others, Mapping):
                given[table] = others
            for key, value in others.items() if table != own and isinstance(others, Mapping) else ():
                name = f"{table}.{key}"
                if name not in given and name not in _OTHERS and _is_near(name):
                    given[name] = value
        extensions = ("job.custom_config_module", "experimental.custom_args_module")
        return cls(
            given=given,
            own=own,
            model=str(_at(section.around, "model.name") or ""),
            extension=next((str(name) for key in extensions if (name := _at(section.around, key))), ""),
        )

    def __getitem__(self, name: str) -> Any:
        row = _BY_NAME[name]
        return next((self.given[each] for each in (name, *row.aliases) if each in self.given), row.default)

    def rows(self) -> Iterator[tuple[str, Row]]:
        yield from ((key, _NAMES[key]) for key in self.given if key in _NAMES)

    def is_on(self, condition: str) -> bool:
        name, _, values = condition.partition(" = ")
        return self[name] in values.split(" or ") if values else not _BY_NAME[name].is_neutral(self[name])

    def is_read(self, row: Row) -> bool:
        return not row.only_with or self.is_on(row.only_with)

    def short(self, name: str) -> str:
        return name.removeprefix(f"{self.own}.")


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _is_near(name: str) -> bool:
    return bool(nearest_names(name, _NAMES, 1, likeness=0.85))


def _is_bad(file: File, row: Row) -> bool:
    is_given = any(name in file.given for name in (row.name, *row.aliases))
    return is_given and file.is_read(row) and not row.takes.fits(file[row.name])


def _findings(file: File) -> Iterator[Finding]:
    for key, value in file.given.items():
        row = _NAMES.get(key)
        if key in _TABLES:
            usual = Finding(
                key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="it is a table of TorchTitan's"
            )
            yield replace(usual, hint="write its keys below it, or remove it")
        elif row is None:
            yield _foreign(file, key, value)
        elif key != row.name and row.name in file.given:
            yield idle(row.usual(file.short(key), value), f"{row.name} says it, too, and takes precedence")
        else:
            yield _finding(file, row, file.short(key), value)
    given = {row.name for _, row in file.rows()}
    for row in _ROWS:
        if row.tells_default and row.name not in given and file.is_read(row):
            yield replace(_finding(file, row, row.name, row.default), origin=Origin.IMPLICIT)
    yield _units(file)
    yield from _IMPLICIT


def _units(file: File) -> Finding:
    own = _OWN_UNITS.get(file.model)
    return implicit(
        "units",
        Outcome.APPROXIMATE,
        f"TorchTitan's units stand in its code: {_USUAL_UNITS if own is None else own.told}; the numbers do not depend "
        "on which modules are units",
    )


def _foreign(file: File, key: str, value: Any) -> Finding:
    table, _, name = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in (*_NAMES, *_OTHERS) if each.rpartition(".")[0] == table]
    hint = f"{file.extension}, which the file names, may know it" if file.extension else "remove it"
    finding = replace(unknown_key(name, value, known, _UNKNOWN, hint), key=file.short(key))
    reason = "it has to do with neither sharding nor memory"
    return replace(idle(finding, reason), known=True) if key in _OTHERS else finding


def _finding(file: File, row: Row, key: str, value: Any) -> Finding:
    is_read = file.is_read(row)
    finding = finding_of(row, key, value, is_read=is_read)
    decides = row.decide is not None and is_read and row.takes.fits(value)
    return row.decide(finding, file) if decides else finding  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(file: File) -> RunConfig:
    reshard, mode = file["parallelism.fsdp_reshard_after_forward"], file["activation_checkpoint.mode"]
    option = file["activation_checkpoint.selective_ac_option"]
    has_pipeline = file.is_on("parallelism.pipeline_parallel_degree")
    replicas, shards = (file[f"parallelism.data_parallel_{axis}_degree"] for axis in ("replicate", "shard"))
    context = file["parallelism.context_parallel_degree"]
    wrap = _USUAL_WRAP if file.model not in _OWN_UNITS else _OWN_UNITS[file.model].wrap
    recomputed = ActivationCheckpointing(checkpoint=True, classes=wrap.classes, reentrant=False)
    return RunConfig(
        config=ShardingConfig(
            # DDP is what TorchTitan does with replicas of one rank each.
            mesh=MeshSpec.of_degrees(
                shard=shards if shards == -1 else shards * context, replicate=replicas if replicas > 1 else None
            ),
            context_parallel_degree=context,
            reshard_after_forward=reshard == "always" or (reshard == "default" and not has_pipeline),
            mixed_precision=MixedPrecision(
                param_dtype=file["training.mixed_precision_param"],
                reduce_dtype=file["training.mixed_precision_reduce"],
                cast_forward_inputs=True,
            ),
            cpu_offload=file["training.enable_cpu_offload"],
            activation_checkpointing=recomputed if mode != "none" else ActivationCheckpointing(),
            wrap=wrap,
        ),
        state_dict_type="sharded",
        async_save=file.is_on("checkpoint.enable") and file.is_on("checkpoint.async_mode"),
        max_grad_norm=file["training.max_norm"],
        selective_checkpointing=option if mode == "selective" and option != "1" else None,
        compile=file["compile.enable"],
        **{kind: file[f"parallelism.{kind}_degree"] for kind in _PARALLELISMS},
    )


_PARALLELISMS = ("expert_parallel", "tensor_parallel", "pipeline_parallel")


# ---------------------------------------------------------------------------------------------------------------------
# A run in TorchTitan's words


_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome


def _is_without_shards(run: RunConfig) -> bool:
    mesh = run.config.mesh
    return not mesh.is_grouped and mesh.replicate_degree != -1 and mesh.shard_degree == 1


def _shards(run: RunConfig) -> int:
    """Of a context axis's ranks, which shard parameters as well, one; 0 where its degree does not divide the shards."""
    shards, context = run.config.mesh.shard_degree, run.context_parallel
    return -1 if shards == -1 else 0 if shards % context else shards // context


def _casts_no_inputs(run: RunConfig) -> bool:
    mixed_precision = run.config.mixed_precision
    return not mixed_precision.cast_root_inputs and not mixed_precision.cast_forward_inputs


# fmt: off
_LACKS: tuple[Lack, ...] = (
    Lack(asked="mesh", when=lambda run: run.config.mesh.is_grouped, outcome=_UNSUPPORTED,
        reason="TorchTitan has one mesh of all ranks, no groups that do not meet", hint="choose two degrees"),
    Lack(asked="mesh", when=lambda run: not run.config.mesh.is_grouped and run.config.mesh.replicate_degree == -1,
        outcome=_NEEDS_DECISION, target="parallelism.data_parallel_replicate_degree",
        reason="TorchTitan leaves the shards open, never the replicas",
        hint="set it to the number of ranks divided by {shard_degree}, and data_parallel_shard_degree to "
        "{shard_degree}"),
    Lack(asked="mesh", when=_is_without_shards, outcome=_APPROXIMATE,
        target="parallelism.data_parallel_shard_degree = 1",
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision"),
    Lack(asked="context parallelism", when=lambda run: not run.config.mesh.is_grouped and _shards(run) == 0,
        outcome=_NEEDS_DECISION, target="parallelism.data_parallel_shard_degree",
        reason="TorchTitan shards parameters over the ranks that share a sequence, and {value} does not divide the "
        "{shard_degree} shards", hint="choose a degree that does"),
    Lack(asked="context parallelism", when=lambda run: not run.config.mesh.is_grouped and _shards(run) != 0,
        outcome=_APPROXIMATE, target="parallelism.context_parallel_degree",
        reason="TorchTitan sends keys and values around a ring: the same numbers up to rounding"),
    Lack(asked="units", when=lambda run: run.wrap.classes != _CLASSES,
        outcome=_APPROXIMATE, target="parallelize.py of the model",
        reason="TorchTitan's models choose their units in code: the token embedding, each block, the last norm with "
        "the output; the numbers do not depend on it"),
    Lack(asked="reshard_after_forward", outcome=_UNSUPPORTED, target="parallelism.fsdp_reshard_after_forward",
        reason="TorchTitan frees parameters everywhere or nowhere, and does not keep them in groups of {value} ranks",
        hint="default needs less memory, never less communication"),
    Lack(asked="param_dtype", when=lambda run: run.config.mixed_precision.param_dtype not in _DTYPES,
        outcome=_NEEDS_DECISION, target="training.mixed_precision_param",
        reason="TorchTitan computes in bfloat16 or float32",
        hint="bfloat16 has a wider range than float16 and needs no scaling of gradients; float32 is exact"),
    Lack(asked="reduce_dtype", when=lambda run: run.config.mixed_precision.reduce_dtype != "float32",
        outcome=_APPROXIMATE, target="training.mixed_precision_reduce",
        reason="TorchTitan reduces in float32 only: finer, and more communication"),
    Lack(asked="dtype of outputs", outcome=_UNSUPPORTED, reason="TorchTitan has no key for the dtype of outputs"),
    Lack(asked="autocast", when=lambda run: run.precision != "fp32",
        outcome=_APPROXIMATE, target="training.mixed_precision_param",
        reason="TorchTitan's FSDP casts parameters and inputs of units, and uses no torch.autocast"),
    Lack(asked="casting of inputs", when=lambda run: not run.config.mixed_precision.cast_forward_inputs,
        outcome=_APPROXIMATE,
        reason="TorchTitan up to v0.2.2 casts the inputs of each unit"),
    Lack(asked="casting of the root's inputs", when=_casts_no_inputs, outcome=_APPROXIMATE,
        reason="TorchTitan casts the root's inputs, too; token ids are not cast anyway"),
    Lack(asked="buffer_dtype", outcome=_APPROXIMATE, reason="TorchTitan leaves buffers in the dtype that they have"),
    Lack(asked="recomputed modules", when=lambda run: run.config.activation_checkpointing.classes not in ((), _CLASSES),
        outcome=_APPROXIMATE, target="activation_checkpoint.mode",
        reason="TorchTitan recomputes its blocks: the same numbers, another memory"),
    Lack(asked="reentrant checkpointing", outcome=_APPROXIMATE, target="activation_checkpoint.mode",
        reason="TorchTitan recomputes without reentering: the same numbers"),
    Lack(asked="activation offloading", outcome=_UNSUPPORTED,
        reason="TorchTitan does not keep activations in CPU memory"),
    Lack(asked="Transformer Engine", outcome=_UNSUPPORTED,
        reason="TorchTitan recomputes with torch's implementation only"),
    *(Lack(asked=f"prefetch in {phase}", outcome=_APPROXIMATE, reason="TorchTitan leaves the order of gathers to "
        "FSDP2; the numbers do not depend on it") for phase in ("forward", "backward")),
    Lack(asked="gradient_sync", outcome=_APPROXIMATE,
        reason="TorchTitan reduces gradients in every microbatch: less memory, more communication"),
    Lack(asked="reshard_after_backward", outcome=_APPROXIMATE,
        reason="TorchTitan frees parameters after each backward: less memory, more communication"),
    Lack(asked="idle experts", outcome=_UNNEEDED,
        reason="TorchTitan runs all experts of a layer in one grouped product, so that ranks do not diverge"),
    Lack(asked="split experts", outcome=_NEEDS_DECISION, target="parallelism.expert_parallel_degree",
        reason="TorchTitan splits experts of its own models, along axes that it takes from those of the mesh",
        hint="parallelism.expert_parallel_degree = {value}, where the model has it"),
    Lack(asked="idle towers", outcome=_UNSUPPORTED,
        reason="TorchTitan runs a tower where the batch has something for it; ranks without would wait for the others"),
    Lack(asked="collective_guard", outcome=_APPROXIMATE, target="comm.train_timeout_seconds",
        reason="TorchTitan does not compare where ranks stand, but ends a run that hangs, after a time",
        hint="comm.train_timeout_seconds is 100 unless it is set"),
    Lack(asked="check_data", outcome=_UNNEEDED,
        reason="TorchTitan's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="broadcast_batch", outcome=_UNNEEDED,
        reason="TorchTitan's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="sync_module_states", when=lambda run: run.config.sync_module_states is not False, outcome=_APPROXIMATE,
        reason="TorchTitan creates the model's values sharded, on each rank its part, and broadcasts none"),
    Lack(asked="ignored_modules", outcome=_UNSUPPORTED, reason="TorchTitan shards all modules"),
    Lack(asked="keep_low_precision_grads", outcome=_APPROXIMATE, target="training.dtype",
        reason="TorchTitan keeps gradients in the dtype of the parameters",
        hint="training.dtype = 'bfloat16' stores parameters and gradients in it"),
    Lack(asked="state_dict_type", when=lambda run: run.state_dict_type != "sharded",
        outcome=_APPROXIMATE, target="checkpoint",
        reason="TorchTitan's checkpoints are sharded",
        hint="last_save_in_hf = true writes the last one unsharded, for Hugging Face"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is None,
        outcome=_APPROXIMATE, target="training.max_norm",
        reason="TorchTitan clips gradients to a norm of 1 unless told otherwise",
        hint="set max_norm to the run's own, or to a large number for none"),
    Lack(asked="frozen parameters", outcome=_UNSUPPORTED, reason="TorchTitan trains all parameters",
        hint="freeze them in the model's code"),
    Lack(asked="tiled MLP", outcome=_UNSUPPORTED, reason="TorchTitan computes MLPs in one piece"),
    Lack(asked="model only", outcome=_APPROXIMATE, target="checkpoint.last_save_model_only",
        reason="TorchTitan leaves the optimizer out of the last checkpoint only"),
    Lack(asked="verbose", outcome=_UNNEEDED, reason="TorchTitan has its own words for its log"),
    Lack(asked="strict", outcome=_UNNEEDED, reason="composer_fsdp2's own word"),
)
# fmt: on

# ---------------------------------------------------------------------------------------------------------------------
# The dialect


class TorchTitanDialect(Dialect):
    """A TOML file; a setting's key is its table and its name."""

    name = target = "torchtitan"
    title = "TorchTitan up to v0.2.2"
    rows = tuple(replace(row, group=row.name.rpartition(".")[0]) for row in _ROWS)
    lacks = _LACKS
    suffix = ".toml"
    words = ("parallelism", "activation_checkpoint", "mixed_precision_", "local_batch_size", "flavor")
    silent = (Section.at(("parallelism",), {"parallelism": {}}),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """One for the whole file: [parallelism], or else the first of the tables that there is."""
        if path or all(_at(values, name) is None for name in _OWN_WORDS):
            return None  # ``training`` and ``checkpoint`` alone are common names
        return next(((name,) for name in _TABLES if isinstance(values.get(name), Mapping)), None)

    def read(self, section: Section) -> Reading:
        file = File.of(section)
        findings = tuple(_findings(file))
        return Reading(
            run=None if any(_is_bad(file, row) for row in _ROWS) or file.given.keys() & {*_TABLES} else _run(file),
            findings=findings,
            aspects=deciding({file.short(key): row.aspect for key, row in file.rows()}, findings),
            rows={row.name: row for row in _ROWS} | {file.short(key): row for key, row in file.rows()},
        )

    def express(self, run: RunConfig) -> Expression:
        """With a number of replicas where the number of ranks tells it: TorchTitan leaves the shards open only."""
        mesh = run.config.mesh
        is_open = not mesh.is_grouped and mesh.replicate_degree == -1
        return super().express(run.with_degrees() if is_open else run)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        config, recomputes = run.config, run.config.activation_checkpointing.checkpoint
        selective = run.selective_checkpointing if recomputes else None
        mesh, parallel = config.mesh, {kind: getattr(run, kind) for kind in ("context_parallel", *_PARALLELISMS)}
        shards, has_degrees = _shards(run), not mesh.is_grouped and mesh.replicate_degree != -1
        freed = "default" if run.pipeline_parallel == 1 else "always"
        is_low = config.mixed_precision.param_dtype in LOW_PRECISION
        for key, value, is_needed in (
            ("parallelism.data_parallel_replicate_degree", mesh.replicate_degree, has_degrees),
            ("parallelism.data_parallel_shard_degree", shards, has_degrees and shards),
            ("parallelism.fsdp_reshard_after_forward", freed if config.reshard_after_forward else "never", True),
            *((f"parallelism.{kind}_degree", degree, degree != 1) for kind, degree in parallel.items()),
            ("compile.enable", True, run.compile),
            ("training.mixed_precision_param", "bfloat16" if is_low else "float32", True),
            ("training.mixed_precision_reduce", "float32", True),
            ("training.enable_cpu_offload", config.cpu_offload, True),
            ("training.max_norm", run.max_grad_norm, run.max_grad_norm is not None),
            ("activation_checkpoint.mode", "selective" if selective else "full" if recomputes else "none", True),
            ("activation_checkpoint.selective_ac_option", str(selective), selective),
            ("checkpoint.enable", True, run.async_save),
            ("checkpoint.async_mode", "async", run.async_save),
        ):
            if is_needed:
                yield Setting(aspect=_BY_NAME[key].aspect, key=key, value=value)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Names of earlier releases become those of v0.2.2; nothing else, for TorchTitan's words are FSDP2's."""
        file = File.of(section)
        gone: dict[str, dict[str, list[tuple[str, Any]]]] = {}
        come: dict[str, list[tuple[str, Any]]] = {}
        given = {key for key, _ in file.rows()}
        for key, row in file.rows():
            if key == row.name:
                continue
            old, _, old_name = key.rpartition(".")
            new, _, new_name = row.name.rpartition(".")
            is_first = row.name not in given
            given.add(row.name)
            gone.setdefault(old, {})[old_name] = [(new_name, file.given[key])] if is_first and old == new else []
            if is_first and old != new:
                come.setdefault(new, []).append((new_name, file.given[key]))
        return [
            MappingEdit(path=tuple(table.split(".")), replacements=gone.get(table, {}), additions=come.get(table, ()))
            for table in dict.fromkeys((*gone, *come))
        ]

    def defaults(self, row: Row) -> Mapping[str, Any]:
        """TOML has no null: a default of None decides nothing."""
        return {} if row.default is None else {"": row.default}

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        values: dict[str, Any] = {"parallelism": {}}
        for name, each in {**self.switched_on(row), row.name: value}.items():
            values = merged(values, nested(name, each))
        yield Question(section=Section.at(("parallelism",), values), key=row.name.removeprefix("parallelism."))
