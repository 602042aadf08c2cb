"""ROLL: ``strategy_args.strategy_config`` of each worker whose ``strategy_name`` is fsdp2_train or fsdp2_infer.

ROLL trains with FSDP2 already, so nothing is translated here but words. Meanings and defaults: ROLL of 2026-08
(``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``); its own guide lacks several of the keys, and is wrong
about wrap_embeddings, about casting and about the versions of torch that an unsaid reshard_after_forward needs.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
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
    default_hint,
    finding_of,
    gaps,
    one_of,
    unknown_key,
)
from composer_fsdp2.config import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MeshSpec,
    ShardingConfig,
)
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["ROWS", "RollDialect"]

STRATEGIES = ("fsdp2_train", "fsdp2_infer")

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "float64"), torch.float64),
}
_PRECISIONS = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}

# ---------------------------------------------------------------------------------------------------------------------
# The table

_DTYPE = Takes(
    "one of " + ", ".join(DTYPES) + ", or null",
    lambda value: value is None or (isinstance(value, str) and value.lower() in DTYPES),
)
_CLASSES = Takes(
    "a class name or a list of them",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value))
    ),
)
_RESHARD = Takes(
    "true, false, null or a group size",
    lambda value: value is None or isinstance(value, bool) or POSITIVE_INT.fits(value),
)
_NO_GRADIENTS = "fsdp2_infer makes no gradients"
_EXACT, _APPROXIMATE, _UNNEEDED = Outcome.EXACT, Outcome.APPROXIMATE, Outcome.UNNEEDED
_UNSUPPORTED, _NEEDS_DECISION = Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"

ROWS: tuple[Row, ...] = (
    Row(
        name="strategy_name",
        default="fsdp2_train",
        meaning="training or inference with FSDP2",
        outcome=_EXACT,
        target="fully_shard",
        reason="both shard with fully_shard",
        takes=one_of(*STRATEGIES),
    ),
    Row(
        name="fsdp_size",
        default=1,
        meaning="over how many ranks a parameter is sharded; 1 or less, or all ranks and more: over all",
        outcome=_EXACT,
        target="mesh",
        reason="",
        takes=Takes("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
        part=Part.MESH,
    ),
    Row(
        name="param_dtype",
        default="bf16",
        meaning="the dtype in which parameters are gathered and computed with",
        outcome=_EXACT,
        target="MixedPrecisionPolicy(param_dtype)",
        reason="the same argument of fully_shard; null is the default",
        takes=_DTYPE,
        part=Part.PRECISION,
    ),
    Row(
        name="reduce_dtype",
        default="float32",
        meaning="the dtype in which gradients are reduced",
        outcome=_EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        reason="the same argument of fully_shard; null is the default",
        takes=_DTYPE,
        part=Part.PRECISION,
    ),
    Row(
        name="enable_mix_precision",
        default=True,
        meaning="whether an unsaid reduce_dtype is float32 (true) or bf16 (false)",
        outcome=_EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        reason="decides reduce_dtype where the file does not say it; later ROLL only",
        takes=BOOL,
        part=Part.PRECISION,
    ),
    Row(
        name="reshard_after_forward",
        default=None,
        meaning="whether parameters are freed between forward and backward; null: in all units but the root",
        outcome=_EXACT,
        target="reshard_after_forward",
        reason="the same argument of fully_shard; the root unit stays gathered",
        takes=_RESHARD,
        part=Part.RESHARD,
    ),
    Row(
        name="offload_policy",
        default=False,
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        outcome=_EXACT,
        target="CPUOffloadPolicy(pin_memory=True)",
        reason="the same policy of fully_shard; any value that is not false, 0, null or empty turns it on",
        neutral=(False, None),
        part=Part.OFFLOAD,
    ),
    Row(
        name="wrap_policy",
        default=None,
        meaning="which modules become units",
        outcome=_EXACT,
        target="units",
        reason="empty: the classes that the model names (_no_split_modules)",
        takes=Takes("a mapping", lambda value: isinstance(value, Mapping)),
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.transformer_layer_cls_to_wrap",
        default=None,
        meaning="the classes of which each module becomes a unit; unsaid: the model's _no_split_modules",
        outcome=_EXACT,
        target="units",
        reason="modules of these classes become units",
        takes=_CLASSES,
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.wrap_embeddings",
        default=False,
        meaning="whether the input embedding is a unit of its own",
        outcome=_EXACT,
        target="units",
        reason="the input embedding becomes a unit",
        takes=BOOL,
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.wrap_lm_output",
        default=False,
        meaning="a unit of its own for lm_head",
        outcome=_EXACT,
        target="units",
        reason="lm_head becomes a unit",
        takes=BOOL,
        neutral=(False,),
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.moe_experts",
        default=None,
        meaning="the classes of experts that become units, where apply_expert_patch or ep_size is on",
        outcome=_EXACT,
        target="units",
        reason="experts become units",
        takes=_CLASSES,
        part=Part.WRAP,
    ),
    Row(
        name="apply_expert_patch",
        default=False,
        meaning="running experts without tokens on one token, so that all ranks issue the same collectives",
        outcome=_UNSUPPORTED,
        target="",
        reason="composer_fsdp2 changes no model's forward, and separately wrapped experts hang where ranks differ in "
        "which experts have tokens",
        hint="keep experts inside their layer's unit (no moe_experts), or run idle experts in the model's forward",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="apply_tiled_mlp",
        default=False,
        meaning="computing MLPs in pieces of the sequence",
        outcome=_UNSUPPORTED,
        target="",
        reason="a change of the model's MLP and no part of sharding; without it activations take more memory",
        hint="activation checkpointing and smaller microbatches save memory, too",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="tiled_num_shards",
        default=4,
        meaning="into how many pieces an MLP's sequence is cut",
        outcome=_UNSUPPORTED,
        target="",
        reason="belongs to apply_tiled_mlp",
        takes=POSITIVE_INT,
        only_with="apply_tiled_mlp",
    ),
    Row(
        name="model_type",
        default=None,
        meaning="of which model the MLP class is replaced",
        outcome=_UNSUPPORTED,
        target="",
        reason="belongs to apply_tiled_mlp",
        only_with="apply_tiled_mlp",
    ),
    Row(
        name="async_save_ckpt",
        default=True,
        meaning="writing checkpoints in the background, the last one excepted",
        outcome=_EXACT,
        target="async_save",
        reason="the checkpoint is staged and written while training goes on",
        takes=BOOL,
        part=Part.ASYNC_SAVE,
    ),
    Row(
        name="save_only_model",
        default=False,
        meaning="checkpoints without the optimizer",
        outcome=_APPROXIMATE,
        target="save_weights_only of the Trainer",
        reason="what a checkpoint holds is said outside of the sharding section there",
        hint="set save_weights_only: true beside save_folder",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="ep_size",
        default=1,
        meaning="expert parallelism: over how many ranks a layer's experts are divided",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; experts are sharded like all other parameters",
        hint="ep_size: 1 trains the same model with more gathering of experts, if its experts fit one rank by one",
        takes=POSITIVE_INT,
        neutral=(1,),
    ),
    Row(
        name="efsdp_size",
        default=1,
        meaning="over how many ranks an expert is sharded",
        outcome=_UNSUPPORTED,
        target="",
        reason="belongs to expert parallelism",
        takes=POSITIVE_INT,
        only_with="ep_size",
    ),
    Row(
        name="moe_use_grouped_mm",
        default=False,
        meaning="one grouped matrix product for all experts of a layer",
        outcome=_NEEDS_DECISION,
        target="",
        reason="a kernel of the model (transformers 5.2 and later) and no part of sharding",
        hint="choose grouped_mm as the experts' implementation in the model's configuration, or set this to false",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="reduce_scatter_during_grad_accumulation",
        default=True,
        meaning="whether gradients are reduced in every microbatch (true) or in a batch's last (false)",
        outcome=_EXACT,
        target="gradient_sync",
        reason="every microbatch, or the last: the same choice",
        takes=BOOL,
        part=Part.GRADIENT_SYNC,
    ),
    Row(
        name="fused_optimizer",
        default=False,
        meaning="AdamW's fused kernel",
        outcome=_APPROXIMATE,
        target="the optimizer",
        reason="an argument of the optimizer and no part of sharding; the same numbers up to rounding",
        hint="create the optimizer with fused=True",
        takes=BOOL,
        neutral=(False,),
    ),
    Row(
        name="init_tokenizer_processor",
        default=True,
        meaning="whether ROLL loads a tokenizer beside the model",
        outcome=_UNNEEDED,
        target="",
        reason="no part of sharding",
        takes=BOOL,
    ),
    Row(
        name="model_args.ulysses_size",
        default=1,
        meaning="context parallelism: over how many ranks a sequence is divided",
        outcome=_UNSUPPORTED,
        target="",
        reason=f"{_ONE_MESH}; a whole sequence must fit one rank",
        hint="ulysses_size: 1, with activation checkpointing or shorter sequences",
        takes=Takes(f"{POSITIVE_INT.text}, or null", lambda value: value is None or POSITIVE_INT.fits(value)),
        neutral=(1, None),
    ),
    Row(
        name="model_args.freeze_module_prefix",
        default=None,
        meaning="parameters that are not trained, by the beginning of their names",
        outcome=_NEEDS_DECISION,
        target="requires_grad",
        reason="the model freezes its own parameters, before it is sharded",
        hint="call requires_grad_(False) on parameters whose names begin so, where the model is made",
        neutral=(None, ""),
    ),
    Row(
        name="model_args.lora_target",
        default=None,
        meaning="layers that get a LoRA adapter, each of which ROLL makes a unit",
        outcome=_APPROXIMATE,
        target="units",
        reason="adapters stay inside their layer's unit: the same numbers with fewer and larger gathers",
        neutral=(None,),
    ),
    Row(
        name="model_args.disable_gradient_checkpointing",
        default=False,
        meaning="whether activations are kept (true) or recomputed (false)",
        outcome=_EXACT,
        target="activation_checkpointing",
        reason="each layer's activations are kept or recomputed",
        takes=BOOL,
        part=Part.CHECKPOINTING,
    ),
    Row(
        name="model_args.gradient_checkpointing_use_reentrant",
        default=None,
        meaning="which of torch's implementations recomputes; null: the reentrant one for mixtures of experts only",
        outcome=_EXACT,
        target="activation_checkpointing_reentrant",
        reason="both implementations run inside a unit",
        takes=Takes("true, false or null", lambda value: value is None or isinstance(value, bool)),
        part=Part.CHECKPOINTING,
    ),
    Row(
        name="model_args.dtype",
        default="bf16",
        meaning="the dtype in which weights are read",
        outcome=_APPROXIMATE,
        target="the dtype that the model is created in",
        reason="ROLL reads weights in it and then stores them in reduce_dtype (training) or param_dtype (inference)",
        hint="create the model in the dtype that it is to be stored in; sharding keeps it",
        takes=one_of("fp32", "bf16", "fp16"),
    ),
    Row(
        name="device_mapping",
        default=None,
        meaning="the devices of this worker, and so the number of ranks",
        outcome=_EXACT,
        target="the number of ranks",
        reason="",
    ),
)
_BY_NAME = {row.name: row for row in ROWS}
_UNKNOWN = "ROLL takes any key into strategy_config and reads those only that it knows, so this one did nothing"

# What no key says; (key, outcome, reason, hint).
_UNSAID_TRAINING = (
    (
        "(unsaid) casting of inputs",
        _EXACT,
        "no unit casts its inputs, and a step runs under torch.autocast in param_dtype",
        "precision amp_bf16 does the same in Composer",
    ),
    (
        "(unsaid) dtype of stored parameters",
        _APPROXIMATE,
        "ROLL stores trained parameters in reduce_dtype, whatever they were created in; here they keep their own",
        "create the model in reduce_dtype",
    ),
    (
        "(unsaid) gradient norms that are not finite",
        _APPROXIMATE,
        "ROLL skips the optimizer's step then; Composer does so with amp_fp16 only",
        "watch the gradient norm with OptimizerMonitor, or stop with NaNMonitor",
    ),
)
_UNSAID = (
    (
        "(unsaid) sharded dimension",
        _APPROXIMATE,
        "ROLL shards the first dimension that fsdp_size divides; here it is the first one, padded: the same numbers",
        "",
    ),
    (
        "(unsaid) state dict",
        _APPROXIMATE,
        "a ROLL checkpoint holds shards (dcp/) and beside them the whole model for Hugging Face",
        "state_dict_type: sharded, and an export for Hugging Face where one is wanted",
    ),
)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class RollDialect:
    """See the module."""

    name = "roll"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        return list(_sections(values, ()))

    def read(self, section: Section) -> Reading:
        worker = _Worker.of(section)
        findings = (*_findings(worker), *_unsaid(worker))
        parts = deciding({row.name: row.part for row in ROWS if row.name in worker.said}, findings)
        is_bad = any(_problem(worker, row) for row in ROWS)
        return Reading(run=None if is_bad else _run(worker), findings=findings, parts=parts)

    def express(self, run: Run) -> Expression:
        """As a ``strategy_config``; what ROLL says in model_args is a finding, since that lies outside of it."""
        return Expression(entries=tuple(_entries(run)), findings=(*_mesh_gaps(run), *gaps(_GAPS, run)))

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Nothing: ROLL's words are FSDP2's."""
        return []

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """Nothing becomes something else, since ROLL's words are FSDP2's."""
        return tuple(as_it_is(reading.findings, "ROLL", _UNKNOWN))

    def frame(self, section: Section) -> Frame:
        """The worker's ``strategy_args`` goes as a whole."""
        has_name = "strategy_args" in section.path
        entry = section.path[: section.path.index("strategy_args") + 1] if has_name else section.path
        return Frame(entry=entry, inner=section.path)


def _sections(values: Any, path: Path) -> Iterator[Path]:
    if isinstance(values, list):
        for number, each in enumerate(values):
            yield from _sections(each, (*path, number))
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key == "strategy_args" and isinstance(value, Mapping) and value.get("strategy_name") in STRATEGIES:
            has_config = isinstance(value.get("strategy_config"), Mapping)
            yield (*path, key, "strategy_config") if has_config else (*path, key)
        else:
            yield from _sections(value, (*path, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """What one worker's part of the file says, by the names of the table.

    Args:
        num_ranks: None if device_mapping does not tell.
        top: The whole file, for what holds for all workers.
    """

    said: Mapping[str, Any]
    num_ranks: int | None
    top: Mapping[str, Any]

    @classmethod
    def of(cls, section: Section) -> "_Worker":
        path = section.path[: section.path.index("strategy_args")] if "strategy_args" in section.path else ()
        around: Any = section.around
        for key in path:
            around = around[key]
        around = around if "strategy_args" in section.path else {}
        said = dict(_flat(section.said, ("wrap_policy",)))
        if section.path[-1:] == ("strategy_args",):  # there is no strategy_config, or it is null
            said = {"strategy_name": section.said["strategy_name"]}
        elif (strategy := around.get("strategy_args")) is not None:
            said = {"strategy_name": strategy.get("strategy_name")} | said
        model = around.get("model_args")
        for name, value in model.items() if isinstance(model, Mapping) else ():
            if f"model_args.{name}" in _BY_NAME:
                said[f"model_args.{name}"] = value
        if "device_mapping" in around:
            said["device_mapping"] = around["device_mapping"]
        return cls(said=said, num_ranks=_count(around.get("device_mapping")), top=section.around)

    def __getitem__(self, name: str) -> Any:
        return self.said.get(name, _BY_NAME[name].default)

    @property
    def is_training(self) -> bool:
        return bool(self["strategy_name"] != "fsdp2_infer")

    @property
    def wraps_experts(self) -> bool:
        return self["apply_expert_patch"] is True or self["ep_size"] != 1

    def is_on(self, name: str) -> bool:
        row = _BY_NAME[name]
        return not row.is_neutral(self[name])


def _flat(said: Mapping[str, Any], nested: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, value in said.items():
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
# Findings


def _problem(worker: _Worker, row: Row) -> str:
    """What stands in the way of reading a key; "" if nothing does."""
    value, ranks = worker[row.name], worker.num_ranks
    if row.only_with and not worker.is_on(row.only_with):
        return ""
    if row.name in worker.said and not row.takes.fits(value):
        return f"this key takes {row.takes.text}"
    if row.name == "fsdp_size" and ranks is not None and 1 < value < ranks and ranks % value:
        return f"the {ranks} ranks of device_mapping are no multiple of it; use {_divisors(ranks)}"
    if row.name == "reshard_after_forward" and type(value) is int:
        size = worker["fsdp_size"]
        shards = size if isinstance(size, int) and 1 < size < (ranks or size + 1) else ranks
        if shards is not None and shards % value:
            return f"it does not divide the {shards} ranks that a parameter is sharded over; use {_divisors(shards)}"
    return ""


def _divisors(number: int) -> str:
    return " or ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def _findings(worker: _Worker) -> Iterator[Finding]:
    for key, value in worker.said.items():
        row = _BY_NAME.get(key)
        if row is None:
            yield unknown_key(key, value, _BY_NAME, _UNKNOWN)
        elif problem := _problem(worker, row):
            hint = default_hint(row)
            yield Finding(key=key, value=value, outcome=_NEEDS_DECISION, target="", reason=problem, hint=hint)
        else:
            yield _fate(worker, row, key)


def _fate(worker: _Worker, row: Row, key: str) -> Finding:
    """Of a key with a value that it takes, said or not."""
    if not worker.is_training and row.name in _FOR_GRADIENTS:
        return Finding(key=key, value=worker[row.name], outcome=_UNNEEDED, target="", reason=_NO_GRADIENTS)
    is_read = not row.only_with or worker.is_on(row.only_with)
    finding = finding_of(row, key, worker[row.name], is_read=is_read)
    return _DECIDED[row.name](worker, finding) if row.name in _DECIDED else finding


_FOR_GRADIENTS = {
    "reduce_dtype",
    "enable_mix_precision",
    "reduce_scatter_during_grad_accumulation",
    "fused_optimizer",
    "model_args.disable_gradient_checkpointing",
    "model_args.gradient_checkpointing_use_reentrant",
    "model_args.freeze_module_prefix",
}

# Keys whose default asks for something, so that a file without them says something all the same.
_TELLING_DEFAULTS = (
    "fsdp_size",
    "param_dtype",
    "reduce_dtype",
    "reshard_after_forward",
    "async_save_ckpt",
    "model_args.disable_gradient_checkpointing",
    "wrap_policy.wrap_embeddings",
)


def _unsaid(worker: _Worker) -> Iterator[Finding]:
    for name in _TELLING_DEFAULTS:
        if name not in worker.said and (worker.is_training or name not in _FOR_GRADIENTS):
            yield _fate(worker, _BY_NAME[name], f"(unsaid) {name}")
    for key, outcome, reason, hint in (*(_UNSAID_TRAINING if worker.is_training else ()), *_UNSAID):
        yield Finding(key=key, value="", outcome=outcome, target="", reason=reason, hint=hint)


def _fsdp_size(worker: _Worker, finding: Finding) -> Finding:
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
        outcome=_APPROXIMATE,
        target=f"mesh of replicas x {size} shards",
        reason="device_mapping does not say how many ranks there are; with this many or fewer ROLL makes no replicas",
        hint=f"with more than {size} ranks nothing is to be done, else set it to 1",
    )


def _reduce_dtype(worker: _Worker, finding: Finding) -> Finding:
    return replace(finding, value=worker.said.get("reduce_dtype") or _word(_reduced_in(worker)))


def _reshard(worker: _Worker, finding: Finding) -> Finding:
    if worker["reshard_after_forward"] is None:
        reason = "torch's own choice: freed in all units but the root"
        hint = "torch 2.7 takes no null here, so that ROLL fails with it: say true"
        return replace(finding, reason=reason, hint=hint)
    return finding


def _offload(worker: _Worker, finding: Finding) -> Finding:
    value = worker["offload_policy"]
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "0"):
        return replace(
            finding,
            outcome=_NEEDS_DECISION,
            target="",
            reason="ROLL takes any text for true, so this run was offloaded",
            hint="as trained: true; as written: false",
        )
    if not value:
        return replace(finding, outcome=_UNNEEDED, target="", reason="nothing is offloaded")
    return finding


def _embeddings(worker: _Worker, finding: Finding) -> Finding:
    if worker["wrap_policy.wrap_embeddings"]:
        return finding
    return replace(
        finding,
        outcome=_APPROXIMATE,
        reason="against its guide, ROLL still makes each embedding a unit that is not tied to the output",
        hint="wrap embeddings as well for the same gathers; the numbers do not depend on it",
    )


def _experts(worker: _Worker, finding: Finding) -> Finding:
    if worker.wraps_experts:
        return finding
    return replace(
        finding,
        outcome=_NEEDS_DECISION,
        target="",
        reason="ROLL wraps experts with apply_expert_patch or ep_size only, so here it did not",
        hint="as trained: remove it; as written, each expert a unit of its own, ranks hang that use different experts",
    )


def _mix(worker: _Worker, finding: Finding) -> Finding:
    if worker.said.get("reduce_dtype") is None:
        return finding
    return replace(finding, outcome=_UNNEEDED, target="", reason="reduce_dtype is said, and goes before it")


def _async_save(worker: _Worker, finding: Finding) -> Finding:
    if worker.is_training and not worker["async_save_ckpt"]:
        return replace(finding, target="", reason="training waits until a checkpoint is written")
    return finding if worker.is_training else replace(finding, outcome=_UNNEEDED, target="", reason="nothing is saved")


def _ulysses(worker: _Worker, finding: Finding) -> Finding:
    size, shards = worker["model_args.ulysses_size"], worker["fsdp_size"]
    if isinstance(size, int) and isinstance(shards, int) and shards < size:
        return replace(finding, reason=f"{finding.reason}; ROLL itself fails with it, as fsdp_size {shards} is smaller")
    return finding


def _checkpointing(worker: _Worker, finding: Finding) -> Finding:
    if worker["model_args.disable_gradient_checkpointing"]:
        return replace(finding, outcome=_UNNEEDED, target="", reason="activations are kept")
    return replace(finding, reason="on unless it is disabled: each layer's activations are recomputed in backward")


def _devices(worker: _Worker, finding: Finding) -> Finding:
    if worker.num_ranks is None:
        return replace(
            finding,
            outcome=_APPROXIMATE,
            reason="it does not say how many devices there are without being run",
            hint="write it as a list or as list(range(FROM, TO))",
        )
    return replace(finding, reason=f"{worker.num_ranks} ranks")


_DECIDED = {
    "fsdp_size": _fsdp_size,
    "reduce_dtype": _reduce_dtype,
    "enable_mix_precision": _mix,
    "reshard_after_forward": _reshard,
    "offload_policy": _offload,
    "wrap_policy.wrap_embeddings": _embeddings,
    "wrap_policy.moe_experts": _experts,
    "async_save_ckpt": _async_save,
    "model_args.ulysses_size": _ulysses,
    "model_args.disable_gradient_checkpointing": _checkpointing,
    "device_mapping": _devices,
}


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(worker: _Worker) -> Run:
    param_dtype = _dtype(worker["param_dtype"], torch.bfloat16)
    reshard = worker["reshard_after_forward"]
    sync = worker["reduce_scatter_during_grad_accumulation"] or not worker.is_training
    return Run(
        config=ShardingConfig(
            mesh=_mesh(worker),
            reshard_after_forward=True if reshard is None else reshard,
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=param_dtype,
                reduce_dtype=_reduced_in(worker),
                cast_forward_inputs=False,
            ),
            cast_root_inputs=False,
            cpu_offload=bool(worker["offload_policy"]),
            activation_checkpointing=_recomputing(worker),
            accumulation=Accumulation(gradient_sync=GradientSync.EVERY if sync else GradientSync.LAST),
            sync_module_states=True,
            precision=_PRECISIONS.get(param_dtype, "fp32"),
        ),
        wrap=_wrap(worker),
        state_dict_type="sharded",
        extras=_extras(worker),
    )


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else DTYPES[name.lower()]


def _reduced_in(worker: _Worker) -> torch.dtype:
    default = torch.float32 if worker["enable_mix_precision"] else torch.bfloat16
    return _dtype(worker.said.get("reduce_dtype"), default)


def _mesh(worker: _Worker) -> MeshSpec:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    if size <= 1 or (ranks is not None and size >= ranks):
        return MeshSpec()
    return MeshSpec(shard=size, replicate=-1)


def _recomputing(worker: _Worker) -> ActivationCheckpointing:
    reentrant = worker["model_args.gradient_checkpointing_use_reentrant"]
    if not worker.is_training or worker["model_args.disable_gradient_checkpointing"]:
        return ActivationCheckpointing()
    is_moe = worker.wraps_experts or worker["wrap_policy.moe_experts"] is not None
    return ActivationCheckpointing(checkpoint=True, reentrant=is_moe if reentrant is None else reentrant)


def _wrap(worker: _Worker) -> Wrap:
    classes = _names(worker["wrap_policy.transformer_layer_cls_to_wrap"])
    others: list[tuple[str, Any]] = []
    if worker["wrap_policy.wrap_embeddings"]:
        others.append(("embeddings", True))
    if worker["wrap_policy.wrap_lm_output"]:
        others.append(("output", True))
    if worker.wraps_experts and (experts := _names(worker["wrap_policy.moe_experts"])):
        others.append(("experts", experts))
    return Wrap(kind=WrapKind.CLASSES, classes=classes, others=tuple(others))


def _names(said: str | list[str] | None) -> tuple[str, ...]:
    return () if said is None else (said,) if isinstance(said, str) else tuple(said)


def _extras(worker: _Worker) -> dict[str, Any]:
    extras: dict[str, Any] = {"async_save": worker["async_save_ckpt"]} if worker.is_training else {}
    for key, name in _EXTRAS.items():
        if worker.is_on(key):
            extras[name] = worker[key]
    if worker.is_on("apply_tiled_mlp"):
        extras["tiled_mlp"] = worker["tiled_num_shards"]
    if "max_grad_norm" in worker.top and worker.is_training:
        extras["max_grad_norm"] = worker.top["max_grad_norm"]
    return extras


_EXTRAS = {
    "apply_expert_patch": "expert_patch",
    "ep_size": "expert_parallel",
    "save_only_model": "save_only_model",
    "model_args.ulysses_size": "context_parallel",
    "model_args.freeze_module_prefix": "freeze",
}


# ---------------------------------------------------------------------------------------------------------------------
# As a target


def _entries(run: Run) -> Iterator[Entry]:
    config, policy = run.config, run.config.mixed_precision
    if not (config.mesh.replicate is not None and config.mesh.shard == -1):
        yield Entry(part=Part.MESH, key="fsdp_size", value=max(config.mesh.shard, 1))
    param_dtype = policy.param_dtype or torch.float32
    yield Entry(part=Part.PRECISION, key="param_dtype", value=_word(param_dtype))
    yield Entry(part=Part.PRECISION, key="reduce_dtype", value=_word(policy.reduce_dtype or param_dtype))
    yield Entry(part=Part.RESHARD, key="reshard_after_forward", value=config.reshard_after_forward)
    yield Entry(part=Part.OFFLOAD, key="offload_policy", value=config.cpu_offload)
    if wrap_policy := _wrap_policy(run.wrap):
        yield Entry(part=Part.WRAP, key="wrap_policy", value=wrap_policy)
    if config.accumulation.gradient_sync is GradientSync.LAST:
        yield Entry(part=Part.GRADIENT_SYNC, key="reduce_scatter_during_grad_accumulation", value=False)
    yield Entry(part=Part.ASYNC_SAVE, key="async_save_ckpt", value=bool(run.extras.get("async_save", False)))
    for key, name in (("apply_expert_patch", "expert_patch"), ("ep_size", "expert_parallel")):
        if name in run.extras:
            yield Entry(part=Part.EXTRA, key=key, value=run.extras[name])
    if run.extras.get("save_only_model"):
        yield Entry(part=Part.EXTRA, key="save_only_model", value=True)
    if "tiled_mlp" in run.extras:
        yield Entry(part=Part.EXTRA, key="apply_tiled_mlp", value=True)
        yield Entry(part=Part.EXTRA, key="tiled_num_shards", value=run.extras["tiled_mlp"])


def _word(dtype: torch.dtype) -> str:
    return next((name for name, each in DTYPES.items() if each is dtype), str(dtype).removeprefix("torch."))


def _wrap_policy(wrap: Wrap) -> dict[str, Any]:
    others = dict(wrap.others)
    policy: dict[str, Any] = {}
    if wrap.kind is WrapKind.CLASSES and wrap.classes:
        policy["transformer_layer_cls_to_wrap"] = list(wrap.classes)
    if others.get("embeddings"):
        policy["wrap_embeddings"] = True
    if others.get("output"):
        policy["wrap_lm_output"] = True
    if others.get("experts"):
        policy["moe_experts"] = list(others["experts"])
    return policy


def _mesh_gaps(run: Run) -> Iterator[Finding]:
    mesh = run.config.mesh
    if mesh.is_grouped:
        reason, hint = "ROLL has one mesh of all ranks, no groups that do not meet", "choose fsdp_size"
    elif mesh.shard == 1 and mesh.replicate is not None:
        reason = "fsdp_size 1 is all ranks to ROLL, so that it cannot keep whole parameters on each rank"
        hint = "fsdp_size 2 keeps half of them; or accept sharding over all ranks"
    elif mesh.shard == -1 and mesh.replicate is not None:
        reason = "ROLL is told the number of shards, which the number of replicas gives with that of ranks only"
        hint = f"set fsdp_size to the number of ranks divided by {mesh.replicate}"
    elif mesh.is_resolved:
        yield Finding(
            key="(mesh)",
            value=str(mesh),
            outcome=_EXACT,
            target="fsdp_size",
            reason=f"the run is for {mesh.size} ranks, and ROLL makes as many replicas as there are ranks",
        )
        return
    else:
        return
    is_open = mesh.shard == -1 and not mesh.is_grouped
    yield Finding(
        key="(mesh)",
        value=str(mesh),
        outcome=_NEEDS_DECISION if is_open else _UNSUPPORTED,
        target="fsdp_size" if is_open else "",
        reason=reason,
        hint=hint,
    )


def _if(value: Any, condition: bool) -> Any:
    return value if condition else None


_GAPS: tuple[Gap, ...] = (
    Gap(
        key="(units)",
        said=lambda run: _if("the model's own hooks", run.wrap.kind is WrapKind.HOOKS),
        outcome=_NEEDS_DECISION,
        target="wrap_policy.transformer_layer_cls_to_wrap",
        reason="ROLL wraps by class, and which classes the model's hooks choose stands in its code",
        hint="name them in wrap_policy; a transformers model names its own if nothing is said",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if(run.wrap.min_num_params, run.wrap.kind is WrapKind.SIZE),
        outcome=_NEEDS_DECISION,
        target="wrap_policy.transformer_layer_cls_to_wrap",
        reason="ROLL wraps by class, not by size",
        hint="name the classes with {value} parameters or more in wrap_policy",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if("one unit", run.wrap.kind is WrapKind.ROOT),
        outcome=_APPROXIMATE,
        reason="ROLL always makes layers units; the numbers do not depend on it, and less memory is needed",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if("as created", run.config.mixed_precision.param_dtype is None),
        outcome=_APPROXIMATE,
        target="param_dtype: fp32",
        reason="ROLL always casts, and takes null for bf16",
        hint="choose the dtype that the model is created in",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if("as computed", run.config.mixed_precision.reduce_dtype is None),
        outcome=_APPROXIMATE,
        target="reduce_dtype",
        reason="ROLL reduces in float32 unless told otherwise, so that param_dtype is said",
    ),
    Gap(
        key="(precision)",
        said=lambda run: run.config.mixed_precision.output_dtype,
        outcome=_UNSUPPORTED,
        reason="ROLL has no key for the dtype of outputs",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            run.config.precision,
            run.config.precision != _PRECISIONS.get(run.config.mixed_precision.param_dtype, "fp32"),  # type: ignore[arg-type]
        ),
        outcome=_APPROXIMATE,
        target="param_dtype",
        reason="ROLL runs each step under torch.autocast in param_dtype",
    ),
    Gap(
        key="(buffers)",
        said=lambda run: run.config.buffer_dtype,
        outcome=_APPROXIMATE,
        reason="ROLL leaves buffers in the dtype that they have",
        hint="cast them where the model is made",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at each unit", run.config.mixed_precision.cast_forward_inputs),
        outcome=_APPROXIMATE,
        reason="ROLL casts no inputs of units and leaves it to torch.autocast",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at the root", run.config.cast_root_inputs),
        outcome=_APPROXIMATE,
        reason="ROLL casts no inputs and leaves it to torch.autocast; token ids are not cast anyway",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(False, not run.config.activation_checkpointing.checkpoint),
        outcome=_NEEDS_DECISION,
        target="model_args.disable_gradient_checkpointing",
        reason="ROLL recomputes activations unless model_args, outside of this section, says otherwise",
        hint="set model_args.disable_gradient_checkpointing: true, or recompute: the numbers do not depend on it",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(
            "reentrant",
            run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.reentrant,
        ),
        outcome=_APPROXIMATE,
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL recomputes without reentering, in mixtures of experts excepted; both give the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: true for the same implementation",
    ),
    Gap(
        key="(activation offloading)",
        said=lambda run: _if(True, run.config.activation_checkpointing.cpu_offload),
        outcome=_UNSUPPORTED,
        reason="ROLL does not keep activations in CPU memory",
    ),
    Gap(
        key="(Transformer Engine)",
        said=lambda run: _if(True, run.config.activation_checkpointing.transformer_engine),
        outcome=_UNSUPPORTED,
        reason="ROLL recomputes with torch's implementation only",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch.forward is not None),
        outcome=_APPROXIMATE,
        reason="ROLL leaves the order of gathers in forward to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch.backward is not None),
        outcome=_APPROXIMATE,
        reason="ROLL leaves the order of gathers in backward to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(gradient_sync)",
        said=lambda run: _if("defer_replica", run.config.accumulation.gradient_sync is GradientSync.DEFER_REPLICA),
        outcome=_APPROXIMATE,
        target="reduce_scatter_during_grad_accumulation: true",
        reason="ROLL reduces over shards and replicas together, in every microbatch or in the last: more communication",
    ),
    Gap(
        key="(reshard_after_backward)",
        said=lambda run: _if("no", not run.config.accumulation.reshard_after_backward),
        outcome=_APPROXIMATE,
        reason="ROLL frees parameters after each backward: less memory, more communication",
    ),
    Gap(
        key="(collective_guard)",
        said=lambda run: run.config.collective_guard,
        outcome=_APPROXIMATE,
        reason="ROLL does not compare where ranks stand; a run that parts hangs until NCCL's timeout",
    ),
    Gap(
        key="(sync_module_states)",
        said=lambda run: _if(str(run.config.sync_module_states), run.config.sync_module_states is not True),
        outcome=_APPROXIMATE,
        reason="ROLL always gives all ranks the values of rank 0",
    ),
    Gap(
        key="(ignored_modules)",
        said=lambda run: run.config.ignored_modules or None,
        outcome=_UNSUPPORTED,
        reason="ROLL shards all modules",
    ),
    Gap(
        key="(keep_low_precision_grads)",
        said=lambda run: _if(True, run.config.keep_low_precision_grads),
        outcome=_APPROXIMATE,
        target="reduce_dtype",
        reason="ROLL keeps gradients in the dtype of the parameters, which is reduce_dtype in later versions",
    ),
    Gap(
        key="(state_dict_type)",
        said=lambda run: _if(run.state_dict_type, run.state_dict_type != "sharded"),
        outcome=_APPROXIMATE,
        reason="ROLL writes shards, and beside them the whole model for Hugging Face, without an optimizer",
    ),
    Gap(
        key="(context parallelism)",
        said=lambda run: run.extras.get("context_parallel"),
        outcome=_NEEDS_DECISION,
        target="model_args.ulysses_size",
        reason="ROLL says it in model_args, outside of this section; fsdp_size must not be smaller",
        hint="set model_args.ulysses_size: {value}",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=_NEEDS_DECISION,
        target="model_args.freeze_module_prefix",
        reason="ROLL says it in model_args, outside of this section",
        hint="set model_args.freeze_module_prefix: {value}",
    ),
    Gap(
        key="(gradient clipping)",
        said=lambda run: run.extras.get("max_grad_norm"),
        outcome=_APPROXIMATE,
        target="max_grad_norm",
        reason="ROLL says it at the top of the file, for all workers",
        hint="set max_grad_norm: {value} there",
    ),
    Gap(
        key="(tensor parallelism)",
        said=lambda run: run.extras.get("tensor_parallel"),
        outcome=_UNSUPPORTED,
        reason="ROLL's FSDP2 has no tensor parallelism",
        hint="its megatron_train strategy has",
    ),
    Gap(
        key="(pipeline parallelism)",
        said=lambda run: run.extras.get("pipeline_parallel"),
        outcome=_UNSUPPORTED,
        reason="ROLL's FSDP2 has no pipeline parallelism",
        hint="its megatron_train strategy has",
    ),
    Gap(
        key="(selective checkpointing)",
        said=lambda run: run.extras.get("selective_checkpointing"),
        outcome=_APPROXIMATE,
        reason="ROLL recomputes all layers or none: less memory, more computation, the same numbers",
    ),
    Gap(
        key="(compile)",
        said=lambda run: run.extras.get("compile"),
        outcome=_UNSUPPORTED,
        reason="ROLL has no key for torch.compile with FSDP2",
    ),
    Gap(
        key="(verbose)",
        said=lambda run: _if(True, run.config.verbose),
        outcome=_UNNEEDED,
        reason="ROLL has its own words for its log",
    ),
    Gap(
        key="(strict)",
        said=lambda run: _if(False, not run.config.strict),
        outcome=_UNNEEDED,
        reason="composer_fsdp2's own word",
    ),
)
