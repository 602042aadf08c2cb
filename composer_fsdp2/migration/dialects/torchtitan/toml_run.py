"""The run that a file asks for."""

from __future__ import annotations

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import ActivationCheckpointing, MixedPrecision, ShardingConfig
from composer_fsdp2.migration.dialects.torchtitan.model_units import OWN_UNITS, USUAL_WRAP
from composer_fsdp2.migration.dialects.torchtitan.toml_file import File
from composer_fsdp2.migration.run import RunConfig

PARALLELISMS = ("expert_parallel", "tensor_parallel", "pipeline_parallel")


def run_of(file: File) -> RunConfig:
    reshard, mode = file["parallelism.fsdp_reshard_after_forward"], file["activation_checkpoint.mode"]
    option = file["activation_checkpoint.selective_ac_option"]
    has_pipeline = file.is_on("parallelism.pipeline_parallel_degree")
    replicas, shards = (file[f"parallelism.data_parallel_{axis}_degree"] for axis in ("replicate", "shard"))
    context = file["parallelism.context_parallel_degree"]
    wrap = USUAL_WRAP if file.model not in OWN_UNITS else OWN_UNITS[file.model].wrap
    recomputed = ActivationCheckpointing(checkpoint=True, classes=wrap.classes, reentrant=False)
    return RunConfig(
        config=ShardingConfig(
            # DDP is what TorchTitan does with replicas of one rank each.
            mesh=MeshSpec.of_degrees(
                shard=shards if shards == -1 else shards * context, replicate=replicas if replicas > 1 else None
            ),
            context_parallel_degree=context,
            reshard_after_forward=reshard == "always" or (reshard == "default" and not has_pipeline),
            mixed_precision=MixedPrecision(
                param_dtype=file["training.mixed_precision_param"],
                reduce_dtype=file["training.mixed_precision_reduce"],
                cast_forward_inputs=True,
            ),
            cpu_offload=file["training.enable_cpu_offload"],
            activation_checkpointing=recomputed if mode != "none" else ActivationCheckpointing(),
            wrap=wrap,
        ),
        stored_dtype=file["training.dtype"],
        state_dict_type="sharded",
        async_save=file.is_on("checkpoint.enable") and file.is_on("checkpoint.async_mode"),
        max_grad_norm=file["training.max_norm"],
        selective_checkpointing=option if mode == "selective" and option != "1" else None,
        compile=file["compile.enable"],
        has_fp8_layers=file.has_fp8_layers,
        **{kind: file[f"parallelism.{kind}_degree"] for kind in PARALLELISMS},
    )
