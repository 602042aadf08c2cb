"""A run in the words of ROLL's ``strategy_config``, and what it has no word for."""

from collections.abc import Iterator
from typing import Any

import torch

from composer_fsdp2.compat.dialects.base import Entry, Expression, Part, Run, Wrap, WrapKind, mesh_text
from composer_fsdp2.compat.dialects.roll_keys import DTYPES, PRECISIONS
from composer_fsdp2.compat.dialects.rows import Gap, gaps
from composer_fsdp2.config import GradientSync
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["express", "word"]


def express(run: Run) -> Expression:
    """As a ``strategy_config``; what ROLL says in model_args is a finding, since that lies outside of it."""
    return Expression(entries=tuple(_entries(run)), findings=(*_mesh_gaps(run), *gaps(_GAPS, run)))


def _entries(run: Run) -> Iterator[Entry]:
    config, policy = run.config, run.config.mixed_precision
    if not (config.mesh.replicate is not None and config.mesh.shard == -1):
        yield Entry(part=Part.MESH, key="fsdp_size", value=max(config.mesh.shard, 1))
    param_dtype = policy.param_dtype or torch.float32
    yield Entry(part=Part.PRECISION, key="param_dtype", value=word(param_dtype))
    yield Entry(part=Part.PRECISION, key="reduce_dtype", value=word(policy.reduce_dtype or param_dtype))
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


def word(dtype: torch.dtype) -> str:
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
            value=mesh_text(mesh),
            outcome=Outcome.EXACT,
            target="fsdp_size",
            reason=f"the run is for {mesh.size} ranks, and ROLL makes as many replicas as there are ranks",
        )
        return
    else:
        return
    is_open = mesh.shard == -1 and not mesh.is_grouped
    yield Finding(
        key="(mesh)",
        value=mesh_text(mesh),
        outcome=Outcome.NEEDS_DECISION if is_open else Outcome.UNSUPPORTED,
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
        outcome=Outcome.NEEDS_DECISION,
        target="wrap_policy.transformer_layer_cls_to_wrap",
        reason="ROLL wraps by class, and which classes the model's hooks choose stands in its code",
        hint="name them in wrap_policy; a transformers model names its own if nothing is said",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if(run.wrap.min_num_params, run.wrap.kind is WrapKind.SIZE),
        outcome=Outcome.NEEDS_DECISION,
        target="wrap_policy.transformer_layer_cls_to_wrap",
        reason="ROLL wraps by class, not by size",
        hint="name the classes with {value} parameters or more in wrap_policy",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if("one unit", run.wrap.kind is WrapKind.ROOT),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL always makes layers units; the numbers do not depend on it, and less memory is needed",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if("as created", run.config.mixed_precision.param_dtype is None),
        outcome=Outcome.APPROXIMATE,
        target="param_dtype: fp32",
        reason="ROLL always casts, and takes null for bf16",
        hint="choose the dtype that the model is created in",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if("as computed", run.config.mixed_precision.reduce_dtype is None),
        outcome=Outcome.APPROXIMATE,
        target="reduce_dtype",
        reason="ROLL reduces in float32 unless told otherwise, so that param_dtype is said",
    ),
    Gap(
        key="(precision)",
        said=lambda run: run.config.mixed_precision.output_dtype,
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL has no key for the dtype of outputs",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            run.config.precision,
            run.config.precision != PRECISIONS.get(run.config.mixed_precision.param_dtype, "fp32"),  # type: ignore[arg-type]
        ),
        outcome=Outcome.APPROXIMATE,
        target="param_dtype",
        reason="ROLL runs each step under torch.autocast in param_dtype",
    ),
    Gap(
        key="(buffers)",
        said=lambda run: run.config.buffer_dtype,
        outcome=Outcome.APPROXIMATE,
        reason="ROLL leaves buffers in the dtype that they have",
        hint="cast them where the model is made",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at each unit", run.config.mixed_precision.cast_forward_inputs),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL casts no inputs of units and leaves it to torch.autocast",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at the root", run.config.cast_root_inputs),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL casts no inputs and leaves it to torch.autocast; token ids are not cast anyway",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(False, not run.config.activation_checkpointing.checkpoint),
        outcome=Outcome.NEEDS_DECISION,
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
        outcome=Outcome.APPROXIMATE,
        target="model_args.gradient_checkpointing_use_reentrant",
        reason="ROLL recomputes without reentering, in mixtures of experts excepted; both give the same numbers",
        hint="set model_args.gradient_checkpointing_use_reentrant: true for the same implementation",
    ),
    Gap(
        key="(activation offloading)",
        said=lambda run: _if(True, run.config.activation_checkpointing.cpu_offload),
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL does not keep activations in CPU memory",
    ),
    Gap(
        key="(Transformer Engine)",
        said=lambda run: _if(True, run.config.activation_checkpointing.transformer_engine),
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL recomputes with torch's implementation only",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch.forward is not None),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL leaves the order of gathers in forward to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch.backward is not None),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL leaves the order of gathers in backward to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(gradient_sync)",
        said=lambda run: _if("defer_replica", run.config.accumulation.gradient_sync is GradientSync.DEFER_REPLICA),
        outcome=Outcome.APPROXIMATE,
        target="reduce_scatter_during_grad_accumulation: true",
        reason="ROLL reduces over shards and replicas together, in every microbatch or in the last: more communication",
    ),
    Gap(
        key="(reshard_after_backward)",
        said=lambda run: _if("no", not run.config.accumulation.reshard_after_backward),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL frees parameters after each backward: less memory, more communication",
    ),
    Gap(
        key="(collective_guard)",
        said=lambda run: run.config.collective_guard,
        outcome=Outcome.APPROXIMATE,
        reason="ROLL does not compare where ranks stand; a run that parts hangs until NCCL's timeout",
    ),
    Gap(
        key="(sync_module_states)",
        said=lambda run: _if(str(run.config.sync_module_states), run.config.sync_module_states is not True),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL always gives all ranks the values of rank 0",
    ),
    Gap(
        key="(ignored_modules)",
        said=lambda run: run.config.ignored_modules or None,
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL shards all modules",
    ),
    Gap(
        key="(keep_low_precision_grads)",
        said=lambda run: _if(True, run.config.keep_low_precision_grads),
        outcome=Outcome.APPROXIMATE,
        target="reduce_dtype",
        reason="ROLL keeps gradients in the dtype of the parameters, which is reduce_dtype in later versions",
    ),
    Gap(
        key="(state_dict_type)",
        said=lambda run: _if(run.state_dict_type, run.state_dict_type != "sharded"),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL writes shards, and beside them the whole model for Hugging Face, without an optimizer",
    ),
    Gap(
        key="(context parallelism)",
        said=lambda run: run.extras.get("context_parallel"),
        outcome=Outcome.NEEDS_DECISION,
        target="model_args.ulysses_size",
        reason="ROLL says it in model_args, outside of this section; fsdp_size must not be smaller",
        hint="set model_args.ulysses_size: {value}",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=Outcome.NEEDS_DECISION,
        target="model_args.freeze_module_prefix",
        reason="ROLL says it in model_args, outside of this section",
        hint="set model_args.freeze_module_prefix: {value}",
    ),
    Gap(
        key="(gradient clipping)",
        said=lambda run: run.extras.get("max_grad_norm"),
        outcome=Outcome.APPROXIMATE,
        target="max_grad_norm",
        reason="ROLL says it at the top of the file, for all workers",
        hint="set max_grad_norm: {value} there",
    ),
    Gap(
        key="(tensor parallelism)",
        said=lambda run: run.extras.get("tensor_parallel"),
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL's FSDP2 has no tensor parallelism",
        hint="its megatron_train strategy has",
    ),
    Gap(
        key="(pipeline parallelism)",
        said=lambda run: run.extras.get("pipeline_parallel"),
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL's FSDP2 has no pipeline parallelism",
        hint="its megatron_train strategy has",
    ),
    Gap(
        key="(selective checkpointing)",
        said=lambda run: run.extras.get("selective_checkpointing"),
        outcome=Outcome.APPROXIMATE,
        reason="ROLL recomputes all layers or none: less memory, more computation, the same numbers",
    ),
    Gap(
        key="(compile)",
        said=lambda run: run.extras.get("compile"),
        outcome=Outcome.UNSUPPORTED,
        reason="ROLL has no key for torch.compile with FSDP2",
    ),
    Gap(
        key="(verbose)",
        said=lambda run: _if(True, run.config.verbose),
        outcome=Outcome.UNNEEDED,
        reason="ROLL has its own words for its log",
    ),
    Gap(
        key="(strict)",
        said=lambda run: _if(False, not run.config.strict),
        outcome=Outcome.UNNEEDED,
        reason="composer_fsdp2's own word",
    ),
)
