"""What of a run no ``fsdp_config`` can say, or composer_fsdp2 does in its own way."""

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.run import RunConfig

_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome


def _leaves_inputs_of_the_root(run: RunConfig) -> bool:
    mixed_precision = run.config.mixed_precision
    return mixed_precision.param_dtype is not None and not mixed_precision.cast_root_inputs


_STACKED = (
    "expert_parallel_degree: {value}, with which tokens travel, is for LLM Foundry's torch_dmoe, where one weight "
    "holds all of a layer's experts"
)
# fmt: off
LACKS: tuple[Lack, ...] = (
    Lack(asked="expert units", when=lambda run: run.config.idle_experts is None, outcome=_APPROXIMATE,
        target="the units around them",
        reason="experts stay in the unit around them, which every rank gathers whatever its tokens choose: the same "
        "numbers, and more memory while it is gathered"),
    Lack(asked="casting of inputs", when=lambda run: run.config.mixed_precision.cast_forward_inputs,
        outcome=_APPROXIMATE, target="at roots",
        reason="as under FSDP1 inputs are cast at roots only; what a block gets in float32, rotary angles for one, it "
        "keeps so", hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(cast_forward_inputs=True)"),
    Lack(asked="casting of the root's inputs", when=_leaves_inputs_of_the_root, outcome=_APPROXIMATE, target="at roots",
        reason="the root's floating point inputs are cast to param_dtype; token ids are not"),
    Lack(asked="dtype of stored parameters", when=lambda run: run.stored_dtype is not None, outcome=_APPROXIMATE,
        reason="trained parameters, and the optimizer's state, are stored in {value} there, whatever dtype they were "
        "created in; here they keep that dtype", hint="create the model in {value}"),
    Lack(asked="products in fp8", outcome=_NEEDS_DECISION, target="precision: amp_fp8",
        reason="{value} computes in fp8 in Transformer Engine's layers only, and the layers that the other system "
        "converts (torchao's, MS-AMP's) are plain ones here",
        hint="precision: amp_bf16 computes in bfloat16; LLM Foundry's fc_type: te makes Transformer Engine's layers"),
    Lack(asked="dtype of outputs", outcome=_APPROXIMATE,
        reason="units give what they compute, as under FSDP1; {value} was asked for",
        hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(output_dtype=...)"),
    Lack(asked="sync_module_states", when=lambda run: run.config.sync_module_states is None, outcome=_APPROXIMATE,
        target="sync_module_states", reason="without the key no values are sent; true sends rank 0's always",
        hint="set it to true if the model is created on rank 0 only"),
    Lack(asked="ignored_modules", outcome=_NEEDS_DECISION, target="ignored_modules",
        reason="a file cannot name modules", hint="set fsdp_config['ignored_modules'] in the script"),
    Lack(asked="tensor parallelism", outcome=_NEEDS_DECISION, target="tp_config",
        reason="which layers are split, and how, is a layer plan of the model, which stands beside the section and in "
        "code",
        hint="a script: parallelism_config['tp'] = {'tensor_parallel_degree': {value}, 'layer_plan': {path: style}}; "
        "LLM Foundry: tp_config: {strategy: ffn, tensor_parallel_degree: {value}}, which splits MPT's feed-forwards"),
    Lack(asked="pipeline parallelism", outcome=_UNSUPPORTED, reason="composer_fsdp2 has no pipeline parallelism"),
    Lack(asked="expert parallelism", when=lambda run: run.has_expert_axis, outcome=_UNSUPPORTED,
        reason="the ranks of the experts are an axis beside the shards there, and composer_fsdp2 has none for experts "
        "that are modules of their own",
        hint=f"train without it: experts are sharded like all other parameters; {_STACKED}"),
    Lack(asked="expert parallelism", when=lambda run: not run.has_expert_axis and run.config.idle_experts is not None,
        outcome=_APPROXIMATE, target="wrap_policy.moe_experts, idle_experts: in_order",
        reason="experts stay where they are sharded, and one is gathered at a time, on every rank in one order, while "
        "no token travels: the same numbers, more communication", hint=_STACKED),
    Lack(asked="expert parallelism", when=lambda run: not run.has_expert_axis and run.config.idle_experts is None,
        outcome=_APPROXIMATE, target="experts in the units of their layers",
        reason="experts are sharded like all other parameters, and a layer is gathered with all of its own, while no "
        "token travels: the same numbers, more communication",
        hint="if they do not fit, name their class in wrap_policy.moe_experts, with idle_experts: in_order, which "
        f"gathers one at a time; {_STACKED}"),
    Lack(asked="tiled MLP", when=lambda run: run.config.tiled_mlp is None, outcome=_NEEDS_DECISION, target="tiled_mlp",
        reason="the file does not name the classes of the MLPs, so that they are computed in one piece: the same "
        "numbers, and more memory in long sequences",
        hint="set tiled_mlp: {classes: [the class of the model's MLPs], chunks: {value}}"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None and not run.max_grad_norm > 0,
        outcome=_NEEDS_DECISION, target="algorithms: {gradient_clipping: ...}",
        reason="a run whose gradients are clipped to a norm of {value} trains nothing, or in the wrong direction",
        hint="set a positive norm, or clip nothing"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None and run.max_grad_norm > 0,
        outcome=_EXACT, target="algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: {value}}}",
        reason="Composer clips by an algorithm, which stands beside the section: LLM Foundry reads it there",
        hint="a script hands it to the Trainer: algorithms=GradientClipping('norm', {value})"),
    Lack(asked="model only", outcome=_APPROXIMATE, target="save_weights_only",
        reason="an argument of Composer's Trainer, outside of this section", hint="save_weights_only: true"),
    Lack(asked="selective checkpointing", outcome=_APPROXIMATE, target="activation_checkpointing_fn of the model",
        reason="entire blocks are recomputed: less memory, more computation, the same numbers",
        hint="the model's activation_checkpointing_fn can choose fewer"),
    Lack(asked="compile", outcome=_APPROXIMATE, target="compile_config",
        reason="an argument of Composer's Trainer, outside of this section; it changes speed and rounding"),
)
# fmt: on
