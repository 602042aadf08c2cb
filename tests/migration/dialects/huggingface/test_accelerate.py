"""accelerate's files, of the shapes that its examples and those of TRL have; DeepSpeed's sections in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.places import OF_ACCELERATES_FILE
from composer_fsdp2.migration.migrate import Migration, migrate_text
from composer_fsdp2.migration.run import RunConfig
from tests.migration.huggingface_oracle import ask

# What `accelerate config` writes around the section.
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


# By shape: the file, and what its fsdp_config says for Composer beside the usual.
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


def run_of(text: str) -> RunConfig:
    run = HuggingFaceDialect().read(Section.at((), yaml.safe_load(text))).run
    assert run is not None
    return run


def finding(migration: Migration, key: str) -> Finding:
    (found,) = [each for each in migration.sections[0].findings if each.key == key]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_files_of_its_examples_need_no_decision(shape: str) -> None:
    """Nearly every file ended with exit 1, or was no section at all, and the code said nothing any more."""
    text, says = SHAPES[shape]
    migration = migrated(text)
    steps = "deepspeed_config.gradient_accumulation_steps"  # of which nothing but DeepSpeed reads here
    assert [each.key for each in migration.blocking] == [steps] * ("gradient_accumulation_steps: 4" in text)
    section = yaml.safe_load(migration.after)["fsdp_config"]
    assert section["wrap_policy"] == {"transformer_layer_cls_to_wrap": "auto"}
    assert {key: section.get(key) for key in says} == says
    again = migrated(migration.after)
    assert not again.is_changed and again.exit_code == 0


def test_other_axes_are_told_of_once() -> None:
    """A run over parts of layers would train as plain FSDP; three findings said one thing."""
    (blocking,) = migrated(HEAD + FSDP2 + axes(tp=2, dp_shard=2, dp_replicate=2) + AROUND).blocking
    assert blocking.key == "parallelism_config.parallelism_config_tp_size"
    assert blocking.outcome is Outcome.NEEDS_DECISION and "layer plan" in blocking.reason


def test_the_ranks_of_a_sequence_shard_parameters_as_well() -> None:
    """Parameters sharded over the other ranks alone would need more memory; a decision would ask what is clear."""
    for head, sizes, words in (
        (FSDP2, {"cp": 4, "dp_shard": 2}, {"context_parallel_degree": 4}),
        (FSDP2, {"cp": 8}, {"context_parallel_degree": 8}),
        (FSDP2, {"cp": 2, "dp_shard": 2, "dp_replicate": 2},
         {"context_parallel_degree": 2, "data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}),
        (ZERO3, {"cp": 2, "dp_shard": 2}, {"context_parallel_degree": 2}),
    ):  # fmt: skip
        migration = migrated(HEAD + head + axes(**sizes) + AROUND)
        assert migration.blocking == ()
        section = yaml.safe_load(migration.after)["fsdp_config"]
        assert {key: section.get(key) for key in words} == words
    for sizes in ({"cp": 4, "dp_shard": 2}, {"cp": 8}):
        again = HuggingFaceDialect().express(run_of(HEAD + FSDP2 + axes(**sizes) + AROUND)).settings
        (degrees,) = [each.value for each in again if each.key == "parallelism_config"]
        assert degrees["parallelism_config_dp_shard_size"] == 8 // sizes["cp"]
    assert run_of(HEAD + FSDP2 + axes(cp=8) + AROUND).config.mesh.shard_degree == 8


def test_zero_stages_keep_what_they_mean() -> None:
    """ZeRO 2 keeps parameters from forward to backward; sharding them there would be other memory and other traffic."""
    runs = {stage: run_of(HEAD + ZERO2.replace("stage: 2", f"stage: {stage}") + AROUND) for stage in range(4)}
    assert [runs[stage].config.reshard_after_forward for stage in (1, 2, 3)] == [False, False, True]
    assert runs[0].config.mesh.shard_degree == 1  # nothing is sharded
    assert {run.config.mixed_precision.param_dtype for run in runs.values()} == {"bfloat16"}
    assert [runs[stage].config.accumulation.gradient_sync.value for stage in range(4)] == [
        "last",
        "last",
        "every",
        "every",
    ]
    clipped = run_of(HEAD + ZERO3.replace("  zero_stage", "  gradient_clipping: 0.5\n  zero_stage") + AROUND)
    assert clipped.max_grad_norm == 0.5
    assert run_of(HEAD + ZERO3 + AROUND).max_grad_norm == 1.0, "accelerate's own, where the file has none"
    unclipped = run_of(HEAD + ZERO3.replace("  zero_stage", "  gradient_clipping: 0\n  zero_stage") + AROUND)
    assert unclipped.max_grad_norm is None


def test_what_zero_does_otherwise_is_told() -> None:
    """Exit 0 without a word on units, checkpoints and host memory would promise the same run."""
    for text in (HEAD + ZERO3 + AROUND, HEAD + ZERO2 + AROUND):
        migration = migrated(text)
        keys = {each.key for each in migration.sections[0].findings}
        given = yaml.safe_load(text)
        assert keys >= {
            "distributed_type",
            "mixed_precision",
            *(f"deepspeed_config.{key}" for key in given["deepspeed_config"]),
        }
        assert keys >= {"units", "autocast", "optimizer"}
        assert finding(migration, "deepspeed_config.zero_stage").outcome is Outcome.APPROXIMATE
    assert "together" in finding(migrated(HEAD + ZERO2 + AROUND), "deepspeed_config.offload_optimizer_device").reason


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("zero_stage: 3", "deepspeed_config_file: ../zero3.json", "deepspeed_config_file"),
        ("offload_param_device: none", "offload_param_device: nvme", "offload_param_device"),
        ("zero_stage: 3", "zero_stage: 4", "zero_stage"),
        ("zero_stage: 3", "zero_stag: 3", "zero_stag"),
        ("zero_stage: 3", "gradient_clipping: often", "gradient_clipping"),
    ],
)
def test_what_only_the_user_knows_of_a_zero_section(old: str, new: str, key: str) -> None:
    """Settings in another file, or on a disk, would be dropped, and the defaults trained."""
    (blocking,) = migrated(HEAD + ZERO3.replace(old, new) + AROUND).blocking
    assert blocking.key == f"deepspeed_config.{key}" and blocking.outcome is Outcome.NEEDS_DECISION
    assert blocking.hint or "write" in blocking.reason or "none of its values" in blocking.reason


def test_a_zero_section_becomes_fsdps_in_its_own_file() -> None:
    """`accelerate launch` would go on with DeepSpeed, or on sections of both."""
    migration = migrated(HEAD + ZERO3 + AROUND, to="accelerate")
    assert migration.exit_code == 0
    values = yaml.safe_load(migration.after)
    assert values["distributed_type"] == "FSDP" and "deepspeed_config" not in values
    assert values["fsdp_config"]["fsdp_version"] == 2 and values["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert "num_processes: 8  # all of the node\n" in migration.after
    (answer,) = ask([("accelerate", values)])
    assert answer["version"] == 2 and answer["reshard"] is True and answer["wrap"] == "CLASSES"


def test_a_key_that_accelerate_refuses_is_a_decision() -> None:
    """The file that never started would be migrated with exit 0, and its misspelt key left as it is."""
    for extra, hint in (("num_proceses: 8", "did you mean num_processes?"), ("my_notes: x", "remove it")):
        text = HEAD + FSDP1 + AROUND + f"{extra}\n"
        (blocking,) = migrated(text).blocking
        assert blocking.key == extra.partition(":")[0] and blocking.hint == hint
        assert extra in migrate_text(text, "run.yaml").after
    (answer,) = ask([("accelerate", yaml.safe_load(text))])
    assert "unknown keys" in answer["error"] and "my_notes" in answer["error"]
    inside = yaml.safe_dump({"training": yaml.safe_load(text)})  # not a file of accelerate's: its section in another
    assert migrated(inside).exit_code == 0


def test_the_keys_of_its_file_are_accelerates_own(tmp_path: Path) -> None:
    """A key that it reads would be called one that it refuses; a file that migrate wrote would not start."""
    from accelerate.commands.config.config_args import ClusterConfig

    later, of_old = {"parallelism_config"}, {"fp16": True, "dynamo_backend": "INDUCTOR"}  # from 1.10 on; put right
    head = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
    assert of_old.keys() - ClusterConfig.process_config({**head, **of_old}).keys() == of_old.keys()
    assert {*ClusterConfig.__dataclass_fields__, *later, *of_old} == OF_ACCELERATES_FILE
    for name, (text, _) in SHAPES.items():
        after = migrated(HEAD + text.removeprefix(HEAD), to="accelerate").after
        (tmp_path / "run.yaml").write_text(after)
        if later.isdisjoint(yaml.safe_load(after)):  # replicas need 1.10, which the report says
            config = ClusterConfig.from_yaml_file(tmp_path / "run.yaml")
            assert config.distributed_type == "FSDP" and str(config.fsdp_config["fsdp_version"]) == "2", name


def test_a_word_for_nothing_is_removed() -> None:
    """A key that nobody reads and that resembles none kept a CI at 1 for ever."""
    migration = migrated(HEAD + FSDP1 + "  zzz: 1\n" + AROUND, to="accelerate")
    assert migration.exit_code == 0 and "zzz" not in migration.after
    near = migrated(HEAD + FSDP1 + "  fsdp_transformer_layer_class: Block\n" + AROUND)
    assert [each.hint for each in near.blocking] == ["did you mean fsdp_transformer_layer_cls_to_wrap?"]


# ---------------------------------------------------------------------------------------------------------------------
# A Trainer's settings in a file of their own, and a mapping that the user points at

BARE = {
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "backward_prefetch": "backward_pre",
    "limit_all_gathers": True,
    "fsdp_use_orig_params": True,
}


def test_fsdp_json_is_read_with_and_without_the_prefix() -> None:
    """transformers takes the prefix off in a file; the report said nothing of any key."""
    text = json.dumps({"fsdp": "full_shard auto_wrap", "bf16": True, **BARE}, indent=2)
    migration = migrate_text(text, "fsdp.json")
    assert migration.exit_code == 0 and migration.is_new_file
    told = {each.key for each in migration.sections[0].findings}
    assert told >= {"fsdp", "bf16", *BARE}
    section = yaml.safe_load(migration.after)["fsdp_config"]
    assert section["wrap_policy"] == {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    assert section["mixed_precision"] == "PURE" and "backward_prefetch" not in section
    stays = migrate_text(text, "fsdp.json", to="accelerate")
    assert stays.exit_code == 0
    assert json.loads(stays.after) == {
        "fsdp": "full_shard auto_wrap",
        "bf16": True,
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "version": 2,
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
    }


def test_what_the_command_says_is_asked_for() -> None:
    """--fsdp shard_grad_op stands in no fsdp.json: FULL_SHARD would be a guess."""
    migration = migrate_text(json.dumps(BARE), "fsdp.json")
    assert {each.key for each in migration.blocking} == {"fsdp", "fsdp_transformer_layer_cls_to_wrap"}
    assert "fsdp: full_shard auto_wrap" in finding(migration, "fsdp").reason
    version2 = migrate_text(json.dumps({**BARE, "version": 2, "reshard_after_forward": True}), "fsdp.json")
    assert version2.exit_code == 0


@pytest.mark.parametrize("at", ["fsdp_config", "training.fsdp_config"])
def test_every_key_of_a_mapping_that_is_pointed_at_is_told(at: str) -> None:
    """--dialect huggingface --at fsdp_config mentioned none of its keys, and ended with 0."""
    values: dict[str, Any] = {"fsdp_config": {"min_num_params": 0, "transformer_layer_cls_to_wrap": ["A"], "zzz": 1}}
    values = {"training": values} if at.startswith("training") else values
    migration = migrate_text(yaml.safe_dump(values), "run.yaml", dialect="huggingface", at=at)
    keys = {each.key for each in migration.sections[0].findings}
    assert keys >= {"fsdp_config.min_num_params", "fsdp_config.transformer_layer_cls_to_wrap", "fsdp_config.zzz"}
    assert migration.exit_code == 1  # FSDP is off there
