"""The run of what holds."""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import DTYPES, PRECISIONS
from composer_fsdp2.migration.dialects.huggingface.held import Held, wrap_of
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.run import RunConfig


def run_of(held: Held) -> RunConfig:
    settings, around, is_fsdp2 = held.settings, held.around, held.reader.is_fsdp2
    config = ShardingConfig(
        mesh=_mesh(held),
        wrap=wrap_of(settings),
        reshard_after_forward=settings["reshard_after_forward"],
        mixed_precision=_mixed_precision(DTYPES[settings["mixed_precision"]], is_fsdp2=is_fsdp2),
        cpu_offload=settings["offload_params"],
        activation_checkpointing=_checkpointing(held),
        prefetch=Prefetch(
            forward=1 if settings["forward_prefetch"] else None,
            backward=0 if settings["backward_prefetch"] == "NO_PREFETCH" else None,
        ),
        accumulation=Accumulation(gradient_sync=GradientSync.LAST if accumulates(held) else GradientSync.EVERY),
        sync_module_states=settings["sync_module_states"],
        context_parallel_degree=settings["cp_size"] * settings["sp_size"],
    )
    is_launcher, is_axolotl = not held.reader.is_trainer, held.reader.is_axolotl
    return RunConfig(
        config=config,
        precision=PRECISIONS[settings["mixed_precision"]],
        stored_dtype=_stored_dtype(held),
        state_dict_type=settings["state_dict_type"],
        num_ranks=around.get("num_processes") if is_launcher else None,
        num_nodes=around.get("num_machines") if is_launcher else None,
        max_grad_norm=settings["gradient_clipping"] if is_launcher else _max_grad_norm(around),
        tensor_parallel=settings["tp_size"],
        expert_parallel=settings["ep_size"],
        has_expert_axis=settings["ep_size"] != 1,
        save_only_model=is_axolotl and bool(around.get("save_only_model")),
        adapter=around.get("adapter") if is_axolotl else None,
        compile=is_axolotl and around.get("torch_compile") in (True, "auto"),
        tiled_chunks=settings["tiled_mlp_num_shards"] if settings["tiled_mlp"] else None,
    )


def _stored_dtype(held: Held) -> str | None:
    """accelerate upcasts what is trained where precision is mixed, as DeepSpeed does; axolotl's own way to FSDP2 leaves
    it in the dtype in which axolotl loads the model."""
    low = DTYPES[held.settings["mixed_precision"]]
    return low if low is None or held.reader is Reader.AXOLOTL_FSDP2 else "float32"


def _max_grad_norm(around: Mapping[str, Any]) -> Any:
    """A Trainer clips to 1 by default, and nothing for a norm of 0."""
    norm = around.get("max_grad_norm", 1.0)
    return None if isinstance(norm, int | float) and norm <= 0 else norm


def _mixed_precision(dtype: str | None, *, is_fsdp2: bool) -> MixedPrecision:
    """FSDP1 cast the root's inputs only, and buffers; accelerate's FSDP2 casts inputs and outputs of each unit."""
    if dtype is None:
        return MixedPrecision()  # there is nothing to cast to
    if is_fsdp2:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype, cast_forward_inputs=True)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _checkpointing(held: Held) -> ActivationCheckpointing:
    settings, is_axolotl = held.settings, held.reader.is_axolotl
    offloads = settings["activation_offloading"] or settings["gradient_checkpointing"] in ("offload", "offload_disk")
    if settings["activation_checkpointing"] or offloads:
        classes = wrap_of(settings).classes if settings["activation_checkpointing"] else ()
        return ActivationCheckpointing(checkpoint=True, classes=classes, reentrant=False, cpu_offload=bool(offloads))
    if not settings["gradient_checkpointing"]:
        return ActivationCheckpointing()
    given = settings["gradient_checkpointing_kwargs"]
    reentrant = given.get("use_reentrant", not is_axolotl) if isinstance(given, Mapping) else not is_axolotl
    return ActivationCheckpointing(checkpoint=True, classes=(), reentrant=bool(reentrant))


def accumulates(held: Held) -> bool:
    """A Trainer puts gradients off to the last microbatch (no_sync); with accelerate alone the script decides, and
    under ZeRO the stage: with gradients in shards each microbatch is reduced."""
    if held.reader is Reader.ACCELERATE_DEEPSPEED:
        return bool(held.settings["gradient_accumulation_steps"] > 1 and held.settings["zero_stage"] < 2)
    steps = held.around.get("gradient_accumulation_steps")
    return held.reader.is_trainer and isinstance(steps, int) and steps > 1 and not held.settings["accelerator_config"]


def _mesh(held: Held) -> MeshSpec:
    """All ranks, unless degrees are given or FSDP1 made groups of its own: its hybrids sharded within a node.

    Raises:
        ConfigError: nobody says how many ranks a node has.
    """
    settings, strategy = held.settings, held.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshSpec().without_shards()
    replicate, shard = settings["dp_replicate_size"], settings["dp_shard_size"]
    is_given = held.key_of("dp_replicate_size", "dp_shard_size") is not None
    if held.reader.is_axolotl and shard == 1:  # axolotl passes on no size of 1: the ranks that are left shard
        if replicate > 1:
            return MeshSpec.of_degrees(-1, replicate)
        is_given = False
    if is_given:
        shard *= settings["cp_size"] * settings["sp_size"]  # parameters are sharded over the ranks of a sequence, too
        if shard == 1:
            raise ConfigError("dp_shard_size is 1, which is no sharding; give the number of ranks of one replica")
        ranks, total = held.around.get("num_processes"), replicate * shard * settings["tp_size"]
        is_launched = held.reader in (Reader.ACCELERATE_FSDP1, Reader.ACCELERATE_FSDP2)
        if is_launched and isinstance(ranks, int) and ranks != total:
            raise ConfigError(f"the sizes of parallelism_config make {total} ranks, and num_processes is {ranks}")
        return MeshSpec.of_degrees(shard, replicate if replicate > 1 else None)
    if strategy is None or not strategy.is_hybrid:
        return MeshSpec()
    if held.is_on_one_node:
        return MeshSpec()
    processes, machines = held.around.get("num_processes"), held.around.get("num_machines", 1)
    if held.reader.is_trainer or not isinstance(processes, int) or not isinstance(machines, int):
        raise ConfigError(
            "FSDP1 sharded within each node, and replicated over nodes, by the number of GPUs that it found; say it, "
            "as parallelism_config: {dp_shard_size: GPUs of a node, dp_replicate_size: number of nodes}"
        )
    if machines < 1 or processes % machines:
        raise ConfigError(f"num_processes {processes} is not a multiple of num_machines {machines}")
    return MeshSpec.of_degrees(processes // machines, -1)
