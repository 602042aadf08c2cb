"""accelerate's files, in the forms of accelerate's and TRL's examples, and DeepSpeed's sections in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_fsdp2.migration.dialects.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.values import OF_ACCELERATES_FILE
from composer_fsdp2.migration.migrate import Migration, migrate_text
from tests.migration.file_cases import APPROXIMATE, EXACT, NEEDS_DECISION, Case, each_case, read_first, settings_of
from tests.migration.huggingface_oracle import ask

# The keys that `accelerate config` writes around the section.
AROUND = """\
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8  # all of the node
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
HEAD = "compute_environment: LOCAL_MACHINE\ndebug: false\ndowncast_bf16: 'no'\n"
FSDP1 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
"""
FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
"""
ZERO3 = """\
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
"""
ZERO2 = """\
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
"""


def axes(**sizes: int) -> str:
    sizes = {"cp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | sizes
    return "parallelism_config:\n" + "".join(
        f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items()
    )


# By form: the file, and the additional keys of its fsdp_config for Composer.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp1": (HEAD + FSDP1 + AROUND, {"forward_prefetch": True, "state_dict_type": "full"}),
    "fsdp1 by the new key": (
        HEAD + FSDP1.replace("sharding_strategy", "reshard_after_forward") + "  fsdp_version: 1\n" + AROUND,
        {"reshard_after_forward": True},
    ),
    "short": (FSDP1, {"mixed_precision": "FULL"}),
    "qlora": (
        HEAD + FSDP1.replace("offload_params: false", "offload_params: true").replace("params: true", "params: false"),
        {"cpu_offload": None},
    ),
    "offload": (HEAD + FSDP1.replace("offload_params: false", "offload_params: true") + AROUND, {"cpu_offload": True}),
    "hybrid on one machine": (
        HEAD + FSDP1.replace("FULL_SHARD", "HYBRID_SHARD") + AROUND,
        {"reshard_after_forward": True, "data_parallel_replicate_degree": None},
    ),
    "hybrid, as short as may be": (
        FSDP1.replace("FULL_SHARD", "HYBRID_SHARD_ZERO2"),
        {"reshard_after_forward": False, "data_parallel_replicate_degree": None},
    ),
    "hybrid on two": (
        HEAD + FSDP1.replace("FULL_SHARD", "HYBRID_SHARD") + AROUND.replace("machines: 1", "machines: 2"),
        {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": -1},
    ),
    "fsdp2": (HEAD + FSDP2 + AROUND, {"reshard_after_forward": True}),
    "fsdp2 with replicas": (
        HEAD + FSDP2 + axes(dp_replicate=2, dp_shard=4) + AROUND,
        {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
    ),
    "zero 3": (HEAD + ZERO3 + AROUND, {"reshard_after_forward": True, "cpu_offload": None, "state_dict_type": "full"}),
    "zero 3, offloaded": (HEAD + ZERO3.replace("none", "cpu") + AROUND, {"cpu_offload": True}),
    "zero 2": (
        HEAD + ZERO2 + AROUND,
        {"reshard_after_forward": False, "cpu_offload": True, "gradient_sync": None, "state_dict_type": "sharded"},
    ),
    "zero 1": (
        HEAD + ZERO2.replace("stage: 2", "stage: 1") + AROUND,
        {"reshard_after_forward": False, "gradient_sync": "last"},
    ),
}


def migrated(text: str, to: str = "composer") -> Migration:
    return migrate_text(text, "run.yaml", to=to)


ACCUMULATED = ["deepspeed_config.gradient_accumulation_steps"]  # read by DeepSpeed only
ONLY_THE_USER = [
    ("zero_stage: 3", "deepspeed_config_file: ../zero3.json", "deepspeed_config_file"),
    ("offload_param_device: none", "offload_param_device: nvme", "offload_param_device"),
    ("zero_stage: 3", "zero_stage: 4", "zero_stage"),
    ("zero_stage: 3", "zero_stag: 3", "zero_stag"),
    ("zero_stage: 3", "gradient_clipping: often", "gradient_clipping"),
]
DIVIDED: list[tuple[str, dict[str, int], dict[str, int]]] = [
    (FSDP2, {"cp": 4, "dp_shard": 2}, {"context_parallel_degree": 4}),
    (FSDP2, {"cp": 8}, {"context_parallel_degree": 8}),
    (
        FSDP2,
        {"cp": 2, "dp_shard": 2, "dp_replicate": 2},
        {"context_parallel_degree": 2, "data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
    ),
    (ZERO3, {"cp": 2, "dp_shard": 2}, {"context_parallel_degree": 2}),
]
IN_TWO = "parallelism_config.parallelism_config_tp_size"
BARE = {
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "backward_prefetch": "backward_pre",
    "limit_all_gathers": True,
    "fsdp_use_orig_params": True,
}
FSDP_JSON = json.dumps({"fsdp": "full_shard auto_wrap", "bf16": True, **BARE}, indent=2)
CASES = {
    **{
        f"nearly every file of its examples ended with exit 1: {name}": Case(
            file=text,
            blocking=ACCUMULATED * ("gradient_accumulation_steps: 4" in text),
            says={
                "fsdp_config.wrap_policy": {"transformer_layer_cls_to_wrap": "auto"},
                **{f"fsdp_config.{key}": value for key, value in says.items()},
            },
        )
        for name, (text, says) in SHAPES.items()
    },
    "a run over parts of layers would train as plain FSDP": Case(
        file=HEAD + FSDP2 + axes(tp=2, dp_shard=2, dp_replicate=2) + AROUND,
        told={IN_TWO: (EXACT, "tp_config: {strategy: auto, tensor_parallel_degree: 2}", "must read one batch")},
        blocking=[],
    ),
    **{
        f"a decision would ask what is clear of divided sequences: {sizes}, {len(head)}": Case(
            file=HEAD + head + axes(**sizes) + AROUND,
            blocking=[],
            says={f"fsdp_config.{key}": degree for key, degree in words.items()},
        )
        for head, sizes, words in DIVIDED
    },
    **{
        f"ZeRO {stage} keeps what it means": Case(
            file=HEAD + ZERO2.replace("stage: 2", f"stage: {stage}") + AROUND,
            to=None,
            run={
                "config.mesh.shard_degree": 1 if stage == 0 else -1,
                "config.reshard_after_forward": reshards,
                "config.mixed_precision.param_dtype": "bfloat16",
                "config.accumulation.gradient_sync.value": sync,
            },
        )
        for stage, reshards, sync in ((1, False, "last"), (2, False, "every"), (3, True, "every"))
    },
    "of ZeRO 0 nothing is sharded": Case(
        file=HEAD + ZERO2.replace("stage: 2", "stage: 0") + AROUND,
        to=None,
        run={"config.mesh.shard_degree": 1, "config.accumulation.gradient_sync.value": "last"},
    ),
    **{
        f"gradients are clipped as accelerate does: {clipping!r}": Case(
            file=HEAD + ZERO3.replace("  zero_stage", f"{clipping}  zero_stage") + AROUND,
            to=None,
            run={"max_grad_norm": norm},
        )
        # DeepSpeed's default, where the file has none.
        for clipping, norm in (("  gradient_clipping: 0.5\n", 0.5), ("", 1.0), ("  gradient_clipping: 0\n", None))
    },
    **{
        f"what ZeRO does otherwise is told: {len(text)}": Case(
            file=HEAD + text + AROUND,
            told={
                **dict.fromkeys(("distributed_type", "mixed_precision", "units", "autocast", "optimizer"), (None,)),
                **{f"deepspeed_config.{key}": (None,) for key in yaml.safe_load(text)["deepspeed_config"]},
                "deepspeed_config.zero_stage": (APPROXIMATE,),
                **({"deepspeed_config.offload_optimizer_device": (None, "together")} if text == ZERO2 else {}),
            },
        )
        for text in (ZERO3, ZERO2)
    },
    **{
        f"what only the user knows would be dropped, and the defaults trained: {new}": Case(
            file=HEAD + ZERO3.replace(old, new) + AROUND, told={f"deepspeed_config.{key}": (NEEDS_DECISION,)}
        )
        for old, new, key in ONLY_THE_USER
    },
    "a key that nobody reads and that resembles none kept a CI at 1 for ever": Case(
        file=HEAD + FSDP1 + "  zzz: 1\n" + AROUND, to="accelerate", blocking=[], says={"fsdp_config.zzz": None}
    ),
    "one that resembles another is a decision": Case(
        file=HEAD + FSDP1 + "  fsdp_transformer_layer_class: Block\n" + AROUND,
        told={
            "fsdp_config.fsdp_transformer_layer_class": (
                NEEDS_DECISION,
                "did you mean fsdp_transformer_layer_cls_to_wrap?",
            )
        },
    ),
    # A Trainer's settings in a separate file.
    "transformers takes the prefix off in a file": Case(
        file=FSDP_JSON,
        name="fsdp.json",
        told=dict.fromkeys(("fsdp", "bf16", *BARE), (None,)),
        blocking=[],
        says={
            "fsdp_config.wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            "fsdp_config.mixed_precision": "PURE",
            "fsdp_config.backward_prefetch": None,
        },
    ),
    "and gets FSDP2 there": Case(
        file=FSDP_JSON,
        name="fsdp.json",
        to="accelerate",
        blocking=[],
        says={
            "fsdp": "full_shard auto_wrap",
            "bf16": True,
            "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "version": 2,
            "reshard_after_forward": True,
            "state_dict_type": "FULL_STATE_DICT",
            "backward_prefetch": None,
            "limit_all_gathers": None,
            "fsdp_use_orig_params": None,
        },
    ),
    "--fsdp shard_grad_op stands in no fsdp.json: FULL_SHARD would be a guess": Case(
        file=json.dumps(BARE),
        name="fsdp.json",
        told={
            "fsdp": (NEEDS_DECISION, "fsdp: full_shard auto_wrap"),
            "fsdp_transformer_layer_cls_to_wrap": (NEEDS_DECISION,),
        },
    ),
    "a file for FSDP2 needs no words": Case(
        file=json.dumps({**BARE, "version": 2, "reshard_after_forward": True}), name="fsdp.json", blocking=[]
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case) -> None:
    """With exit code 0 and no finding on units, checkpoints and host memory, the report would promise an equal run."""
    case.check()


def test_the_ranks_of_a_sequence_shard_parameters_as_well() -> None:
    """Parameters sharded over the other ranks only would need more memory, and a decision would leave a clear value
    open."""
    for sizes in ({"cp": 4, "dp_shard": 2}, {"cp": 8}):
        again = HuggingFaceDialect().express(read_first(HEAD + FSDP2 + axes(**sizes) + AROUND).run)
        degrees = settings_of(again)["parallelism_config"]
        assert degrees["parallelism_config_dp_shard_size"] == 8 // sizes["cp"]
    assert read_first(HEAD + FSDP2 + axes(cp=8) + AROUND).run.config.mesh.shard_degree == 8


def test_a_zero_section_becomes_fsdps_in_its_own_file() -> None:
    """`accelerate launch` would still use DeepSpeed, or read both sections."""
    migration = migrated(HEAD + ZERO3 + AROUND, to="accelerate")
    assert migration.exit_code == 0
    values = yaml.safe_load(migration.after)
    assert values["distributed_type"] == "FSDP" and "deepspeed_config" not in values
    assert values["fsdp_config"]["fsdp_version"] == 2 and values["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert "num_processes: 8  # all of the node\n" in migration.after
    (answer,) = ask([("accelerate", values)])
    assert answer["version"] == 2 and answer["reshard"] is True and answer["wrap"] == "CLASSES"


def test_a_key_that_accelerate_refuses_is_a_decision() -> None:
    """A file that never started would be migrated with exit code 0, with its misspelt key."""
    for extra, hint in (("num_proceses: 8", "did you mean num_processes?"), ("my_notes: x", "remove it")):
        text = HEAD + FSDP1 + AROUND + f"{extra}\n"
        (blocking,) = migrated(text).blocking
        assert blocking.key == extra.partition(":")[0] and blocking.hint == hint
        assert extra in migrate_text(text, "run.yaml", to="composer").after
    (answer,) = ask([("accelerate", yaml.safe_load(text))])
    assert "unknown keys" in answer["error"] and "my_notes" in answer["error"]
    inside = yaml.safe_dump({"training": yaml.safe_load(text)})  # not accelerate's file, but its section in another
    assert migrated(inside).exit_code == 0


def test_the_keys_of_its_file_are_accelerates_own(tmp_path: Path) -> None:
    """A key that accelerate reads would be reported as refused, or a migrated file would not start."""
    from accelerate.commands.config.config_args import ClusterConfig

    later, of_old = {"parallelism_config"}, {"fp16": True, "dynamo_backend": "INDUCTOR"}  # from 1.10 on; corrected
    head = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
    assert of_old.keys() - ClusterConfig.process_config({**head, **of_old}).keys() == of_old.keys()
    assert {*ClusterConfig.__dataclass_fields__, *later, *of_old} == OF_ACCELERATES_FILE
    for name, (text, _) in SHAPES.items():
        after = migrated(HEAD + text.removeprefix(HEAD), to="accelerate").after
        (tmp_path / "run.yaml").write_text(after)
        if later.isdisjoint(yaml.safe_load(after)):  # replicas require 1.10, which the report mentions
            config = ClusterConfig.from_yaml_file(tmp_path / "run.yaml")
            assert config.distributed_type == "FSDP" and str(config.fsdp_config["fsdp_version"]) == "2", name


@pytest.mark.parametrize("at", ["fsdp_config", "training.fsdp_config"])
def test_every_key_of_a_mapping_that_is_pointed_at_is_told(at: str) -> None:
    """With --dialect huggingface --at fsdp_config the report listed none of its keys, with exit code 0."""
    values: dict[str, Any] = {"fsdp_config": {"min_num_params": 0, "transformer_layer_cls_to_wrap": ["A"], "zzz": 1}}
    values = {"training": values} if at.startswith("training") else values
    migration = migrate_text(yaml.safe_dump(values), "run.yaml", to="composer", dialect="huggingface", at=at)
    keys = {each.key for each in migration.sections[0].findings}
    assert keys >= {"fsdp_config.min_num_params", "fsdp_config.transformer_layer_cls_to_wrap", "fsdp_config.zzz"}
    assert migration.exit_code == 1  # FSDP is off
