"""axolotl's files: the Hugging Face keys that it passes on, and the same run on FSDP2."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.migration.dialects.huggingface import AxolotlDialect
from tests.migration.file_cases import APPROXIMATE, EXACT, NEEDS_DECISION, UNNEEDED, UNSUPPORTED, Case, each_case

# Keys around the section in the files of its examples.
AROUND = """\
base_model: some/llama-8b  # a comment
datasets:
  - path: some/data
    type: alpaca
val_set_size: 0.0
sequence_len: 2048
sample_packing: true

gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
learning_rate: 2e-5

bf16: auto
tf32: false
wandb_project:
"""
# Composer's keys, where the old keys were; the number of microbatches depends on that of ranks.
CARRIED_OVER = ("bf16", "micro_batch_size", "num_epochs", "optimizer", "learning_rate")
RECOMPUTED = "gradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: false\n"
OF_OLD = """\
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true  # of both
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
"""
OF_TODAY = """\
fsdp_version: 2
fsdp_config:
  offload_params: false
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
  activation_checkpointing: true
"""
SPECIAL = 'special_tokens:\n  pad_token: "<|end|>"\n'


# By form, as in axolotl's examples: the file, and the additional keys of its fsdp_config for Composer.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "fft, of old": (AROUND + RECOMPUTED + OF_OLD + SPECIAL, {"cpu_offload": True, "backward_prefetch": "NONE"}),
    "fft with liger, of old": (
        AROUND
        + "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n"
        + RECOMPUTED
        + OF_OLD
        + "  fsdp_backward_prefetch: BACKWARD_PRE\n",
        {"cpu_offload": True},
    ),
    "qlora, of old": (
        "adapter: qlora\nload_in_4bit: true\nlora_r: 16\n" + AROUND + RECOMPUTED.replace("false", "true") + OF_OLD,
        {"cpu_offload": True, "activation_checkpointing": True},
    ),
    "words alone": (
        AROUND + "fsdp: [auto_wrap]\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
        {"reshard_after_forward": True},
    ),
    "fft": (AROUND + OF_TODAY + SPECIAL, {"activation_checkpointing": True, "state_dict_type": "full"}),
    "fft, version inside": (
        AROUND
        + OF_TODAY.replace("fsdp_version: 2\n", "").replace("fsdp_config:\n", "fsdp_config:\n  fsdp_version: 2\n"),
        {"activation_checkpointing": True},
    ),
    "with prefixes and words": (
        AROUND + "fsdp:\n  - auto_wrap\n  - full_shard\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: false\n",
        {"cpu_offload": True, "reshard_after_forward": True},
    ),
    "qlora": ("adapter: qlora\nload_in_4bit: true\n" + AROUND + OF_TODAY, {"activation_checkpointing": True}),
    "quantization aware": (AROUND + "qat:\n  weight_dtype: int4\nsave_only_model: true\n" + OF_TODAY, {}),
    "fp8": (AROUND + "fp8: true\n" + OF_TODAY, {}),
    "replicas": (
        AROUND + "dp_shard_size: 2\ndp_replicate_size: 2\n" + OF_TODAY,
        {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
    ),
    "last model full": (
        AROUND + OF_TODAY.replace("FULL_", "SHARDED_") + "  final_state_dict_type: FULL_STATE_DICT\n",
        {"state_dict_type": "sharded"},
    ),
}


STORED = ["dtype of stored parameters"]
ASKED = {"load_in_4bit: true": "quantized weights", "fp8: true": "fp8"}
CHECKPOINTING = "config.activation_checkpointing"
PRECISIONS = [
    ("bf16: auto", "amp_bf16", "bfloat16"),
    ("bf16: true", "amp_bf16", "bfloat16"),
    ("bf16: false\nfp16: true", "amp_fp16", "float16"),
    ("bf16:\nfp16:", "fp32", None),
    ("bf16: full", "fp32", None),  # neither autocast nor an FSDP dtype: the parameters are bfloat16
    ("bf16: auto\nfp8: true", "amp_fp8", "bfloat16"),
]
RECOMPUTING = [
    ("gradient_checkpointing: true", True, False),
    ("gradient_checkpointing: unsloth", True, False),
    ("gradient_checkpointing: offload", True, True),
    ("gradient_checkpointing: true\nactivation_offloading: true", True, True),
    ("activation_offloading: legacy", True, True),
    ("gradient_checkpointing: false", False, False),
]
SETTINGS = [
    ("fsdp_offload_params: true", {"offload_params": True, "reshard_after_forward": True}),
    ("fsdp_sharding_strategy: FULL_SHARD", {"reshard_after_forward": True}),  # removed entirely
    ("zzz: 1", {"reshard_after_forward": True}),
]
AXES = {
    "tensor_parallel_size: 2\ndp_shard_size: 2\ndp_replicate_size: 2\n": {"tensor_parallel_size": EXACT},
    "dp_shard_size: 2\ncontext_parallel_size: 2\ntensor_parallel_size: 2\n": {"tensor_parallel_size": EXACT},
    "expert_parallel_size: 2\ndp_shard_size: 2\n": {"expert_parallel_size": UNSUPPORTED},
    "dp_shard_size: 2\ncontext_parallel_size: 2\n": {},
}
UNSYNCED = AROUND + OF_OLD.replace("sync_module_states: true", "sync_module_states: false")
QLORA = "load_in_4bit: true\nadapter: qlora\n" + AROUND + OF_OLD
SOME_LAYERS = "unfrozen_parameters:\n  - model.layers.4[4-9]+\n" + AROUND + OF_OLD
OF_ACCELERATE = (
    "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n"
    "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: true\n"
    "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_dp_replicate_size: 2\n"
)
CASES = {
    **{
        f"every file of axolotl's ended with exit 1, or was taken for one of Composer's: {name}": Case(
            file=text,
            blocking=[key for line, key in ASKED.items() if line in text],
            says={
                "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                **{f"fsdp_config.{key}": value for key, value in says.items()},
            },
            has=tuple(f"{line}\n" for line in AROUND.splitlines() if not line.startswith(CARRIED_OVER)),
        )
        for name, (text, says) in SHAPES.items()
    },
    **{
        f"a file for FSDP2 stays as it is: {name}": Case(file=text, to="axolotl", after="file")
        for name, (text, _) in SHAPES.items()
        if "fsdp_version: 2" in text  # at any place
    },
    **{
        f"axolotl refuses activation_offloading without gradient_checkpointing: recomputed {is_recomputed}": Case(
            file="precision: amp_bf16\nfsdp_config:\n  activation_cpu_offload: true\n"
            f"  activation_checkpointing: {is_recomputed}\n",
            to="axolotl",
            says={"gradient_checkpointing": True, "activation_offloading": True},
        )
        for is_recomputed in ("true", "false")
    },
    "a part of a file without a base_model was taken for Composer's": Case(file=OF_TODAY, blocking=[]),
    **{
        f"other axes are told of once by the key that asks: {keys}": Case(
            file=AROUND + keys + OF_TODAY,
            told={key: (outcome,) for key, outcome in asked.items()},
            blocking=[key for key, outcome in asked.items() if outcome.blocks],
        )
        for keys, asked in AXES.items()
    },
    **{
        f"they stay in axolotl's file: {keys}": Case(file=AROUND + keys + OF_TODAY, to="axolotl", blocking=[])
        for keys in AXES
    },
    **{
        f"axolotl exports keys with the prefix, and without: {prefix!r}": Case(
            file=AROUND + RECOMPUTED + OF_OLD.replace("  fsdp_", prefix),
            to=None,
            run={
                "config.cpu_offload": True,
                "config.reshard_after_forward": True,
                "config.wrap.classes": ("LlamaDecoderLayer",),
                "config.sync_module_states": True,
                "state_dict_type": "full",
                "precision": "amp_bf16",
                "config.mixed_precision.reduce_dtype": "bfloat16",
                f"{CHECKPOINTING}.reentrant": False,
            },
        )
        for prefix in ("  fsdp_", "  ")
    },
    **{
        f"`auto` and `full` are no words of a Trainer's: {words}": Case(
            file=AROUND.replace("bf16: auto", words) + OF_OLD,
            to=None,
            run={"precision": precision, "config.mixed_precision.param_dtype": param_dtype},
        )
        for words, precision, param_dtype in PRECISIONS
    },
    **{
        f"recomputing has words of its own: {words}": Case(
            file=f"{AROUND}{words}\n{OF_OLD}",
            to=None,
            run={
                f"{CHECKPOINTING}.checkpoint": recomputes,
                f"{CHECKPOINTING}.cpu_offload": offloads,
                # axolotl's default differs from a Trainer's
                **({f"{CHECKPOINTING}.reentrant": False} if recomputes else {}),
            },
        )
        for words, recomputes, offloads in RECOMPUTING
    },
    "a strategy that was never passed on is a decision": Case(
        file=AROUND + OF_OLD.replace("strategy: FULL_SHARD", "strategy: SHARD_GRAD_OP"),
        told={"fsdp_config.fsdp_sharding_strategy": (NEEDS_DECISION, "FULL_SHARD")},
        blocking=["fsdp_config.fsdp_sharding_strategy"],
    ),
    **{
        f"axolotl passes no size of 1 on: {sizes!r}": Case(
            file=AROUND + sizes + OF_TODAY,
            told=dict.fromkeys(re.findall(r"(\w+): 1", sizes), (UNNEEDED, "1 has no effect")),
            run={"config.mesh.shard_degree": -1, "config.mesh.replicate_degree": replicas},
            blocking=[],
        )
        for sizes, replicas in (
            ("dp_shard_size: 1\n", 1),
            ("dp_replicate_size: 1\n", 1),
            ("dp_shard_size: 1\ndp_replicate_size: 1\n", 1),
            ("dp_shard_size: 1\ndp_replicate_size: 2\n", 2),
            ("dp_replicate_size: 2\n", 2),
        )
    },
    "recomputing twice is refused with what to remove": Case(
        file=AROUND + OF_OLD + "  fsdp_activation_checkpointing: true\ngradient_checkpointing: true\n",
        told={"fsdp_config.fsdp_activation_checkpointing": (NEEDS_DECISION, "remove gradient_checkpointing")},
    ),
    "a prefetch, on which no number depends, is none": Case(
        file=AROUND + OF_OLD + "  fsdp_forward_prefetch: true\n",
        told={"fsdp_config.fsdp_forward_prefetch": (APPROXIMATE, "false was in effect")},
    ),
    "a run of 0.11 prefetched in backward": Case(
        file=AROUND + OF_OLD + "  fsdp_backward_prefetch: BACKWARD_PRE\n",
        told={"fsdp_config.fsdp_backward_prefetch": (APPROXIMATE, "0.11", "0.12")},
        says={"fsdp_config.backward_prefetch": None},
    ),
    # lstrip("fsdp_") left backward_prefetch and limit_all_gathers intact, and turned the third into ync_module_states.
    "what was synchronised depends on the release": Case(
        file=UNSYNCED.replace("  fsdp_cpu_ram_efficient_loading: true\n", ""),
        told={"fsdp_config.fsdp_sync_module_states": (NEEDS_DECISION, "0.12")},
    ),
    # The section's keys are removed, the model's stay; without `adapter` a run would train all weights.
    "a QLoRA run carried over would lose its 4 bits in fully_shard": Case(
        file=QLORA,
        told={"quantized weights": (UNSUPPORTED, "bfloat16")},
        has=("load_in_4bit: true\nadapter: qlora\n",),
    ),
    "and keeps them in axolotl's own file": Case(
        file=QLORA,
        to="axolotl",
        told={"quantized weights": (None,), "load_in_4bit": (NEEDS_DECISION, "cpu_ram_efficient_loading: false")},
        blocking=[*STORED, "load_in_4bit"],
    ),
    "the migrated run would train all layers": Case(
        file=SOME_LAYERS,
        told={"unfrozen_parameters": (EXACT,)},
        says={"fsdp_config.train_only": [r"model\.layers\.4[4-9]+"]},
    ),
    "of a parameter whose rows are trained in part all would be": Case(
        file=SOME_LAYERS.replace("+\n", "+.*weight$[:100]\n"), told={"unfrozen_parameters": (NEEDS_DECISION, "range")}
    ),
    "axolotl's own does not": Case(file=SOME_LAYERS, to="axolotl", blocking=STORED, has=("unfrozen_parameters:\n",)),
    "a short file was read as a Trainer's, to whom keys with the prefix are nothing": Case(
        file="base_model: some/llama-8b\nbf16: auto\nfsdp: [full_shard, auto_wrap]\n"
        "fsdp_config:\n  fsdp_offload_params: true\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
        says={"fsdp_config.cpu_offload": True},
    ),
    "a misspelt key is a decision": Case(
        file=AROUND + OF_TODAY + "  offload_param: true\n",
        told={"fsdp_config.offload_param": (NEEDS_DECISION, "did you mean offload_params?")},
        blocking=["fsdp_config.offload_param"],
    ),
    "a word for nothing goes": Case(
        file=AROUND + OF_OLD + "  zzz: 1\n", to="axolotl", blocking=STORED, says={"fsdp_config.zzz": None}
    ),
    "FSDP1 becomes FSDP2 in axolotl's own words; comments and all other keys stay": Case(
        file=AROUND + RECOMPUTED + OF_OLD + SPECIAL,
        to="axolotl",
        blocking=STORED,
        after=AROUND
        + RECOMPUTED
        + """\
fsdp_version: 2
fsdp_config:
  offload_params: true  # of both
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
"""
        + SPECIAL,
    ),
    "without `fsdp` its offload, its wrapping and full checkpoints would be gone": Case(
        file=AROUND + "fsdp:\n  - shard_grad_op\n  - auto_wrap\n  - offload\n",
        to="axolotl",
        says={
            "fsdp": None,
            "fsdp_version": 2,
            "fsdp_config": {
                "reshard_after_forward": False,
                "state_dict_type": "FULL_STATE_DICT",
                "offload_params": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        },
    ),
    **{
        f"two edits at a file's end stood in each other's way: {settings}": Case(
            file=f"{AROUND}fsdp_config:\n  {settings}\n",
            to="axolotl",
            blocking=STORED,
            says={"fsdp_version": 2, "fsdp_config": new | {"state_dict_type": "FULL_STATE_DICT"}},
            has=("base_model: some/llama-8b  # a comment\n",),
        )
        for settings, new in SETTINGS
    },
    "what no word of axolotl's holds is told": Case(
        file="fsdp_config: {data_parallel_shard_degree: 2, activation_checkpointing: true}\n",
        to="axolotl",
        told={
            "(number of ranks)": (APPROXIMATE, "as many ranks as it is launched with", "launch 2"),
            "(reentrant checkpointing)": (APPROXIMATE, "without reentering"),
        },
    ),
    "axolotl recomputes where it offloads": Case(
        file="fsdp_config: {activation_cpu_offload: true}\n",
        to="axolotl",
        told={"activation_cpu_offload": (APPROXIMATE, "recomputes")},
    ),
    "another system's run in axolotl's words": Case(
        file=OF_ACCELERATE,
        to="axolotl",
        blocking=STORED,  # accelerate upcasts, and axolotl's FSDP2 does not
        says={"fsdp_config.transformer_layer_cls_to_wrap": "Block"},
        keeps=("config.mesh", "config.cpu_offload", "state_dict_type", "precision", "max_grad_norm"),
        run={"config.mesh": MeshSpec.of_degrees(4, 2), "max_grad_norm": None},
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case) -> None:
    """A run trained with the keys that axolotl passes on, so only these count."""
    case.check()


@pytest.mark.parametrize("keys", ["fsdp:\nfsdp_config:\n", "deepspeed: ds.json\nfsdp:\n", ""])
def test_a_file_without_fsdp_is_no_section(keys: str) -> None:
    """Most axolotl files leave fsdp empty, and each would have a needless finding."""
    assert AxolotlDialect().sections(yaml.safe_load(AROUND + keys)) == []
