"""ROLL's keys of ``strategy_config``, and of what stands around it, with what no key says.

Meanings and defaults: ROLL of 2026-08 (``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``).
"""

from collections.abc import Mapping

import torch

from composer_fsdp2.compat.dialects.base import Part
from composer_fsdp2.compat.dialects.rows import BOOL, POSITIVE_INT, Row, Takes, one_of
from composer_fsdp2.findings import Outcome

__all__ = [
    "BY_NAME",
    "DTYPES",
    "NO_GRADIENTS",
    "PRECISIONS",
    "ROWS",
    "STRATEGIES",
    "UNKNOWN",
    "UNSAID",
    "UNSAID_TRAINING",
]


STRATEGIES = ("fsdp2_train", "fsdp2_infer")

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "float64"), torch.float64),
}
PRECISIONS = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}


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
NO_GRADIENTS = "fsdp2_infer makes no gradients"
_ONE_MESH = "composer_fsdp2 shards over the data-parallel ranks only"

ROWS: tuple[Row, ...] = (
    Row(
        name="strategy_name",
        default="fsdp2_train",
        meaning="training or inference with FSDP2",
        outcome=Outcome.EXACT,
        target="fully_shard",
        reason="both shard with fully_shard",
        takes=one_of(*STRATEGIES),
    ),
    Row(
        name="fsdp_size",
        default=1,
        meaning="over how many ranks a parameter is sharded; 1 or less, or all ranks and more: over all",
        outcome=Outcome.EXACT,
        target="mesh",
        reason="",
        takes=Takes("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
        part=Part.MESH,
    ),
    Row(
        name="param_dtype",
        default="bf16",
        meaning="the dtype in which parameters are gathered and computed with",
        outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(param_dtype)",
        reason="the same argument of fully_shard; null is the default",
        takes=_DTYPE,
        part=Part.PRECISION,
    ),
    Row(
        name="reduce_dtype",
        default="float32",
        meaning="the dtype in which gradients are reduced",
        outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        reason="the same argument of fully_shard; null is the default",
        takes=_DTYPE,
        part=Part.PRECISION,
    ),
    Row(
        name="enable_mix_precision",
        default=True,
        meaning="whether an unsaid reduce_dtype is float32 (true) or bf16 (false)",
        outcome=Outcome.EXACT,
        target="MixedPrecisionPolicy(reduce_dtype)",
        reason="decides reduce_dtype where the file does not say it; later ROLL only",
        takes=BOOL,
        part=Part.PRECISION,
    ),
    Row(
        name="reshard_after_forward",
        default=None,
        meaning="whether parameters are freed between forward and backward; null: in all units but the root",
        outcome=Outcome.EXACT,
        target="reshard_after_forward",
        reason="the same argument of fully_shard; the root unit stays gathered",
        takes=_RESHARD,
        part=Part.RESHARD,
    ),
    Row(
        name="offload_policy",
        default=False,
        meaning="keeping parameters, gradients and optimizer state in CPU memory",
        outcome=Outcome.EXACT,
        target="CPUOffloadPolicy(pin_memory=True)",
        reason="the same policy of fully_shard; any value that is not false, 0, null or empty turns it on",
        neutral=(False, None),
        part=Part.OFFLOAD,
    ),
    Row(
        name="wrap_policy",
        default=None,
        meaning="which modules become units",
        outcome=Outcome.EXACT,
        target="units",
        reason="empty: the classes that the model names (_no_split_modules)",
        takes=Takes("a mapping", lambda value: isinstance(value, Mapping)),
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.transformer_layer_cls_to_wrap",
        default=None,
        meaning="the classes of which each module becomes a unit; unsaid: the model's _no_split_modules",
        outcome=Outcome.EXACT,
        target="units",
        reason="modules of these classes become units",
        takes=_CLASSES,
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.wrap_embeddings",
        default=False,
        meaning="whether the input embedding is a unit of its own",
        outcome=Outcome.EXACT,
        target="units",
        reason="the input embedding becomes a unit",
        takes=BOOL,
        part=Part.WRAP,
    ),
    Row(
        name="wrap_policy.wrap_lm_output",
        default=False,
        meaning="a unit of its own for lm_head",
        outcome=Outcome.EXACT,
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
        outcome=Outcome.EXACT,
        target="units",
        reason="experts become units",
        takes=_CLASSES,
        part=Part.WRAP,
    ),
    Row(
        name="apply_expert_patch",
        default=False,
        meaning="running experts without tokens on one token, so that all ranks issue the same collectives",
        outcome=Outcome.UNSUPPORTED,
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
        outcome=Outcome.UNSUPPORTED,
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
        outcome=Outcome.UNSUPPORTED,
        target="",
        reason="belongs to apply_tiled_mlp",
        takes=POSITIVE_INT,
        only_with="apply_tiled_mlp",
    ),
    Row(
        name="model_type",
        default=None,
        meaning="of which model the MLP class is replaced",
        outcome=Outcome.UNSUPPORTED,
        target="",
        reason="belongs to apply_tiled_mlp",
        only_with="apply_tiled_mlp",
    ),
    Row(
        name="async_save_ckpt",
        default=True,
        meaning="writing checkpoints in the background, the last one excepted",
        outcome=Outcome.EXACT,
        target="async_save",
        reason="the checkpoint is staged and written while training goes on",
        takes=BOOL,
        part=Part.ASYNC_SAVE,
    ),
    Row(
        name="save_only_model",
        default=False,
        meaning="checkpoints without the optimizer",
        outcome=Outcome.APPROXIMATE,
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
        outcome=Outcome.UNSUPPORTED,
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
        outcome=Outcome.UNSUPPORTED,
        target="",
        reason="belongs to expert parallelism",
        takes=POSITIVE_INT,
        only_with="ep_size",
    ),
    Row(
        name="moe_use_grouped_mm",
        default=False,
        meaning="one grouped matrix product for all experts of a layer",
        outcome=Outcome.NEEDS_DECISION,
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
        outcome=Outcome.EXACT,
        target="gradient_sync",
        reason="every microbatch, or the last: the same choice",
        takes=BOOL,
        part=Part.GRADIENT_SYNC,
    ),
    Row(
        name="fused_optimizer",
        default=False,
        meaning="AdamW's fused kernel",
        outcome=Outcome.APPROXIMATE,
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
        outcome=Outcome.UNNEEDED,
        target="",
        reason="no part of sharding",
        takes=BOOL,
    ),
    Row(
        name="model_args.ulysses_size",
        default=1,
        meaning="context parallelism: over how many ranks a sequence is divided",
        outcome=Outcome.UNSUPPORTED,
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
        outcome=Outcome.NEEDS_DECISION,
        target="requires_grad",
        reason="the model freezes its own parameters, before it is sharded",
        hint="call requires_grad_(False) on parameters whose names begin so, where the model is made",
        neutral=(None, ""),
    ),
    Row(
        name="model_args.lora_target",
        default=None,
        meaning="layers that get a LoRA adapter, each of which ROLL makes a unit",
        outcome=Outcome.APPROXIMATE,
        target="units",
        reason="adapters stay inside their layer's unit: the same numbers with fewer and larger gathers",
        neutral=(None,),
    ),
    Row(
        name="model_args.disable_gradient_checkpointing",
        default=False,
        meaning="whether activations are kept (true) or recomputed (false)",
        outcome=Outcome.EXACT,
        target="activation_checkpointing",
        reason="each layer's activations are kept or recomputed",
        takes=BOOL,
        part=Part.CHECKPOINTING,
    ),
    Row(
        name="model_args.gradient_checkpointing_use_reentrant",
        default=None,
        meaning="which of torch's implementations recomputes; null: the reentrant one for mixtures of experts only",
        outcome=Outcome.EXACT,
        target="activation_checkpointing_reentrant",
        reason="both implementations run inside a unit",
        takes=Takes("true, false or null", lambda value: value is None or isinstance(value, bool)),
        part=Part.CHECKPOINTING,
    ),
    Row(
        name="model_args.dtype",
        default="bf16",
        meaning="the dtype in which weights are read",
        outcome=Outcome.APPROXIMATE,
        target="the dtype that the model is created in",
        reason="ROLL reads weights in it and then stores them in reduce_dtype (training) or param_dtype (inference)",
        hint="create the model in the dtype that it is to be stored in; sharding keeps it",
        takes=one_of("fp32", "bf16", "fp16"),
    ),
    Row(
        name="device_mapping",
        default=None,
        meaning="the devices of this worker, and so the number of ranks",
        outcome=Outcome.EXACT,
        target="the number of ranks",
        reason="",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
UNKNOWN = "ROLL takes any key into strategy_config and reads those only that it knows, so this one did nothing"

# What no key says; (key, outcome, reason, hint).
UNSAID_TRAINING = (
    (
        "(unsaid) casting of inputs",
        Outcome.EXACT,
        "no unit casts its inputs, and a step runs under torch.autocast in param_dtype",
        "precision amp_bf16 does the same in Composer",
    ),
    (
        "(unsaid) dtype of stored parameters",
        Outcome.APPROXIMATE,
        "ROLL stores trained parameters in reduce_dtype, whatever they were created in; here they keep their own",
        "create the model in reduce_dtype",
    ),
    (
        "(unsaid) gradient norms that are not finite",
        Outcome.APPROXIMATE,
        "ROLL skips the optimizer's step then; Composer does so with amp_fp16 only",
        "watch the gradient norm with OptimizerMonitor, or stop with NaNMonitor",
    ),
)
UNSAID = (
    (
        "(unsaid) sharded dimension",
        Outcome.APPROXIMATE,
        "ROLL shards the first dimension that fsdp_size divides; here it is the first one, padded: the same numbers",
        "",
    ),
    (
        "(unsaid) state dict",
        Outcome.APPROXIMATE,
        "a ROLL checkpoint holds shards (dcp/) and beside them the whole model for Hugging Face",
        "state_dict_type: sharded, and an export for Hugging Face where one is wanted",
    ),
)
