"""ROLL: ``strategy_args.strategy_config`` of each worker whose ``strategy_name`` is fsdp2_train or fsdp2_infer.

ROLL trains with FSDP2 already, so nothing is translated here but words. Meanings and defaults: ROLL of 2026-08
(``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``); its own guide lacks several of the keys, and is wrong
about wrap_embeddings, about casting and about the versions of torch that an implicit reshard_after_forward needs.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts, TiledMLP
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
    undecided,
    unknown_key,
)
from composer_fsdp2.config.sharding import (
    DTYPES_BY_SHORT_NAME,
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    ShardingConfig,
)
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    Frame,
    Question,
    Reading,
    Section,
    Setting,
    deciding,
    implicit,
)
from composer_fsdp2.migration.paths import Path, merged, nested, value_at
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

_STRATEGIES = ("fsdp2_train", "fsdp2_infer")
_DTYPES = {
    **{name: dtype for short, dtype in DTYPES_BY_SHORT_NAME.items() for name in (short, dtype)},
    "half": "float16",
    "float": "float32",
}
# By model_type, the MLPs that it can tile (verl's tiled_mlp.py, of which ROLL has a copy).
_MLPS = {
    "llama": "LlamaMLP",
    "qwen2": "Qwen2MLP",
    "qwen2_5": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "qwen3_moe": "Qwen3MoeMLP",
}
_PRECISIONS = {"bfloat16": "amp_bf16", "float16": "amp_fp16"}


# ---------------------------------------------------------------------------------------------------------------------
# What a worker's part of the file says


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What one worker's part of the file says, by the names of the table.

    Args:
        num_ranks: None if device_mapping does not tell.
        top: The whole file, for what holds for all workers.
    """

    given: Mapping[str, Any]
    num_ranks: int | None
    top: Mapping[str, Any]

    @classmethod
    def of(cls, section: Section) -> "Worker":
        has_worker = "strategy_args" in section.path
        around = value_at(section.around, section.path[: section.path.index("strategy_args")]) if has_worker else {}
        given = dict(_flat(section.given, ("wrap_policy",)))
        if section.path[-1:] == ("strategy_args",):  # there is no strategy_config, or it is null
            given = {"strategy_name": section.given["strategy_name"]}
        elif (strategy := around.get("strategy_args")) is not None:
            given = {"strategy_name": strategy.get("strategy_name")} | given
        model = around.get("model_args")
        beside = (("strategy_config", section.given.get("strategy_config")), ("model_args", model))
        given |= {name: value for name, value in beside if value is not None and not isinstance(value, Mapping)}
        for name, value in model.items() if isinstance(model, Mapping) else ():
            if f"model_args.{name}" in _BY_NAME:
                given[f"model_args.{name}"] = value
        if "device_mapping" in around:
            given["device_mapping"] = around["device_mapping"]
        return cls(given=given, num_ranks=_count(around.get("device_mapping")), top=section.around)

    @property
    def misshapen(self) -> tuple[str, ...]:
        """What must be a mapping, and is none."""
        names = ("strategy_config", "model_args")
        return tuple(name for name in names if not isinstance(self.given.get(name, {}), Mapping))

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, _BY_NAME[name].default)

    @property
    def is_training(self) -> bool:
        return bool(self["strategy_name"] != "fsdp2_infer")

    @property
    def wraps_experts(self) -> bool:
        return self["apply_expert_patch"] is True or self["ep_size"] != 1

    def is_on(self, name: str) -> bool:
        row = _BY_NAME[name]
        return not row.is_neutral(self[name])


def _flat(given: Mapping[str, Any], nested: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if key in nested and isinstance(value, Mapping) and value:
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield str(key), value


def _count(devices: Any) -> int | None:
    """How many devices: ROLL evaluates the string; here lists, ranges and their sums are understood."""
    if isinstance(devices, str):
        try:
            return len(_listed(ast.parse(devices.strip(), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, MemoryError):
            return None
    return len(devices) if isinstance(devices, list) else None


def _listed(node: ast.expr) -> Sequence[Any]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _listed(node.args[0])
        if node.func.id == "range":
            return range(*(ast.literal_eval(argument) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_listed(node.left), *_listed(node.right)]
    value = ast.literal_eval(node)
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Where the value decides


def _fsdp_size(finding: Finding, worker: Worker) -> Finding:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    if size <= 1 or (ranks is not None and size >= ranks):
        of_all = f"all {ranks} ranks" if ranks is not None else "all ranks"
        return replace(finding, target="1-D mesh", reason=f"1 or less, or all ranks and more, is: over {of_all}")
    if ranks is not None:
        return replace(
            finding,
            target=f"mesh of {ranks // size} replicas x {size} shards",
            reason=f"{ranks} ranks make {ranks // size} groups, each with all parameters",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target=f"mesh of replicas x {size} shards",
        reason="device_mapping does not say how many ranks there are; with this many or fewer ROLL makes no replicas",
        hint=f"with more than {size} ranks nothing is to be done, else set it to 1",
    )


def _reduce_dtype(finding: Finding, worker: Worker) -> Finding:
    return replace(finding, value=worker.given.get("reduce_dtype") or _word(_reduced_in(worker)))


def _reshard(finding: Finding, worker: Worker) -> Finding:
    if worker["reshard_after_forward"] is None:
        reason = "torch's own choice: freed in all units but the root"
        hint = "torch 2.7 takes no null here, so that ROLL fails with it: say true"
        return replace(finding, reason=reason, hint=hint)
    return finding


def _offload(finding: Finding, worker: Worker) -> Finding:
    value = worker["offload_policy"]
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "0"):
        reason = "ROLL treats any text as true, so this run was offloaded"
        return undecided(finding, reason, "as trained: true; as written: false")
    if not value:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is offloaded")
    return finding


def _embeddings(finding: Finding, worker: Worker) -> Finding:
    if worker["wrap_policy.wrap_embeddings"]:
        return finding
    return replace(
        finding,
        reason="against its guide, ROLL still makes each embedding a unit that is not tied to the output",
    )


def _experts(finding: Finding, worker: Worker) -> Finding:
    if worker.wraps_experts:
        return finding
    return idle(finding, "ROLL wraps experts with apply_expert_patch or ep_size only, so here it did not")


def _patch(finding: Finding, worker: Worker) -> Finding:
    if finding.asks and worker["wrap_policy.moe_experts"] is None:
        return idle(finding, "no expert is a unit of its own, so that all ranks gather the same without it")
    return finding


def _mix(finding: Finding, worker: Worker) -> Finding:
    if worker.given.get("reduce_dtype") is None:
        return finding
    return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="reduce_dtype is given, and takes precedence")


def _async_save(finding: Finding, worker: Worker) -> Finding:
    if worker.is_training and not worker["async_save_ckpt"]:
        return replace(finding, target="", reason="training waits until a checkpoint is written")
    return (
        finding
        if worker.is_training
        else replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is saved")
    )


def _ulysses(finding: Finding, worker: Worker) -> Finding:
    size, shards = worker["model_args.ulysses_size"], worker["fsdp_size"]
    if isinstance(size, int) and isinstance(shards, int) and shards < size:
        return replace(finding, hint=f"ROLL itself fails with it, as fsdp_size {shards} is smaller")
    return finding


def _tiling(finding: Finding, worker: Worker) -> Finding:
    if finding.outcome is not Outcome.EXACT or str(worker["model_type"]) in _MLPS:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target="",
        reason="model_type does not say which MLPs these are, so that they are computed in one piece: the same "
        "numbers, and more memory in long sequences",
        hint=f"name the model (model_type: {', '.join(_MLPS)}), or the class in tiled_mlp",
    )


def _checkpointing(finding: Finding, worker: Worker) -> Finding:
    if worker["model_args.disable_gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    return replace(finding, reason="on unless it is disabled: each layer's activations are recomputed in backward")


def _devices(finding: Finding, worker: Worker) -> Finding:
    if worker.num_ranks is None:
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="it does not say how many devices there are without being run",
            hint="write it as a list or as list(range(FROM, TO))",
        )
    return replace(finding, reason=f"{worker.num_ranks} ranks")


# ---------------------------------------------------------------------------------------------------------------------
# The table

_DTYPE = takes_if(
    "one of " + ", ".join(_DTYPES) + ", or null",
    lambda value: value is None or (isinstance(value, str) and value.lower() in _DTYPES),
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
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"

# fmt: off
_ROWS: tuple[Row, ...] = (
    Row(name="strategy_name", default="fsdp2_train", outcome=Outcome.EXACT, target="fully_shard",
        takes=one_of(*_STRATEGIES), meaning="training or inference with FSDP2", reason="both shard with fully_shard"),
    Row(name="fsdp_size", tells_default=True, default=1, outcome=Outcome.EXACT, target="mesh", takes=INT,
        aspect=Aspect.MESH,
        decide=_fsdp_size,
        meaning="over how many ranks a parameter is sharded; 1 or less, or all ranks and more: over all", reason=""),
    Row(name="param_dtype", tells_default=True, default="bf16", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(param_dtype)",
        takes=_DTYPE, aspect=Aspect.PRECISION, meaning="the dtype in which parameters are gathered and computed with",
        reason="the same argument of fully_shard; null is the default"),
    Row(name="reduce_dtype", tells_default=True, default="float32", outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        takes=_DTYPE, aspect=Aspect.PRECISION, decide=_reduce_dtype, meaning="the dtype in which gradients are reduced",
        reason="the same argument of fully_shard; null is the default"),
    Row(name="enable_mix_precision", default=True, outcome=Outcome.EXACT, target="MixedPrecisionPolicy(reduce_dtype)",
        takes=BOOL, aspect=Aspect.PRECISION, decide=_mix,
        meaning="whether an implicit reduce_dtype is float32 (true) or bf16 (false)",
        reason="decides reduce_dtype where the file does not give it; later ROLL only"),
    Row(name="reshard_after_forward", tells_default=True, default=None, outcome=Outcome.EXACT,
        target="reshard_after_forward",
        takes=_RESHARD, aspect=Aspect.RESHARD, decide=_reshard,
        meaning="whether parameters are freed between forward and backward; null: in all units but the root",
        reason="the same argument of fully_shard; the root unit stays gathered"),
    Row(name="offload_policy", default=False, outcome=Outcome.EXACT, target="CPUOffloadPolicy(pin_memory=True)",
        neutral=(False, None), aspect=Aspect.OFFLOAD, decide=_offload,
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        reason="the same policy of fully_shard; any value that is not false, 0, null or empty turns it on"),
    Row(name="wrap_policy", default=None, outcome=Outcome.EXACT, target="units",
        takes=takes_if("a mapping", lambda value: isinstance(value, Mapping)), aspect=Aspect.WRAP,
        meaning="which modules become units", reason="empty: the classes that the model names (_no_split_modules)"),
    Row(name="wrap_policy.transformer_layer_cls_to_wrap", default=None, outcome=Outcome.EXACT, target="units",
        takes=_CLASSES, aspect=Aspect.WRAP,
        meaning="the classes of which each module becomes a unit; by default the model's _no_split_modules",
        reason="modules of these classes become units"),
    Row(name="wrap_policy.wrap_embeddings", tells_default=True, default=False, outcome=Outcome.EXACT, target="units",
        takes=BOOL,
        aspect=Aspect.WRAP, decide=_embeddings, meaning="whether the input embedding is a unit of its own",
        reason="the input embedding becomes a unit"),
    Row(name="wrap_policy.wrap_lm_output", default=False, outcome=Outcome.EXACT, target="units", takes=BOOL,
        neutral=(False,), aspect=Aspect.WRAP, meaning="a unit of its own for lm_head",
        reason="lm_head becomes a unit"),
    Row(name="wrap_policy.moe_experts", default=None, outcome=Outcome.EXACT, target="units", takes=_CLASSES,
        aspect=Aspect.WRAP, decide=_experts, capability="expert units",
        meaning="the classes of experts that become units, where apply_expert_patch or ep_size is on",
        reason="experts become units"),
    Row(name="apply_expert_patch", default=False, outcome=Outcome.EXACT, takes=BOOL, neutral=(False,),
        target="idle_experts", aspect=Aspect.EXPERTS, capability="idle experts", decide=_patch,
        meaning="running experts without tokens on one token, so that all ranks issue the same collectives",
        reason="every rank runs each expert in one order, on no rows where it has no token, in the place of one row "
        "times 0: the same numbers"),
    Row(name="apply_tiled_mlp", default=False, outcome=Outcome.EXACT, takes=BOOL, neutral=(False,),
        target="tiled_mlp", aspect=Aspect.TILING, capability="tiled MLP", decide=_tiling,
        meaning="computing MLPs in pieces of the sequence",
        reason="the same modules in as many pieces, each computed once more in backward"),
    Row(name="tiled_num_shards", default=4, outcome=Outcome.EXACT, target="tiled_mlp", takes=POSITIVE_INT,
        only_with="apply_tiled_mlp", decide=_tiling, meaning="into how many pieces an MLP's sequence is cut",
        reason="belongs to apply_tiled_mlp"),
    Row(name="model_type", default=None, outcome=Outcome.EXACT, target="tiled_mlp", only_with="apply_tiled_mlp",
        decide=_tiling, meaning="of which model the MLP class is replaced; by default of all that ROLL knows",
        reason="names the class of the MLPs"),
    Row(name="async_save_ckpt", tells_default=True, default=True, outcome=Outcome.EXACT, target="async_save",
        takes=BOOL,
        aspect=Aspect.ASYNC_SAVE, decide=_async_save,
        meaning="writing checkpoints in the background, the last one excepted",
        reason="the checkpoint is staged and written while training goes on"),
    Row(name="save_only_model", default=False, outcome=Outcome.APPROXIMATE, target="save_weights_only of the Trainer",
        capability="model only", takes=BOOL, neutral=(False,), meaning="checkpoints without the optimizer",
        reason="what a checkpoint holds is decided outside of the sharding section there",
        hint="set save_weights_only: true beside save_folder"),
    Row(name="ep_size", default=1, outcome=Outcome.UNSUPPORTED, takes=POSITIVE_INT, neutral=(1,),
        capability="expert parallelism",
        meaning="expert parallelism: over how many ranks a layer's experts are divided",
        reason=f"{_ONE_MESH}; experts are sharded like all other parameters",
        hint="ep_size: 1 trains the same model with more gathering of experts, if its experts fit one rank by one"),
    Row(name="efsdp_size", default=1, outcome=Outcome.UNSUPPORTED, takes=POSITIVE_INT, only_with="ep_size",
        meaning="over how many ranks an expert is sharded", reason="belongs to expert parallelism"),
    Row(name="moe_use_grouped_mm", default=False, outcome=Outcome.APPROXIMATE, takes=BOOL, neutral=(False,),
        meaning="one grouped matrix product for all experts of a layer",
        reason="a kernel of the model (transformers 5.2 and later) and no part of sharding: the same numbers up to "
        "rounding", hint="choose grouped_mm as the experts' implementation in the model's configuration"),
    Row(name="reduce_scatter_during_grad_accumulation", default=True, outcome=Outcome.EXACT, target="gradient_sync",
        takes=BOOL, aspect=Aspect.GRADIENT_SYNC,
        meaning="whether gradients are reduced in every microbatch (true) or in a batch's last (false)",
        reason="every microbatch, or the last: the same choice"),
    Row(name="fused_optimizer", default=False, outcome=Outcome.APPROXIMATE, target="the optimizer", takes=BOOL,
        neutral=(False,), meaning="AdamW's fused kernel",
        reason="an argument of the optimizer and no part of sharding; the same numbers up to rounding",
        hint="create the optimizer with fused=True"),
    Row(name="init_tokenizer_processor", default=True, outcome=Outcome.UNNEEDED, takes=BOOL,
        meaning="whether ROLL loads a tokenizer beside the model", reason="no part of sharding"),
    Row(name="model_args.ulysses_size", default=1, outcome=Outcome.EXACT, target="context_parallel_degree",
        takes=takes_if(f"{POSITIVE_INT.text}, or null", lambda value: value is None or POSITIVE_INT.fits(value)),
        neutral=(1, None), aspect=Aspect.CONTEXT, decide=_ulysses, capability="context parallelism",
        meaning="context parallelism: over how many ranks a sequence is divided",
        reason="attention exchanges heads for sequence, there as here, and these ranks take one batch; a model whose "
        "attention cannot be divided so is refused when it is planned"),
    Row(name="model_args.freeze_module_prefix", default=None, outcome=Outcome.EXACT, target="freeze",
        neutral=(None, ""), aspect=Aspect.FREEZE, capability="frozen parameters",
        meaning="parameters that are not trained, by the beginning of their names",
        reason="the same parameters, frozen before the model is sharded; prefixes end at dots"),
    Row(name="model_args.lora_target", default=None, outcome=Outcome.APPROXIMATE, target="units", neutral=(None,),
        meaning="layers that get a LoRA adapter, each of which ROLL makes a unit",
        reason="adapters stay inside their layer's unit: the same numbers with fewer and larger gathers"),
    Row(name="model_args.disable_gradient_checkpointing", tells_default=True, default=False, outcome=Outcome.EXACT,
        target="activation_checkpointing", takes=BOOL, aspect=Aspect.CHECKPOINTING, decide=_checkpointing,
        meaning="whether activations are kept (true) or recomputed (false)",
        reason="each layer's activations are kept or recomputed"),
    Row(name="model_args.gradient_checkpointing_use_reentrant", default=None, outcome=Outcome.EXACT,
        target="activation_checkpointing_reentrant",
        takes=takes_if("true, false or null", lambda value: value is None or isinstance(value, bool)),
        aspect=Aspect.CHECKPOINTING,
        meaning="which of torch's implementations recomputes; null: the reentrant one for mixtures of experts only",
        reason="both implementations run inside a unit"),
    Row(name="model_args.dtype", default="bf16", outcome=Outcome.APPROXIMATE,
        target="the dtype that the model is created in", takes=one_of("fp32", "bf16", "fp16"),
        meaning="the dtype in which weights are read",
        reason="ROLL reads weights in it and then stores them in reduce_dtype (training) or param_dtype (inference)",
        hint="create the model in the dtype that it is to be stored in; sharding keeps it"),
    Row(name="device_mapping", default=None, outcome=Outcome.EXACT, target="the number of ranks", decide=_devices,
        meaning="the devices of this worker, and so the number of ranks", reason=""),
)
# fmt: on
_BY_NAME = {row.name: row for row in _ROWS}

_UNKNOWN = "ROLL takes any key into strategy_config and reads those only that it knows, so this one did nothing"
# By how other systems call it, a degree that is near to the name of another one of ROLL's.
_OF_OTHERS = dict.fromkeys(("cp_size", "sp_size", "context_parallel_size"), "model_args.ulysses_size")
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
_IMPLICIT_TRAINING = (
    implicit(
        "casting of inputs",
        Outcome.EXACT,
        "no unit casts its inputs, and a step runs under torch.autocast in param_dtype",
        "precision amp_bf16 does the same in Composer",
    ),
    implicit(
        "dtype of stored parameters",
        Outcome.APPROXIMATE,
        "ROLL stores trained parameters in reduce_dtype, whatever they were created in; here they keep their own",
        "create the model in reduce_dtype",
    ),
    implicit(
        "gradient norms that are not finite",
        Outcome.APPROXIMATE,
        "ROLL skips the optimizer's step then; Composer does so with amp_fp16 only",
        "watch the gradient norm with OptimizerMonitor, or stop with NaNMonitor",
    ),
)
_IMPLICIT = (
    implicit(
        "sharded dimension",
        Outcome.APPROXIMATE,
        "ROLL shards the first dimension that fsdp_size divides; here it is the first one, padded: the same numbers",
    ),
    implicit(
        "state dict",
        Outcome.APPROXIMATE,
        "a ROLL checkpoint holds shards (dcp/) and beside them the full model for Hugging Face",
        "state_dict_type: sharded, and an export for Hugging Face where one is wanted",
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _findings(worker: Worker) -> Iterator[Finding]:
    for key, value in worker.given.items():
        row = _BY_NAME.get(key)
        if key in worker.misshapen:
            yield Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="ROLL takes a mapping here, and "
                "fails with this", hint="write its keys below it, or remove it")  # fmt: skip
        elif key in _OF_OTHERS:
            usual = Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="", known=False)
            yield undecided(usual, _UNKNOWN, f"as trained: remove it; ROLL's own word is {_OF_OTHERS[key]}")
        elif row is None:
            yield unknown_key(key, value, _BY_NAME, _UNKNOWN)
        elif problem := _problem(worker, row):
            hint = "remove it" if row.default is None else f"its default is {row.default!r}"
            yield undecided(row.usual(key, value), problem, hint)
        else:
            yield _finding(worker, row)
    for row in _ROWS:
        is_for_it = worker.is_training or row.name not in _FOR_GRADIENTS
        if row.tells_default and row.name not in worker.given and is_for_it:
            yield replace(_finding(worker, row), origin=Origin.IMPLICIT)
    yield from (*(_IMPLICIT_TRAINING if worker.is_training else ()), *_IMPLICIT)


def _problem(worker: Worker, row: Row) -> str:
    """What stands in the way of reading a key; "" if nothing does."""
    value, ranks = worker[row.name], worker.num_ranks
    if row.only_with and not worker.is_on(row.only_with):
        return ""
    if row.name in worker.given and not row.takes.fits(value):
        return f"this key takes {row.takes.text}"
    if row.name == "fsdp_size" and ranks is not None and 1 < value < ranks and ranks % value:
        return f"the {ranks} ranks of device_mapping are not a multiple of it; use {_divisors(ranks)}"
    if row.name == "reshard_after_forward" and type(value) is int:
        size = worker["fsdp_size"]
        shards = size if isinstance(size, int) and 1 < size < (ranks or size + 1) else ranks
        if shards is not None and shards % value:
            return f"it does not divide the {shards} ranks that a parameter is sharded over; use {_divisors(shards)}"
    return ""


def _divisors(number: int) -> str:
    return " or ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def _finding(worker: Worker, row: Row) -> Finding:
    """The finding of a key with a value that it takes, given or not."""
    value = worker[row.name]
    if not worker.is_training and row.name in _FOR_GRADIENTS:
        return idle(row.usual(row.name, value), _NO_GRADIENTS)
    finding = finding_of(row, row.name, value, is_read=not row.only_with or worker.is_on(row.only_with))
    return finding if row.decide is None else row.decide(finding, worker)


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(worker: Worker) -> RunConfig:
    param_dtype = _dtype(worker["param_dtype"], "bfloat16")
    reshard = worker["reshard_after_forward"]
    syncs = worker["reduce_scatter_during_grad_accumulation"] or not worker.is_training
    is_training, tiled, experts = worker.is_training, _tiled(worker), _wrap(worker).experts
    return RunConfig(
        config=ShardingConfig(
            mesh=_mesh(worker),
            wrap=_wrap(worker),
            freeze=_prefixes(worker["model_args.freeze_module_prefix"]),
            idle_experts=IdleExperts.IN_ORDER if experts and worker["apply_expert_patch"] else None,
            context_parallel_degree=worker["model_args.ulysses_size"] or 1,
            tiled_mlp=tiled,
            reshard_after_forward=True if reshard is None else reshard,
            mixed_precision=MixedPrecision(
                param_dtype=param_dtype, reduce_dtype=_reduced_in(worker), cast_root_inputs=False
            ),
            cpu_offload=bool(worker["offload_policy"]),
            activation_checkpointing=_recomputing(worker),
            accumulation=Accumulation(gradient_sync=GradientSync.EVERY if syncs else GradientSync.LAST),
            sync_module_states=True,
        ),
        precision=_PRECISIONS.get(param_dtype, "fp32"),
        state_dict_type="sharded",
        async_save=is_training and worker["async_save_ckpt"],
        save_only_model=worker.is_on("save_only_model"),
        max_grad_norm=worker.top.get("max_grad_norm") if is_training else None,
        num_ranks=worker.num_ranks,
        expert_parallel=worker["ep_size"],
        tiled_chunks=None if tiled is not None else _chunks(worker),
    )


def _chunks(worker: Worker) -> int | None:
    """None where MLPs are computed in one piece."""
    is_tiled = worker.is_training and worker.is_on("apply_tiled_mlp") and worker["tiled_num_shards"] > 1
    return worker["tiled_num_shards"] if is_tiled else None


def _tiled(worker: Worker) -> TiledMLP | None:
    """The MLPs that are tiled, where the file says of which model they are."""
    chunks, cls = _chunks(worker), _MLPS.get(str(worker["model_type"]))
    return None if chunks is None or cls is None else TiledMLP(classes=(cls,), chunks=chunks)


def _prefixes(given: object) -> tuple[str, ...]:
    """Names with commas between them, or a list."""
    names = given if isinstance(given, list) else str(given or "").split(",")
    return tuple(name for each in names if (name := str(each).strip()))


def _dtype(name: str | None, default: str) -> str:
    return default if name is None else _DTYPES[name.lower()]


def _reduced_in(worker: Worker) -> str:
    return _dtype(worker.given.get("reduce_dtype"), "float32" if worker["enable_mix_precision"] else "bfloat16")


def _mesh(worker: Worker) -> MeshSpec:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    is_whole_world = size <= 1 or (ranks is not None and size >= ranks)
    return MeshSpec() if is_whole_world else MeshSpec.of_degrees(shard=size, replicate=-1)


def _recomputing(worker: Worker) -> ActivationCheckpointing:
    reentrant = worker["model_args.gradient_checkpointing_use_reentrant"]
    if not worker.is_training or worker["model_args.disable_gradient_checkpointing"]:
        return ActivationCheckpointing()
    is_moe = worker.wraps_experts or worker["wrap_policy.moe_experts"] is not None
    return ActivationCheckpointing(checkpoint=True, classes=(), reentrant=is_moe if reentrant is None else reentrant)


def _wrap(worker: Worker) -> Wrap:
    return Wrap(
        kind=WrapKind.CLASSES,
        classes=_names(worker["wrap_policy.transformer_layer_cls_to_wrap"]),
        embeddings=True,  # against its guide, unless they are tied: then they cannot be
        output=worker["wrap_policy.wrap_lm_output"],
        experts=_names(worker["wrap_policy.moe_experts"]) if worker.wraps_experts else (),
    )


def _names(given: str | list[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


# ---------------------------------------------------------------------------------------------------------------------
# A run in ROLL's words


def _word(dtype: str) -> str:
    return next((name for name, each in _DTYPES.items() if each == dtype), dtype)


def _wrap_policy(wrap: Wrap) -> dict[str, Any]:
    classes = list(wrap.classes) if wrap.kind is WrapKind.CLASSES else []
    policy = {
        "transformer_layer_cls_to_wrap": classes,
        "wrap_embeddings": wrap.embeddings,
        "wrap_lm_output": wrap.output,
        "moe_experts": list(wrap.experts),
    }
    return {key: value for key, value in policy.items() if value}


def _tiles(run: RunConfig) -> tuple[int | None, str | None]:
    """In how many pieces, and of which model the MLPs are; without one ROLL tiles all that it knows."""
    classes = () if run.config.tiled_mlp is None else run.config.tiled_mlp.classes
    if not {*classes} <= {*_MLPS.values()}:
        return None, None
    types = [name for name, cls in _MLPS.items() if cls in classes]
    return run.mlp_chunks, types[0] if len(classes) == 1 else None


def _with_degrees(run: RunConfig) -> RunConfig:
    return run.with_degrees() if _has_open_replicas(run.config.mesh) else run


def _has_open_replicas(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.has_replicas and mesh.shard_degree == -1


def _keeps_full_parameters(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.has_replicas and mesh.shard_degree == 1


def _is_for_so_many_ranks(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.is_resolved and not _keeps_full_parameters(mesh)


def _recomputes_by_hooks(run: RunConfig) -> bool:
    return run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.classes is None


_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_CLASSES_KEY = "wrap_policy.transformer_layer_cls_to_wrap"
# fmt: off
_LACKS: tuple[Lack, ...] = (
    Lack(asked="mesh", when=lambda run: run.config.mesh.is_grouped, outcome=_UNSUPPORTED,
        reason="ROLL has one mesh of all ranks, no groups that do not meet", hint="choose fsdp_size"),
    Lack(asked="mesh", when=lambda run: _keeps_full_parameters(run.config.mesh), outcome=_UNSUPPORTED,
        reason="fsdp_size 1 is all ranks to ROLL, so that it cannot keep full parameters on each rank",
        hint="fsdp_size 2 keeps half of them; or accept sharding over all ranks"),
    Lack(asked="mesh", when=lambda run: _has_open_replicas(run.config.mesh), outcome=_NEEDS_DECISION,
        target="fsdp_size",
        reason="ROLL is told the number of shards, which the number of replicas gives with that of ranks only",
        hint="set fsdp_size to the number of ranks divided by {replicate_degree}"),
    Lack(asked="mesh", when=lambda run: _is_for_so_many_ranks(run.config.mesh), outcome=Outcome.EXACT,
        target="fsdp_size",
        reason="the run is for {size} ranks, and ROLL makes as many replicas as there are ranks"),
    Lack(asked="units", when=lambda run: run.wrap.kind is WrapKind.HOOKS, outcome=_NEEDS_DECISION, target=_CLASSES_KEY,
        reason="ROLL wraps by class, and which classes the model's hooks choose stands in its code",
        hint="name them in wrap_policy; a transformers model names its own if nothing is given"),
    Lack(asked="units", when=lambda run: run.wrap.kind is WrapKind.SIZE, outcome=_NEEDS_DECISION,
        target=_CLASSES_KEY, reason="ROLL wraps by class, not by size",
        hint="name the classes of these {value} in wrap_policy"),
    Lack(asked="units", when=lambda run: run.wrap.kind is WrapKind.ROOT, outcome=_APPROXIMATE,
        reason="ROLL always makes layers units; the numbers do not depend on it, and less memory is needed"),
    Lack(asked="param_dtype", when=lambda run: run.config.mixed_precision.param_dtype is None,
        outcome=_APPROXIMATE, target="param_dtype: fp32",
        reason="ROLL always casts, and takes null for bf16", hint="choose the dtype that the model is created in"),
    Lack(asked="reduce_dtype", when=lambda run: run.config.mixed_precision.reduce_dtype is None,
        outcome=_APPROXIMATE, target="reduce_dtype",
        reason="ROLL reduces in float32 unless told otherwise, so that param_dtype is written"),
    Lack(asked="dtype of outputs", outcome=_UNSUPPORTED, reason="ROLL has no key for the dtype of outputs"),
    Lack(asked="autocast",
        when=lambda run: run.precision != _PRECISIONS.get(run.config.mixed_precision.param_dtype or "", "fp32"),
        outcome=_APPROXIMATE, target="param_dtype", reason="ROLL runs each step under torch.autocast in param_dtype"),
    Lack(asked="buffer_dtype", outcome=_APPROXIMATE, reason="ROLL leaves buffers in the dtype that they have",
        hint="cast them where the model is made"),
    Lack(asked="casting of inputs", when=lambda run: run.config.mixed_precision.cast_forward_inputs,
        outcome=_APPROXIMATE,
        reason="ROLL casts no inputs of units and leaves it to torch.autocast"),
    Lack(asked="casting of the root's inputs", when=lambda run: run.config.mixed_precision.cast_root_inputs,
        outcome=_APPROXIMATE,
        reason="ROLL casts no inputs and leaves it to torch.autocast; token ids are not cast anyway"),
    Lack(asked="activation_checkpointing", when=lambda run: not run.config.activation_checkpointing.checkpoint,
        outcome=_NEEDS_DECISION,
        target="model_args.disable_gradient_checkpointing",
        reason="ROLL recomputes activations unless model_args, outside of this section, says otherwise",
        hint="set model_args.disable_gradient_checkpointing: true, or recompute: the numbers do not depend on it"),
    Lack(asked="activation_checkpointing", when=lambda run: _recomputes_by_hooks(run), outcome=_APPROXIMATE,
        reason="which modules the model's hooks recompute stands in its code; ROLL recomputes the layers that the "
        "model itself chooses (gradient_checkpointing_enable): the same numbers, another memory"),
    Lack(asked="recomputed modules", when=lambda run: bool(run.config.activation_checkpointing.classes),
        outcome=_APPROXIMATE,
        reason="ROLL recomputes the layers that the model itself chooses (gradient_checkpointing_enable): the same "
        "numbers, another memory"),
    Lack(asked="reentrant checkpointing", outcome=_APPROXIMATE,
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL recomputes without reentering, in mixtures of experts excepted; both give the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: true for the same implementation"),
    Lack(asked="activation offloading", outcome=_UNSUPPORTED, reason="ROLL does not keep activations in CPU memory"),
    Lack(asked="Transformer Engine", outcome=_UNSUPPORTED, reason="ROLL recomputes with torch's implementation only"),
    *(Lack(asked=f"prefetch in {phase}", outcome=_APPROXIMATE, reason=f"ROLL leaves the order of gathers in {phase} to "
        "FSDP2; the numbers do not depend on it") for phase in ("forward", "backward")),
    Lack(
        asked="gradient_sync",
        when=lambda run: run.config.accumulation.gradient_sync is GradientSync.DEFER_REPLICA,
        outcome=_APPROXIMATE,
        target="reduce_scatter_during_grad_accumulation: true",
        reason="ROLL reduces over shards and replicas together, in every microbatch or in the last: more communication",
    ),
    Lack(asked="reshard_after_backward", outcome=_APPROXIMATE,
        reason="ROLL frees parameters after each backward: less memory, more communication"),
    Lack(asked="idle experts", outcome=_APPROXIMATE, target="apply_expert_patch",
        reason="ROLL runs experts without tokens on one token, times 0: the same numbers where all of them are finite"),
    Lack(asked="split experts", outcome=_NEEDS_DECISION, target="ep_size",
        reason="ROLL's ep_size splits experts by a patch of the model's own, not stacked ones as LLM Foundry's",
        hint="ep_size: {value}, where ROLL knows the model"),
    Lack(asked="idle towers", outcome=_UNSUPPORTED,
        reason="ROLL runs a tower where the batch has something for it; ranks without would wait for the others",
        hint="name no class of the tower in wrap_policy: it is in the unit around it then"),
    Lack(asked="collective_guard", outcome=_APPROXIMATE,
        reason="ROLL does not compare where ranks stand; a run whose ranks diverge hangs until NCCL's timeout"),
    Lack(asked="check_data", outcome=_UNNEEDED,
        reason="ROLL gives a batch to each data-parallel rank, not to each rank"),
    Lack(asked="broadcast_batch", outcome=_UNNEEDED,
        reason="ROLL gives a batch to each data-parallel rank, not to each rank"),
    Lack(asked="sync_module_states", when=lambda run: not run.config.sync_module_states, outcome=_APPROXIMATE,
        reason="ROLL always gives all ranks the values of rank 0"),
    Lack(asked="ignored_modules", outcome=_UNSUPPORTED, reason="ROLL shards all modules"),
    Lack(asked="keep_low_precision_grads", outcome=_APPROXIMATE, target="reduce_dtype",
        reason="ROLL keeps gradients in the dtype of the parameters, which is reduce_dtype in later versions"),
    Lack(asked="state_dict_type", when=lambda run: run.state_dict_type != "sharded", outcome=_APPROXIMATE,
        reason="ROLL writes shards, and beside them the full model for Hugging Face, without an optimizer"),
    Lack(asked="context parallelism", outcome=_NEEDS_DECISION, target="model_args.ulysses_size",
        reason="ROLL says it in model_args, outside of this section; fsdp_size must not be smaller",
        hint="set model_args.ulysses_size: {value}"),
    Lack(asked="frozen parameters", outcome=_NEEDS_DECISION, target="model_args.freeze_module_prefix",
        reason="ROLL says it in model_args, outside of this section",
        hint="set model_args.freeze_module_prefix: {value}, by names of the transformers model"),
    Lack(asked="tiled MLP", when=lambda run: _tiles(run)[0] is None, outcome=_APPROXIMATE,
        reason=f"ROLL tiles {', '.join(dict.fromkeys(_MLPS.values()))} only: the same numbers, and more memory in long "
        "sequences"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None,
        outcome=_APPROXIMATE, target="max_grad_norm",
        reason="ROLL says it at the top of the file, for all workers", hint="set max_grad_norm: {value} there"),
    *(Lack(asked=f"{kind} parallelism", outcome=_UNSUPPORTED, reason=f"ROLL's FSDP2 has no {kind} parallelism",
        hint="its megatron_train strategy has") for kind in ("tensor", "pipeline")),
    Lack(asked="selective checkpointing", outcome=_APPROXIMATE,
        reason="ROLL recomputes all layers or none: less memory, more computation, the same numbers"),
    Lack(asked="compile", outcome=_UNSUPPORTED, reason="ROLL has no key for torch.compile with FSDP2"),
    Lack(asked="verbose", outcome=_UNNEEDED, reason="ROLL has its own words for its log"),
    Lack(asked="strict", outcome=_UNNEEDED, reason="composer_fsdp2's own word"),
)
# fmt: on

# ---------------------------------------------------------------------------------------------------------------------
# The dialect

_FILE = {"worker": {"strategy_args": {"strategy_name": _STRATEGIES[0], "strategy_config": {}}}}
_PATH: Path = ("worker", "strategy_args", "strategy_config")
# Where in a worker's part of a file keys stand that are not in its strategy_config.
_OUTER = {"strategy_name": "strategy_args", "device_mapping": "", "model_args": ""}


def _place(name: str) -> str:
    where = _OUTER.get(name.split(".")[0], "strategy_args.strategy_config")
    return f"{where}.{name}" if where else name


class RollDialect(Dialect):
    """A worker's ``strategy_args``; its tables are above."""

    name = target = "roll"
    title = "ROLL"
    rows = tuple(replace(row, group=_place(row.name).rpartition(".")[0] or "worker") for row in _ROWS)
    lacks = _LACKS
    interpolates = True  # Hydra's compose, and OmegaConf.to_container(resolve=True)
    words = ("strategy_args",)
    heads = (("strategy_args", (("strategy_name", "fsdp2_train"),)), ("strategy_config", ()))
    silent = (Section.at(_PATH, _FILE),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        if path[-1:] != ("strategy_args",) or values.get("strategy_name") not in _STRATEGIES:
            return None
        return (*path, "strategy_config") if isinstance(values.get("strategy_config"), Mapping) else path

    def read(self, section: Section) -> Reading:
        worker = Worker.of(section)
        findings = tuple(_findings(worker))
        aspects = deciding({row.name: row.aspect for row in _ROWS if row.name in worker.given}, findings)
        is_bad = bool(worker.misshapen) or any(_problem(worker, row) for row in _ROWS)
        return Reading(run=None if is_bad else _run(worker), findings=findings, aspects=aspects, rows=_BY_NAME)

    def express(self, run: RunConfig) -> Expression:
        return super().express(_with_degrees(run))

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """As a ``strategy_config``; what ROLL says in model_args is a finding, since that lies outside of it."""
        config, precision = run.config, run.config.mixed_precision
        param_dtype = precision.param_dtype or "float32"
        wrap_policy = _wrap_policy(run.wrap)
        is_open = config.mesh.has_replicas and config.mesh.shard_degree == -1
        gradients = config.accumulation.gradient_sync
        chunks, model_type = _tiles(run)
        for aspect, key, value, is_needed in (
            (Aspect.MESH, "fsdp_size", max(config.mesh.shard_degree, 1), not is_open),
            (Aspect.PRECISION, "param_dtype", _word(param_dtype), True),
            (Aspect.PRECISION, "reduce_dtype", _word(precision.reduce_dtype or param_dtype), True),
            (Aspect.RESHARD, "reshard_after_forward", config.reshard_after_forward, True),
            (Aspect.OFFLOAD, "offload_policy", config.cpu_offload, True),
            (Aspect.WRAP, "wrap_policy", wrap_policy, wrap_policy),
            (Aspect.GRADIENT_SYNC, "reduce_scatter_during_grad_accumulation", False, gradients is GradientSync.LAST),
            (Aspect.ASYNC_SAVE, "async_save_ckpt", run.async_save, True),
            (Aspect.OTHER, "apply_expert_patch", True, config.idle_experts is not None),
            (Aspect.OTHER, "ep_size", run.expert_parallel, run.expert_parallel != 1),
            (Aspect.OTHER, "save_only_model", True, run.save_only_model),
            (Aspect.OTHER, "apply_tiled_mlp", True, chunks is not None),
            (Aspect.OTHER, "tiled_num_shards", chunks, chunks is not None),
            (Aspect.OTHER, "model_type", model_type, chunks is not None and model_type),
        ):
            if is_needed:
                yield Setting(aspect=aspect, key=key, value=value)

    def keeps(self, key: str) -> bool:
        return True

    def frame(self, section: Section) -> Frame:
        """The worker's ``strategy_args`` goes as a whole."""
        has_name = "strategy_args" in section.path
        entry = section.path[: section.path.index("strategy_args") + 1] if has_name else section.path
        return Frame(entry=entry, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        return (_place(row.name),)

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        values: dict[str, Any] = _FILE
        for name, each in {**self.switched_on(row), row.name: value}.items():
            values = merged(values, {"worker": nested(_place(name), each)})
        yield Question(section=Section.at(_PATH, values), key=row.name)
