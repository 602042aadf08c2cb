"""TorchTitan's table of keys, the units of its models, and the fields of a run that its files cannot express."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import BOOL, INT, POSITIVE_INT, one_of, takes_if
from composer_fsdp2.config.sharding import LOW_PRECISION, ActivationCheckpointing
from composer_fsdp2.migration.effective import Effective
from composer_fsdp2.migration.lens import Lens, Limitation, as_is, case, cases, limits, unless
from composer_fsdp2.migration.paths import find_at
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig, Wrap, WrapKind
from composer_fsdp2.migration.training import OF_TRAINERS, adamw_of, count, duration_in, optimizer_of, option

DTYPES = ("float32", "bfloat16")
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
_RECOMPUTES = "activation_checkpoint.mode = selective or full"
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"


def _belonging(only_with: str, *names: str, reason: str, outcome: Outcome = Outcome.UNSUPPORTED) -> tuple[Lens, ...]:
    """Return rows of keys that are options of the feature ``only_with``, and have no effect without it."""
    return tuple(
        Lens(
            name=name,
            meaning=f"a detail of {only_with}",
            outcome=outcome,
            reason=reason,
            only_with=only_with,
            aliases=(name.replace("parallelism.", "experimental."),) if name.startswith("parallelism.") else (),
        )
        for name in names
    )


_CLASSES = ("TransformerBlock",)
_USUAL_WRAP = Wrap(kind=WrapKind.CLASSES, classes=_CLASSES, embeddings=True, output=True)
_USUAL_UNITS = (
    "the token embedding, each block, the last norm together with the output (which default leaves gathered; here it "
    "is freed like the others), and the rest (in v0.1.0 each block, and the rest)"
)
# The modules that are units, which TorchTitan's models choose in their parallelize.py: as a ``wrap``, and as a text.
_OWN_UNITS = {
    "flux": (
        Wrap(kind=WrapKind.CLASSES, classes=("DoubleStreamBlock", "SingleStreamBlock")),
        "each block, the four layers before them, the last one, and the rest; the four and the last one stay with "
        "the rest here",
    ),
    "llama3-siglip2": (
        replace(_USUAL_WRAP, classes=(*_CLASSES, "TransformerLayer")),
        f"each layer of the encoder, {_USUAL_UNITS}",
    ),
    "transformers_modeling_backend": (
        replace(_USUAL_WRAP, classes=()),
        f"{_USUAL_UNITS}; blocks are the layers of transformers' model",
    ),
}


def units_of(values: Mapping[str, Any]) -> tuple[Wrap, str]:
    """Return the units of the model that a file names: as a ``Wrap``, and as text for reports."""
    return _OWN_UNITS.get(str(find_at(values, ("model", "name"))), (_USUAL_WRAP, _USUAL_UNITS))


# ---------------------------------------------------------------------------------------------------------------------
# Fields that several keys decide


def _mesh(shards: int, file: Effective) -> MeshSpec:
    """Return the mesh. Replicas of one rank each are TorchTitan's DDP. Context-parallel ranks also shard parameters."""
    replicas, context = (file[f"parallelism.{name}_degree"] for name in ("data_parallel_replicate", "context_parallel"))
    return MeshSpec.of_degrees(shards if shards == -1 else shards * context, replicas if replicas > 1 else None)


def _shards(run: RunConfig) -> int | None:
    """Return ``data_parallel_shard_degree`` for a run; None if the mesh has groups or unknown replicas, or CP does
    not divide it."""
    mesh = run.config.mesh
    if mesh.is_grouped or mesh.replicate_degree == -1:
        return None
    shards, rest = divmod(mesh.shard_degree, run.context_parallel)
    return -1 if mesh.shard_degree == -1 else None if rest else shards


def _context(run: RunConfig) -> int | None:
    """Return the context parallel degree; None if it is 1, or does not divide the shard degree."""
    mesh = run.config.mesh
    is_odd = not mesh.is_grouped and mesh.shard_degree > 0 and mesh.shard_degree % run.context_parallel
    return None if is_odd else unless(1, run.context_parallel)


def _replicas(run: RunConfig) -> int | None:
    mesh = run.config.mesh
    return None if mesh.is_grouped or mesh.replicate_degree == -1 else mesh.replicate_degree


def _recomputed(mode: str, file: Effective) -> ActivationCheckpointing:
    if mode == "none":
        return ActivationCheckpointing()
    return ActivationCheckpointing(checkpoint=True, classes=units_of(file.around)[0].classes, reentrant=False)


def _mode(run: RunConfig) -> str:
    if not run.config.activation_checkpointing.checkpoint:
        return "none"
    return "selective" if run.selective_checkpointing else "full"


def has_fp8_layers(file: Effective) -> bool:
    """Return whether a converter makes layers of float8 or MX."""
    names: Any = file["model.converters"]
    names = [names] if isinstance(names, str) else names
    return bool(file["float8.enable_float8_linear"]) or any("float8" in name or "mx" in name for name in names)


# Defaults of v0.2.2's AdamW.
_DEFAULTS = {"name": "AdamW", "lr": 8e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

# fmt: off
_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_OPTION = "activation_checkpoint.selective_ac_option"
ROWS: tuple[Lens, ...] = (
    Lens(name="parallelism.data_parallel_replicate_degree", fields=("mesh",), write=_replicas, default=1,
        outcome=Outcome.EXACT, target="data_parallel_replicate_degree", takes=POSITIVE_INT,
        aliases=("training.data_parallel_replicate_degree",), meaning="the number of replicas",
        reason="the replica axis of the mesh; 1 is none"),
    Lens(name="parallelism.data_parallel_shard_degree", reports_default=True, default=-1, outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", takes=_SHARD,
        aliases=("training.data_parallel_shard_degree", "training.data_parallel_degree"), read={"mesh": _mesh},
        write=_shards, decide=cases(case(
        lambda value, file: value == 1 and not file.is_on("parallelism.context_parallel_degree"),
        _APPROXIMATE, hint="leave it: the numbers differ by the casts",
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision; here FSDP2 replicates "
        "full parameters and casts them")),
        meaning="over how many ranks a parameter is sharded; -1: all that are left",
        reason="the shard axis of the mesh"),
    Lens(name="parallelism.fsdp_reshard_after_forward", reports_default=True, default="default", outcome=Outcome.EXACT,
        target="reshard_after_forward", takes=one_of("default", "always", "never"),
        read={"reshard_after_forward": lambda value, file: value == "always" or
            (value == "default" and not file.is_on("parallelism.pipeline_parallel_degree"))},
        write=lambda run: "never" if not run.config.reshard_after_forward else
        "default" if run.pipeline_parallel == 1 else "always", decide=cases(
        case(lambda value, file: value == "default" and file.is_on("parallelism.pipeline_parallel_degree"),
            target="reshard_after_forward: false", reason="not freed, because of the pipeline"),
        case(lambda value, file: value == "always", _APPROXIMATE,
            reason="all units but the last norm, which is the root's here and stays gathered")),
        meaning="whether parameters are freed between forward and backward; default: unless pipeline parallelism is on",
        reason="the same argument of fully_shard"),
    Lens(name="parallelism.tensor_parallel_degree", read={"tensor_parallel": as_is},
        write=lambda run: unless(1, run.tensor_parallel), default=1, outcome=Outcome.EXACT,
        takes=POSITIVE_INT, target="layer_plan: auto", neutral=(1,), aliases=("training.tensor_parallel_degree",),
        meaning="tensor parallelism",
        reason="layers are split by the plan of Hugging Face's model, which does not divide the sequence between them, "
        "as TorchTitan's plans do: the same numbers, more memory for activations",
        hint="a layer plan of your own, with SequenceParallel for the norms, divides it"),
    Lens(name="parallelism.disable_loss_parallel", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL,
        only_with="parallelism.tensor_parallel_degree", aliases=("training.disable_loss_parallel",),
        target="the output's layout in the layer plan",
        decide=cases(case(lambda value, file: value is True, Outcome.EXACT, reason="logits are whole there as here")),
        meaning="whether the loss is computed from whole logits (true) or from each rank's part of the vocabulary",
        reason="Composer's losses and metrics read full logits, so the plan gathers them: the same numbers, more "
        "memory", hint="torch's loss_parallel, with a layer plan of your own"),
    *_belonging("parallelism.tensor_parallel_degree", "parallelism.enable_async_tensor_parallel",
        outcome=Outcome.APPROXIMATE, reason="the communication of split layers is not overlapped with their products: "
        "the same numbers, less speed"),
    Lens(name="parallelism.pipeline_parallel_degree", read={"pipeline_parallel": as_is},
        write=lambda run: unless(1, run.pipeline_parallel), default=1, outcome=Outcome.UNSUPPORTED, takes=POSITIVE_INT,
        neutral=(1,), aliases=("experimental.pipeline_parallel_degree",), meaning="pipeline parallelism",
        reason=f"{_ONE_MESH}; each rank runs the whole model",
        hint="pipeline_parallel_degree = 1 and a larger data_parallel_shard_degree"),
    *_belonging("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_split_points",
        "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers", "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
        "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_expert_parallel_overlap",
        reason="belongs to pipeline parallelism"),
    Lens(name="parallelism.context_parallel_degree", read={"context_parallel_degree": as_is}, write=_context,
        default=1, outcome=Outcome.APPROXIMATE, takes=POSITIVE_INT, target="context_parallel_degree", neutral=(1,),
        aliases=("experimental.context_parallel_degree",),
        meaning="context parallelism, whose ranks shard parameters as well",
        reason="keys and values go around a ring there; here attention exchanges heads for sequence (Ulysses): the "
        "same numbers up to rounding, and the degree must divide the number of heads"),
    *_belonging("parallelism.context_parallel_degree", "parallelism.context_parallel_rotate_method",
        "parallelism.context_parallel_load_balancer", outcome=Outcome.APPROXIMATE,
        reason="belongs to context parallelism by a ring, which is even without it by heads"),
    Lens(name="parallelism.expert_parallel_degree", read={"expert_parallel": as_is},
        write=lambda run: unless(1, run.expert_parallel), default=1, outcome=Outcome.APPROXIMATE, takes=POSITIVE_INT,
        target="shards of experts, over the ranks of the mesh", neutral=(1,),
        meaning="expert parallelism; without experts in the model it does nothing",
        reason="there, tokens are sent to the GroupedExperts of TorchTitan's own models; here, experts are sharded "
        "like all other parameters, and gathered with their layer: the same numbers, more communication",
        hint="the fsdp_config key expert_parallel_degree, which sends tokens, distributes the experts of Hugging "
        "Face's Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-V3, and of LLM Foundry's torch_dmoe; others need the "
        "memory for one layer's experts"),
    *_belonging("parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree",
        "parallelism.expert_parallel_comm_backend", outcome=Outcome.APPROXIMATE,
        reason="belongs to expert parallelism, in whose place experts are sharded and gathered: the same numbers"),
    Lens(name="parallelism.enable_compiled_autograd", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL,
        neutral=(False,), aliases=("experimental.enable_compiled_autograd",),
        meaning="compiling the backward; up to v0.2.0",
        reason="composer_fsdp2 does not compile the backward: slower, the same numbers up to rounding"),
    Lens(name="training.mixed_precision_param", read={"mixed_precision.param_dtype": as_is},
        write=lambda run: "bfloat16" if run.config.mixed_precision.param_dtype in LOW_PRECISION else "float32",
        reports_default=True, default="bfloat16", outcome=Outcome.EXACT, target="MixedPrecisionPolicy(param_dtype)",
        takes=one_of(*DTYPES), meaning="the dtype in which parameters are gathered and computed with",
        reason="the same argument of fully_shard"),
    Lens(name="training.mixed_precision_reduce", read={"mixed_precision.reduce_dtype": as_is},
        write=lambda run: "float32", reports_default=True, default="float32", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)", takes=one_of("float32"),
        meaning="the dtype in which gradients are reduced", reason="the same argument of fully_shard"),
    Lens(name="training.dtype", read={"stored_dtype": as_is},
        write=lambda run: "bfloat16" if run.stored_dtype == "bfloat16" else None, default="float32",
        outcome=Outcome.APPROXIMATE, target="the dtype that the model is created in", takes=one_of(*DTYPES),
        neutral=("float32",), meaning="the dtype of parameters, gradients and optimizer state",
        reason="sharding keeps the dtype that parameters are created in", hint="create the model in bfloat16"),
    Lens(name="training.enable_cpu_offload", read={"cpu_offload": as_is}, write=lambda run: run.config.cpu_offload,
        default=False, outcome=Outcome.EXACT, target="CPUOffloadPolicy", takes=BOOL, neutral=(False,),
        aliases=("experimental.enable_cpu_offload",),
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        reason="the same policy of fully_shard"),
    Lens(name="training.max_norm", read={"max_grad_norm": as_is}, write=lambda run: run.max_grad_norm,
        reports_default=True, default=1.0, takes=_NUMBER,
        outcome=Outcome.APPROXIMATE, target="algorithms.gradient_clipping",
        meaning="clipping gradients by their norm", reason="clipping stands outside of the sharding section",
        hint="in Composer: algorithms.gradient_clipping: {clipping_type: norm, clipping_threshold: max_norm}"),
    Lens(name="activation_checkpoint.mode", reports_default=True, default="selective", outcome=Outcome.EXACT,
        target="activation_checkpointing", takes=one_of("none", "selective", "full", "memory_budget"),
        read={"activation_checkpointing": _recomputed},
        write=_mode, decide=cases(
            case(lambda value, file: value == "none", Outcome.UNNEEDED, reason="activations are stored"),
            case(lambda value, file: value == "memory_budget", _APPROXIMATE,
                reason="the compiler chose the recomputed operations; here each block is recomputed: less memory, "
                "more computation, the same numbers", hint="none keeps all activations instead"),
            case(lambda value, file: value == "selective" and file[_OPTION] != "1", _APPROXIMATE,
                reason="all blocks are recomputed instead of some: less memory, more computation, the same numbers",
                hint="the model's activation_checkpointing_fn may choose every n-th block, if no policy names classes",
            )),
        meaning="which activations are recomputed",
        reason="each block's activations are stored or recomputed, by torch's implementation without reentering"),
    Lens(name="activation_checkpoint.selective_ac_option", reports_default=True, default="2",
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing", takes=_SELECTIVE,
        only_with="activation_checkpoint.mode = selective",
        read={"selective_checkpointing": lambda option, file:
            option if file["activation_checkpoint.mode"] == "selective" and option != "1" else None},
        write=lambda run: run.selective_checkpointing if run.config.activation_checkpointing.checkpoint else None,
        decide=cases(case(lambda value, file: value == "1", Outcome.EXACT, reason="all blocks")),
        meaning="under selective: every n-th block, or by operator",
        reason="which blocks are recomputed is the model's activation_checkpointing_fn's choice"),
    Lens(name="activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", default=["moe.router.gate"],
        outcome=Outcome.APPROXIMATE, only_with="activation_checkpoint.mode = selective",
        meaning="which matrix products are recomputed by operator",
        reason="whole blocks are recomputed, these products among them"),
    Lens(name="activation_checkpoint.memory_budget", default=0.5, outcome=Outcome.APPROXIMATE, takes=_NUMBER,
        only_with="activation_checkpoint.mode = memory_budget", meaning="how much the compiler keeps; from v0.2.0 on",
        reason="a detail of activation_checkpoint.mode = memory_budget: here nothing inside a block is stored"),
    Lens(name="activation_checkpoint.visualize_memory_budget_pareto", default=False, outcome=Outcome.UNNEEDED,
        takes=BOOL, only_with="activation_checkpoint.mode = memory_budget", meaning="a picture of memory budgets",
        reason="an aid for choosing memory_budget, no part of a run"),
    Lens(name="activation_checkpoint.preserve_rng_state", default=True, outcome=Outcome.EXACT, takes=BOOL,
        only_with=_RECOMPUTES,
        meaning="whether dropout is the same when activations are recomputed; false up to v0.2.1, true in v0.2.2",
        reason="it always is here, which costs little"),
    Lens(name="activation_checkpoint.early_stop", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL,
        only_with=_RECOMPUTES,
        meaning="ending recomputation with the last activation that is needed; from v0.2.0 on",
        reason="torch's default, true, is used here: less computation, the same numbers"),
    Lens(name="activation_checkpoint.determinism_check", default="default", outcome=Outcome.APPROXIMATE,
        only_with=_RECOMPUTES, neutral=("default",),
        meaning="how recomputed activations are compared with the first ones; from v0.2.1 on",
        reason="torch's default check is used here: it compares shapes, dtypes and devices"),
    Lens(name="activation_checkpoint.debug", default=False, outcome=Outcome.UNNEEDED, takes=BOOL,
        meaning="recording recomputed operations", reason="an aid for debugging, no part of a run"),
    Lens(name="checkpoint.enable", fields=("async_save",), write=lambda run: unless(False, run.async_save),
        default=False, outcome=Outcome.APPROXIMATE, target="save_folder of the Trainer", takes=BOOL, neutral=(False,),
        aliases=("checkpoint.enable_checkpoint",), meaning="saving checkpoints",
        reason="where and how often is saved stands outside of the sharding section",
        hint="set save_folder and save_interval"),
    Lens(name="checkpoint.async_mode", default="disabled", outcome=Outcome.EXACT, target="async_save",
        takes=one_of("disabled", "async", "async_with_pinned_mem"), neutral=("disabled",),
        only_with="checkpoint.enable",
        read={"async_save": lambda value, file: file.is_on("checkpoint.enable") and value != "disabled"},
        write=lambda run: "async" if run.async_save else None, decide=cases(
        case(lambda value, file: value == "async_with_pinned_mem", _APPROXIMATE,
            reason="written in the background, without a separate process")),
        meaning="writing checkpoints in the background",
        reason="the checkpoint is staged and written while training continues"),
    Lens(name="checkpoint.keep_latest_k", default=10, outcome=Outcome.APPROXIMATE,
        target="save_num_checkpoints_to_keep of the Trainer", takes=INT, only_with="checkpoint.enable",
        meaning="the number of retained checkpoints; 0: all",
        reason="the same number, outside of the sharding section; all is -1 there",
        hint="set save_num_checkpoints_to_keep"),
    Lens(name="checkpoint.last_save_model_only", default=True, outcome=Outcome.APPROXIMATE, takes=BOOL,
        neutral=(False,), only_with="checkpoint.enable",
        aliases=("checkpoint.last_save_model_weights_only", "checkpoint.model_weights_only"),
        meaning="the last checkpoint without the optimizer; v0.1.0 has the first alias, and false as its default",
        reason="Composer's last checkpoint is like the others: the optimizer is in it",
        hint="a model alone is taken from it with checkpoint convert"),
    Lens(name="checkpoint.initial_load_model_only", default=True, outcome=Outcome.APPROXIMATE, takes=BOOL,
        target="load_weights_only of the Trainer", only_with="checkpoint.enable",
        aliases=("checkpoint.initial_load_model_weights_only",),
        meaning="whether only the model is loaded from initial_load_path; v0.1.0 has the alias",
        reason="what a run begins with stands outside of the sharding section", hint="set load_path"),
    Lens(name="checkpoint.last_save_in_hf", default=False, outcome=Outcome.APPROXIMATE, target="checkpoint convert",
        takes=BOOL, neutral=(False,), only_with="checkpoint.enable",
        meaning="the last checkpoint in Hugging Face's format", reason="an export after training",
        hint="convert the last checkpoint, or use LLM Foundry's hf_checkpointer"),
    Lens(name="checkpoint.export_dtype", default="float32", outcome=Outcome.APPROXIMATE, target="checkpoint convert",
        takes=one_of("float16", "bfloat16", "float32"), neutral=("float32",), only_with="checkpoint.enable",
        meaning="the dtype of the last checkpoint, if it is of the model alone", reason="an export after training"),
    Lens(name="compile.enable", default=False, outcome=Outcome.APPROXIMATE, target="compile_config of the Trainer",
        takes=BOOL, neutral=(False,), aliases=("training.compile",), read={"compile": as_is},
        write=lambda run: unless(False, run.compile), decide=cases(
            case(lambda value, file: value is True and file["compile.components"] == ["loss"],
                reason="only the loss was compiled, which computes the same numbers uncompiled")),
        meaning="compiling each block, and the loss",
        reason="TorchTitan compiles block by block, inside of units; without it training is slower, and the numbers "
        "are the same up to rounding",
        hint="compile the blocks where the model is made (block.compile()); Composer's compile_config takes the whole "
        "model"),
    Lens(name="compile.components", default=["model", "loss"], outcome=Outcome.APPROXIMATE, only_with="compile.enable",
        meaning="whether the model, the loss or both are compiled; from v0.2.0 on",
        reason="a detail of compile.enable"),
    Lens(name="compile.backend", default="inductor", outcome=Outcome.APPROXIMATE, only_with="compile.enable",
        meaning="the backend of torch.compile; from v0.2.0 on", reason="a detail of compile.enable"),
    Lens(name="model.converters", default=[], outcome=Outcome.UNSUPPORTED, takes=_CONVERTERS, neutral=([], ""),

        read={"has_fp8_layers": lambda value, file: has_fp8_layers(file)}, decide=cases(
            case(lambda value, file: value not in ([], "") and not has_fp8_layers(file), _APPROXIMATE,
                reason="what a converter makes of the model is the model's, and no part of sharding",
                hint="convert the model where it is made")),
        meaning="conversions of the model before it is sharded, such as float8 layers",
        reason="the linear layers compute in float8 or MX, and composer_fsdp2 converts no model",
        hint="convert the model with torchao where it is made, or remove the converter: the run computes in bfloat16"),
    Lens(name="float8.enable_float8_linear", default=False, outcome=Outcome.UNSUPPORTED, takes=BOOL, neutral=(False,),
        meaning="linear layers in float8; v0.1.0, in later releases model.converters",
        reason="the linear layers compute in float8, and composer_fsdp2 converts no model",
        hint="convert the model with torchao where it is made, or remove it: the run computes in bfloat16"),
    Lens(name="quantize.linear.float8.enable_fsdp_float8_all_gather", default=False, outcome=Outcome.UNSUPPORTED,
        takes=BOOL, neutral=(False,), only_with="model.converters",
        aliases=("float8.enable_fsdp_float8_all_gather", "quantize.linear.fp8.enable_fsdp_float8_all_gather"),
        meaning="gathering parameters in float8",
        reason="composer_fsdp2 gathers parameters in the dtype of mixed_precision_param",
        hint="set it to false: more communication, finer values"),
    Lens(name="fault_tolerance.enable", default=False, outcome=Outcome.UNSUPPORTED, takes=BOOL, neutral=(False,),
        meaning="replicas that join and leave during training",
        reason="composer_fsdp2's mesh is of one size for the whole run",
        hint="data_parallel_replicate_degree sets a fixed number of replicas"),
    Lens(name="training.local_batch_size", read={"microbatch_size": count}, write=lambda run: run.microbatch_size,
        outcome=Outcome.EXACT, target="device_train_microbatch_size", aliases=("training.batch_size",),
        meaning="rows of a rank's microbatch", reason="as many rows"),
    Lens(name="training.global_batch_size", read={"global_batch_size": count, "num_microbatches": lambda rows, file:
        1 if count(rows) is None and file["training.local_batch_size"] is not None else None},
        write=lambda run: run.with_batches().global_batch_size, outcome=Outcome.EXACT, neutral=(-1,),
        target="global_train_batch_size", meaning="rows of all ranks for one step; -1: one microbatch of each",
        reason="as many rows"),
    Lens(name="training.steps", read={"max_duration": lambda value, file: f"{count(value)}ba" if count(value) else
        None}, write=duration_in("ba"), outcome=Outcome.EXACT, target="max_duration", meaning="steps of the optimizer",
        reason="as many batches"),
    Lens(name="optimizer.name", read={"optimizer": lambda name, file: optimizer_of(
        {"name": name, **{each: file[f"optimizer.{each}"] for each in OF_TRAINERS.values()}}, _DEFAULTS)},
        write=lambda run: "AdamW" if adamw_of(run) else None, outcome=Outcome.EXACT, target="optimizer",
        meaning="the optimizer", reason="the same formula"),
    *(Lens(name=f"optimizer.{name}", fields=("optimizer",), write=option(name, _DEFAULTS[name]),
        outcome=Outcome.EXACT, target="optimizer", meaning="an option of AdamW",
        reason="the same decay: Composer's weight_decay is this one times the learning rate"
        if name == "weight_decay" else "the same value") for name in OF_TRAINERS.values()),
)
# fmt: on
NAMES = {name: row for row in ROWS for name in (row.name, *row.aliases)}

# ---------------------------------------------------------------------------------------------------------------------
# Fields of a run that TorchTitan cannot configure, or implements differently

# fmt: off
LIMITS: tuple[Limitation, ...] = (
    limits(_UNSUPPORTED, "mesh.groups", "mesh",
        reason="TorchTitan has one mesh of all ranks, no groups that do not meet", hint="choose two degrees"),
    limits(_NEEDS_DECISION, "mesh.replicas", "mesh", was=-1, target="parallelism.data_parallel_replicate_degree",
        reason="TorchTitan leaves the shards open, never the replicas",
        hint="set it to the number of ranks divided by {shard_degree}, and data_parallel_shard_degree to "
        "{shard_degree}"),
    limits(_APPROXIMATE, "mesh.shards", was=1, is_kept=True,
        target="parallelism.data_parallel_shard_degree = 1",
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision"),
    limits(_NEEDS_DECISION, "context_parallel_degree", "mesh.shards", target="parallelism.data_parallel_shard_degree",
        reason="TorchTitan shards parameters over the ranks that share a sequence, and {value} does not divide the "
        "{shard_degree} shards", hint="choose a degree that does"),
    limits(_APPROXIMATE, "context_parallel_degree", is_kept=True, target="parallelism.context_parallel_degree",
        reason="TorchTitan sends keys and values around a ring: the same numbers up to rounding"),
    limits(_APPROXIMATE, "wrap", target="parallelize.py of the model",
        reason="TorchTitan's models choose their units in code: the token embedding, each block, the last norm with "
        "the output; the numbers do not depend on it"),
    limits(_UNSUPPORTED, "reshard_after_forward", target="parallelism.fsdp_reshard_after_forward",
        reason="TorchTitan frees parameters everywhere or nowhere, and does not keep them in groups of {value} ranks",
        hint="default needs less memory, never less communication"),
    limits(_NEEDS_DECISION, "mixed_precision.param_dtype", target="training.mixed_precision_param",
        reason="TorchTitan computes in bfloat16 or float32",
        hint="bfloat16 has a wider range than float16 and needs no scaling of gradients; float32 is exact"),
    limits(_APPROXIMATE, "mixed_precision.reduce_dtype", target="training.mixed_precision_reduce",
        reason="TorchTitan reduces in float32 only: finer, and more communication"),
    limits(_APPROXIMATE, "stored_dtype",
        target="training.dtype", reason="TorchTitan creates parameters in training.dtype, which is float32 unless it "
        "is set; {value} was requested"),
    limits(_NEEDS_DECISION, "precision", was="amp_fp8", title="products in fp8", target="model.converters",
        reason="TorchTitan's converters create float8 layers of torchao, and of its own models",
        hint='model.converters = ["quantize.linear.float8"], or train in bfloat16'),
    limits(_UNSUPPORTED, "mixed_precision.output_dtype", reason="TorchTitan has no key for the dtype of outputs"),
    limits(_APPROXIMATE, "precision", target="training.mixed_precision_param",
        reason="TorchTitan's FSDP casts parameters and inputs of units, and uses no torch.autocast"),
    limits(_APPROXIMATE, "mixed_precision.cast_forward_inputs", "mixed_precision.cast_root_inputs",
        reason="TorchTitan up to v0.2.2 casts the inputs of each unit"),
    limits(_APPROXIMATE, "mixed_precision.buffer_dtype",
        reason="TorchTitan leaves buffers in the dtype that they have"),
    limits(_APPROXIMATE, "activation_checkpointing.classes", target="activation_checkpoint.mode",
        reason="TorchTitan recomputes its blocks: the same numbers, another memory"),
    limits(_APPROXIMATE, "activation_checkpointing.reentrant", target="activation_checkpoint.mode",
        reason="TorchTitan recomputes without reentering: the same numbers"),
    limits(_UNSUPPORTED, "activation_checkpointing.cpu_offload", "activation_checkpointing",
        reason="TorchTitan does not keep activations in CPU memory"),
    limits(_UNSUPPORTED, "activation_checkpointing.transformer_engine",
        reason="TorchTitan recomputes with torch's implementation only"),
    *(limits(_APPROXIMATE, f"prefetch.{phase}", reason="TorchTitan leaves the order of gathers to "
        "FSDP2; the numbers do not depend on it") for phase in ("forward", "backward")),
    limits(_APPROXIMATE, "accumulation.gradient_sync",
        reason="TorchTitan reduces gradients in every microbatch: less memory, more communication"),
    limits(_APPROXIMATE, "has_expert_axis", title="expert parallelism",
        reason="TorchTitan takes the ranks of experts from those of the shards: the same numbers"),
    limits(_APPROXIMATE, "accumulation.reshard_after_backward",
        reason="TorchTitan frees parameters after each backward: less memory, more communication"),
    limits(_UNNEEDED, "idle_experts",
        reason="TorchTitan runs all experts of a layer in one grouped product, so ranks do not diverge"),
    limits(_NEEDS_DECISION, "expert_parallel_degree", target="parallelism.expert_parallel_degree",
        reason="TorchTitan distributes experts of its own models, along axes that it takes from those of the mesh",
        hint="parallelism.expert_parallel_degree = {value}, where the model has it"),
    limits(_UNSUPPORTED, "idle_towers",
        reason="TorchTitan runs a tower where the batch has something for it; ranks without would wait for the others"),
    limits(_APPROXIMATE, "collective_guard", target="comm.train_timeout_seconds",
        reason="TorchTitan does not compare where ranks stand, but ends a run that hangs, after a time",
        hint="comm.train_timeout_seconds is 100 unless it is set"),
    *(limits(_UNNEEDED, field, reason="TorchTitan's loaders count data-parallel ranks: those that share a batch read "
        "the same") for field in ("check_data", "broadcast_batch")),
    limits(_APPROXIMATE, "sync_module_states",
        reason="TorchTitan creates the model's values sharded, on each rank its part, and broadcasts none"),
    limits(_UNSUPPORTED, "ignored_modules", reason="TorchTitan shards all modules"),
    limits(_APPROXIMATE, "mixed_precision.gradients", target="training.dtype",
        reason="TorchTitan keeps gradients in the dtype of the parameters",
        hint="training.dtype = 'bfloat16' stores parameters and gradients in it"),
    limits(_APPROXIMATE, "state_dict_type", target="checkpoint",
        reason="TorchTitan's checkpoints are sharded",
        hint="last_save_in_hf = true writes the last one unsharded, for Hugging Face"),
    limits(_NEEDS_DECISION, "other_clipping", "max_grad_norm", target="training.max_norm",
        reason="TorchTitan clips gradients to a norm, 1 unless it is set; the run clips them by {value}",
        hint="choose a norm, or a large number for none"),
    limits(_APPROXIMATE, "max_grad_norm", target="training.max_norm",
        reason="TorchTitan clips gradients to a norm of 1 by default",
        hint="set max_norm to the run's own, or to a large number for none"),
    limits(_UNSUPPORTED, "freeze", "train_only", is_any=True, reason="TorchTitan trains all parameters",
        hint="freeze them in the model's code"),
    limits(_UNSUPPORTED, "tiled_mlp.chunks", "tiled_mlp", reason="TorchTitan computes MLPs in one piece"),
    limits(_APPROXIMATE, "save_only_model", target="checkpoint.last_save_model_only",
        reason="TorchTitan leaves the optimizer out of the last checkpoint only"),
    limits(_APPROXIMATE, "undecayed", target="optimizer.weight_decay",
        reason="a Trainer decays neither biases nor the weights of norms, TorchTitan all parameters"),
    limits(_APPROXIMATE, *OF_TRAINING, is_any=True, title="batches, steps and optimizer",
        reason="TorchTitan counts the rows of all ranks, whose number is not known here, and steps; its optimizers are "
        "Adam and AdamW", hint="set training.global_batch_size, training.steps and optimizer"),
    limits(_UNNEEDED, "verbose", reason="TorchTitan has its own keys for its log"),
)
# fmt: on
