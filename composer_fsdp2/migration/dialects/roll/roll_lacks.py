"""What of a run ROLL's FSDP2 cannot say, or does in its own way."""

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.dialects.roll.roll_words import GRAD_NORM, MLPS, PRECISIONS
from composer_fsdp2.migration.run import RunConfig, WrapKind


def tiles_of(run: RunConfig) -> tuple[int | None, str | None]:
    """In how many pieces, and of which model the MLPs are; without one ROLL tiles all that it knows."""
    classes = () if run.config.tiled_mlp is None else run.config.tiled_mlp.classes
    if not {*classes} <= {*MLPS.values()}:
        return None, None
    types = [name for name, cls in MLPS.items() if cls in classes]
    return run.mlp_chunks, types[0] if len(classes) == 1 else None


def has_open_replicas(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.has_replicas and mesh.shard_degree == -1


def _keeps_full_parameters(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.shard_degree == 1


def _is_for_so_many_ranks(mesh: MeshSpec) -> bool:
    return not mesh.is_grouped and mesh.is_resolved and not _keeps_full_parameters(mesh)


def _recomputes_by_hooks(run: RunConfig) -> bool:
    return run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.classes is None


def _reduced_in(run: RunConfig) -> str:
    mixed_precision = run.config.mixed_precision
    return mixed_precision.reduce_dtype or mixed_precision.param_dtype or "float32"


_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_CLASSES_KEY = "wrap_policy.transformer_layer_cls_to_wrap"
# fmt: off
LACKS: tuple[Lack, ...] = (
    Lack(asked="mesh", when=lambda run: run.config.mesh.is_grouped, outcome=_UNSUPPORTED,
        reason="ROLL has one mesh of all ranks, no groups that do not meet", hint="choose fsdp_size"),
    Lack(asked="mesh", when=lambda run: _keeps_full_parameters(run.config.mesh), outcome=_UNSUPPORTED,
        reason="fsdp_size 1 is all ranks to ROLL, so that it cannot keep full parameters on each rank",
        hint="fsdp_size 2 keeps half of them; or accept sharding over all ranks"),
    Lack(asked="mesh", when=lambda run: has_open_replicas(run.config.mesh), outcome=_NEEDS_DECISION,
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
        when=lambda run: run.precision != PRECISIONS.get(run.config.mixed_precision.param_dtype or "", "fp32"),
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
    Lack(asked="non-reentrant checkpointing", outcome=_APPROXIMATE,
        when=lambda run: run.expert_parallel != 1 or run.config.idle_experts is not None,
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL reenters in mixtures of experts unless it is set to false; both give the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: false for the same implementation"),
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
        hint="set model_args.freeze_module_prefix: {value}, by names of the transformers model; a dot at the end of a "
        "module's name keeps longer names out"),
    Lack(asked="tiled MLP", when=lambda run: tiles_of(run)[0] is None, outcome=_APPROXIMATE,
        reason=f"ROLL tiles {', '.join(dict.fromkeys(MLPS.values()))} only: the same numbers, and more memory in long "
        "sequences"),
    Lack(asked="classes of tiled MLPs", when=lambda run: tiles_of(run)[0] is not None and tiles_of(run)[1] is None,
        outcome=_APPROXIMATE, reason="without a model_type, which names one class, ROLL tiles all MLPs that it knows: "
        "the same numbers"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm not in (None, GRAD_NORM),
        outcome=_APPROXIMATE, target="max_grad_norm",
        reason=f"ROLL says it at the top of the file, for all workers, and clips to {GRAD_NORM} without",
        hint="set max_grad_norm: {value} there"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is None,
        outcome=_APPROXIMATE, target="max_grad_norm",
        reason=f"ROLL clips gradients to a norm of {GRAD_NORM} unless the top of the file says otherwise",
        hint="set max_grad_norm there to a large number, such as 1.0e+9, or train with clipping"),
    Lack(asked="clipping by value", outcome=_NEEDS_DECISION, target="max_grad_norm",
        reason=f"ROLL clips gradients to a norm, {GRAD_NORM} unless the top of the file sets it; the run clips them by "
        "{value}", hint="choose a norm, or a large number for none"),
    Lack(asked="dtype of stored parameters", outcome=_APPROXIMATE, target="reduce_dtype",
        when=lambda run: run.stored_dtype != _reduced_in(run),
        reason="ROLL stores trained parameters, and the optimizer's state, in reduce_dtype, and not {value}"),
    Lack(asked="products in fp8", outcome=_UNSUPPORTED, reason="ROLL's FSDP2 computes nothing in fp8",
        hint="param_dtype: bf16 computes in bfloat16"),
    *(Lack(asked=f"{kind} parallelism", outcome=_UNSUPPORTED, reason=f"ROLL's FSDP2 has no {kind} parallelism",
        hint="its megatron_train strategy has") for kind in ("tensor", "pipeline")),
    Lack(asked="selective checkpointing", outcome=_APPROXIMATE,
        reason="ROLL recomputes all layers or none: less memory, more computation, the same numbers"),
    Lack(asked="compile", outcome=_UNSUPPORTED, reason="ROLL has no key for torch.compile with FSDP2"),
    Lack(asked="verbose", outcome=_UNNEEDED, reason="ROLL has its own words for its log"),
)
# fmt: on
