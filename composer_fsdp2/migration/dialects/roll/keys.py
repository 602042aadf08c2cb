"""ROLL's table of keys, and the fields of a run that its files cannot express."""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import MeshSpec, divisors_text
from composer_fsdp2.config.parallel import IdleExperts, TiledMLP
from composer_fsdp2.config.rows import BOOL, INT, POSITIVE_INT, idle, one_of, takes_if
from composer_fsdp2.config.sharding import DTYPES_BY_SHORT_NAME, ActivationCheckpointing, GradientSync
from composer_fsdp2.migration.effective import Effective
from composer_fsdp2.migration.lens import Lens, Limitation, as_is, case, cases, limits, unless
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig, Wrap, WrapKind
from composer_fsdp2.migration.training import OF_TRAINERS, count, optimizer_of

STRATEGIES = ("fsdp2_train", "fsdp2_infer")
DTYPES = {
    **{name: dtype for short, dtype in DTYPES_BY_SHORT_NAME.items() for name in (short, dtype)},
    "half": "float16",
    "float": "float32",
}
# The MLPs that ROLL can tile, by model_type (verl's tiled_mlp.py, copied by ROLL).
MLPS = {
    "llama": "LlamaMLP",
    "qwen2": "Qwen2MLP",
    "qwen2_5": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "qwen3_moe": "Qwen3MoeMLP",
}
PRECISIONS = {"bfloat16": "amp_bf16", "float16": "amp_fp16"}
_NO_GRADIENTS = "fsdp2_infer makes no gradients"
_FOR_GRADIENTS = {
    "reduce_dtype",
    "enable_mix_precision",
    "reduce_scatter_during_grad_accumulation",
    "fused_optimizer",
    "model_args.disable_gradient_checkpointing",
    "model_args.gradient_checkpointing_use_reentrant",
    "model_args.freeze_module_prefix",
}


class Worker(Effective):
    """The effective configuration of one worker."""

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks; None if device_mapping does not determine it."""
        return count_of(self.given.get("device_mapping"))

    @property
    def is_training(self) -> bool:
        return bool(self["strategy_name"] != "fsdp2_infer")

    def finding(self, row: Lens, key: str, value: Any) -> Finding:
        if not self.is_training and row.name in _FOR_GRADIENTS and not self.problem(row):
            return idle(row.usual(key, value), _NO_GRADIENTS)
        return Effective.finding(self, row, key, value)


def count_of(devices: Any) -> int | None:
    """Return the number of devices in ``device_mapping``.

    Of strings, which ROLL evaluates, lists, ranges and their sums are parsed.
    """
    try:
        listed = _evaluated(ast.parse(devices.strip(), mode="eval").body) if isinstance(devices, str) else devices
        return len(listed) if isinstance(listed, list | tuple | range) else None
    except (SyntaxError, ValueError, TypeError, MemoryError, OverflowError):
        return None


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="list"), args=[argument], keywords=[]):
            return _evaluated(argument)
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            return range(*map(ast.literal_eval, arguments))
        case ast.BinOp(op=ast.Add()):
            return [*_evaluated(node.left), *_evaluated(node.right)]
    return ast.literal_eval(node)


# ---------------------------------------------------------------------------------------------------------------------
# Fields and values


def dtype_of(name: str | None, default: str) -> str:
    return default if name is None else DTYPES[name.lower()]


def dtype_name_of(dtype: str) -> str:
    return next((name for name, each in DTYPES.items() if each == dtype), dtype)


def reduced_in(worker: Effective) -> str:
    return dtype_of(worker.given.get("reduce_dtype"), "float32" if worker["enable_mix_precision"] else "bfloat16")


def _reduce_dtype_name(run: RunConfig) -> str:
    precision = run.config.mixed_precision
    return dtype_name_of(precision.reduce_dtype or precision.param_dtype or "float32")


def _mesh(size: int, worker: Worker) -> MeshSpec:
    is_whole_world = size <= 1 or (worker.num_ranks is not None and size >= worker.num_ranks)
    return MeshSpec() if is_whole_world else MeshSpec.of_degrees(shard=size, replicate=-1)


def _replicas(worker: Worker) -> int:
    return (worker.num_ranks or 0) // int(worker["fsdp_size"])


def _shards(run: RunConfig) -> int | None:
    mesh = run.config.mesh
    is_open = not mesh.is_grouped and mesh.has_replicas and mesh.shard_degree == -1
    return None if is_open else max(mesh.shard_degree, 1)


def wraps_experts(worker: Effective) -> bool:
    return worker["apply_expert_patch"] is True or worker["ep_size"] != 1


def _wrap(value: Any, worker: Worker) -> Wrap:
    return Wrap(
        kind=WrapKind.CLASSES,
        classes=_names(worker["wrap_policy.transformer_layer_cls_to_wrap"]),
        embeddings=True,  # contrary to its guide, unless they are tied: then they cannot be
        output=worker["wrap_policy.wrap_lm_output"],
        experts=_names(worker["wrap_policy.moe_experts"]) if wraps_experts(worker) else (),
    )


def _names(given: str | list[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _wrap_policy(run: RunConfig) -> dict[str, Any] | None:
    wrap = run.wrap
    policy = {
        "transformer_layer_cls_to_wrap": list(wrap.classes) if wrap.kind is WrapKind.CLASSES else [],
        "wrap_embeddings": wrap.embeddings,
        "wrap_lm_output": wrap.output,
        "moe_experts": list(wrap.experts),
    }
    return {key: value for key, value in policy.items() if value} or None


def _activation_checkpointing(disabled: bool, worker: Worker) -> ActivationCheckpointing:
    reentrant = worker["model_args.gradient_checkpointing_use_reentrant"]
    if not worker.is_training or disabled:
        return ActivationCheckpointing()
    is_moe = wraps_experts(worker) or worker["wrap_policy.moe_experts"] is not None
    return ActivationCheckpointing(checkpoint=True, classes=(), reentrant=is_moe if reentrant is None else reentrant)


def tiles_of(run: RunConfig) -> tuple[int | None, str | None]:
    """Return the number of chunks of tiled MLPs, and their ``model_type``. Without one, ROLL tiles all known MLPs."""
    classes = () if run.config.tiled_mlp is None else run.config.tiled_mlp.classes
    if not {*classes} <= {*MLPS.values()}:
        return None, None
    types = [name for name, cls in MLPS.items() if cls in classes]
    return run.mlp_chunks, types[0] if len(classes) == 1 else None


def _tiling_of(worker: Worker) -> tuple[TiledMLP | None, int | None]:
    """Return the tiled MLPs if ``model_type`` determines their class, else only the number of chunks."""
    chunks, cls = worker["tiled_num_shards"], MLPS.get(str(worker["model_type"]))
    if not (worker.is_training and worker.is_on("apply_tiled_mlp") and chunks > 1):
        return None, None
    return (None, chunks) if cls is None else (TiledMLP(classes=(cls,), chunks=chunks), None)


def _prefixes(worker: Worker) -> list[str]:
    """Return the prefixes of frozen parameters: the items of a list, or of a string split at commas."""
    given = worker["model_args.freeze_module_prefix"]
    return [*map(str, given)] if isinstance(given, list) else [] if given is None else str(given or "").split(",")


def _numbered_prefix(worker: Worker) -> str:
    """Return the first prefix that ends with a digit, and so also matches longer numbers (``layers.1`` and
    ``layers.10``)."""
    return next((each for each in _prefixes(worker) if each[-1:].isdigit()), "")


def _prefix_without_dot(worker: Worker) -> str:
    """Return the first prefix that does not end with a dot."""
    return next((each for each in _prefixes(worker) if not each.endswith(".")), "")


def _has_too_few_shards(worker: Worker) -> bool:
    """Return whether there are fewer shards than ranks of a sequence."""
    size, shards = worker["model_args.ulysses_size"], worker["fsdp_size"]
    return isinstance(size, int) and isinstance(shards, int) and shards < size  # an interpolation is read elsewhere


def _size_problem(size: int, worker: Worker) -> str:
    ranks = worker.num_ranks
    if ranks is None or not 1 < size < ranks or ranks % size == 0:
        return ""
    return f"the {ranks} ranks of device_mapping are not a multiple of it; use {divisors_text(ranks)}"


def _group_problem(group: Any, worker: Worker) -> str:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    shards = size if isinstance(size, int) and 1 < size < (ranks or size + 1) else ranks
    if type(group) is not int or shards is None or shards % group == 0:
        return ""
    return f"it does not divide the {shards} ranks that a parameter is sharded over; use {divisors_text(shards)}"


# ---------------------------------------------------------------------------------------------------------------------
# The table

_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_tiling = cases(
    case(
        lambda value, worker: worker.is_on("apply_tiled_mlp") and str(worker["model_type"]) not in MLPS,
        _APPROXIMATE,
        target="",
        reason="model_type does not name the MLPs' class, so they are not tiled: the same numbers, and more memory in "
        "long sequences",
        hint=f"name the model (model_type: {', '.join(MLPS)}), or the class in tiled_mlp",
    )
)
_DTYPE = takes_if(
    "one of " + ", ".join(DTYPES) + ", or null",
    lambda value: value is None or (isinstance(value, str) and value.lower() in DTYPES),
)
_CLASSES = takes_if(
    "a class name or a list of them",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value))
    ),
)
_RESHARD = takes_if(
    "true, false, null or a group size",
    lambda value: value is None or isinstance(value, bool) or POSITIVE_INT.fits(value),
)
# fmt: off
_ulysses = cases(
    case(lambda value, worker: _has_too_few_shards(worker) and "fsdp_size" in worker.given, Outcome.NEEDS_DECISION,
        reason=lambda worker: f"ROLL fails with it, because fsdp_size {worker['fsdp_size']} is smaller: no run was "
        "trained so",
        hint=lambda worker: f"set fsdp_size to {worker['model_args.ulysses_size']} or more, or ulysses_size to 1"),
    case(lambda value, worker: _has_too_few_shards(worker), _APPROXIMATE,
        hint=lambda worker: f"ROLL fails where fsdp_size is smaller, and its default is {worker['fsdp_size']}"),
)
# ROLL freezes each parameter whose name starts with a prefix; here a prefix ends at a dot.
_freeze = cases(
    case(lambda value, worker: not all(map(str.strip, _prefixes(worker))), Outcome.NEEDS_DECISION,
        reason="an empty prefix freezes every parameter", hint="remove the comma, or name the modules"),
    case(lambda value, worker: any(each != each.strip() for each in _prefixes(worker)), Outcome.NEEDS_DECISION,
        reason="releases of ROLL that keep the spaces around a comma freeze nothing by such a prefix",
        hint="as written: remove the spaces; as such a release trained: remove the prefix"),
    case(lambda value, worker: _numbered_prefix(worker) != "", Outcome.NEEDS_DECISION,
        reason=lambda worker: f"ROLL freezes all names that start with {_numbered_prefix(worker)}, also those of "
        f"{_numbered_prefix(worker)}0; here it ends at a dot",
        hint=lambda worker: f"{_numbered_prefix(worker)}. for this module alone; or name each of them"),
    case(lambda value, worker: _prefix_without_dot(worker) != "", _APPROXIMATE,
        reason=lambda worker: f"here {_prefix_without_dot(worker)} ends at a dot; ROLL also freezes "
        f"{_prefix_without_dot(worker)}_2, if the model "
        "has such a name",
        hint="name the others, too, if any; a prefix with a dot at its end is the same in both"),
)
ROWS: tuple[Lens, ...] = (
    Lens(name="strategy_name", default="fsdp2_train", outcome=Outcome.EXACT, target="fully_shard",
        takes=one_of(*STRATEGIES), meaning="training or inference with FSDP2", reason="both shard with fully_shard"),
    Lens(name="fsdp_size", reports_default=True, default=1, outcome=Outcome.EXACT, target="mesh", takes=INT,
        wrong=_size_problem,
        read={"mesh": _mesh},
        write=_shards, decide=cases(
            case(lambda size, worker: size <= 1 or (worker.num_ranks is not None and size >= worker.num_ranks),
                target="1-D mesh", reason=lambda worker: "1 or less, or all ranks and more, is: over "
                + (f"all {worker.num_ranks} ranks" if worker.num_ranks is not None else "all ranks")),
            case(lambda size, worker: worker.num_ranks is not None,
                target=lambda worker: f"mesh of {_replicas(worker)} replicas x {worker['fsdp_size']} shards",
                reason=lambda worker: f"{worker.num_ranks} ranks make {_replicas(worker)} groups, each with all "
                "parameters"),
            case(lambda size, worker: True, _APPROXIMATE,
                target=lambda worker: f"mesh of replicas x {worker['fsdp_size']} shards",
                reason="device_mapping does not show the number of ranks; with this many or fewer ROLL creates no "
                "replicas",
                hint=lambda worker: f"with more than {worker['fsdp_size']} ranks nothing is to be done, else set it to "
                "1")),
        meaning="over how many ranks a parameter is sharded; 1 or less, or all ranks and more: over all", reason=""),
    Lens(name="param_dtype",
        read={"mixed_precision.param_dtype": lambda value, worker: dtype_of(value, "bfloat16"),
            "precision": lambda value, worker: PRECISIONS.get(dtype_of(value, "bfloat16"), "fp32")},
        write=lambda run: dtype_name_of(run.config.mixed_precision.param_dtype or "float32"), reports_default=True,
        default="bf16", outcome=Outcome.EXACT, target="MixedPrecisionPolicy(param_dtype)", takes=_DTYPE,
        meaning="the dtype in which parameters are gathered and computed with",
        reason="the same argument of fully_shard; null is the default"),
    Lens(name="reduce_dtype", reports_default=True, default="float32", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)", takes=_DTYPE,
        read={"mixed_precision.reduce_dtype": lambda value, worker: reduced_in(worker)}, write=_reduce_dtype_name,
        decide=lambda finding, worker: replace(finding, value=worker.given.get("reduce_dtype") or
            dtype_name_of(reduced_in(worker))), meaning="the dtype in which gradients are reduced",
        reason="the same argument of fully_shard; null is the default"),
    Lens(name="enable_mix_precision", default=True, outcome=Outcome.EXACT, target="MixedPrecisionPolicy(reduce_dtype)",
        takes=BOOL, fields=("mixed_precision.reduce_dtype",),
        decide=cases(case(lambda value, worker: worker.given.get("reduce_dtype") is not None, Outcome.UNNEEDED,
            reason="reduce_dtype is set, and takes precedence")),
        meaning="whether an implicit reduce_dtype is float32 (true) or bf16 (false)",
        reason="sets reduce_dtype if the file does not; later ROLL only"),
    Lens(name="reshard_after_forward", reports_default=True, default=None, outcome=Outcome.EXACT,
        target="reshard_after_forward",
        takes=_RESHARD, wrong=_group_problem,
        read={"reshard_after_forward": lambda value, worker: True if value is None else value},
        write=lambda run: run.config.reshard_after_forward,
        decide=cases(case(lambda value, worker: value is None, reason="torch's own choice: freed in all units but the "
            "root", hint="torch 2.7 does not accept null here, so ROLL fails with it: set true")),
        meaning="whether parameters are freed between forward and backward; null: in all units but the root",
        reason="the same argument of fully_shard; the root unit stays gathered"),
    Lens(name="offload_policy", default=False, outcome=Outcome.EXACT, target="CPUOffloadPolicy(pin_memory=True)",
        neutral=(False, None), read={"cpu_offload": lambda value, worker: bool(value)},
        write=lambda run: run.config.cpu_offload, decide=cases(
            case(lambda value, worker: isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "0"),
                Outcome.NEEDS_DECISION, reason="ROLL treats any text as true, so this run was offloaded",
                hint="as trained: true; as written: false"),
            case(lambda value, worker: not value, Outcome.UNNEEDED, reason="nothing is offloaded")),
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        reason="the same policy of fully_shard; any value that is not false, 0, null or empty turns it on"),
    Lens(name="wrap_policy", write=_wrap_policy, default=None,
        read={"wrap": _wrap, "idle_experts":
            lambda value, worker: IdleExperts.IN_ORDER if _wrap(value, worker).experts else None},
        outcome=Outcome.EXACT, target="units", takes=takes_if("a mapping", lambda value: isinstance(value, Mapping)),
        meaning="which modules are units", reason="empty: the classes that the model names (_no_split_modules)"),
    Lens(name="wrap_policy.transformer_layer_cls_to_wrap", fields=("wrap.kind", "wrap.classes"), default=None,
        outcome=Outcome.EXACT, target="units", takes=_CLASSES,
        meaning="the classes whose modules are units; by default the model's _no_split_modules",
        reason="modules of these classes are units"),
    Lens(name="wrap_policy.wrap_embeddings", fields=("wrap.embeddings",), reports_default=True, default=False,
        outcome=Outcome.EXACT, target="units", takes=BOOL,
        decide=cases(case(lambda value, worker: not value, reason="against its guide, ROLL still makes each embedding "
        "a unit that is not tied to the output")), meaning="whether the input embedding is a separate unit",
        reason="the input embedding is a unit"),
    Lens(name="wrap_policy.wrap_lm_output", fields=("wrap.output",), default=False, outcome=Outcome.EXACT,
        target="units", takes=BOOL, neutral=(False,), meaning="whether lm_head is a separate unit",
        reason="lm_head is a unit"),
    Lens(name="wrap_policy.moe_experts", fields=("wrap.experts",), default=None, outcome=Outcome.EXACT, target="units",
        takes=_CLASSES, decide=cases(case(lambda value, worker: not wraps_experts(worker), Outcome.UNNEEDED,
        reason="ROLL wraps experts with apply_expert_patch or ep_size only, so here it did not")),
        meaning="the classes of experts that are units, if apply_expert_patch or ep_size is on",
        reason="experts are units"),
    Lens(name="apply_expert_patch", default=False, outcome=Outcome.EXACT, takes=BOOL, neutral=(False,),
        target="idle_experts", fields=("idle_experts",),
        write=lambda run: unless(False, run.config.idle_experts is not None), decide=cases(
            case(lambda value, worker: value and worker["wrap_policy.moe_experts"] is None, Outcome.UNNEEDED,
                reason="no expert is a separate unit, so all ranks gather the same without it")),
        meaning="running experts without tokens on one token, to issue the same collectives on all ranks",
        reason="every rank runs each expert in one order, on no rows where it has no token, in the place of one row "
        "times 0: the same numbers"),
    Lens(name="apply_tiled_mlp", read={"tiled_mlp": lambda value, worker: _tiling_of(worker)[0],
            "tiled_chunks": lambda value, worker: _tiling_of(worker)[1]},
        write=lambda run: unless(False, tiles_of(run)[0] is not None), default=False, outcome=Outcome.EXACT,
        takes=BOOL, neutral=(False,), target="tiled_mlp", decide=_tiling,
        meaning="computing MLPs in pieces of the sequence",
        reason="the same modules in as many pieces, each computed once more in backward"),
    Lens(name="tiled_num_shards", write=lambda run: tiles_of(run)[0], fields=("tiled_mlp",), default=4,
        outcome=Outcome.EXACT, target="tiled_mlp", takes=POSITIVE_INT, only_with="apply_tiled_mlp", decide=_tiling,
        meaning="into how many pieces an MLP's sequence is cut", reason="belongs to apply_tiled_mlp"),
    Lens(name="model_type", write=lambda run: tiles_of(run)[0] and tiles_of(run)[1], fields=("tiled_mlp",),
        default=None, outcome=Outcome.EXACT, target="tiled_mlp", only_with="apply_tiled_mlp", decide=_tiling,
        meaning="the model whose MLP class is replaced; by default all that ROLL knows",
        reason="names the class of the MLPs"),
    Lens(name="async_save_ckpt", reports_default=True, default=True, outcome=Outcome.EXACT, target="async_save",
        takes=BOOL,
        read={"async_save": lambda value, worker: worker.is_training and value},
        write=lambda run: run.async_save, decide=cases(
            case(lambda value, worker: worker.is_training and not value, target="",
                reason="training waits until a checkpoint is written"),
            case(lambda value, worker: not worker.is_training, Outcome.UNNEEDED, reason="nothing is saved")),
        meaning="writing checkpoints in the background, the last one excepted",
        reason="the checkpoint is staged and written while training continues"),
    Lens(name="save_only_model", read={"save_only_model": as_is}, write=lambda run: unless(False, run.save_only_model),
        default=False, outcome=Outcome.APPROXIMATE, target="save_weights_only of the Trainer", takes=BOOL,
        neutral=(False,), meaning="checkpoints without the optimizer",
        reason="the contents of a checkpoint are set outside of the sharding section there",
        hint="set save_weights_only: true beside save_folder"),
    Lens(name="ep_size", read={"expert_parallel": as_is}, write=lambda run: unless(1, run.expert_parallel), default=1,
        outcome=Outcome.APPROXIMATE, takes=POSITIVE_INT, neutral=(1,),
        target="shards of experts, over the ranks of the mesh",
        meaning="expert parallelism: over how many ranks a layer's experts are divided",
        reason="ROLL's experts are modules of a transformers model, whose tokens travel by a patch of ROLL's; here "
        "they are sharded like all other parameters, and gathered where they run: the same numbers, more communication",
        hint="with wrap_policy.moe_experts one expert is gathered at a time, else all of a layer's; the fsdp_config "
        "key expert_parallel_degree, with which tokens travel, splits those of Hugging Face's Mixtral, Qwen2-MoE, "
        "Qwen3-MoE, OLMoE and DeepSeek-V3, and LLM Foundry's torch_dmoe"),
    Lens(name="efsdp_size", default=1, outcome=Outcome.APPROXIMATE, takes=POSITIVE_INT, only_with="ep_size",
        target="shards of experts, over the ranks of the mesh", meaning="over how many ranks an expert is sharded",
        reason="experts are sharded over as many ranks as all other parameters"),
    Lens(name="moe_use_grouped_mm", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL, neutral=(False,),
        meaning="one grouped matrix product for all experts of a layer",
        reason="a kernel of the model (transformers 5.2 and later) and no part of sharding: the same numbers up to "
        "rounding", hint="choose grouped_mm as the experts' implementation in the model's configuration"),
    Lens(name="reduce_scatter_during_grad_accumulation", read={"accumulation.gradient_sync":
        lambda value, worker: GradientSync.EVERY if value or not worker.is_training else GradientSync.LAST},
        write=lambda run: False if run.config.accumulation.gradient_sync is GradientSync.LAST else None, default=True,
        outcome=Outcome.EXACT, target="gradient_sync", takes=BOOL,
        meaning="whether gradients are reduced in every microbatch (true) or in a batch's last (false)",
        reason="every microbatch, or the last: the same choice"),
    Lens(name="fused_optimizer", default=False, outcome=Outcome.APPROXIMATE, target="the optimizer", takes=BOOL,
        neutral=(False,), meaning="AdamW's fused kernel",
        reason="an argument of the optimizer and no part of sharding; the same numbers up to rounding",
        hint="create the optimizer with fused=True"),
    Lens(name="init_tokenizer_processor", default=True, outcome=Outcome.UNNEEDED, takes=BOOL,
        meaning="whether ROLL loads a tokenizer beside the model", reason="no part of sharding"),
    Lens(name="model_args.ulysses_size", default=1, outcome=Outcome.EXACT, target="context_parallel_degree",
        takes=takes_if(f"{POSITIVE_INT.text}, or null", lambda value: value is None or POSITIVE_INT.fits(value)),
        neutral=(1, None), decide=_ulysses, read={"context_parallel_degree": lambda value, worker: value or 1},
        meaning="context parallelism: over how many ranks a sequence is divided",
        reason="attention exchanges heads for sequence, there as here, and these ranks take one batch; a model whose "
        "attention cannot be divided so is refused when it is planned"),
    Lens(name="model_args.freeze_module_prefix", default=None, outcome=Outcome.EXACT, target="freeze",
        neutral=(None,), decide=_freeze, read={"freeze": lambda value, worker:
            tuple(name for each in _prefixes(worker) if (name := each.strip().removesuffix(".")))},
        meaning="parameters that are not trained, by the beginning of their names",
        reason="the same parameters, frozen before the model is sharded, by prefixes that end at a dot"),
    Lens(name="model_args.lora_target",
        read={"adapter": lambda value, worker: "lora" if value and worker.is_training else None}, default=None,
        outcome=Outcome.APPROXIMATE, target="units", neutral=(None,),
        meaning="layers with a LoRA adapter; ROLL makes each adapter a unit",
        reason="adapters stay inside their layer's unit: the same numbers with fewer and larger gathers"),
    Lens(name="model_args.disable_gradient_checkpointing", reports_default=True, default=False, outcome=Outcome.EXACT,
        target="activation_checkpointing", takes=BOOL, read={"activation_checkpointing": _activation_checkpointing},
        write=lambda run: not run.config.activation_checkpointing.checkpoint,
        decide=cases(
            case(lambda value, worker: value, Outcome.UNNEEDED, reason="activations are stored"),
            case(lambda value, worker: True, reason="on unless it is disabled: each layer's activations are recomputed "
                "in backward")),
        meaning="whether activations are stored (true) or recomputed (false)",
        reason="each layer's activations are stored or recomputed"),
    Lens(name="model_args.gradient_checkpointing_use_reentrant", fields=("activation_checkpointing.reentrant",),
        default=None, outcome=Outcome.EXACT, target="activation_checkpointing_reentrant",
        takes=takes_if("true, false or null", lambda value: value is None or isinstance(value, bool)),
        meaning="which of torch's implementations recomputes; null: the reentrant one for mixtures of experts only",
        reason="both implementations run inside a unit"),
    Lens(name="model_args.dtype", default="bf16", outcome=Outcome.APPROXIMATE,
        target="the dtype that the model is created in", takes=one_of("fp32", "bf16", "fp16"),
        meaning="the dtype in which weights are read",
        reason="ROLL reads weights in it and then stores them in reduce_dtype (training) or param_dtype (inference)",
        hint="create the model in the dtype that it is to be stored in; sharding keeps it"),
    Lens(name="device_mapping", default=None, outcome=Outcome.EXACT, target="the number of ranks",
        read={"num_ranks": lambda value, worker: worker.num_ranks},
        decide=cases(
            case(lambda value, worker: worker.num_ranks is None, _APPROXIMATE,
                reason="the number of devices is not known before it is evaluated",
                hint="write it as a list or as list(range(FROM, TO))"),
            case(lambda value, worker: True, reason=lambda worker: f"{worker.num_ranks} ranks")),
        meaning="the devices of this worker, and so the number of ranks", reason=""),
    Lens(name="training_args.per_device_train_batch_size", read={"microbatch_size": count},
        outcome=Outcome.EXACT, target="device_train_microbatch_size", meaning="rows of a rank's microbatch",
        reason="as many rows"),
    Lens(name="training_args.gradient_accumulation_steps", read={"num_microbatches":
        lambda steps, worker: count(steps or (worker["training_args.per_device_train_batch_size"] and 1))},
        outcome=Outcome.EXACT, target="global_train_batch_size", meaning="a rank's microbatches for one step",
        reason="as many microbatches, of all ranks' rows"),
    *(Lens(name=f"training_args.{key}", read={"optimizer": lambda value, worker: optimizer_of(
        {option: worker[f"training_args.{each}"] for each, option in OF_TRAINERS.items() if option != "eps"})}
        if name == "lr" else {},
        fields=("optimizer",) if name != "lr" else (), outcome=Outcome.EXACT, target="optimizer",
        meaning="an option of AdamW", reason="the same decay: Composer's weight_decay is this one times the learning "
        "rate" if name == "weight_decay" else "the same value")
        for key, name in OF_TRAINERS.items() if name != "eps"),
)
# fmt: on
BY_NAME = {row.name: row for row in ROWS}

# ---------------------------------------------------------------------------------------------------------------------
# Fields of a run that ROLL's FSDP2 cannot configure, or implements differently

# The norm to which ROLL clips gradients if the top level of the file has no max_grad_norm.
GRAD_NORM = 1.0
_CLASSES_KEY = "wrap_policy.transformer_layer_cls_to_wrap"
# fmt: off
LIMITS: tuple[Limitation, ...] = (
    limits(_UNSUPPORTED, "mesh.groups", "mesh",
        reason="ROLL has one mesh of all ranks, no groups that do not meet", hint="choose fsdp_size"),
    limits(_UNSUPPORTED, "mesh.shards", "mesh", was=1,
        reason="fsdp_size 1 means all ranks in ROLL, so it cannot keep full parameters on each rank",
        hint="fsdp_size 2 keeps half of them; or accept sharding over all ranks"),
    limits(_NEEDS_DECISION, "mesh.replicas", "mesh", beside={"mesh.shards": -1}, target="fsdp_size",
        reason="ROLL's key is the number of shards, which follows from the number of replicas only with that of ranks",
        hint="set fsdp_size to the number of ranks divided by {replicate_degree}"),
    limits(_APPROXIMATE, "mesh.replicas", target="fsdp_size",
        reason="ROLL makes replicas of the ranks that are left, those of other axes included"),
    limits(_EXACT, "num_ranks", target="device_mapping",
        reason="ROLL counts the ranks by device_mapping, outside of this section",
        hint="device_mapping: list(range(0, {value})) for as many"),
    limits(_APPROXIMATE, "wrap.experts", target="apply_expert_patch",
        reason="ROLL makes each expert a unit with apply_expert_patch only: the same numbers"),
    limits(_NEEDS_DECISION, "wrap.kind", "wrap", was=WrapKind.HOOKS, target=_CLASSES_KEY,
        reason="ROLL wraps by class, and which classes the model's hooks choose stands in its code",
        hint="name them in wrap_policy; by default ROLL uses the _no_split_modules of a transformers model"),
    limits(_NEEDS_DECISION, "wrap.kind", "wrap", was=WrapKind.SIZE, target=_CLASSES_KEY,
        reason="ROLL wraps by class, not by size", hint="name the classes of these {value} in wrap_policy"),
    limits(_APPROXIMATE, "wrap.kind", "wrap", was=WrapKind.ROOT,
        reason="ROLL always makes layers units; the numbers do not depend on it, and less memory is needed"),
    limits(_APPROXIMATE, "mixed_precision.param_dtype", target="param_dtype: fp32",
        reason="ROLL always casts, and takes null for bf16", hint="choose the dtype that the model is created in"),
    limits(_APPROXIMATE, "mixed_precision.reduce_dtype", target="reduce_dtype",
        reason="ROLL reduces in float32 by default, so param_dtype is written"),
    limits(_UNSUPPORTED, "mixed_precision.output_dtype", reason="ROLL has no key for the dtype of outputs"),
    limits(_UNSUPPORTED, "precision", was="amp_fp8", title="products in fp8",
        reason="ROLL's FSDP2 computes nothing in fp8", hint="param_dtype: bf16 computes in bfloat16"),
    limits(_APPROXIMATE, "precision", target="param_dtype",
        reason="ROLL runs each step under torch.autocast in param_dtype"),
    limits(_APPROXIMATE, "mixed_precision.buffer_dtype", reason="ROLL leaves buffers in the dtype that they have",
        hint="cast them where the model is made"),
    limits(_APPROXIMATE, "mixed_precision.cast_forward_inputs", "mixed_precision.cast_root_inputs",
        reason="ROLL casts no inputs of units and leaves it to torch.autocast"),
    limits(_APPROXIMATE, "mixed_precision.cast_root_inputs",
        reason="ROLL casts no inputs and leaves it to torch.autocast; token ids are not cast anyway"),
    limits(_UNSUPPORTED, "activation_checkpointing.cpu_offload", reason="ROLL does not keep activations in CPU memory"),
    limits(_NEEDS_DECISION, "activation_checkpointing.checkpoint", "activation_checkpointing",
        target="model_args.disable_gradient_checkpointing",
        reason="ROLL recomputes activations unless model_args, outside of this section, disables it",
        hint="set model_args.disable_gradient_checkpointing: true, or recompute: the numbers do not depend on it"),
    limits(_APPROXIMATE, "activation_checkpointing.classes", "activation_checkpointing.checkpoint", was=None,
        title="activation_checkpointing",
        reason="which modules the model's hooks recompute stands in its code; ROLL recomputes the layers that the "
        "model itself chooses (gradient_checkpointing_enable): the same numbers, another memory"),
    limits(_APPROXIMATE, "activation_checkpointing.classes",
        reason="ROLL recomputes the layers that the model itself chooses (gradient_checkpointing_enable): the same "
        "numbers, another memory"),
    limits(_APPROXIMATE, "activation_checkpointing.reentrant", was=True,
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL recomputes without reentering, except in mixtures of experts; both compute the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: true for the same implementation"),
    limits(_APPROXIMATE, "activation_checkpointing.reentrant", was=False, title="non-reentrant checkpointing",
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL reenters in mixtures of experts unless it is set to false; both compute the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: false for the same implementation"),
    limits(_UNSUPPORTED, "activation_checkpointing.transformer_engine",
        reason="ROLL recomputes with torch's implementation only"),
    *(limits(_APPROXIMATE, f"prefetch.{phase}", reason=f"ROLL leaves the order of gathers in {phase} to "
        "FSDP2; the numbers do not depend on it") for phase in ("forward", "backward")),
    limits(
        _APPROXIMATE,
        "accumulation.gradient_sync",
        was=GradientSync.DEFER_REPLICA,
        target="reduce_scatter_during_grad_accumulation: true",
        reason="ROLL reduces over shards and replicas together, in every microbatch or in the last: more communication",
    ),
    limits(_APPROXIMATE, "has_expert_axis",
        reason="ROLL takes the ranks of experts from those of the shards: the same numbers"),
    limits(_APPROXIMATE, "accumulation.reshard_after_backward",
        reason="ROLL frees parameters after each backward: less memory, more communication"),
    limits(_APPROXIMATE, "idle_experts", is_kept=True, target="apply_expert_patch",
        reason="ROLL runs experts without tokens on one token, times 0: the same numbers where all of them are finite"),
    limits(_NEEDS_DECISION, "expert_parallel_degree", target="ep_size",
        reason="ROLL's ep_size splits experts by a patch of the model's own, not stacked ones as LLM Foundry's",
        hint="ep_size: {value}, where ROLL knows the model"),
    limits(_UNSUPPORTED, "idle_towers",
        reason="ROLL runs a tower where the batch has something for it; ranks without would wait for the others",
        hint="name no class of the tower in wrap_policy: it is in the unit around it then"),
    limits(_APPROXIMATE, "collective_guard",
        reason="ROLL does not compare where ranks stand; a run whose ranks diverge hangs until NCCL's timeout"),
    *(limits(_UNNEEDED, field, reason="ROLL distributes batches to data-parallel ranks, not to each rank")
        for field in ("check_data", "broadcast_batch")),
    limits(_APPROXIMATE, "sync_module_states",
        reason="ROLL always broadcasts the values of rank 0"),
    limits(_UNSUPPORTED, "ignored_modules", reason="ROLL shards all modules"),
    limits(_APPROXIMATE, "mixed_precision.gradients", target="reduce_dtype",
        reason="ROLL keeps gradients in the dtype of the parameters, which is reduce_dtype in later versions"),
    limits(_APPROXIMATE, "state_dict_type",
        reason="ROLL writes shards, and beside them the full model for Hugging Face, without an optimizer"),
    limits(_NEEDS_DECISION, "context_parallel_degree", target="model_args.ulysses_size",
        reason="ROLL sets it in model_args, outside of this section; fsdp_size must not be smaller",
        hint="set model_args.ulysses_size: {value}"),
    limits(_NEEDS_DECISION, "train_only", target="model_args.freeze_module_prefix",
        reason="ROLL lists frozen parameters, by prefixes; the run lists trained ones: {value}",
        hint="set model_args.freeze_module_prefix to the names of all others"),
    limits(_NEEDS_DECISION, "freeze", target="model_args.freeze_module_prefix",
        reason="ROLL sets it in model_args, outside of this section",
        hint="set model_args.freeze_module_prefix: {value}, by names of the transformers model; a dot at the end of a "
        "module's name keeps longer names out"),
    limits(_APPROXIMATE, "tiled_mlp.chunks", "tiled_mlp",
        reason=f"ROLL tiles {', '.join(dict.fromkeys(MLPS.values()))} only: the same numbers, and more memory in long "
        "sequences"),
    limits(_APPROXIMATE, "tiled_mlp.classes",
        reason="without a model_type, which names one class, ROLL tiles all MLPs that it knows: "
        "the same numbers"),
    limits(_NEEDS_DECISION, "other_clipping", "max_grad_norm", target="max_grad_norm",
        reason=f"ROLL clips gradients to a norm, {GRAD_NORM} unless the top of the file sets it; the run clips them by "
        "{value}", hint="choose a norm, or a large number for none"),
    limits(_APPROXIMATE, "max_grad_norm", was=None, target="max_grad_norm",
        reason=f"ROLL clips gradients to a norm of {GRAD_NORM} unless the top of the file sets it",
        hint="set max_grad_norm there to a large number, such as 1.0e+9, or train with clipping"),
    limits(_APPROXIMATE, "max_grad_norm", target="max_grad_norm",
        reason=f"ROLL sets it at the top of the file, for all workers, and clips to {GRAD_NORM} without",
        hint="set max_grad_norm: {value} there"),
    limits(_APPROXIMATE, "stored_dtype", target="reduce_dtype",
        reason="ROLL stores trained parameters, and the optimizer's state, in reduce_dtype, and not {value}"),
    *(limits(_UNSUPPORTED, f"{kind}_parallel", reason=f"ROLL's FSDP2 has no {kind} parallelism",
        hint="its megatron_train strategy has") for kind in ("tensor", "pipeline")),
    limits(_APPROXIMATE, "selective_checkpointing",
        reason="ROLL recomputes all layers or none: less memory, more computation, the same numbers"),
    limits(_UNSUPPORTED, "compile", reason="ROLL has no key for torch.compile with FSDP2"),
    limits(_APPROXIMATE, *OF_TRAINING, is_any=True, title="batches, steps and optimizer", target="training_args",
        reason="ROLL has them in a worker's training_args, outside of this section",
        hint="set training_args.per_device_train_batch_size, gradient_accumulation_steps and learning_rate"),
    limits(_UNNEEDED, "verbose", reason="ROLL has its own keys for its log"),
)
# fmt: on
