"""A run in the words of TorchTitan's TOML, and what it has no word for."""

from collections.abc import Iterator
from typing import Any

import torch

from composer_fsdp2.compat.dialects.base import Entry, Expression, Run, mesh_text
from composer_fsdp2.compat.dialects.rows import Gap, gaps
from composer_fsdp2.compat.dialects.torchtitan_keys import BY_NAME, EXTRAS
from composer_fsdp2.config import GradientSync, ShardingConfig
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["express"]


def express(run: Run) -> Expression:
    """As tables of TOML; an entry's key is its table and its name."""
    return Expression(entries=tuple(_entries(run)), findings=(*_mesh_gaps(run), *gaps(_GAPS, run)))


def _entries(run: Run) -> Iterator[Entry]:
    config, policy = run.config, run.config.mixed_precision
    if not config.mesh.is_grouped and config.mesh.replicate != -1:
        yield _entry("parallelism.data_parallel_replicate_degree", config.mesh.replicate or 1)
        yield _entry("parallelism.data_parallel_shard_degree", config.mesh.shard)
    has_pipeline = "pipeline_parallel" in run.extras
    freed = "always" if has_pipeline else "default"
    yield _entry("parallelism.fsdp_reshard_after_forward", freed if config.reshard_after_forward else "never")
    for key, name in EXTRAS.items():
        if name in run.extras:
            yield _entry(key, run.extras[name])
    yield _entry("training.mixed_precision_param", "bfloat16" if policy.param_dtype in _LOW else "float32")
    yield _entry("training.mixed_precision_reduce", "float32")
    yield _entry("training.enable_cpu_offload", config.cpu_offload)
    if "max_grad_norm" in run.extras:
        yield _entry("training.max_norm", run.extras["max_grad_norm"])
    selective = run.extras.get("selective_checkpointing")
    mode = "none" if not config.activation_checkpointing.checkpoint else "selective" if selective else "full"
    yield _entry("activation_checkpoint.mode", mode)
    if mode == "selective":
        yield _entry("activation_checkpoint.selective_ac_option", str(selective))
    if run.extras.get("async_save"):
        yield _entry("checkpoint.enable", True)
        yield _entry("checkpoint.async_mode", "async")


_LOW = (torch.bfloat16, torch.float16)


def _entry(name: str, value: Any) -> Entry:
    return Entry(part=BY_NAME[name].part, key=name, value=value)


def _mesh_gaps(run: Run) -> Iterator[Finding]:
    mesh = run.config.mesh
    if mesh.is_grouped:
        outcome, target = Outcome.UNSUPPORTED, ""
        reason, hint = "TorchTitan has one mesh of all ranks, no groups that do not meet", "choose two degrees"
    elif mesh.replicate == -1:
        outcome, target = Outcome.NEEDS_DECISION, "parallelism.data_parallel_replicate_degree"
        reason = "TorchTitan leaves the shards open, never the replicas"
        hint = f"set it to the number of ranks divided by {mesh.shard}, and data_parallel_shard_degree to {mesh.shard}"
    elif mesh.shard == 1:
        outcome, target = Outcome.APPROXIMATE, "parallelism.data_parallel_shard_degree = 1"
        reason = "without shards TorchTitan uses DDP, and torch.autocast for mixed precision"
        hint = ""
    else:
        return
    yield Finding(key="(mesh)", value=mesh_text(mesh), outcome=outcome, target=target, reason=reason, hint=hint)


def _if(value: Any, condition: bool) -> Any:
    return value if condition else None


def _is_of_type(config: ShardingConfig, name: str, *known: torch.dtype) -> bool:
    return getattr(config.mixed_precision, name) in known


_GAPS: tuple[Gap, ...] = (
    Gap(
        key="(units)",
        said=lambda run: _if(
            ", ".join(run.wrap.classes) or run.wrap.kind.value, run.wrap.classes != ("TransformerBlock",)
        ),
        outcome=Outcome.APPROXIMATE,
        target="parallelize.py of the model",
        reason="TorchTitan's models choose their units in code: the token embedding, each block, the last norm with "
        "the output; the numbers do not depend on it",
    ),
    Gap(
        key="(reshard_after_forward)",
        said=lambda run: _if(run.config.reshard_after_forward, not isinstance(run.config.reshard_after_forward, bool)),
        outcome=Outcome.UNSUPPORTED,
        target="parallelism.fsdp_reshard_after_forward",
        reason="TorchTitan frees parameters wholly or not at all, and does not keep them in groups of {value} ranks",
        hint="default needs less memory, never less communication",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            str(run.config.mixed_precision.param_dtype),
            not _is_of_type(run.config, "param_dtype", torch.float32, torch.bfloat16),
        ),
        outcome=Outcome.NEEDS_DECISION,
        target="training.mixed_precision_param",
        reason="TorchTitan computes in bfloat16 or float32",
        hint="bfloat16 has a wider range than float16 and needs no scaling of gradients; float32 is exact",
    ),
    Gap(
        key="(precision)",
        said=lambda run: _if(
            str(run.config.mixed_precision.reduce_dtype),
            not _is_of_type(run.config, "reduce_dtype", torch.float32),
        ),
        outcome=Outcome.APPROXIMATE,
        target="training.mixed_precision_reduce",
        reason="TorchTitan reduces in float32 only: finer, and more communication",
    ),
    Gap(
        key="(precision)",
        said=lambda run: run.config.mixed_precision.output_dtype,
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan has no key for the dtype of outputs",
    ),
    Gap(
        key="(autocast)",
        said=lambda run: _if(run.config.precision, run.config.precision != "fp32"),
        outcome=Outcome.APPROXIMATE,
        target="training.mixed_precision_param",
        reason="TorchTitan's FSDP casts parameters and inputs of units, and uses no torch.autocast",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at roots only", not run.config.mixed_precision.cast_forward_inputs),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan up to v0.2.2 casts the inputs of each unit",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if(
            "not at the root", not run.config.cast_root_inputs and not run.config.mixed_precision.cast_forward_inputs
        ),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan casts the root's inputs, too; token ids are not cast anyway",
    ),
    Gap(
        key="(buffers)",
        said=lambda run: run.config.buffer_dtype,
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan leaves buffers in the dtype that they have",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(
            "reentrant",
            run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.reentrant,
        ),
        outcome=Outcome.APPROXIMATE,
        target="activation_checkpoint.mode",
        reason="TorchTitan recomputes without reentering: the same numbers",
    ),
    Gap(
        key="(activation offloading)",
        said=lambda run: _if(True, run.config.activation_checkpointing.cpu_offload),
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan does not keep activations in CPU memory",
    ),
    Gap(
        key="(Transformer Engine)",
        said=lambda run: _if(True, run.config.activation_checkpointing.transformer_engine),
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan recomputes with torch's implementation only",
    ),
    Gap(
        key="(prefetch)",
        said=lambda run: _if("as configured", run.config.prefetch != type(run.config.prefetch)()),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan leaves the order of gathers to FSDP2; the numbers do not depend on it",
    ),
    Gap(
        key="(gradient_sync)",
        said=lambda run: _if(
            run.config.accumulation.gradient_sync.value,
            run.config.accumulation.gradient_sync is not GradientSync.EVERY,
        ),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan reduces gradients in every microbatch: less memory, more communication",
    ),
    Gap(
        key="(reshard_after_backward)",
        said=lambda run: _if("no", not run.config.accumulation.reshard_after_backward),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan frees parameters after each backward: less memory, more communication",
    ),
    Gap(
        key="(collective_guard)",
        said=lambda run: run.config.collective_guard,
        outcome=Outcome.APPROXIMATE,
        target="comm.train_timeout_seconds",
        reason="TorchTitan does not compare where ranks stand, but ends a run that hangs, after a time",
        hint="comm.train_timeout_seconds is 100 unless it is set",
    ),
    Gap(
        key="(sync_module_states)",
        said=lambda run: _if(str(run.config.sync_module_states), run.config.sync_module_states is not False),
        outcome=Outcome.APPROXIMATE,
        reason="TorchTitan creates the model's values sharded, on each rank its part, and broadcasts none",
    ),
    Gap(
        key="(ignored_modules)",
        said=lambda run: run.config.ignored_modules or None,
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan shards all modules",
    ),
    Gap(
        key="(keep_low_precision_grads)",
        said=lambda run: _if(True, run.config.keep_low_precision_grads),
        outcome=Outcome.APPROXIMATE,
        target="training.dtype",
        reason="TorchTitan keeps gradients in the dtype of the parameters",
        hint="training.dtype = 'bfloat16' stores parameters and gradients in it",
    ),
    Gap(
        key="(state_dict_type)",
        said=lambda run: _if(run.state_dict_type, run.state_dict_type != "sharded"),
        outcome=Outcome.APPROXIMATE,
        target="checkpoint",
        reason="TorchTitan's checkpoints are sharded",
        hint="last_save_in_hf = true writes the last one whole, for Hugging Face",
    ),
    Gap(
        key="(gradient clipping)",
        said=lambda run: _if("off", "max_grad_norm" not in run.extras),
        outcome=Outcome.APPROXIMATE,
        target="training.max_norm",
        reason="TorchTitan clips gradients to a norm of 1 unless told otherwise",
        hint="set max_norm to the run's own, or to a large number for none",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan trains all parameters",
        hint="freeze them in the model's code",
    ),
    Gap(
        key="(expert patch)",
        said=lambda run: run.extras.get("expert_patch"),
        outcome=Outcome.UNNEEDED,
        reason="TorchTitan runs all experts of a layer in one grouped product, so that ranks do not part",
    ),
    Gap(
        key="(tiled MLP)",
        said=lambda run: run.extras.get("tiled_mlp"),
        outcome=Outcome.UNSUPPORTED,
        reason="TorchTitan computes MLPs in one piece",
    ),
    Gap(
        key="(model only)",
        said=lambda run: run.extras.get("save_only_model"),
        outcome=Outcome.APPROXIMATE,
        target="checkpoint.last_save_model_only",
        reason="TorchTitan leaves the optimizer out of the last checkpoint only",
    ),
    Gap(
        key="(verbose)",
        said=lambda run: _if(True, run.config.verbose),
        outcome=Outcome.UNNEEDED,
        reason="TorchTitan has its own words for its log",
    ),
    Gap(
        key="(strict)",
        said=lambda run: _if(False, not run.config.strict),
        outcome=Outcome.UNNEEDED,
        reason="composer_fsdp2's own word",
    ),
)
