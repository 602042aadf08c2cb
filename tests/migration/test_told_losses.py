"""A loss in the target is reported at the key that sets the lost value, and only there."""

from __future__ import annotations

from tests.migration.file_cases import APPROXIMATE, NEEDS_DECISION, UNSUPPORTED, Case, each_case

WORKER = "actor_train:\n  strategy_args:\n    strategy_name: fsdp2_train\n    strategy_config:\n"
TILED = "      tiled_num_shards: 4\n", "      apply_tiled_mlp: true\n"
ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\n"
WRAPPED = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
NOT_SHARDED = "fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n" + WRAPPED
AXOLOTL = "base_model: m\nmicro_batch_size: 1\n"
RECOMPUTING = "fsdp_config:\n  activation_checkpointing: true\n"
OFFLOADING = "fsdp_config: {activation_cpu_offload: true, activation_checkpointing_reentrant: false}\n"
PIPELINE = "[parallelism]\npipeline_parallel_degree = 2\ndata_parallel_shard_degree = 4\n"
PIPELINE += "[training]\nlocal_batch_size = 8\nmixed_precision_param = 'float32'\n"
REDUCED = """\
fsdp_config:
  keep_low_precision_grads: true  # gradients
  mixed_precision: PURE  # fast
"""

CASES = {
    **{
        f"a detail that stands {where} its switch took the loss, and was softened": Case(
            file=WORKER + "".join(keys), to="torchtitan", told={"apply_tiled_mlp": (UNSUPPORTED, "one piece")}
        )
        for where, keys in {"above": TILED, "below": TILED[::-1]}.items()
    },
    "parameters would be sharded over fewer ranks": Case(
        file=WORKER + "      ep_size: 2\n", to="axolotl", told={"ep_size": (NEEDS_DECISION, "an axis of their own")}
    ),
    "the loss of the units hid that of the recomputed classes": Case(
        file=RECOMPUTING + "  activation_checkpointing_policy: [LlamaAttention]\n",
        to="accelerate",
        told={
            "(units)": (APPROXIMATE, "hooks"),
            "activation_checkpointing_policy": (APPROXIMATE, "its policy wraps, not LlamaAttention"),
        },
    ),
    **{
        f"a text that only lost a dead key passed for an FSDP2 section: {ranks}": Case(
            file=ACCELERATE + ranks + NOT_SHARDED + "  fsdp_made_up: 1\n",
            to="accelerate",
            told={"(mesh)": (UNSUPPORTED, "no run without shards")},
        )
        for ranks in ("", "num_processes: 8\n")
    },
    "no policy to recompute by": Case(
        file=AXOLOTL + "fsdp: full_shard\ngradient_checkpointing: true\nfsdp_config: {use_orig_params: true}\n",
        to="axolotl",
        told={"gradient_checkpointing": (UNSUPPORTED, "fails without a policy")},
    ),
    "accelerate refuses a size-based policy without a size": Case(
        file=AXOLOTL + "fsdp: [shard_grad_op]\nfsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP}\n",
        to="axolotl",
        says={"fsdp_config": {"reshard_after_forward": False, "state_dict_type": "FULL_STATE_DICT"}},
    ),
    "a word turned on what its key turns off": Case(
        file=AXOLOTL + "fsdp: [full_shard, offload]\nfsdp_config: {fsdp_offload_params: false}\n",
        to="axolotl",
        says={"fsdp_config.offload_params": True},
        keeps=("config.cpu_offload",),
    ),
    "nothing is cast to float32's own dtype": Case(
        file=WORKER + "      param_dtype: fp32\n      reduce_dtype: fp32\n",
        to="accelerate",
        untold=("(mixed_precision.cast_root_inputs)",),
    ),
    "how nothing is recomputed": Case(
        file=OFFLOADING, to="accelerate", blocking=["activation_cpu_offload", "reduce_dtype"]
    ),
    "shards beside an axis that goes": Case(
        file=PIPELINE,
        name="run.toml",
        to="roll",
        blocking=["pipeline_parallel_degree"],
        told={"data_parallel_shard_degree": (APPROXIMATE, "the ranks that are left", "fsdp_size: 4")},
    ),
    "keys stood beside the comment of another one": Case(
        file=REDUCED,
        to="roll",
        told={"mixed_precision": (APPROXIMATE, "param_dtype: bf16, reduce_dtype: bf16")},
        has=("# gradients\n    param_dtype: bf16\n    reduce_dtype: bf16\n    # fast\n",),
    ),
    "axolotl refuses an optimizer under FSDP2, and nothing else of training": Case(
        file=AXOLOTL + "fsdp: [full_shard]\noptimizer: adamw_bnb_8bit\nlearning_rate: 1e-4\n"
        "fsdp_config: {fsdp_offload_params: false}\n",
        to="axolotl",
        told={"optimizer": (NEEDS_DECISION, "adamw_torch_8bit")},
        untold=("learning_rate", "micro_batch_size"),
    ),
    "a number in quotes": Case(
        file=ACCELERATE + "num_processes: '8'\nfsdp_config:\n" + WRAPPED, to="roll", run={"num_ranks": 8}
    ),
    "ranks that are no number": Case(
        file=ACCELERATE + "num_processes: [8]\nfsdp_config:\n" + WRAPPED,
        told={"mesh": (NEEDS_DECISION, "it takes a number")},
    ),
}


@each_case(CASES)
def test_what_is_told(case: Case) -> None:
    case.check()
