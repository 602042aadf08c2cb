"""Write a run as keys of an ``fsdp_config``, and list the fields of a run that such keys cannot express."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.sharding import ActivationCheckpointing, GradientDtype, MixedPrecision
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME, Key, KeyGroup
from composer_fsdp2.fsdp1.parallel_values import idle_towers_value, tiled_mlp_value
from composer_fsdp2.fsdp1.parsing import BackwardPrefetch, NamedPrecision, mixed_precision_of
from composer_fsdp2.fsdp1.policy_values import checkpointed_value, freeze_value, wrap_policy_value
from composer_fsdp2.migration.lens import Lens, Limitation, limits, unless
from composer_fsdp2.migration.run import RunConfig


def _groups(run: RunConfig) -> Any:
    """Return the value of ``process_group``: the shard group, or [shard, replicate]; None for a mesh of all ranks."""
    groups = [list(each.ranks) or str(each) for each in reversed(run.config.mesh.groups)]
    return groups if len(groups) > 1 else next(iter(groups), None)


def _shards(run: RunConfig) -> int | None:
    return None if run.config.mesh.is_grouped else unless(-1, run.config.mesh.shard_degree)


def _replicas(run: RunConfig) -> int | None:
    mesh = run.config.mesh
    return mesh.replicate_degree if mesh.has_replicas and not mesh.is_grouped else None


def _mixed_precision(run: RunConfig) -> str | dict[str, str]:
    """Return FULL, DEFAULT or PURE if one of them means the run's mixed precision, else a mapping of dtypes."""
    mixed_precision = run.config.mixed_precision
    dtypes = {name: getattr(mixed_precision, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    for preset in ("FULL", "DEFAULT", "PURE"):
        if mixed_precision_of(NamedPrecision(preset), run.precision) == MixedPrecision(**dtypes):
            return preset
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


Write = Callable[[RunConfig], Any]


def _own_field(row: Key) -> Write:
    """Return a function that writes a key that only composer_fsdp2 has, unless its value is the default.

    Experts are written as units only with ``idle_experts``, and classes only if activations are recomputed or
    offloaded.
    """

    def write(run: RunConfig) -> Any:
        config = run.config
        if not config.activation_checkpointing.enabled:
            config = replace(config, activation_checkpointing=ActivationCheckpointing())
        if config.idle_experts is None:
            config = replace(config, wrap=replace(config.wrap, experts=()))
        field = attrgetter(*row.fields)(config)
        value = field.value if isinstance(field, Enum) else CONVERTED.get(row.name, lambda each: each)(field)
        return unless(row.default, value)

    return write


# Conversion of these keys' fields to their values in a file; other systems have keys for these fields, too.
CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "wrap_policy": wrap_policy_value,
    "activation_checkpointing_policy": checkpointed_value,
    "freeze": freeze_value,
    "train_only": freeze_value,
    "tiled_mlp": tiled_mlp_value,
    "idle_towers": idle_towers_value,
}


def _checkpointing(value: Callable[[ActivationCheckpointing], Any]) -> Write:
    """Return a function that writes the value only if activations are recomputed or offloaded."""
    return lambda run: (
        value(run.config.activation_checkpointing) if run.config.activation_checkpointing.enabled else None
    )


def _true_if(value: Callable[[RunConfig], object]) -> Write:
    """Return a function that writes ``true`` if the value is truthy, otherwise nothing."""
    return lambda run: True if value(run) else None


# Keys with their values for a run, in the order of a new section; None leaves a key out.
_WRITES: Mapping[str, Write] = {
    "process_group": _groups,
    "data_parallel_shard_degree": _shards,
    "data_parallel_replicate_degree": _replicas,
    "reshard_after_forward": lambda run: run.config.reshard_after_forward,
    "mixed_precision": _mixed_precision,
    "state_dict_type": lambda run: run.state_dict_type,
    "activation_checkpointing": _checkpointing(lambda each: each.checkpoint),
    "activation_checkpointing_reentrant": _checkpointing(lambda each: None if each.reentrant else False),
    "backward_prefetch": lambda run: BackwardPrefetch.NONE.value if run.config.prefetch.backward == 0 else None,
    "backward_prefetch_limit": lambda run: run.config.prefetch.backward or None,
    "forward_prefetch": _true_if(lambda run: run.config.prefetch.forward is not None),
    "activation_cpu_offload": _true_if(lambda run: run.config.activation_checkpointing.cpu_offload),
    "te_checkpoint_wrapper": _true_if(lambda run: run.config.activation_checkpointing.transformer_engine),
    "forward_prefetch_limit": lambda run: unless(1, run.config.prefetch.forward or 1),
    "cpu_offload": _true_if(lambda run: run.config.cpu_offload),
    "sync_module_states": _true_if(lambda run: run.config.sync_module_states),
    "keep_low_precision_grads": _true_if(
        lambda run: run.config.mixed_precision.gradients is not GradientDtype.OF_PARAMETER
    ),
    **{row.name: _own_field(row) for row in KEYS if row.group == KeyGroup.OURS and row.sets},
    "async_save": _true_if(lambda run: run.async_save),
    "verbose": _true_if(lambda run: run.verbose),
}
WRITTEN = tuple(
    Lens(name=name, fields=KEYS_BY_NAME[name].fields, write=write, outcome=Outcome.EXACT)
    for name, write in _WRITES.items()
)

# ---------------------------------------------------------------------------------------------------------------------
# Fields of a run that no ``fsdp_config`` can configure, or that composer_fsdp2 implements differently

_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
_STACKED = (
    "expert_parallel_degree: {value}, with which tokens travel, splits them where it knows the model's layers "
    "(Hugging Face's Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3; LLM Foundry's torch_dmoe)"
)
# fmt: off
LIMITS: tuple[Limitation, ...] = (
    limits(_APPROXIMATE, "wrap.experts",
        target="the units around them",
        reason="experts stay in the unit around them, which every rank gathers whatever its tokens choose: the same "
        "numbers, and more memory while it is gathered"),
    limits(_APPROXIMATE, "mixed_precision.cast_forward_inputs", "mixed_precision.cast_root_inputs", target="at roots",
        reason="as under FSDP1 inputs are cast at roots only; what a block gets in float32, rotary angles for one, it "
        "keeps so", hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(cast_forward_inputs=True)"),
    limits(_APPROXIMATE, "mixed_precision.cast_root_inputs", target="at roots",
        reason="the root's floating point inputs are cast to param_dtype; token ids are not"),
    limits(_APPROXIMATE, "stored_dtype",
        reason="trained parameters, and the optimizer's state, are stored in {value} there, whatever dtype they were "
        "created in; here they keep that dtype", hint="create the model in {value}"),
    limits(_NEEDS_DECISION, "precision", was="amp_fp8", is_kept=True, title="products in fp8",
        target="precision: amp_fp8",
        reason="{value} computes in fp8 in Transformer Engine's layers only, and the layers that the other system "
        "converts (torchao's, MS-AMP's) are plain ones here",
        hint="precision: amp_bf16 computes in bfloat16; LLM Foundry's fc_type: te makes Transformer Engine's layers"),
    limits(_APPROXIMATE, "mixed_precision.output_dtype",
        reason="units do not cast their outputs, as in FSDP1; {value} was requested",
        hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(output_dtype=...)"),
    limits(_APPROXIMATE, "sync_module_states",
        target="sync_module_states", reason="without the key no values are sent; true sends rank 0's always",
        hint="set it to true if the model is created on rank 0 only"),
    limits(_NEEDS_DECISION, "ignored_modules", target="ignored_modules",
        reason="a file cannot name modules", hint="set fsdp_config['ignored_modules'] in the script"),
    limits(_EXACT, "tensor_parallel", is_kept=True,
        target="tp_config: {strategy: auto, tensor_parallel_degree: {value}}",
        reason="layers are split by the plan of the model, if it is one of transformers' with a base_model_tp_plan or "
        "LLM Foundry's MPT; LLM Foundry reads the degree beside the section",
        hint="the ranks that split a layer must read one batch: replication: {value} in LLM Foundry's dataset section, "
        "or broadcast_batch: first or gather beside; a script: parallelism_config['tp'] = {'tensor_parallel_degree': "
        "{value}, 'layer_plan': 'auto'}"),
    limits(_UNSUPPORTED, "pipeline_parallel", reason="composer_fsdp2 has no pipeline parallelism"),
    limits(_UNSUPPORTED, "has_expert_axis", "expert_parallel",
        reason="the ranks of the experts are an axis beside the shards there, and those of shards in composer_fsdp2",
        hint=f"train without it: experts are sharded like all other parameters; {_STACKED}"),
    limits(_APPROXIMATE, "expert_parallel", target="experts in the units of wrap_policy",
        reason="experts are sharded like all other parameters and gathered where they run, while no token travels: the "
        "same numbers, more communication",
        hint="wrap_policy.moe_experts, with idle_experts: in_order, gathers one expert at a time, else all of a "
        f"layer's are; {_STACKED}"),
    limits(_NEEDS_DECISION, "tiled_mlp.chunks", target="tiled_mlp",
        reason="the file does not name the classes of the MLPs, so they are not tiled: the same numbers, and more "
        "memory in long sequences",
        hint="set tiled_mlp: {classes: [the class of the model's MLPs], chunks: {value}}"),
    limits(_NEEDS_DECISION, "max_grad_norm", target="algorithms: {gradient_clipping: ...}",
        reason="a run whose gradients are clipped to a norm of {value} trains nothing, or in the wrong direction",
        hint="set a positive norm, or clip nothing"),
    limits(_EXACT, "max_grad_norm", is_kept=True,
        target="algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: {value}}}",
        reason="Composer clips by an algorithm, which stands beside the section: LLM Foundry reads it there",
        hint="a script hands it to the Trainer: algorithms=GradientClipping('norm', {value})"),
    limits(_APPROXIMATE, "save_only_model", target="save_weights_only",
        reason="an argument of Composer's Trainer, outside of this section", hint="save_weights_only: true"),
    limits(_APPROXIMATE, "selective_checkpointing", target="activation_checkpointing_fn of the model",
        reason="entire blocks are recomputed: less memory, more computation, the same numbers",
        hint="the model's activation_checkpointing_fn can choose fewer"),
    limits(_APPROXIMATE, "compile", target="compile_config",
        reason="an argument of Composer's Trainer, outside of this section; it changes speed and rounding"),
    limits(_APPROXIMATE, "num_microbatches", "global_batch_size", target="global_train_batch_size",
        reason="Composer takes the rows of all ranks, whose number is not known here, or which share batches; a rank "
        "has {value} microbatches in a step", hint="global_train_batch_size: device_train_microbatch_size times "
        "{value} times the number of ranks; of ranks that share a batch one counts"),
    limits(_APPROXIMATE, "max_duration", target="max_duration",
        reason="Composer takes whole epochs, and {value} is none", hint="give a number of steps, such as 1000ba"),
    limits(_APPROXIMATE, "undecayed", target="optimizer",
        reason="a Trainer decays neither biases nor the weights of norms, LLM Foundry's optimizer all parameters; its "
        "weight_decay is a Trainer's times the learning rate",
        hint="optimizer.param_groups: [{param_str_match: bias|norm|ln_, weight_decay: 0.0}]"),
    limits(_APPROXIMATE, "optimizer", now=None, target="optimizer",
        reason="LLM Foundry has decoupled_adamw, decoupled_lionw, clip_lion and adalr_lion, and not {value}",
        hint="optimizer: {name: ..., lr: ...}, of one of these, or of one of your own in code_paths"),
    limits(_APPROXIMATE, "optimizer", target="optimizer: decoupled_adamw",
        reason="the same AdamW, whose state has the precision of the parameters there: not that of {value}, and more "
        "memory"),
)
# fmt: on
