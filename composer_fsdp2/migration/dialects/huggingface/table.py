"""The table of keys of Hugging Face, accelerate and axolotl."""

from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.rows import ANY, Aspect, Row
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface import fates
from composer_fsdp2.migration.dialects.huggingface.places import BESIDE, DEEPSPEED, DEGREES, SETTINGS
from composer_fsdp2.migration.dialects.huggingface.readers import A1, A2, AD, NOBODY, T1, T2, X1, X2, Reader
from composer_fsdp2.migration.dialects.huggingface.values import (
    BF16,
    BOOL,
    CLASSES,
    COUNT,
    DEGREE,
    DEVICE,
    FLAG,
    NORM,
    OFFLOADING,
    PIECES,
    POLICY,
    PRECISION,
    PREFETCH,
    RECOMPUTING,
    RESHARD,
    STAGE,
    STATE_DICT,
    STEPS,
    STRATEGY,
    SYNCS,
    TRUTH,
    VERSION,
    WORDS,
)

_UNPREFIXED = "the same key without the prefix"
_KEPT = "accelerate reads it for FSDP2 as for FSDP1"


def _everywhere(value: Any) -> dict[Reader, Any]:
    return dict.fromkeys(Reader, value)


def _instead(trainer: str, launcher: str = "") -> dict[Reader, str]:
    """What does the same where a key is not read: in a Trainer's arguments for transformers 4.51.3, in a file of
    accelerate's."""
    ways = {T1: trainer, X1: trainer, A1: launcher, A2: launcher}
    return {reader: way for reader, way in ways.items() if way}


# A key of accelerate 1.12, with DeepSpeed's sequence parallelism.
SEQUENCE_DTYPE = "seq_parallel_communication_data_type"
_LAUNCHER = "belongs to DeepSpeed's launcher; torchrun and composer have their own words for the nodes"
# Its other keys, which stand in parallelism_config.
SEQUENCES = {
    "sp_size": "over how many ranks",
    "sp_backend": "who divides sequences",
    "sp_seq_length": "the length that all sequences have",
    "sp_seq_length_is_variable": "whether lengths differ",
    "sp_attn_implementation": "which attention computes",
}
# What nothing of FSDP2 depends on.
_OF_DEEPSPEED = (
    ("deepspeed_multinode_launcher", "who starts the processes of several nodes", _LAUNCHER),
    ("deepspeed_hostfile", "the nodes", _LAUNCHER),
    ("deepspeed_exclusion_filter", "nodes and GPUs to leave out", _LAUNCHER),
    ("deepspeed_inclusion_filter", "nodes and GPUs to take", _LAUNCHER),
    ("offload_optimizer_nvme_path", "where a disk takes the optimizer's state", "of use with the device nvme only"),
    ("offload_param_nvme_path", "where a disk takes parameters", "of use with the device nvme only"),
    (
        "deepspeed_moe_layer_cls_names",
        "layers that ZeRO 3 gathers as wholes, since ranks use other experts in them",
        "FSDP2 gathers units as wholes, whichever experts a rank uses",
    ),
    (
        SEQUENCE_DTYPE,
        "of what ranks of one sequence exchange",
        "belongs to DeepSpeed's sequence parallelism",
    ),
)

# fmt: off
_ROWS: tuple[Row, ...] = (
    Row(name="fsdp", takes=WORDS, group=BESIDE, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward, the mesh, cpu_offload, the wrapped modules", read_by=(T1, T2, X1, X2),
        decide=fates.of_words, meaning="turns FSDP on: the strategy, offload, auto_wrap",
        reason="each word has its form under FSDP2"),
    Row(name="distributed_type", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=(A1, A2, AD),
        meaning="FSDP makes accelerate launch read fsdp_config, DEEPSPEED deepspeed_config",
        decide=fates.of_type, reason="turns FSDP on; in accelerate's files fsdp_version tells FSDP2 apart"),
    Row(name="mixed_precision", takes=PRECISION, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype alike", defaults=_everywhere("no"), read_by=(A1, A2, AD),
        decide=fates.of_precision, meaning="autocast, and parameters, gradients and buffers of FSDP in this dtype",
        reason="gradients are reduced in the low dtype, too: accelerate gives all of the policy one dtype"),
    Row(name="bf16", takes=BF16, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype bfloat16", defaults=_everywhere(False),
        read_by=(T1, T2, X1, X2), decide=fates.of_bf16,
        meaning="autocast, and parameters, gradients and buffers of FSDP in bfloat16",
        reason="gradients are reduced in bfloat16, too: accelerate gives all of the policy one dtype"),
    Row(name="fp16", takes=FLAG, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype float16", defaults=_everywhere(False),
        meaning="autocast with loss scaling, and parameters, gradients and buffers of FSDP in float16",
        reason="gradients are reduced in float16, too: accelerate gives all of the policy one dtype"),
    Row(name="fp8", takes=FLAG, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.APPROXIMATE,
        target="precision: amp_fp8; mixed_precision: bfloat16", defaults=_everywhere(False), read_by=(X1, X2),
        decide=fates.of_switch("fp8"), capability="products in fp8", meaning="matrix products in fp8, by torchao",
        reason="FSDP takes bfloat16; the matrix products in fp8 are another library's",
        hint="check that the fp8 library in use takes FSDP2"),
    Row(name="tiled_mlp", takes=FLAG, group=BESIDE, aspect=Aspect.TILING, outcome=Outcome.APPROXIMATE,
        target="tiled_mlp", defaults=_everywhere(False), read_by=(X1, X2), decide=fates.of_switch("tiled_mlp"),
        capability="tiled MLP", meaning="MLPs are computed in pieces of the sequence",
        reason="the same MLPs in pieces, each computed once more in backward"),
    Row(name="tiled_mlp_num_shards", takes=PIECES, group=BESIDE, aspect=Aspect.TILING, outcome=Outcome.APPROXIMATE,
        target="tiled_mlp", defaults=_everywhere(4), read_by=(X1, X2), decide=fates.of_switch("tiled_mlp"),
        meaning="into how many pieces; without it axolotl goes by the length of the sequence",
        reason="a detail of tiled_mlp"),
    Row(name="accelerator_config", takes=SYNCS, group=BESIDE, aspect=Aspect.GRADIENT_SYNC, outcome=Outcome.EXACT,
        target="gradient_sync", defaults=_everywhere(False), read_by=(T1, T2, X1, X2), decide=fates.of_syncs,
        meaning="of accelerate's other settings, whether each microbatch reduces gradients "
        "(gradient_accumulation_kwargs: {sync_each_batch: true})",
        reason="each microbatch reduces its gradients, there as here"),
    Row(name="activation_offloading", takes=OFFLOADING, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing, and activation_cpu_offload",
        defaults=_everywhere(False), read_by=(X1, X2), decide=fates.of_switch("activation_offloading"),
        meaning="layers are recomputed, from inputs that rest in host memory",
        reason="the same layers, inside their units; legacy and disk differ in how the inputs are moved"),
    Row(name="gradient_checkpointing", takes=RECOMPUTING, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing", defaults=_everywhere(False),
        read_by=(T1, T2, X1, X2),
        decide=fates.of_gradient_checkpointing,
        meaning="the model recomputes its layers in backward, from outside of their units",
        reason="the same layers are recomputed, but inside their units, which saves a second all-gather"),
    Row(name="gradient_checkpointing_kwargs", takes=ANY, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.EXACT, target="activation_checkpointing: reentrant or not", read_by=(T1, T2, X1, X2),
        meaning="which of torch's implementations recomputes (use_reentrant, true by default; false in axolotl)",
        reason="both implementations run inside a fully_shard unit"),
    Row(name="version", takes=VERSION, outcome=Outcome.EXACT, defaults={T1: 1, A1: 1, X1: 1, T2: 2, A2: 2, X2: 2},
        read_by=(A1, A2, T2, X1, X2), decide=fates.of_version, meaning="which FSDP: 1, or 2",
        reason="which FSDP the file is for; in accelerate's words fsdp_version: 2"),
    Row(name="sharding_strategy", takes=STRATEGY, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward and the mesh",
        defaults=dict.fromkeys((T1, A1, X1), ShardingStrategy.FULL_SHARD), read_by=(A1,),
        instead=_instead(trainer="the first word of fsdp", launcher="fsdp_reshard_after_forward, and "
        "parallelism_config for replicas"), decide=fates.of_strategy,
        meaning="what is sharded, and when parameters are freed"),
    Row(name="reshard_after_forward", takes=RESHARD, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward", defaults=_everywhere(True), read_by=(T2, A2, X2),
        instead=_instead(trainer="full_shard or shard_grad_op in fsdp", launcher="fsdp_sharding_strategy"),
        meaning="whether parameters are freed after forward; FSDP1 did not read it beside a strategy, which there "
        "always is", reason="FSDP2's own word"),
    Row(name="offload_params", aliases=("cpu_offload",), takes=BOOL, aspect=Aspect.OFFLOAD, outcome=Outcome.EXACT,
        target="CPUOffloadPolicy", defaults=_everywhere(False),
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="the word offload in fsdp"),
        meaning="parameters, gradients and the optimizer rest in host memory", reason="the same under FSDP2"),
    Row(name="auto_wrap_policy", takes=POLICY, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="the modules that fully_shard is called on",
        defaults={**dict.fromkeys((T1, A1, A2, X1, X2), "NO_WRAP"), T2: "TRANSFORMER_BASED_WRAP",
            AD: "TRANSFORMER_BASED_WRAP"},
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="the word auto_wrap in fsdp"), decide=fates.of_policy,
        meaning="which modules become units of their own", reason="the same modules, each a unit"),
    Row(name="transformer_layer_cls_to_wrap", takes=CLASSES, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on each module of these classes", defaults=_everywhere(()),
        instead=_instead(trainer=_UNPREFIXED), decide=fates.of_wrap,
        meaning="classes of the modules that become units; by default those of the model's _no_split_modules",
        reason="the same modules, each a unit"),
    Row(name="min_num_params", takes=COUNT, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on modules chosen by FSDP1's rule", defaults=_everywhere(0),
        instead=_instead(trainer=_UNPREFIXED), decide=fates.of_wrap,
        meaning="under SIZE_BASED_WRAP, modules with at least so many parameters that no unit below them holds",
        reason="the same modules, each a unit"),
    Row(name="backward_prefetch", takes=PREFETCH, aspect=Aspect.BACKWARD_PREFETCH, outcome=Outcome.EXACT,
        target="prefetch in backward",
        defaults={**dict.fromkeys((T1, A1, X1), "NO_PREFETCH"), **dict.fromkeys((T2, A2, X2, AD), "BACKWARD_PRE")},
        read_by=(T1, A1, X1),
        checked_by=(A2,),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_backward_prefetch in the script"),
        decide=fates.of_backward_prefetch, meaning="when backward gathers the next unit; not at all by default"),
    Row(name="backward_prefetch_policy", takes=ANY, outcome=Outcome.APPROXIMATE, read_by=(NOBODY,),
        instead=_instead(trainer="backward_prefetch", launcher="fsdp_backward_prefetch"),
        meaning="backward_prefetch, as accelerate up to 0.34 called it; from 1.0 on nobody reads it",
        reason="accelerate up to 0.34 read it, and later releases prefetch nothing; no number depends on it"),
    Row(name="forward_prefetch", takes=BOOL, aspect=Aspect.FORWARD_PREFETCH, outcome=Outcome.EXACT,
        target="set_modules_to_forward_prefetch, one unit ahead", defaults=_everywhere(False), read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_forward_prefetch in the script"),
        decide=fates.of_forward_prefetch,
        meaning="forward prefetches the next unit, in the order of the first step",
        reason="each unit prefetches the next one, as FSDP1 did"),
    Row(name="state_dict_type", takes=STATE_DICT, aspect=Aspect.STATE_DICT, outcome=Outcome.EXACT,
        target="state_dict_type",
        defaults={**dict.fromkeys((T1, A1, T2, X1), "full"), **dict.fromkeys((A2, X2, AD), "sharded")},
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="FSDP_STATE_DICT_TYPE in the environment"),
        meaning="what checkpoints hold", reason=_KEPT),
    Row(name="sync_module_states", takes=BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="sync_module_states; in accelerate's FSDP2 cpu_ram_efficient_loading does it",
        defaults={**dict.fromkeys((T1, A1, X1, AD), True), **dict.fromkeys((T2, A2, X2), False)}, read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="fsdp_cpu_ram_efficient_loading"), decide=fates.of_sync,
        meaning="rank 0 sends its parameters and buffers to all others",
        reason="rank 0's values go out before training"),
    Row(name="cpu_ram_efficient_loading", takes=BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="cpu_ram_efficient_loading",
        defaults={**_everywhere(False), A1: True, A2: True},
        instead=_instead(trainer=_UNPREFIXED), decide=fates.of_loading,
        meaning="only rank 0 reads a pretrained model's weights; the others get them from it", reason=_KEPT),
    Row(name="use_orig_params", takes=BOOL, outcome=Outcome.UNNEEDED, defaults=_everywhere(True),
        read_by=(T1, A1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="parameters keep their own tensors instead of one flat one a unit",
        reason="FSDP2 has no flat parameter: each keeps its own tensor, whatever this says"),
    Row(name="limit_all_gathers", takes=TRUTH, outcome=Outcome.UNNEEDED, defaults=_everywhere(True),
        read_by=(T1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="keeps the CPU from queueing more all-gathers than memory can hold",
        reason="FSDP2 bounds the memory of gathered parameters by itself, without blocking the CPU"),
    Row(name="activation_checkpointing", takes=TRUTH, aspect=Aspect.CHECKPOINTING, outcome=Outcome.EXACT,
        target="checkpoint_wrapper on the wrapped modules", defaults=_everywhere(False),
        instead=_instead(trainer=_UNPREFIXED), decide=fates.of_checkpointing,
        meaning="wrapped modules are recomputed in backward, by torch's non-reentrant implementation",
        reason="the same modules, inside their units"),
    Row(name="ignored_modules", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="ignored_params", read_by=(NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(ignored_modules=...) in the script"),
        meaning="modules that stay out of FSDP: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it: accelerate takes modules themselves, from the script"),
    Row(name="mixed_precision_policy", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="MixedPrecisionPolicy",
        read_by=(NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script"),
        meaning="the dtypes one by one: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it"),
    *(
        Row(
            name=name,
            takes=takes,
            meaning="for TPUs: torch_xla's own FSDP",
            outcome=Outcome.UNSUPPORTED,
            reason="torch_xla's FSDP is another system; FSDP2 has no form for it",
            defaults=_everywhere(None if takes is ANY else False),
            read_by=(T1, T2),
            instead=_instead(trainer=_UNPREFIXED),
            decide=fates.of_text if takes is TRUTH else None,
        )
        for name, takes in (
            ("xla", TRUTH),
            ("xla_fsdp_v2", TRUTH),
            ("xla_fsdp_grad_ckpt", TRUTH),
            ("xla_fsdp_settings", ANY),
        )
    ),
    Row(name="dp_replicate_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_replicate_degree", defaults=_everywhere(1), decide=fates.of_degree,
        meaning="so many replicas, each sharded over dp_shard_size ranks (FSDP2 only, accelerate 1.10)",
        reason="replicas average their gradients"),
    Row(name="dp_shard_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", defaults=_everywhere(1), decide=fates.of_shards,
        meaning="over how many ranks parameters are sharded (FSDP2 only, accelerate 1.10)",
        reason="the ranks of one replica"),
    Row(name="tp_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        meaning="tensor parallelism over so many ranks (accelerate 1.10)",
        reason="an axis of its own, beside the shards", defaults=_everywhere(1), decide=fates.of_degree,
        capability="tensor parallelism"),
    Row(name="cp_size", takes=DEGREE, group=DEGREES, aspect=Aspect.CONTEXT, outcome=Outcome.EXACT,
        meaning="context parallelism over so many ranks (accelerate 1.10)",
        reason="ranks that share sequences, and shard parameters as well: by a ring there, by "
        "heads here, with the same numbers up to rounding", defaults=_everywhere(1), decide=fates.of_degree,
        capability="context parallelism"),
    Row(name="sp_size", takes=DEGREE, group=DEGREES, aspect=Aspect.CONTEXT, outcome=Outcome.EXACT,
        target="context_parallel_degree", read_by=(AD,),
        meaning="sequences over so many ranks, by DeepSpeed's Ulysses (accelerate 1.12)",
        reason="ranks that share sequences, and shard parameters as well: attention exchanges heads for sequence, "
        "there as here", defaults=_everywhere(1), decide=fates.of_degree, capability="context parallelism"),
    *(Row(name=name, takes=ANY, group=DEGREES, outcome=Outcome.UNNEEDED, defaults=_everywhere(None), read_by=(AD,),
        meaning=f"of DeepSpeed's sequence parallelism, {text}", reason="the new run divides sequences by itself")
        for name, text in SEQUENCES.items() if name != "sp_size"),
    *(Row(name=name, takes=ANY, group=DEGREES, outcome=Outcome.APPROXIMATE, defaults=_everywhere(None),
        read_by=(T1, T2, A1, A2),
        meaning="how ranks of one sequence get each other's keys and values (accelerate 1.10)",
        reason="another way of communication: the same numbers up to rounding")
        for name in ("cp_backend", "cp_comm_strategy")),
    Row(name="ep_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        meaning="experts over so many ranks, by axolotl's plugin", reason="an axis of its own, beside the shards",
        defaults=_everywhere(1), read_by=(X1, X2), decide=fates.of_degree, capability="expert parallelism"),
    Row(name="cpu_offload_pin_memory", takes=BOOL, outcome=Outcome.APPROXIMATE, target="pinned host memory",
        defaults=_everywhere(True), read_by=(X1, X2), decide=fates.of_pinning,
        meaning="whether what rests in host memory is pinned, and so never swapped out",
        reason="offloaded shards are pinned here: faster copies, and the host needs the memory for them"),
    Row(name="final_state_dict_type", takes=STATE_DICT, outcome=Outcome.APPROXIMATE, target="state_dict_type",
        defaults=_everywhere(None), read_by=(X1, X2), decide=fates.of_last_checkpoint,
        meaning="what the model that is saved at the end holds, if not what the checkpoints do",
        reason="one key says it for all checkpoints",
        hint="composer-fsdp2 checkpoint convert makes the other form of the last one"),
    Row(name="zero_stage", takes=STAGE, group=DEEPSPEED, aspect=Aspect.RESHARD, outcome=Outcome.APPROXIMATE,
        target="FULL_SHARD: reshard_after_forward=True on one mesh of all ranks", defaults=_everywhere(2),
        read_by=(AD,), decide=fates.of_stage,
        meaning="what DeepSpeed shards: 1 the optimizer's state, 2 gradients too, 3 parameters too",
        reason="all is sharded by both; DeepSpeed gathers parameters one by one, within limits that it sets itself, "
        "FSDP2 unit by unit: the same numbers, other memory"),
    *(
        Row(name=f"offload_{what}_device", takes=DEVICE, group=DEEPSPEED, aspect=Aspect.OFFLOAD,
            outcome=Outcome.APPROXIMATE, target="CPUOffloadPolicy", defaults=_everywhere("none"), read_by=(AD,),
            decide=fates.of_device, meaning=f"where {text}",
            reason="FSDP2 offloads parameters, gradients and the optimizer's state together")
        for what, text in (("optimizer", "the optimizer's state rests"), ("param", "parameters rest, under stage 3"))
    ),
    Row(name="zero3_init_flag", takes=BOOL, group=DEEPSPEED, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="sync_module_states", defaults=_everywhere(False), read_by=(AD,), decide=fates.of_zero3_init,
        meaning="parameters are sharded while from_pretrained makes the model, so that no rank holds all of them",
        reason="DeepSpeed sends rank 0's values out, and so does sync_module_states",
        hint="where a rank has no memory for the whole model: init_device: mixed in LLM Foundry, meta in a script"),
    Row(name="zero3_save_16bit_model", takes=BOOL, group=DEEPSPEED, aspect=Aspect.STATE_DICT,
        outcome=Outcome.APPROXIMATE, target="state_dict_type", defaults=_everywhere(False), read_by=(AD,),
        decide=fates.of_switch("zero3_save_16bit_model"), meaning="save_pretrained writes full weights, in 16 bits",
        reason="full checkpoints, in the parameters' own dtype"),
    Row(name="gradient_clipping", takes=NORM, group=DEEPSPEED, outcome=Outcome.EXACT, target="gradient clipping",
        defaults=_everywhere(None) | {AD: 1.0}, read_by=(AD,), decide=fates.of_clipping,
        capability="gradient clipping", meaning="to which norm DeepSpeed clips gradients: 1 by default",
        reason="the norm of all gradients, by both"),
    Row(name="gradient_accumulation_steps", takes=STEPS, group=DEEPSPEED, outcome=Outcome.EXACT,
        target="gradient_sync: every from stage 2 on, else last", defaults=_everywhere(1), read_by=(AD,),
        decide=fates.of_steps,
        meaning="how many microbatches make a step", reason="stages 2 and 3 reduce gradients in each microbatch"),
    Row(name="deepspeed_config_file", takes=ANY, group=DEEPSPEED, outcome=Outcome.NEEDS_DECISION, read_by=(AD,),
        defaults=_everywhere(None), meaning="DeepSpeed's own settings, in a file of their own, which hold instead",
        reason="the settings are in another file, which is not read here",
        hint="write its zero_optimization.stage here as zero_stage, its offload_... as offload_optimizer_device and "
        "offload_param_device, and remove this"),
    *(
        Row(name=name, takes=ANY, group=DEEPSPEED, outcome=Outcome.UNNEEDED, read_by=(AD,),
            defaults=_everywhere(None), meaning=meaning, reason=reason)
        for name, meaning, reason in _OF_DEEPSPEED
    ),
)
# fmt: on
ROWS = tuple(replace(row, group=row.group or SETTINGS) for row in _ROWS)
SYNC_ROW = next(row for row in ROWS if row.name == "sync_module_states")
BY_PLACE = {(row.group, name): row for row in ROWS for name in (row.name, *row.aliases)}
# For FSDP2 these say nothing, whatever their value.
WITHOUT_EFFECT = ("use_orig_params", "limit_all_gathers")
# By the name that axolotl has for it beside fsdp_config.
OF_AXOLOTL = {
    "fsdp_version": BY_PLACE[SETTINGS, "version"],
    **{name: BY_PLACE[DEGREES, name] for name in ("dp_shard_size", "dp_replicate_size")},
    "tensor_parallel_size": BY_PLACE[DEGREES, "tp_size"],
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), BY_PLACE[DEGREES, "cp_size"]),
    "expert_parallel_size": BY_PLACE[DEGREES, "ep_size"],
}
