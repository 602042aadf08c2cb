"""A run in the words of an ``fsdp_config`` under composer_fsdp2, and what no ``fsdp_config`` can say."""

from collections.abc import Iterator
from typing import Any

from composer_fsdp2.compat.dialects.base import Entry, Expression, Part, Run, WrapKind
from composer_fsdp2.compat.dialects.rows import Gap, gaps
from composer_fsdp2.config import BackwardPrefetch, MeshSpec, RankGroups, ShardingConfig
from composer_fsdp2.findings import Outcome
from composer_fsdp2.fsdp1.values import parse_mixed_precision

__all__ = ["express"]


def express(run: Run) -> Expression:
    """The keys of the section, and Composer's ``precision`` beside it."""
    return Expression(
        entries=tuple(_entries(run)),
        findings=tuple(gaps(_GAPS, run)),
        beside=(Entry(part=Part.PRECISION, key="precision", value=run.config.precision),),
    )


def _entries(run: Run) -> Iterator[Entry]:
    config = run.config
    yield from _mesh(config.mesh)
    yield Entry(part=Part.RESHARD, key="reshard_after_forward", value=config.reshard_after_forward)
    yield Entry(part=Part.PRECISION, key="mixed_precision", value=_mixed_precision(config))
    yield Entry(part=Part.STATE_DICT, key="state_dict_type", value=run.state_dict_type)
    checkpointing = config.activation_checkpointing
    if checkpointing.enabled:
        yield Entry(part=Part.CHECKPOINTING, key="activation_checkpointing", value=checkpointing.checkpoint)
    if checkpointing.enabled and not checkpointing.reentrant:  # true is FSDP1's default
        yield Entry(part=Part.CHECKPOINTING, key="activation_checkpointing_reentrant", value=False)
    if config.prefetch.backward == 0:
        yield Entry(part=Part.BACKWARD_PREFETCH, key="backward_prefetch", value=BackwardPrefetch.NONE.value)
    elif config.prefetch.backward is not None:
        yield Entry(part=Part.BACKWARD_PREFETCH, key="backward_prefetch_limit", value=config.prefetch.backward)
    if config.prefetch.forward is not None:
        yield Entry(part=Part.FORWARD_PREFETCH, key="forward_prefetch", value=True)
    for part, key, value, default in (
        (Part.CHECKPOINTING, "activation_cpu_offload", checkpointing.cpu_offload, False),
        (Part.CHECKPOINTING, "te_checkpoint_wrapper", checkpointing.transformer_engine, False),
        (Part.FORWARD_PREFETCH, "forward_prefetch_limit", config.prefetch.forward or 1, 1),
        (Part.OFFLOAD, "cpu_offload", config.cpu_offload, False),
        (Part.SYNC, "sync_module_states", config.sync_module_states, False),
        (Part.PRECISION, "keep_low_precision_grads", config.keep_low_precision_grads, False),
        (Part.GRADIENT_SYNC, "gradient_sync", config.accumulation.gradient_sync.value, "every"),
        (Part.EXTRA, "reshard_after_backward", config.accumulation.reshard_after_backward, True),
        (Part.EXTRA, "collective_guard", config.collective_guard, None),
        (Part.ASYNC_SAVE, "async_save", run.extras.get("async_save", False), False),
        (Part.EXTRA, "strict", config.strict, True),
        (Part.EXTRA, "verbose", config.verbose, False),
    ):
        if value != default and value is not None:
            yield Entry(part=part, key=key, value=value)


def _mesh(mesh: MeshSpec) -> Iterator[Entry]:
    if mesh.is_grouped:
        groups = [_group(each) for each in mesh.axis_groups]
        yield Entry(part=Part.MESH, key="process_group", value=groups[0] if len(groups) == 1 else groups)
        return
    if mesh.shard != -1:
        yield Entry(part=Part.MESH, key="data_parallel_shard_degree", value=mesh.shard)
    if mesh.replicate is not None:
        yield Entry(part=Part.MESH, key="data_parallel_replicate_degree", value=mesh.replicate)


def _group(groups: RankGroups) -> str | list[int]:
    return list(groups.ranks) or str(groups)


def _mixed_precision(config: ShardingConfig) -> str | dict[str, str | None]:
    """Composer's word where there is one, else the dtypes."""
    policy = config.mixed_precision
    dtypes = {
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "buffer_dtype": config.buffer_dtype,
    }
    for word in ("FULL", "DEFAULT", "PURE"):
        meant = parse_mixed_precision(word, config.precision)
        of_word = (meant.policy.param_dtype, meant.policy.reduce_dtype, meant.buffer_dtype)
        if of_word == tuple(dtypes.values()):
            return word
    return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}


# ---------------------------------------------------------------------------------------------------------------------
# What it cannot say


def _if(value: Any, condition: bool) -> Any:
    return value if condition else None


_WRAP_REASON = "Composer asks the model which modules become units; no configuration can say it"
_GAPS: tuple[Gap, ...] = (
    Gap(
        key="(units)",
        said=lambda run: _if(", ".join(run.wrap.classes), bool(run.wrap.classes)),
        outcome=Outcome.NEEDS_DECISION,
        target="fsdp_wrap_fn of the model",
        reason=_WRAP_REASON,
        hint="give the model `def fsdp_wrap_fn(self, module): return type(module).__name__ in '{value}'.split(', ')`, "
        "or leave it to LLM Foundry, whose models choose their own blocks",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if("as the model says", run.wrap.kind is WrapKind.CLASSES and not run.wrap.classes),
        outcome=Outcome.NEEDS_DECISION,
        target="fsdp_wrap_fn of the model",
        reason=_WRAP_REASON,
        hint="LLM Foundry's hf_causal_lm chooses the same classes by itself (_no_split_modules); else give the model "
        "an fsdp_wrap_fn",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if(run.wrap.min_num_params, run.wrap.kind is WrapKind.SIZE),
        outcome=Outcome.NEEDS_DECISION,
        target="fsdp_wrap_fn of the model",
        reason=_WRAP_REASON,
        hint="let the model's fsdp_wrap_fn choose modules that have {value} parameters or more in no unit below them",
    ),
    Gap(
        key="(units)",
        said=lambda run: _if("one unit", run.wrap.kind is WrapKind.ROOT),
        outcome=Outcome.APPROXIMATE,
        target="fsdp_wrap_fn of the model",
        reason="under Composer a model without hooks is one unit; one with an fsdp_wrap_fn has several: the same "
        "numbers, less memory",
    ),
    Gap(
        key="(units)",
        said=lambda run: ", ".join(name for name, value in run.wrap.others if value) or None,
        outcome=Outcome.APPROXIMATE,
        target="fsdp_wrap_fn of the model",
        reason="{value} were units of their own; the numbers do not depend on it",
        hint="let the model's fsdp_wrap_fn choose them as well",
    ),
    Gap(
        key="(activation checkpointing)",
        said=lambda run: _if(
            True, run.config.activation_checkpointing.checkpoint and run.wrap.kind is not WrapKind.HOOKS
        ),
        outcome=Outcome.NEEDS_DECISION,
        target="activation_checkpointing_fn of the model",
        reason="Composer asks the model which modules are recomputed, too, and without an activation_checkpointing_fn "
        "or modules with _activation_checkpointing none is: the same numbers, but all activations are kept",
        hint="LLM Foundry's models choose their own blocks; else give the model an activation_checkpointing_fn, and a "
        "transformers model config.use_cache = False, since a block that runs again would add to its cache; or call "
        "gradient_checkpointing_enable() on the model, which does both, and leave activation_checkpointing out",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if("at every unit", run.config.mixed_precision.cast_forward_inputs),
        outcome=Outcome.APPROXIMATE,
        target="at roots",
        reason="as under FSDP1 inputs are cast at roots only; what a block gets in float32, rotary angles for one, it "
        "keeps so",
        hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(cast_forward_inputs=True)",
    ),
    Gap(
        key="(casting of inputs)",
        said=lambda run: _if(
            "nowhere", not run.config.cast_root_inputs and run.config.mixed_precision.param_dtype is not None
        ),
        outcome=Outcome.APPROXIMATE,
        target="at roots",
        reason="the root's floating point inputs are cast to param_dtype; token ids are not",
    ),
    Gap(
        key="(dtype of outputs)",
        said=lambda run: run.config.mixed_precision.output_dtype,
        outcome=Outcome.APPROXIMATE,
        target="",
        reason="units give what they compute, as under FSDP1; {value} was asked for",
        hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(output_dtype=...)",
    ),
    Gap(
        key="(sync_module_states)",
        said=lambda run: _if("where ranks lack values", run.config.sync_module_states is None),
        outcome=Outcome.APPROXIMATE,
        target="sync_module_states",
        reason="without the key no values are sent; true sends rank 0's always",
        hint="say true if the model is created on rank 0 only",
    ),
    Gap(
        key="(ignored modules)",
        said=lambda run: run.config.ignored_modules or None,
        outcome=Outcome.NEEDS_DECISION,
        target="ignored_modules",
        reason="a file cannot name modules",
        hint="set fsdp_config['ignored_modules'] in the script",
    ),
    *(
        Gap(
            key=f"({words})",
            said=lambda run, name=name: _if(run.extras.get(name), run.extras.get(name, 1) not in (1, False)),  # type: ignore[misc]
            outcome=Outcome.UNSUPPORTED,
            reason=f"composer_fsdp2 shards data parallel runs; it has no {words}",
        )
        for name, words in (
            ("tensor_parallel", "tensor parallelism"),
            ("pipeline_parallel", "pipeline parallelism"),
            ("context_parallel", "context parallelism"),
            ("expert_parallel", "expert parallelism"),
        )
    ),
    Gap(
        key="(expert patch)",
        said=lambda run: run.extras.get("expert_patch") or None,
        outcome=Outcome.NEEDS_DECISION,
        reason="nothing makes ranks agree on which experts run; where an expert is a unit of its own, they would hang",
        hint="keep all experts of a layer in one unit, which this section does unless the model wraps experts",
    ),
    Gap(
        key="(tiled MLP)",
        said=lambda run: run.extras.get("tiled_mlp"),
        outcome=Outcome.NEEDS_DECISION,
        reason="MLPs are computed in one piece: the same numbers, more memory in long sequences",
        hint="recompute activations, or use shorter microbatches",
    ),
    Gap(
        key="(frozen parameters)",
        said=lambda run: run.extras.get("freeze"),
        outcome=Outcome.NEEDS_DECISION,
        target="the model's code, or LLM Foundry's layer_freezing callback",
        reason="what is frozen stands in no fsdp_config",
        hint="freeze {value}",
    ),
    Gap(
        key="(gradient clipping)",
        said=lambda run: run.extras.get("max_grad_norm"),
        outcome=Outcome.APPROXIMATE,
        target="algorithms.gradient_clipping",
        reason="Composer clips by an algorithm, which stands outside of this section",
        hint="algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: {value}}}",
    ),
    Gap(
        key="(model only)",
        said=lambda run: run.extras.get("save_only_model"),
        outcome=Outcome.APPROXIMATE,
        target="save_weights_only",
        reason="an argument of Composer's Trainer, outside of this section",
        hint="save_weights_only: true",
    ),
    Gap(
        key="(selective checkpointing)",
        said=lambda run: run.extras.get("selective_checkpointing"),
        outcome=Outcome.APPROXIMATE,
        target="activation_checkpointing_fn of the model",
        reason="whole blocks are recomputed: less memory, more computation, the same numbers",
        hint="the model's activation_checkpointing_fn can choose fewer",
    ),
    Gap(
        key="(compile)",
        said=lambda run: run.extras.get("compile"),
        outcome=Outcome.APPROXIMATE,
        target="compile_config",
        reason="an argument of Composer's Trainer, outside of this section; it changes speed and rounding",
    ),
)
