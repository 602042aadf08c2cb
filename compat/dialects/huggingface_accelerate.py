"""A run in the words of accelerate's FSDP2 configuration, and what it has no word for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.compat.dialects.base import Entry, Expression, Part, Run, Wrap, WrapKind, mesh_text
from composer_fsdp2.compat.dialects.huggingface_keys import DEGREES_PREFIX
from composer_fsdp2.compat.dialects.huggingface_reading import DTYPES, PRECISIONS, SIZE_HINT, SIZE_REASON, STATE_DICTS
from composer_fsdp2.compat.dialects.rows import Gap, gaps
from composer_fsdp2.config import GradientSync, ShardingConfig
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["degrees_of", "differences_of", "express"]


def express(run: Run) -> Expression:
    """A configuration file of accelerate's, for ``accelerate launch --config_file``."""
    settings: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": run.config.reshard_after_forward is not False,
        **_wrap_settings(run.wrap),
        "fsdp_offload_params": run.config.cpu_offload,
        "fsdp_state_dict_type": STATE_DICTS[run.state_dict_type],
        "fsdp_cpu_ram_efficient_loading": run.config.sync_module_states is not False,
        "fsdp_activation_checkpointing": run.config.activation_checkpointing.checkpoint,
    }
    degrees = degrees_of(run)
    entries = (
        Entry(part=Part.EXTRA, key="distributed_type", value="FSDP"),
        Entry(part=Part.PRECISION, key="mixed_precision", value=_mixed_precision(run.config)),
        *(
            Entry(part=Part.EXTRA, key=name, value=run.extras[name])
            for name in ("num_processes", "num_machines")
            if name in run.extras
        ),
        Entry(part=Part.RESHARD, key="fsdp_config", value=settings),
        *([Entry(part=Part.MESH, key="parallelism_config", value=degrees)] if degrees else []),
    )
    return Expression(entries=entries, findings=(*differences_of(run), *gaps(_GAPS, run)))


def _wrap_settings(wrap: Wrap) -> dict[str, Any]:
    if wrap.kind is WrapKind.ROOT:
        return {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if wrap.kind is WrapKind.SIZE:
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": wrap.min_num_params}
    classes = {"fsdp_transformer_layer_cls_to_wrap": ",".join(wrap.classes)} if wrap.classes else {}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **classes}


def _mixed_precision(config: ShardingConfig) -> str:
    words = {precision: word for word, precision in PRECISIONS.items()}
    return words[config.precision]


def degrees_of(run: Run) -> dict[str, int]:
    """Of ``parallelism_config``; without it, accelerate shards over all ranks."""
    mesh, processes = run.config.mesh, run.extras.get("num_processes")
    others = [run.extras.get(name, 1) for name in _OTHER_AXES]
    replicate, shard = 1 if mesh.replicate is None else mesh.replicate, mesh.shard
    if processes and (replicate == -1) != (shard == -1) and not mesh.is_grouped and mesh.replicate is not None:
        replicate = processes // shard if replicate == -1 else replicate
        shard = processes // replicate if shard == -1 else shard
    if mesh.is_grouped or shard < 2 or replicate < 1 or _is_over_all_ranks(run):
        return {}
    return {
        "parallelism_config_dp_replicate_size": replicate,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": others[0],
        "parallelism_config_cp_size": others[1],
    }


_OTHER_AXES = ("tensor_parallel", "context_parallel")


def _is_over_all_ranks(run: Run) -> bool:
    """Whether this is what accelerate does by itself, if it is launched with so many ranks."""
    mesh = run.config.mesh
    is_alone = not mesh.is_grouped and mesh.replicate in (None, 1)
    has_other_axes = any(run.extras.get(name, 1) > 1 for name in _OTHER_AXES)
    return is_alone and not has_other_axes and mesh.shard in (-1, run.extras.get("num_processes", mesh.shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field that accelerate's configuration has no word for: what holds there, and what becomes of other values.

    Args:
        held: The values that accelerate's FSDP2 has by itself.
    """

    name: str
    get: Callable[[ShardingConfig], Any]
    held: tuple[Any, ...]
    outcome: Outcome
    reason: str
    hint: str = ""


_SCRIPT = "in the training script"
_DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        name="prefetch.forward",
        get=lambda config: config.prefetch.forward,
        held=(None,),
        outcome=Outcome.APPROXIMATE,
        reason="accelerate's FSDP2 gathers no unit ahead in forward: the same numbers, maybe slower",
        hint=f"set_modules_to_forward_prefetch {_SCRIPT}",
    ),
    Difference(
        name="prefetch.backward",
        get=lambda config: config.prefetch.backward,
        held=(None,),
        outcome=Outcome.APPROXIMATE,
        reason="accelerate leaves the prefetch to FSDP2: one unit ahead in backward, one more unit in memory",
        hint=f"set_modules_to_backward_prefetch {_SCRIPT}",
    ),
    Difference(
        name="buffer_dtype",
        get=lambda config: config.buffer_dtype,
        held=(None,),
        outcome=Outcome.APPROXIMATE,
        reason="accelerate's FSDP2 leaves buffers in their dtype; FSDP1 cast them",
        hint=f"cast the buffers {_SCRIPT}, before prepare, for the same numbers",
    ),
    Difference(
        name="keep_low_precision_grads",
        get=lambda config: config.keep_low_precision_grads,
        held=(False,),
        outcome=Outcome.UNSUPPORTED,
        reason="under FSDP2 gradients have the dtype of their parameters",
    ),
    Difference(
        name="accumulation.gradient_sync",
        get=lambda config: config.accumulation.gradient_sync,
        held=(GradientSync.EVERY,),
        outcome=Outcome.APPROXIMATE,
        reason="no configuration file says it: accelerator.accumulate and a Trainer reduce in the last microbatch, "
        "both over shards and replicas",
        hint="GradientAccumulationPlugin(sync_each_batch=True) reduces in every one",
    ),
    Difference(
        name="accumulation.reshard_after_backward",
        get=lambda config: config.accumulation.reshard_after_backward,
        held=(True,),
        outcome=Outcome.APPROXIMATE,
        reason="accelerate frees parameters after every backward: the same numbers, more all-gathers",
        hint=f"set_reshard_after_backward {_SCRIPT}",
    ),
    Difference(
        name="activation_checkpointing.cpu_offload",
        get=lambda config: config.activation_checkpointing.cpu_offload,
        held=(False,),
        outcome=Outcome.UNSUPPORTED,
        reason="accelerate keeps no activations in host memory",
        hint=f"offload_wrapper {_SCRIPT}",
    ),
    Difference(
        name="activation_checkpointing.transformer_engine",
        get=lambda config: config.activation_checkpointing.transformer_engine,
        held=(False,),
        outcome=Outcome.UNSUPPORTED,
        reason="accelerate recomputes by torch's implementation only",
    ),
    Difference(
        name="activation_checkpointing.transformer_engine_seed",
        get=lambda config: config.activation_checkpointing.transformer_engine_seed,
        held=(1234,),
        outcome=Outcome.UNNEEDED,
        reason="accelerate does not recompute by Transformer Engine",
    ),
    Difference(
        name="ignored_modules",
        get=lambda config: config.ignored_modules,
        held=((),),
        outcome=Outcome.UNSUPPORTED,
        reason="no configuration file can name modules",
        hint="FullyShardedDataParallelPlugin(ignored_modules=...)",
    ),
    Difference(
        name="sync_module_states",
        get=lambda config: config.sync_module_states,
        held=(True, False),
        outcome=Outcome.APPROXIMATE,
        reason="cpu_ram_efficient_loading sends rank 0's values out always, not only where some ranks have none",
    ),
    Difference(
        name="collective_guard",
        get=lambda config: config.collective_guard,
        held=(None,),
        outcome=Outcome.UNSUPPORTED,
        reason="accelerate's ranks do not compare what they are about to communicate",
    ),
    Difference(
        name="strict",
        get=lambda config: config.strict,
        held=(True,),
        outcome=Outcome.UNNEEDED,
        reason="composer_fsdp2's own word",
    ),
    Difference(
        name="verbose",
        get=lambda config: config.verbose,
        held=(False,),
        outcome=Outcome.UNNEEDED,
        reason="accelerate has its own words for its log",
    ),
)


_GAPS: tuple[Gap, ...] = (
    Gap(
        key="(gradient clipping)",
        said=lambda run: run.extras.get("max_grad_norm"),
        outcome=Outcome.APPROXIMATE,
        target="accelerator.clip_grad_norm_",
        reason="no configuration file of accelerate's clips gradients",
        hint=f"accelerator.clip_grad_norm_(parameters, {{value}}) {_SCRIPT}, or a Trainer's max_grad_norm",
    ),
    Gap(
        key="(async_save)",
        said=lambda run: run.extras.get("async_save") or None,
        outcome=Outcome.APPROXIMATE,
        reason="accelerate writes checkpoints before training goes on: the same files, later",
    ),
    Gap(
        key="(model only)",
        said=lambda run: run.extras.get("save_only_model"),
        outcome=Outcome.APPROXIMATE,
        target="accelerator.save_model",
        reason="what a checkpoint holds stands in the script, or in a Trainer's save_only_model",
    ),
    Gap(
        key="(selective checkpointing)",
        said=lambda run: run.extras.get("selective_checkpointing"),
        outcome=Outcome.APPROXIMATE,
        target="fsdp_activation_checkpointing",
        reason="accelerate recomputes all of a layer: less memory, more computation",
    ),
    Gap(
        key="(compile)",
        said=lambda run: run.extras.get("compile"),
        outcome=Outcome.APPROXIMATE,
        target="dynamo_config",
        reason="outside of this section; it changes speed and rounding",
        hint="dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=Outcome.NEEDS_DECISION,
        target="requires_grad",
        reason="what is frozen stands in no configuration file of accelerate's",
        hint=f"freeze {{value}} {_SCRIPT}, before prepare",
    ),
    Gap(
        key="(tiled MLP)",
        said=lambda run: run.extras.get("tiled_mlp"),
        outcome=Outcome.NEEDS_DECISION,
        reason="MLPs are computed in one piece: the same numbers, more memory in long sequences",
        hint="recompute activations, or use shorter microbatches",
    ),
    Gap(
        key="(expert patch)",
        said=lambda run: run.extras.get("expert_patch") or None,
        outcome=Outcome.NEEDS_DECISION,
        reason="nothing makes ranks agree on which experts run; where an expert is a unit of its own, they would hang",
        hint="keep all experts of a layer in one unit",
    ),
    *(
        Gap(
            key=f"({name})",
            said=lambda run, name=name: run.extras[name] if run.extras.get(name, 1) not in (1, False) else None,  # type: ignore[misc]
            outcome=Outcome.UNSUPPORTED,
            reason=f"accelerate has no {name.replace('_', ' ')} with FSDP2",
        )
        for name in ("pipeline_parallel", "expert_parallel")
    ),
)


def differences_of(run: Run) -> Iterator[Finding]:
    """What accelerate's file cannot say, or says otherwise."""
    for row in _DIFFERENCES:
        value = row.get(run.config)
        if value not in row.held:
            yield _difference(row.name, value, row.outcome, row.reason, row.hint)
    if "num_processes" not in run.extras:
        yield Finding(
            key="(num_processes)",
            value=None,
            outcome=Outcome.EXACT,
            target="accelerate launch --num_processes",
            reason="the number of ranks is not known here, and accelerate does not count them",
        )
    yield from _mesh_differences(run)
    yield from _precision_differences(run.config)
    yield from _wrap_differences(run)
    yield from _checkpointing_differences(run)


def _difference(name: str, value: object, outcome: Outcome, reason: str, hint: str = "", target: str = "") -> Finding:
    return Finding(key=f"({name})", value=value, outcome=outcome, target=target, reason=reason, hint=hint)


def _mesh_differences(run: Run) -> Iterator[Finding]:
    mesh, reshard = run.config.mesh, run.config.reshard_after_forward
    if not isinstance(reshard, bool):
        yield _difference(
            "reshard_after_forward", reshard, Outcome.UNSUPPORTED, "accelerate takes true or false only, no group size"
        )
    if mesh.is_grouped:
        yield _difference(
            "mesh", mesh_text(mesh), Outcome.UNSUPPORTED, "accelerate shards over all ranks, or replicas of them"
        )
    elif mesh.shard == 1:
        reason = "accelerate's FSDP2 has no run without shards (NO_SHARD)"
        yield _difference(
            "mesh", mesh_text(mesh), Outcome.UNSUPPORTED, reason, "distributed_type: MULTI_GPU, which is DDP"
        )
    elif run.extras.get("parallelism_config"):
        yield _difference("mesh", mesh_text(mesh), Outcome.EXACT, _SINCE_1_10, target="parallelism_config")
    elif _is_over_all_ranks(run):
        yield from _all_ranks(run)
    else:
        yield _axes(run)


_SINCE_1_10 = "accelerate reads parallelism_config from 1.10 on; 1.8.1 refuses the whole file"


def _all_ranks(run: Run) -> Iterator[Finding]:
    mesh = run.config.mesh
    if mesh.shard != -1 and "num_processes" not in run.extras:
        reason = "accelerate shards over as many ranks as it is launched with"
        hint = f"launch {mesh.shard}"
        yield _difference("mesh", mesh_text(mesh), Outcome.APPROXIMATE, reason, hint, "num_processes")
    elif mesh != replace(mesh, shard=-1, replicate=None):
        yield _difference("mesh", mesh_text(mesh), Outcome.UNNEEDED, "accelerate shards over all ranks by itself")


def _axes(run: Run) -> Finding:
    """Replicas, or further axes: a word that part of accelerate's releases refuse."""
    mesh, others = run.config.mesh, [name for name in _OTHER_AXES if run.extras.get(name, 1) > 1]
    value = ", ".join([mesh_text(mesh), *(f"{name} {run.extras[name]}" for name in others)])
    if degrees_of(run):
        reason = _SINCE_1_10
        hint = "accelerate 1.10 or later: write it, with --force or by hand; an earlier one: shard over all ranks"
        hint += " without replicas, which needs none" if not others else ", without other axes"
    else:
        reason = "parallelism_config takes all numbers, and the number of ranks is not known here"
        names = ("dp_replicate_size", "dp_shard_size", *(f"{name[0]}p_size" for name in others))
        said = ", ".join(f"{DEGREES_PREFIX}{name}: ..." for name in names)
        hint = f"parallelism_config: {{{said}}}, for accelerate 1.10 or later"
    return _difference("mesh", value, Outcome.NEEDS_DECISION, reason, hint, "parallelism_config")


def _precision_differences(config: ShardingConfig) -> Iterator[Finding]:
    word = _mixed_precision(config)
    policy, dtype = config.mixed_precision, DTYPES[word]
    code = f"FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(...)) {_SCRIPT}"
    dtypes = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    for name, value in dtypes.items():
        if value != dtype:
            reason = f"mixed_precision: {word} makes it {dtype or 'what the parameters are'}"
            yield _difference(f"mixed_precision.{name}", str(value), Outcome.UNSUPPORTED, reason, code)
    casts = (policy.cast_forward_inputs, config.cast_root_inputs, policy.output_dtype)
    if word == "no":
        if casts != (False, True, None):
            yield _difference("mixed_precision", str(casts), Outcome.UNNEEDED, "without a dtype nothing is cast")
    elif casts != (True, True, dtype):
        yield _difference(
            "mixed_precision.cast_forward_inputs",
            policy.cast_forward_inputs,
            Outcome.APPROXIMATE,
            f"accelerate's FSDP2 casts inputs and outputs of every unit to {dtype}; rotary angles lose digits",
            code,
        )


def _wrap_differences(run: Run) -> Iterator[Finding]:
    wrap = run.wrap
    if wrap.kind is WrapKind.SIZE:
        yield _difference("wrap", wrap.min_num_params, Outcome.UNSUPPORTED, SIZE_REASON, SIZE_HINT)
    if wrap.kind is WrapKind.HOOKS:
        yield _difference(
            "wrap",
            wrap.kind.value,
            Outcome.APPROXIMATE,
            "accelerate does not call the model's hooks; the classes of its _no_split_modules become units",
            "fsdp_transformer_layer_cls_to_wrap names others",
        )
    if any(value for _, value in wrap.others):
        names = ", ".join(name for name, value in wrap.others if value)
        yield _difference(
            "wrap",
            names,
            Outcome.APPROXIMATE,
            f"accelerate has no word for {names}, which become parts of the root's unit",
            "add their classes to fsdp_transformer_layer_cls_to_wrap",
        )


def _checkpointing_differences(run: Run) -> Iterator[Finding]:
    wanted = run.config.activation_checkpointing
    name = "activation_checkpointing"
    if not wanted.checkpoint:
        if not wanted.reentrant:
            yield _difference(f"{name}.reentrant", False, Outcome.UNNEEDED, "nothing is recomputed")
        return
    if run.wrap.kind is WrapKind.ROOT:
        reason = "accelerate recomputes the modules that its policy wraps, and breaks where there is no policy"
        yield _difference(name, True, Outcome.UNSUPPORTED, reason, "gradient_checkpointing_enable() on the model")
        return
    yield _difference(
        name,
        True,
        Outcome.APPROXIMATE,
        "accelerate's FSDP2 recomputes each child of a unit by itself, always by the non-reentrant implementation, and "
        "without the random numbers of forward: dropout differs",
        "gradient_checkpointing_enable() on the model keeps them",
        target="fsdp_activation_checkpointing",
    )
