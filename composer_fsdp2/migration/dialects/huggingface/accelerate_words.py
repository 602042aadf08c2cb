"""A run in the words of accelerate's FSDP2 configuration, and what it has no word for."""

from collections.abc import Iterator
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import Aspect
from composer_fsdp2.config.sharding import DTYPES_BY_SHORT_NAME
from composer_fsdp2.migration.capabilities import Lack, lacking
from composer_fsdp2.migration.dialect import Setting
from composer_fsdp2.migration.dialects.huggingface.places import DEGREES_PREFIX
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

DTYPES = {"no": None, **{name: DTYPES_BY_SHORT_NAME[name] for name in ("fp16", "bf16")}, "fp8": "bfloat16"}
# Composer's precisions, by accelerate's word.
PRECISIONS = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
WORDS_BY_PRECISION = {precision: word for word, precision in PRECISIONS.items()}
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


def settings_of(run: RunConfig) -> Iterator[Setting]:
    """A configuration file of accelerate's, for ``accelerate launch --config_file``."""
    settings = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": run.config.reshard_after_forward is not False,
        **wrap_settings(run.wrap),
        "fsdp_offload_params": run.config.cpu_offload,
        "fsdp_state_dict_type": STATE_DICTS[run.state_dict_type],
        "fsdp_cpu_ram_efficient_loading": run.config.sync_module_states is not False,
        "fsdp_activation_checkpointing": run.config.activation_checkpointing.checkpoint,
    }
    degrees = degrees_of(run)
    for aspect, key, value in (
        (Aspect.OTHER, "distributed_type", "FSDP"),
        (Aspect.PRECISION, "mixed_precision", WORDS_BY_PRECISION[run.precision]),
        (Aspect.OTHER, "num_processes", run.num_ranks),
        (Aspect.OTHER, "num_machines", run.num_nodes),
        (Aspect.RESHARD, "fsdp_config", settings),
        (Aspect.MESH, "parallelism_config", degrees or None),
    ):
        if value is not None:
            yield Setting(aspect=aspect, key=key, value=value)


def wrap_settings(wrap: Wrap) -> dict[str, Any]:
    if wrap.kind is WrapKind.ROOT:
        return {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if wrap.kind is WrapKind.SIZE:
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": wrap.min_num_params}
    classes = {"fsdp_transformer_layer_cls_to_wrap": ",".join(wrap.classes)} if wrap.classes else {}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **classes}


# ---------------------------------------------------------------------------------------------------------------------
# The mesh


def _other_axes(run: RunConfig) -> dict[str, int]:
    return {"tensor_parallel": run.tensor_parallel, "context_parallel": run.context_parallel}


def _replicas(mesh: MeshSpec) -> int:
    return mesh.replicate_degree if mesh.has_replicas else 1


def degrees_of(run: RunConfig) -> dict[str, int]:
    """The sizes in ``parallelism_config``; without it, accelerate shards over all ranks."""
    mesh, ranks, others = run.config.mesh, run.num_ranks, _other_axes(run)
    replicate, shard = _replicas(mesh), mesh.shard_degree
    if ranks and (replicate == -1) != (shard == -1) and not mesh.is_grouped and mesh.has_replicas:
        replicate = ranks // shard if replicate == -1 else replicate
        shard = ranks // replicate if shard == -1 else shard
    context = others["context_parallel"]  # over whose ranks parameters are sharded as well
    if mesh.is_grouped or shard < 2 or replicate < 1 or shard % context or _is_over_all_ranks(run):
        return {}
    sizes = {"dp_replicate": replicate, "dp_shard": shard // context, "tp": others["tensor_parallel"]}
    sizes["cp"] = context
    return {f"{DEGREES_PREFIX}{name}_size": size for name, size in sizes.items()}


def _is_over_all_ranks(run: RunConfig) -> bool:
    """Whether this is what accelerate does by itself, if it is launched with so many ranks."""
    mesh = run.config.mesh
    is_alone = not mesh.is_grouped and _replicas(mesh) == 1 and max(_other_axes(run).values()) == 1
    return is_alone and (run.num_ranks is None or mesh.shard_degree in (-1, run.num_ranks))


_SINCE_1_10 = "accelerate reads parallelism_config from 1.10 on; 1.8.1 refuses the whole file"


def _mesh_difference(run: RunConfig, *, has_degrees: bool) -> Finding | None:
    mesh = run.config.mesh
    if mesh.is_grouped:
        reason = "accelerate shards over all ranks, or replicas of them"
        return _lacking("mesh", mesh.text, Outcome.UNSUPPORTED, reason)
    if mesh.shard_degree == 1:
        reason = "accelerate's FSDP2 has no run without shards (NO_SHARD)"
        hint = "distributed_type: MULTI_GPU, which is DDP"
        return _lacking("mesh", mesh.text, Outcome.UNSUPPORTED, reason, hint)
    if has_degrees:
        return _lacking("mesh", mesh.text, Outcome.EXACT, _SINCE_1_10, target="parallelism_config")
    if not _is_over_all_ranks(run):
        return _axes(run)
    if mesh.shard_degree != -1 and run.num_ranks is None:
        reason = "accelerate shards over as many ranks as it is launched with"
        hint = f"launch {mesh.shard_degree}"
        return _lacking("mesh", mesh.text, Outcome.APPROXIMATE, reason, hint, "num_processes")
    if mesh.shard_degree != -1 or mesh.has_replicas:
        return _lacking("mesh", mesh.text, Outcome.UNNEEDED, "accelerate shards over all ranks by itself")
    return None


def _axes(run: RunConfig) -> Finding:
    """Replicas, or further axes: a word that part of accelerate's releases refuse."""
    mesh, others = run.config.mesh, {name: size for name, size in _other_axes(run).items() if size > 1}
    value = ", ".join([mesh.text, *(f"{name} {size}" for name, size in others.items())])
    if degrees_of(run):
        reason = _SINCE_1_10
        hint = "accelerate 1.10 or later: write it, with --force or by hand; an earlier one: shard over all ranks"
        hint += " without replicas, which needs none" if not others else ", without other axes"
    else:
        reason = "parallelism_config takes all numbers, and the number of ranks is not known here"
        names = ("dp_replicate_size", "dp_shard_size", *(f"{name[0]}p_size" for name in others))
        text = ", ".join(f"{DEGREES_PREFIX}{name}: ..." for name in names)
        hint = f"parallelism_config: {{{text}}}, for accelerate 1.10 or later"
    return _lacking("mesh", value, Outcome.NEEDS_DECISION, reason, hint, "parallelism_config")


# ---------------------------------------------------------------------------------------------------------------------
# What it lacks

_SCRIPT = "in the training script"
_POLICY = f"FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(...)) {_SCRIPT}"


def _lacking(key: str, value: object, outcome: Outcome, reason: str, hint: str = "", target: str = "") -> Finding:
    return Finding(
        key=key, value=value, outcome=outcome, target=target, reason=reason, hint=hint, origin=Origin.LACKING
    )


def differences_of(run: RunConfig, *, has_degrees: bool = False) -> Iterator[Finding]:
    """What accelerate's file cannot say, or says otherwise, also of what its FSDP1 could.

    Args:
        has_degrees: Whether the file itself has the mesh's degrees, for releases that can read them.
    """
    yield from lacking(OF_FSDP1, run)
    of_mesh = _mesh_difference(run, has_degrees=has_degrees)
    yield from (() if of_mesh is None else (of_mesh,))
    yield from precision_differences(run)


def precision_differences(run: RunConfig) -> Iterator[Finding]:
    word = WORDS_BY_PRECISION[run.precision]
    asked, dtype = run.config.mixed_precision, DTYPES[word]
    for name in ("param_dtype", "reduce_dtype"):
        value = getattr(asked, name)
        if value != dtype:
            reason = f"mixed_precision: {word} makes it {dtype or 'what the parameters are'}"
            yield _lacking(f"mixed_precision.{name}", str(value), Outcome.UNSUPPORTED, reason, _POLICY)
    casts = (asked.cast_forward_inputs, asked.cast_root_inputs, asked.output_dtype)
    if word == "no":
        if casts != (False, True, None):
            yield _lacking("mixed_precision", str(casts), Outcome.UNNEEDED, "without a dtype nothing is cast")
    elif casts != (True, True, dtype):
        yield _lacking(
            "mixed_precision.cast_forward_inputs",
            asked.cast_forward_inputs,
            Outcome.APPROXIMATE,
            f"accelerate's FSDP2 casts inputs and outputs of every unit to {dtype}; rotary angles lose digits",
            _POLICY,
        )


SIZE_REASON = (
    "accelerate's SIZE_BASED_WRAP under FSDP2 chooses module lists as well, on which fully_shard breaks, and counts "
    "parameters that inner units hold"
)
SIZE_HINT = "TRANSFORMER_BASED_WRAP, with the classes of the layers"
_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome


def _recomputes(run: RunConfig) -> bool:
    return run.config.activation_checkpointing.checkpoint


def _recomputes_others(run: RunConfig) -> bool:
    classes = run.config.activation_checkpointing.classes
    return bool(classes) and classes != run.wrap.classes and run.wrap.kind is not WrapKind.ROOT


# fmt: off
# Of what its own FSDP1 could, or did otherwise.
OF_FSDP1: tuple[Lack, ...] = (
    Lack(asked="prefetch in forward", outcome=_APPROXIMATE,
        reason="accelerate's FSDP2 prefetches no unit in forward: the same numbers, maybe slower",
        hint=f"set_modules_to_forward_prefetch {_SCRIPT}"),
    Lack(asked="prefetch in backward", outcome=_APPROXIMATE,
        reason="accelerate leaves the prefetch to FSDP2: one unit in backward, one more unit in memory",
        hint=f"set_modules_to_backward_prefetch {_SCRIPT}"),
    Lack(asked="buffer_dtype", outcome=_APPROXIMATE,
        reason="accelerate's FSDP2 leaves buffers in their dtype; FSDP1 cast them",
        hint=f"cast the buffers {_SCRIPT}, before prepare, for the same numbers"),
    Lack(asked="keep_low_precision_grads", outcome=_UNSUPPORTED,
        reason="under FSDP2 gradients have the dtype of their parameters"),
    Lack(asked="gradient_sync", outcome=_APPROXIMATE,
        reason="no configuration file says it: accelerator.accumulate and a Trainer reduce in the last microbatch, "
        "both over shards and replicas", hint="GradientAccumulationPlugin(sync_each_batch=True) reduces in every one"),
    Lack(asked="reshard_after_backward", outcome=_APPROXIMATE,
        reason="accelerate frees parameters after every backward: the same numbers, more all-gathers",
        hint=f"set_reshard_after_backward {_SCRIPT}"),
    Lack(asked="activation offloading", outcome=_UNSUPPORTED, reason="accelerate keeps no activations in host memory",
        hint=f"offload_wrapper {_SCRIPT}"),
    Lack(asked="Transformer Engine", outcome=_UNSUPPORTED,
        reason="accelerate recomputes by torch's implementation only"),
    Lack(asked="ignored_modules", outcome=_UNSUPPORTED, reason="no configuration file can name modules",
        hint="FullyShardedDataParallelPlugin(ignored_modules=...)"),
    Lack(asked="sync_module_states", when=lambda run: run.config.sync_module_states is None, outcome=_APPROXIMATE,
        reason="cpu_ram_efficient_loading sends rank 0's values out always, not only where some ranks have none"),
    Lack(asked="idle experts", outcome=_NEEDS_DECISION,
        reason="nothing makes ranks agree on which experts run; where an expert is a unit of its own, they would hang",
        hint="keep all experts of a layer in one unit"),
    Lack(asked="split experts", outcome=_NEEDS_DECISION,
        reason="accelerate does not split experts: each rank gathers all of a layer's",
        hint="leave it out; the model trains the same, with more gathering"),
    Lack(asked="idle towers", outcome=_NEEDS_DECISION,
        reason="nothing makes ranks agree on which towers run; where a unit lies in a tower, they would hang",
        hint="name no class of the tower among those to wrap"),
    Lack(asked="collective_guard", outcome=_UNSUPPORTED,
        reason="accelerate's ranks do not compare what they are about to communicate"),
    Lack(asked="check_data", outcome=_UNNEEDED,
        reason="accelerate's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="broadcast_batch", outcome=_UNNEEDED,
        reason="accelerate's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="unused implementation", outcome=_UNNEEDED, reason="nothing is recomputed"),
    Lack(asked="verbose", outcome=_UNNEEDED, reason="accelerate has its own words for its log"),
    Lack(asked="number of ranks", outcome=Outcome.EXACT, target="accelerate launch --num_processes",
        reason="the number of ranks is not known here, and accelerate does not count them"),
    Lack(asked="reshard_after_forward", outcome=_UNSUPPORTED,
        reason="accelerate takes true or false only, no group size"),
    Lack(asked="units", when=lambda run: run.wrap.kind is WrapKind.SIZE, outcome=_UNSUPPORTED, reason=SIZE_REASON,
        hint=SIZE_HINT),
    Lack(asked="units", when=lambda run: run.wrap.kind is WrapKind.HOOKS, outcome=_APPROXIMATE,
        reason="accelerate does not call the model's hooks; the classes of its _no_split_modules become units",
        hint="fsdp_transformer_layer_cls_to_wrap names others"),
    Lack(asked="recomputed modules", when=_recomputes_others, outcome=_APPROXIMATE,
        target="fsdp_activation_checkpointing",
        reason="accelerate recomputes the modules that its policy wraps, not {value}: the same numbers, another memory",
        hint="gradient_checkpointing_enable() on the model"),
    Lack(asked="further units", outcome=_APPROXIMATE,
        reason="accelerate has no word for {value}, which become parts of the root's unit",
        hint="add their classes to fsdp_transformer_layer_cls_to_wrap"),
    Lack(asked="activation_checkpointing", when=lambda run: _recomputes(run) and run.wrap.kind is WrapKind.ROOT,
        outcome=_UNSUPPORTED,
        reason="accelerate recomputes the modules that its policy wraps, and breaks where there is no policy",
        hint="gradient_checkpointing_enable() on the model"),
    Lack(asked="activation_checkpointing", when=lambda run: _recomputes(run) and run.wrap.kind is not WrapKind.ROOT,
        outcome=_APPROXIMATE, target="fsdp_activation_checkpointing",
        reason="accelerate's FSDP2 recomputes each child of a unit by itself, always by the non-reentrant "
        "implementation, and without the random numbers of forward: dropout differs",
        hint="gradient_checkpointing_enable() on the model keeps them"),
)
# fmt: on

# Of what only other systems' files ask for.
# fmt: off
STORED_AS_CREATED = Lack(asked="dtype of stored parameters", outcome=_APPROXIMATE,
    when=lambda run: run.precision == "fp32" and run.stored_dtype is not None,
    reason="without mixed precision trained parameters keep the dtype that they are created in; {value} was asked for",
    hint="create the model in {value}")
OF_OTHERS: tuple[Lack, ...] = (
    STORED_AS_CREATED,
    Lack(asked="dtype of stored parameters", outcome=_APPROXIMATE, target="float32",
        when=lambda run: run.precision != "fp32" and run.stored_dtype != "float32",
        reason="accelerate stores trained parameters, and the optimizer's state, in float32 under mixed precision, and "
        "not {value}: finer, and more memory where they were created in less"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None,
        outcome=_APPROXIMATE, target="accelerator.clip_grad_norm_",
        reason="no configuration file of accelerate's clips gradients, and FSDP does not by itself",
        hint=f"accelerator.clip_grad_norm_(parameters, {{value}}) {_SCRIPT}, or a Trainer's max_grad_norm"),
    Lack(asked="clipping by value", outcome=_NEEDS_DECISION, target="the training script",
        reason="Hugging Face's files clip gradients to a norm or not at all; the run clips them by {value}",
        hint="choose a norm, or clip in the script"),
    Lack(asked="async_save", outcome=_APPROXIMATE,
        reason="accelerate writes checkpoints before training goes on: the same files, later"),
    Lack(asked="model only", outcome=_APPROXIMATE, target="accelerator.save_model",
        reason="what a checkpoint holds stands in the script, or in a Trainer's save_only_model"),
    Lack(asked="selective checkpointing", outcome=_APPROXIMATE, target="fsdp_activation_checkpointing",
        reason="accelerate recomputes all of a layer: less memory, more computation"),
    Lack(asked="compile", outcome=_APPROXIMATE, target="dynamo_config",
        reason="outside of this section; it changes speed and rounding",
        hint="dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}"),
    Lack(asked="frozen parameters", outcome=_NEEDS_DECISION, target="requires_grad",
        reason="what is frozen stands in no configuration file of accelerate's",
        hint=f"freeze {{value}} {_SCRIPT}, before prepare"),
    Lack(asked="tiled MLP", outcome=_NEEDS_DECISION,
        reason="MLPs are computed in one piece: the same numbers, more memory in long sequences",
        hint="recompute activations, or use shorter microbatches"),
    *(Lack(asked=f"{kind} parallelism", outcome=_UNSUPPORTED, reason=f"accelerate has no {kind} parallelism with FSDP2"
        ) for kind in ("pipeline", "expert")),
    *(Lack(asked=f"{kind} parallelism", when=lambda run: not degrees_of(run), outcome=_NEEDS_DECISION,
        target=f"parallelism_config.{DEGREES_PREFIX}{kind[0]}p_size",
        reason="its degree is written together with those of the mesh, and the number of ranks is not known here",
        hint="write {value} beside the other sizes") for kind in ("tensor", "context")),
)
# fmt: on
