"""The fields of a run that FSDP2 of accelerate or axolotl cannot configure, or implements differently."""

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.migration.dialects.huggingface.keys import SIZE_HINT, SIZE_REASON
from composer_fsdp2.migration.dialects.huggingface.values import DEGREES_PREFIX
from composer_fsdp2.migration.lens import Limitation, covers, limits
from composer_fsdp2.migration.run import OF_TRAINING, WrapKind

_SINCE_1_10 = "accelerate reads parallelism_config from 1.10 on; 1.8.1 refuses the whole file"
# Fields that parallelism_config sets.
NEEDS_DEGREES = ("mesh.replicas", "tensor_parallel", "context_parallel_degree")
_SCRIPT = "in the training script"
_POLICY = f"FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(...)) {_SCRIPT}"
_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
# fmt: off
_STORED_AS_CREATED = limits(_APPROXIMATE, "stored_dtype", now=None,
    reason="without mixed precision trained parameters keep the dtype that they are created in; {value} was requested",
    hint="create the model in {value}")
LIMITS: tuple[Limitation, ...] = (
    # The mesh.
    limits(_UNSUPPORTED, "mesh.groups", "mesh", reason="accelerate shards over all ranks, or replicas of them"),
    limits(_UNSUPPORTED, "mesh.shards", "mesh", was=1, reason="accelerate's FSDP2 has no run without shards (NO_SHARD)",
        hint="distributed_type: MULTI_GPU, which is DDP"),
    limits(_NEEDS_DECISION, "mesh.replicas", "mesh", target="parallelism_config",
        reason="parallelism_config takes all sizes; the number of ranks is not known here, or accelerate refuses them, "
        "as it does other axes beside replicas of one rank",
        hint=f"parallelism_config: {{{DEGREES_PREFIX}dp_replicate_size: ..., {DEGREES_PREFIX}dp_shard_size: ...}}, for "
        "accelerate 1.10 or later"),
    *(limits(_NEEDS_DECISION, field, is_kept=True, target="parallelism_config", reason=_SINCE_1_10,
        hint="accelerate 1.10 or later (for tp_size also transformers 4.52): write it, with --force or by hand; an "
        "earlier one: shard over all ranks without replicas and other axes") for field in NEEDS_DEGREES),
    limits(_APPROXIMATE, "mesh.shards", "num_ranks", target="num_processes",
        reason="accelerate shards over as many ranks as it is launched with", hint="launch {shard_degree}"),
    limits(_APPROXIMATE, "num_ranks", target="num_processes",
        reason="accelerate shards over as many ranks as it is launched with", hint="launch {value}"),
    # Features of accelerate's FSDP1 that its FSDP2 lacks or implements differently.
    limits(_APPROXIMATE, "prefetch.forward",
        reason="accelerate's FSDP2 prefetches no unit in forward: the same numbers, maybe slower",
        hint=f"set_modules_to_forward_prefetch {_SCRIPT}"),
    limits(_APPROXIMATE, "prefetch.backward",
        reason="accelerate leaves the prefetch to FSDP2: one unit in backward, one more unit in memory",
        hint=f"set_modules_to_backward_prefetch {_SCRIPT}"),
    limits(_APPROXIMATE, "mixed_precision.buffer_dtype",
        reason="accelerate's FSDP2 leaves buffers in their dtype; FSDP1 cast them",
        hint=f"cast the buffers {_SCRIPT}, before prepare, for the same numbers"),
    limits(_UNSUPPORTED, "mixed_precision.gradients",
        reason="under FSDP2 gradients have the dtype of their parameters"),
    limits(_APPROXIMATE, "accumulation.gradient_sync",
        reason="no key of a configuration file sets it: accelerator.accumulate and a Trainer reduce in the last "
        "microbatch, both over shards and replicas", hint="GradientAccumulationPlugin(sync_each_batch=True) reduces "
        "in every one"),
    limits(_APPROXIMATE, "accumulation.reshard_after_backward",
        reason="accelerate frees parameters after every backward: the same numbers, more all-gathers",
        hint=f"set_reshard_after_backward {_SCRIPT}"),
    limits(_UNSUPPORTED, "activation_checkpointing.cpu_offload",
        reason="accelerate keeps no activations in host memory", hint=f"offload_wrapper {_SCRIPT}"),
    limits(_UNSUPPORTED, "activation_checkpointing.transformer_engine",
        reason="accelerate recomputes by torch's implementation only"),
    limits(_APPROXIMATE, "cpu_offload", is_kept=True, beside={"sync_module_states": True}, target="fsdp_offload_params",
        reason="accelerate up to 1.12 puts the values that rank 0 loads on the GPU, where offloaded parameters cannot "
        "be (read in its sources, not run)",
        hint="accelerate 1.13, or fsdp_cpu_ram_efficient_loading: false with one seed or file for all ranks"),
    limits(_UNSUPPORTED, "ignored_modules", reason="no configuration file can name modules",
        hint="FullyShardedDataParallelPlugin(ignored_modules=...)"),
    limits(_APPROXIMATE, "sync_module_states", was=True, target="cpu_ram_efficient_loading",
        reason="FSDP1 sent rank 0's values to all ranks; FSDP2 does so with cpu_ram_efficient_loading only: each rank "
        "trains on its part of the values that it has loaded or drawn itself",
        hint="have all ranks load one file, or draw from one seed; or cpu_ram_efficient_loading: true"),
    limits(_APPROXIMATE, "sync_module_states",
        reason="cpu_ram_efficient_loading sends rank 0's values out always, not only where some ranks have none"),
    limits(_NEEDS_DECISION, "idle_experts", "wrap.experts",
        reason="ranks do not agree on which experts run; if an expert is a separate unit, they would hang",
        hint="keep all experts of a layer in one unit"),
    limits(_NEEDS_DECISION, "expert_parallel_degree",
        reason="accelerate does not split experts: each rank gathers all of a layer's",
        hint="leave it out; the model trains the same, with more gathering"),
    limits(_NEEDS_DECISION, "idle_towers",
        reason="ranks do not agree on which towers run; if a tower contains a unit, they would hang",
        hint="name no class of the tower among those to wrap"),
    limits(_UNSUPPORTED, "collective_guard",
        reason="accelerate's ranks do not compare what they are about to communicate"),
    *(limits(_UNNEEDED, field, reason="accelerate's loaders count data-parallel ranks: those that share a batch read "
        "the same") for field in ("check_data", "broadcast_batch")),
    limits(_UNNEEDED, "verbose", reason="accelerate has its own keys for its log"),
    limits(Outcome.EXACT, "num_ranks", was=None, is_kept=True, target="accelerate launch --num_processes",
        reason="the number of ranks is not known here, and accelerate does not count them"),
    limits(_UNSUPPORTED, "reshard_after_forward",
        reason="accelerate takes true or false only, no group size"),
    limits(_UNSUPPORTED, "wrap.kind", was=WrapKind.SIZE, is_kept=True, reason=SIZE_REASON,
        hint=SIZE_HINT),
    limits(_APPROXIMATE, "wrap.kind", was=WrapKind.HOOKS,
        reason="accelerate does not call the model's hooks; the classes of its _no_split_modules are units",
        hint="fsdp_transformer_layer_cls_to_wrap names others"),
    limits(_APPROXIMATE, "activation_checkpointing.classes", was=None, target="fsdp_activation_checkpointing",
        reason="which modules the model's hooks recompute stands in its code; accelerate recomputes the modules that "
        "its policy wraps: the same numbers, another memory", hint="gradient_checkpointing_enable() on the model"),
    limits(_APPROXIMATE, "activation_checkpointing.classes",
        target="fsdp_activation_checkpointing",
        reason="accelerate recomputes the modules that its policy wraps, not {value}: the same numbers, another memory",
        hint="gradient_checkpointing_enable() on the model"),
    limits(_APPROXIMATE, "wrap.embeddings", "wrap.output", "wrap.experts", is_any=True, title="further units",
        reason="accelerate has no key for {value}, which are parts of the root's unit",
        hint="add their classes to fsdp_transformer_layer_cls_to_wrap"),
    limits(_UNSUPPORTED, "activation_checkpointing.checkpoint", "activation_checkpointing.reentrant",
        "activation_checkpointing.classes", is_kept=True, beside={"wrap.kind": WrapKind.ROOT},
        reason="accelerate recomputes the modules that its policy wraps, and fails without a policy",
        hint="gradient_checkpointing_enable() on the model"),
    limits(_APPROXIMATE, "activation_checkpointing.checkpoint", "activation_checkpointing.reentrant", is_kept=True,
        target="fsdp_activation_checkpointing",
        reason="accelerate's FSDP2 recomputes each child of a unit separately, always by the non-reentrant "
        "implementation, and without restoring RNG state: dropout differs",
        hint="gradient_checkpointing_enable() on the model keeps them"),
    # Features that only other systems' files configure.
    _STORED_AS_CREATED,
    limits(_APPROXIMATE, "stored_dtype", target="float32",
        reason="accelerate up to 1.12 stores parameters, and the optimizer's state, in float32 under mixed precision, "
        "and not {value}: finer, and more memory where they were created in less; 1.13.0 leaves them as created"),
    limits(_NEEDS_DECISION, "other_clipping", "max_grad_norm", target="the training script",
        reason="Hugging Face's files clip gradients to a norm or not at all; the run clips them by {value}",
        hint="choose a norm, or clip in the script"),
    limits(_APPROXIMATE, "max_grad_norm", target="accelerator.clip_grad_norm_",
        reason="no configuration file of accelerate's clips gradients, and neither does FSDP",
        hint=f"accelerator.clip_grad_norm_(parameters, {{value}}) {_SCRIPT}, or a Trainer's max_grad_norm"),
    limits(_APPROXIMATE, *OF_TRAINING, is_any=True, title="batches, steps and optimizer",
        target="the training script",
        reason="no configuration file of accelerate's has them", hint="write them in the script, or as a Trainer's"),
    limits(_APPROXIMATE, "async_save",
        reason="accelerate writes checkpoints before training continues: the same files, later"),
    limits(_APPROXIMATE, "save_only_model", target="accelerator.save_model",
        reason="the contents of a checkpoint are set in the script, or by a Trainer's save_only_model"),
    limits(_APPROXIMATE, "selective_checkpointing", target="fsdp_activation_checkpointing",
        reason="accelerate recomputes all of a layer: less memory, more computation"),
    limits(_APPROXIMATE, "compile", target="dynamo_config",
        reason="outside of this section; it changes speed and rounding",
        hint="dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}"),
    limits(_NEEDS_DECISION, "freeze", "train_only", is_any=True, target="requires_grad",
        reason="no configuration file of accelerate's freezes parameters",
        hint=f"set requires_grad {_SCRIPT}, before prepare: {{value}}"),
    limits(_NEEDS_DECISION, "tiled_mlp.chunks", "tiled_mlp",
        reason="MLPs are computed in one piece: the same numbers, more memory in long sequences",
        hint="recompute activations, or use shorter microbatches"),
    *(limits(_UNSUPPORTED, f"{kind}_parallel", "has_expert_axis",
        reason=f"accelerate has no {kind} parallelism with FSDP2") for kind in ("pipeline", "expert")),
    *(limits(_NEEDS_DECISION, kind, target="parallelism_config",
        reason="its degree is written together with those of the mesh; the number of ranks is not known here, or "
        "accelerate refuses them, as it does other axes beside replicas of one rank",
        hint=f"write {DEGREES_PREFIX}{kind[0]}p_size: {{value}} beside the other sizes")
        for kind in ("tensor_parallel", "context_parallel_degree")),
    # Precision.
    *(limits(_UNSUPPORTED, f"mixed_precision.{name}",
        reason="mixed_precision sets one dtype for parameters and gradients, and not {value}", hint=_POLICY)
        for name in ("param_dtype", "reduce_dtype")),
    limits(_APPROXIMATE, "mixed_precision.cast_forward_inputs", "mixed_precision.output_dtype",
        "mixed_precision.cast_root_inputs",
        reason="accelerate's FSDP2 casts inputs and outputs of every unit to the low dtype; rotary angles lose digits",
        hint=_POLICY),
    limits(_APPROXIMATE, "mixed_precision.output_dtype", "mixed_precision.cast_root_inputs",
        reason="accelerate's FSDP2 casts the outputs of every unit to the low dtype", hint=_POLICY),
    limits(_UNNEEDED, "mixed_precision.cast_root_inputs", reason="without a low dtype nothing is cast"),
)
# fmt: on

# Fields for which accelerate's limitations do not apply to axolotl.
_OWN_OF_AXOLOTL = (
    "freeze",
    "cpu_offload",  # axolotl's function moves the values
    "reshard_after_forward",
    "activation_checkpointing.checkpoint",
    "activation_checkpointing.cpu_offload",
    "max_grad_norm",
    "save_only_model",
    "compile",
    "expert_parallel",
    "num_ranks",
    "wrap.embeddings",
    "wrap.output",
    "wrap.experts",
    "stored_dtype",
    "tiled_mlp.chunks",
    "mesh",
    "tensor_parallel",
    "context_parallel_degree",
    *OF_TRAINING,
)


# fmt: off
LIMITS_OF_AXOLOTL: tuple[Limitation, ...] = (
    *(each for each in LIMITS if each.beside or not covers(_OWN_OF_AXOLOTL, each.fields[0])),
    limits(_APPROXIMATE, "reshard_after_forward", was=False, target="FSDP_RESHARD_AFTER_FORWARD",
        reason="axolotl 0.12 to 0.14 exports true only: parameters are freed after forward, the same numbers with less "
        "memory and more communication", hint="FSDP_RESHARD_AFTER_FORWARD=false in the environment keeps them"),
    limits(_UNSUPPORTED, "reshard_after_forward", reason="axolotl takes true or false only, no group size"),
    limits(_APPROXIMATE, "state_dict_type", target="state_dict_type: FULL_STATE_DICT",
        reason="a Trainer refuses save_only_model with sharded checkpoints"),
    _STORED_AS_CREATED,
    limits(_NEEDS_DECISION, "stored_dtype",
        reason="axolotl's FSDP2 stores trained parameters, and the optimizer's state, in the low dtype that it loads "
        "the model in, and the run stores them in {value}: FSDP1 and accelerate upcast them to float32",
        hint="--to accelerate keeps float32, as fsdp_version: 1 does; --force writes it, to train in the low dtype"),
    limits(_NEEDS_DECISION, "max_grad_norm", target="max_grad_norm",
        reason="axolotl clips nothing at a norm of {value}, with which the run trains nothing, or in the wrong "
        "direction", hint="set a positive norm, or 0 to clip nothing"),
    limits(_NEEDS_DECISION, "train_only", target="unfrozen_parameters",
        reason="axolotl escapes each dot of a pattern before which no + follows, and takes a range in brackets at its "
        "end for rows: {value} would match other names", hint="write names without wildcards"),
    limits(_NEEDS_DECISION, "freeze", target="unfrozen_parameters",
        reason="axolotl lists trained parameters, not frozen ones",
        hint="unfrozen_parameters: patterns of all names but "
        "those of {value}"),
    limits(_APPROXIMATE, "tiled_mlp.classes", target="tiled_mlp",
        reason="axolotl tiles the MLPs of the model that it loads, and takes no classes: the same numbers"),
    limits(_APPROXIMATE, "wrap.embeddings", "wrap.output", "wrap.experts", is_any=True, title="further units",
        reason="axolotl has no key for {value}, which are parts of the root's unit",
        hint="add their classes to transformer_layer_cls_to_wrap"),
    limits(_UNSUPPORTED, "mesh.groups", "mesh", reason="axolotl shards over all ranks, or replicas of them"),
    limits(_UNSUPPORTED, "mesh.shards", "mesh", was=1, reason="axolotl's FSDP2 has no run without shards (NO_SHARD)",
        hint="leave fsdp_config out, which is DDP"),
    *(limits(_NEEDS_DECISION, field, "mesh", target="dp_shard_size",
        reason="axolotl takes all sizes of a mesh; the number of ranks is not known here, or it refuses them, as it "
        "does other axes beside replicas of one rank",
        hint=f"dp_shard_size: GPUs of a replica, dp_replicate_size: number of replicas{other}")
        for field, other in (
            ("mesh.replicas", ""), ("mesh.shards", ""), ("tensor_parallel", ", tensor_parallel_size: {value}"),
            ("context_parallel_degree", ", context_parallel_size: {value}"),
            ("expert_parallel", ", expert_parallel_size: {value}"))),
    limits(_NEEDS_DECISION, "has_expert_axis", "expert_parallel", target="expert_parallel_size",
        reason="axolotl's ranks of experts are an axis of their own, beside the shards: parameters are sharded over "
        "fewer ranks", hint="write the sizes that are meant, with their product the number of ranks"),
    limits(_APPROXIMATE, "activation_checkpointing.checkpoint", "activation_checkpointing",
        "activation_checkpointing.cpu_offload", was=False, target="activation_offloading",
        title="activation offloading",
        reason="axolotl offloads what recomputation starts from, and recomputes: the same numbers, more computation"),
    limits(_APPROXIMATE, "activation_checkpointing.reentrant", target="activation_checkpointing",
        reason="axolotl's FSDP2 recomputes without reentering: the same numbers"),
    limits(_APPROXIMATE, "num_ranks", target="num_processes",
        reason="axolotl shards over as many ranks as it is launched with", hint="launch {value}"),
    limits(_APPROXIMATE, "undecayed", target="weight_decay",
        reason="axolotl decays neither biases nor the weights of norms, the run all parameters"),
    limits(_APPROXIMATE, *OF_TRAINING, is_any=True, title="batches, steps and optimizer",
        reason="axolotl counts the microbatches of a rank, whose number is not known here, and steps or whole epochs; "
        "its optimizers are a Trainer's",
        hint="set gradient_accumulation_steps, max_steps or num_epochs, optimizer and learning_rate"),
)
# fmt: on
