"""The run that a worker's part of a file asks for."""

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts, TiledMLP
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    ShardingConfig,
)
from composer_fsdp2.migration.dialects.roll.roll_words import GRAD_NORM, MLPS, PRECISIONS, dtype_of
from composer_fsdp2.migration.dialects.roll.worker import Worker, frozen_in, reduced_in
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind


def run_of(worker: Worker) -> RunConfig:
    param_dtype = dtype_of(worker["param_dtype"], "bfloat16")
    reshard = worker["reshard_after_forward"]
    syncs = worker["reduce_scatter_during_grad_accumulation"] or not worker.is_training
    is_training, tiled, experts = worker.is_training, _tiled(worker), _wrap(worker).experts
    return RunConfig(
        config=ShardingConfig(
            mesh=_mesh(worker),
            wrap=_wrap(worker),
            freeze=tuple(name for each in frozen_in(worker) if (name := each.strip().removesuffix("."))),
            idle_experts=IdleExperts.IN_ORDER if experts else None,
            context_parallel_degree=worker["model_args.ulysses_size"] or 1,
            tiled_mlp=tiled,
            reshard_after_forward=True if reshard is None else reshard,
            mixed_precision=MixedPrecision(
                param_dtype=param_dtype, reduce_dtype=reduced_in(worker), cast_root_inputs=False
            ),
            cpu_offload=bool(worker["offload_policy"]),
            activation_checkpointing=_recomputing(worker),
            accumulation=Accumulation(gradient_sync=GradientSync.EVERY if syncs else GradientSync.LAST),
            sync_module_states=True,
        ),
        precision=PRECISIONS.get(param_dtype, "fp32"),
        state_dict_type="sharded",
        async_save=is_training and worker["async_save_ckpt"],
        save_only_model=worker.is_on("save_only_model"),
        stored_dtype=reduced_in(worker) if is_training else None,
        max_grad_norm=worker.top.get("max_grad_norm", GRAD_NORM) if is_training else None,
        num_ranks=worker.num_ranks,
        expert_parallel=worker["ep_size"],
        adapter="lora" if worker["model_args.lora_target"] and is_training else None,
        tiled_chunks=None if tiled is not None else _chunks(worker),
    )


def _chunks(worker: Worker) -> int | None:
    """None where MLPs are computed in one piece."""
    is_tiled = worker.is_training and worker.is_on("apply_tiled_mlp") and worker["tiled_num_shards"] > 1
    return worker["tiled_num_shards"] if is_tiled else None


def _tiled(worker: Worker) -> TiledMLP | None:
    """The MLPs that are tiled, where the file says of which model they are."""
    chunks, cls = _chunks(worker), MLPS.get(str(worker["model_type"]))
    return None if chunks is None or cls is None else TiledMLP(classes=(cls,), chunks=chunks)


def _mesh(worker: Worker) -> MeshSpec:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    is_whole_world = size <= 1 or (ranks is not None and size >= ranks)
    return MeshSpec() if is_whole_world else MeshSpec.of_degrees(shard=size, replicate=-1)


def _recomputing(worker: Worker) -> ActivationCheckpointing:
    reentrant = worker["model_args.gradient_checkpointing_use_reentrant"]
    if not worker.is_training or worker["model_args.disable_gradient_checkpointing"]:
        return ActivationCheckpointing()
    is_moe = worker.wraps_experts or worker["wrap_policy.moe_experts"] is not None
    return ActivationCheckpointing(checkpoint=True, classes=(), reentrant=is_moe if reentrant is None else reentrant)


def _wrap(worker: Worker) -> Wrap:
    return Wrap(
        kind=WrapKind.CLASSES,
        classes=_names(worker["wrap_policy.transformer_layer_cls_to_wrap"]),
        embeddings=True,  # against its guide, unless they are tied: then they cannot be
        output=worker["wrap_policy.wrap_lm_output"],
        experts=_names(worker["wrap_policy.moe_experts"]) if worker.wraps_experts else (),
    )


def _names(given: str | list[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
