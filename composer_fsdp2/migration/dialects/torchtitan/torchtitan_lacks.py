"""What of a run TorchTitan cannot say, or does in its own way."""

from __future__ import annotations

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.dialects.torchtitan.model_units import CLASSES
from composer_fsdp2.migration.dialects.torchtitan.toml_keys import DTYPES
from composer_fsdp2.migration.run import RunConfig

_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome


def _is_without_shards(run: RunConfig) -> bool:
    mesh = run.config.mesh
    return not mesh.is_grouped and mesh.replicate_degree != -1 and mesh.shard_degree == 1


def shards_of(run: RunConfig) -> int:
    """Of a context axis's ranks, which shard parameters as well, one; 0 where its degree does not divide the shards."""
    shards, context = run.config.mesh.shard_degree, run.context_parallel
    return -1 if shards == -1 else 0 if shards % context else shards // context


def _casts_no_inputs(run: RunConfig) -> bool:
    mixed_precision = run.config.mixed_precision
    return not mixed_precision.cast_root_inputs and not mixed_precision.cast_forward_inputs


# fmt: off
LACKS: tuple[Lack, ...] = (
    Lack(asked="mesh", when=lambda run: run.config.mesh.is_grouped, outcome=_UNSUPPORTED,
        reason="TorchTitan has one mesh of all ranks, no groups that do not meet", hint="choose two degrees"),
    Lack(asked="mesh", when=lambda run: not run.config.mesh.is_grouped and run.config.mesh.replicate_degree == -1,
        outcome=_NEEDS_DECISION, target="parallelism.data_parallel_replicate_degree",
        reason="TorchTitan leaves the shards open, never the replicas",
        hint="set it to the number of ranks divided by {shard_degree}, and data_parallel_shard_degree to "
        "{shard_degree}"),
    Lack(asked="mesh", when=_is_without_shards, outcome=_APPROXIMATE,
        target="parallelism.data_parallel_shard_degree = 1",
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision"),
    Lack(asked="context parallelism", when=lambda run: not run.config.mesh.is_grouped and shards_of(run) == 0,
        outcome=_NEEDS_DECISION, target="parallelism.data_parallel_shard_degree",
        reason="TorchTitan shards parameters over the ranks that share a sequence, and {value} does not divide the "
        "{shard_degree} shards", hint="choose a degree that does"),
    Lack(asked="context parallelism", when=lambda run: not run.config.mesh.is_grouped and shards_of(run) != 0,
        outcome=_APPROXIMATE, target="parallelism.context_parallel_degree",
        reason="TorchTitan sends keys and values around a ring: the same numbers up to rounding"),
    Lack(asked="units", when=lambda run: run.wrap.classes != CLASSES,
        outcome=_APPROXIMATE, target="parallelize.py of the model",
        reason="TorchTitan's models choose their units in code: the token embedding, each block, the last norm with "
        "the output; the numbers do not depend on it"),
    Lack(asked="reshard_after_forward", outcome=_UNSUPPORTED, target="parallelism.fsdp_reshard_after_forward",
        reason="TorchTitan frees parameters everywhere or nowhere, and does not keep them in groups of {value} ranks",
        hint="default needs less memory, never less communication"),
    Lack(asked="param_dtype", when=lambda run: run.config.mixed_precision.param_dtype not in DTYPES,
        outcome=_NEEDS_DECISION, target="training.mixed_precision_param",
        reason="TorchTitan computes in bfloat16 or float32",
        hint="bfloat16 has a wider range than float16 and needs no scaling of gradients; float32 is exact"),
    Lack(asked="reduce_dtype", when=lambda run: run.config.mixed_precision.reduce_dtype != "float32",
        outcome=_APPROXIMATE, target="training.mixed_precision_reduce",
        reason="TorchTitan reduces in float32 only: finer, and more communication"),
    Lack(asked="dtype of stored parameters", when=lambda run: run.stored_dtype not in DTYPES, outcome=_APPROXIMATE,
        target="training.dtype", reason="TorchTitan creates parameters in training.dtype, which is float32 unless it "
        "is set; {value} was asked for"),
    Lack(asked="products in fp8", outcome=_NEEDS_DECISION, target="model.converters",
        reason="TorchTitan's converters make float8 layers of torchao's, and of those of its own models",
        hint='model.converters = ["quantize.linear.float8"], or train in bfloat16'),
    Lack(asked="dtype of outputs", outcome=_UNSUPPORTED, reason="TorchTitan has no key for the dtype of outputs"),
    Lack(asked="autocast", when=lambda run: run.precision != "fp32",
        outcome=_APPROXIMATE, target="training.mixed_precision_param",
        reason="TorchTitan's FSDP casts parameters and inputs of units, and uses no torch.autocast"),
    Lack(asked="casting of inputs", when=lambda run: not run.config.mixed_precision.cast_forward_inputs,
        outcome=_APPROXIMATE,
        reason="TorchTitan up to v0.2.2 casts the inputs of each unit"),
    Lack(asked="casting of the root's inputs", when=_casts_no_inputs, outcome=_APPROXIMATE,
        reason="TorchTitan casts the root's inputs, too; token ids are not cast anyway"),
    Lack(asked="buffer_dtype", outcome=_APPROXIMATE, reason="TorchTitan leaves buffers in the dtype that they have"),
    Lack(asked="recomputed modules", when=lambda run: run.config.activation_checkpointing.classes != CLASSES,
        outcome=_APPROXIMATE, target="activation_checkpoint.mode",
        reason="TorchTitan recomputes its blocks: the same numbers, another memory"),
    Lack(asked="reentrant checkpointing", outcome=_APPROXIMATE, target="activation_checkpoint.mode",
        reason="TorchTitan recomputes without reentering: the same numbers"),
    Lack(asked="activation offloading", outcome=_UNSUPPORTED,
        reason="TorchTitan does not keep activations in CPU memory"),
    Lack(asked="Transformer Engine", outcome=_UNSUPPORTED,
        reason="TorchTitan recomputes with torch's implementation only"),
    *(Lack(asked=f"prefetch in {phase}", outcome=_APPROXIMATE, reason="TorchTitan leaves the order of gathers to "
        "FSDP2; the numbers do not depend on it") for phase in ("forward", "backward")),
    Lack(asked="gradient_sync", outcome=_APPROXIMATE,
        reason="TorchTitan reduces gradients in every microbatch: less memory, more communication"),
    Lack(asked="reshard_after_backward", outcome=_APPROXIMATE,
        reason="TorchTitan frees parameters after each backward: less memory, more communication"),
    Lack(asked="idle experts", outcome=_UNNEEDED,
        reason="TorchTitan runs all experts of a layer in one grouped product, so that ranks do not diverge"),
    Lack(asked="split experts", outcome=_NEEDS_DECISION, target="parallelism.expert_parallel_degree",
        reason="TorchTitan splits experts of its own models, along axes that it takes from those of the mesh",
        hint="parallelism.expert_parallel_degree = {value}, where the model has it"),
    Lack(asked="idle towers", outcome=_UNSUPPORTED,
        reason="TorchTitan runs a tower where the batch has something for it; ranks without would wait for the others"),
    Lack(asked="collective_guard", outcome=_APPROXIMATE, target="comm.train_timeout_seconds",
        reason="TorchTitan does not compare where ranks stand, but ends a run that hangs, after a time",
        hint="comm.train_timeout_seconds is 100 unless it is set"),
    Lack(asked="check_data", outcome=_UNNEEDED,
        reason="TorchTitan's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="broadcast_batch", outcome=_UNNEEDED,
        reason="TorchTitan's loaders count data-parallel ranks, so that those which share a batch read the same"),
    Lack(asked="sync_module_states", when=lambda run: run.config.sync_module_states is not False, outcome=_APPROXIMATE,
        reason="TorchTitan creates the model's values sharded, on each rank its part, and broadcasts none"),
    Lack(asked="ignored_modules", outcome=_UNSUPPORTED, reason="TorchTitan shards all modules"),
    Lack(asked="keep_low_precision_grads", outcome=_APPROXIMATE, target="training.dtype",
        reason="TorchTitan keeps gradients in the dtype of the parameters",
        hint="training.dtype = 'bfloat16' stores parameters and gradients in it"),
    Lack(asked="state_dict_type", when=lambda run: run.state_dict_type != "sharded",
        outcome=_APPROXIMATE, target="checkpoint",
        reason="TorchTitan's checkpoints are sharded",
        hint="last_save_in_hf = true writes the last one unsharded, for Hugging Face"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is None,
        outcome=_APPROXIMATE, target="training.max_norm",
        reason="TorchTitan clips gradients to a norm of 1 unless told otherwise",
        hint="set max_norm to the run's own, or to a large number for none"),
    Lack(asked="clipping by value", outcome=_NEEDS_DECISION, target="training.max_norm",
        reason="TorchTitan clips gradients to a norm, 1 unless it is set; the run clips them by {value}",
        hint="choose a norm, or a large number for none"),
    Lack(asked="frozen parameters", outcome=_UNSUPPORTED, reason="TorchTitan trains all parameters",
        hint="freeze them in the model's code"),
    Lack(asked="tiled MLP", outcome=_UNSUPPORTED, reason="TorchTitan computes MLPs in one piece"),
    Lack(asked="model only", outcome=_APPROXIMATE, target="checkpoint.last_save_model_only",
        reason="TorchTitan leaves the optimizer out of the last checkpoint only"),
    Lack(asked="verbose", outcome=_UNNEEDED, reason="TorchTitan has its own words for its log"),
)
# fmt: on
