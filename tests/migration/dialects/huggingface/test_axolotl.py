"""axolotl's files: what it passes on of Hugging Face's words, and the same in FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.huggingface import AxolotlDialect
from composer_fsdp2.migration.migrate import Migration, migrate_text
from composer_fsdp2.migration.run import RunConfig

# What stands around the section in the files of its examples.
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


def migrated(text: str, to: str = "composer") -> Migration:
    migration = migrate_text(text, "run.yaml", to=to)
    assert {section.dialect for section in migration.sections} == {"axolotl"}
    return migration


def section_of(migration: Migration) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(migration.after)
    return dict(values["fsdp_config"])


def run_of(text: str) -> RunConfig:
    values = yaml.safe_load(text)
    dialect = AxolotlDialect()
    assert dialect.sections(values) == [()]
    run = dialect.read(Section.at((), values)).run
    assert run is not None
    return run


def finding(migration: Migration, key: str) -> Finding:
    (found,) = [each for each in migration.sections[0].findings if each.key == key]
    return found


# By shape: the file, and what its fsdp_config says for Composer beside the usual. As in axolotl's examples.
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


STORED = "dtype of stored parameters"


def keys_to_decide(migration: Migration) -> list[str]:
    return [each.key for each in migration.blocking]


@pytest.mark.parametrize("shape", SHAPES)
def test_files_of_its_examples_need_no_decision(shape: str) -> None:
    """Every file of axolotl's ended with exit 1, or was taken for one of Composer's."""
    text, says = SHAPES[shape]
    migration = migrated(text)
    asked = {"load_in_4bit: true": "quantized weights", "fp8: true": "fp8"}
    assert [each.key for each in migration.blocking] == [key for line, key in asked.items() if line in text]
    section = section_of(migration)
    assert section["wrap_policy"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    assert {key: section.get(key) for key in says} == says
    for line in AROUND.splitlines():
        assert line.startswith("bf16") or line in migration.after.splitlines()
    again = migrate_text(migration.after, "run.yaml")
    assert not again.is_changed and again.exit_code == 0
    if "fsdp_version: 2" in text:  # wherever it stands
        assert not migrated(text, to="axolotl").is_changed


def test_the_version_beside_the_section_is_axolotls_alone() -> None:
    """A part of a file without a base_model was taken for Composer's, of which each key was misspelt."""
    assert migrated(OF_TODAY).exit_code == 0


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("tensor_parallel_size: 2\ndp_shard_size: 2\ndp_replicate_size: 2\n",
         {"tensor_parallel_size": Outcome.NEEDS_DECISION}),
        ("dp_shard_size: 2\ncontext_parallel_size: 2\ntensor_parallel_size: 2\n",
         {"tensor_parallel_size": Outcome.NEEDS_DECISION}),
        ("expert_parallel_size: 2\ndp_shard_size: 2\n", {"expert_parallel_size": Outcome.UNSUPPORTED}),
        ("dp_shard_size: 2\ncontext_parallel_size: 2\n", {}),
    ],
)  # fmt: skip
def test_other_axes_are_told_of_once_by_the_key_that_asks(keys: str, asked: dict[str, Outcome]) -> None:
    """A run over layers or experts would train as plain FSDP, or be refused twice for one key."""
    migration = migrated(AROUND + keys + OF_TODAY)
    assert [(each.key, each.outcome) for each in migration.blocking] == [*asked.items()]
    assert migrated(AROUND + keys + OF_TODAY, to="axolotl").exit_code == 0


def test_keys_with_the_prefix_did_hold() -> None:
    """axolotl exports them, so that a report that the run went by nothing was wrong, and the file lost its offload."""
    old = run_of(AROUND + RECOMPUTED + OF_OLD)
    new = run_of(AROUND + RECOMPUTED + OF_OLD.replace("  fsdp_", "  "))
    assert old == new
    assert old.config.cpu_offload and old.config.reshard_after_forward is True
    assert old.config.wrap.classes == ("LlamaDecoderLayer",) and old.config.sync_module_states
    assert old.state_dict_type == "full" and old.precision == "amp_bf16"
    assert old.config.mixed_precision.reduce_dtype == "bfloat16"
    assert not old.config.activation_checkpointing.reentrant


@pytest.mark.parametrize(
    ("words", "precision", "param_dtype"),
    [
        ("bf16: auto", "amp_bf16", "bfloat16"),
        ("bf16: true", "amp_bf16", "bfloat16"),
        ("bf16: false\nfp16: true", "amp_fp16", "float16"),
        ("bf16:\nfp16:", "fp32", None),
        ("bf16: full", "fp32", None),  # no autocast and no dtype of FSDP's: the parameters are bfloat16
        ("bf16: auto\nfp8: true", "amp_fp8", "bfloat16"),
    ],
)
def test_precision_is_what_axolotl_exports(words: str, precision: str, param_dtype: str | None) -> None:
    """`auto` and `full` are no words of a Trainer's; the run would have another dtype."""
    run = run_of(AROUND.replace("bf16: auto", words) + OF_OLD)
    assert (run.precision, run.config.mixed_precision.param_dtype) == (precision, param_dtype)


@pytest.mark.parametrize(
    ("words", "recomputes", "offloads"),
    [
        ("gradient_checkpointing: true", True, False),
        ("gradient_checkpointing: unsloth", True, False),
        ("gradient_checkpointing: offload", True, True),
        ("gradient_checkpointing: true\nactivation_offloading: true", True, True),
        ("activation_offloading: legacy", True, True),
        ("gradient_checkpointing: false", False, False),
    ],
)
def test_recomputing_has_words_of_its_own(words: str, recomputes: bool, offloads: bool) -> None:
    """`offload` beside `true` is refused as no value, and activations would be kept."""
    checkpointing = run_of(f"{AROUND}{words}\n{OF_OLD}").config.activation_checkpointing
    assert (checkpointing.checkpoint, checkpointing.cpu_offload) == (recomputes, offloads)
    assert not recomputes or not checkpointing.reentrant  # axolotl's default is another one than a Trainer's


def test_what_axolotl_does_not_pass_on_is_told_by_what_it_changes() -> None:
    """A strategy that was never passed on is a decision; a prefetch, on which no number depends, is none."""
    text = AROUND + OF_OLD.replace("strategy: FULL_SHARD", "strategy: SHARD_GRAD_OP")
    (blocking,) = migrated(text).blocking
    assert blocking.key == "fsdp_config.fsdp_sharding_strategy" and "FULL_SHARD" in blocking.reason
    prefetch = finding(
        migrated(AROUND + OF_OLD + "  fsdp_forward_prefetch: true\n"), "fsdp_config.fsdp_forward_prefetch"
    )
    assert prefetch.outcome is Outcome.APPROXIMATE and "went by false" in prefetch.reason


def test_what_axolotls_trainer_got_by_release_is_told_and_not_turned_off() -> None:
    """A run of 0.11 prefetched in backward, and came out with backward_prefetch: NONE: slower for nothing."""
    migration = migrated(AROUND + OF_OLD + "  fsdp_backward_prefetch: BACKWARD_PRE\n")
    prefetch = finding(migration, "fsdp_config.fsdp_backward_prefetch")
    assert "backward_prefetch" not in section_of(migration)
    assert prefetch.outcome is Outcome.APPROXIMATE and "0.11" in prefetch.reason and "0.12" in prefetch.reason
    # lstrip("fsdp_") left backward_prefetch and limit_all_gathers whole, and made ync_module_states of the third.
    assert "backward_prefetch".lstrip("fsdp_") == "backward_prefetch" and "sync".lstrip("fsdp_") == "ync"
    text = AROUND + OF_OLD.replace("sync_module_states: true", "sync_module_states: false")
    synced = finding(
        migrated(text.replace("  fsdp_cpu_ram_efficient_loading: true\n", "")), "fsdp_config.fsdp_sync_module_states"
    )
    assert synced.outcome is Outcome.NEEDS_DECISION and "0.12" in synced.reason


def test_quantized_weights_are_told_of() -> None:
    """A QLoRA run carried over would lose its 4 bits in fully_shard, and nothing would have said so."""
    migration = migrated("load_in_4bit: true\nadapter: qlora\n" + AROUND + OF_OLD)
    told = finding(migration, "quantized weights")
    assert told.outcome is Outcome.UNSUPPORTED and told.value == "4 bits" and "bfloat16" in told.hint
    assert migration.exit_code == 1
    own = finding(migrated("load_in_4bit: true\nadapter: qlora\n" + AROUND + OF_OLD, to="axolotl"), "quantized weights")
    assert not own.outcome.blocks
    # The section's keys go, the model's stay; without `adapter` a run would train all weights.
    assert migration.after.startswith("load_in_4bit: true\nadapter: qlora\n")


def test_a_run_that_trains_some_layers_only_is_a_decision() -> None:
    """`unfrozen_parameters` was not mentioned, and the migrated run would have trained all."""
    text = "unfrozen_parameters:\n  - model.layers.4[4-9]+\n" + AROUND + OF_OLD
    told = finding(migrated(text), "trained parameters")
    assert told.outcome is Outcome.NEEDS_DECISION and "freeze" in told.hint
    own = migrated(text, to="axolotl")
    assert keys_to_decide(own) == [STORED] and own.after.startswith("unfrozen_parameters:\n")


def test_few_of_its_words_are_enough() -> None:
    """A short file was read as a Trainer's, to whom keys with the prefix are nothing."""
    text = "base_model: some/llama-8b\nbf16: auto\nfsdp: [full_shard, auto_wrap]\n"
    text += "fsdp_config:\n  fsdp_offload_params: true\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    assert section_of(migrated(text))["cpu_offload"] is True


def test_a_misspelt_key_is_a_decision_and_a_word_for_nothing_goes() -> None:
    """`transformer_layer_class` was passed over, and the layers were one unit each only by luck."""
    near = migrated(AROUND + OF_TODAY + "  offload_param: true\n")
    assert [each.hint for each in near.blocking] == ["did you mean offload_params?"]
    far = migrated(AROUND + OF_OLD + "  zzz: 1\n", to="axolotl")
    assert keys_to_decide(far) == [STORED] and "zzz" not in far.after


def test_fsdp1_becomes_fsdp2_in_axolotls_own_words() -> None:
    """The page on several GPUs says what to write; comments and all other keys stay."""
    migration = migrated(AROUND + RECOMPUTED + OF_OLD + SPECIAL, to="axolotl")
    assert keys_to_decide(migration) == [STORED]
    assert (
        migration.after
        == AROUND
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
        + SPECIAL
    )
    assert not migrated(migration.after, to="axolotl").is_changed


def test_what_words_say_of_old_is_written_out() -> None:
    """Without `fsdp` its offload, its wrapping and full checkpoints would be gone."""
    text = AROUND + "fsdp:\n  - shard_grad_op\n  - auto_wrap\n  - offload\n"
    migration = migrated(text, to="axolotl")
    values = yaml.safe_load(migration.after)
    assert "fsdp" not in values and values["fsdp_version"] == 2
    assert values["fsdp_config"] == {
        "reshard_after_forward": False,
        "state_dict_type": "FULL_STATE_DICT",
        "offload_params": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }


@pytest.mark.parametrize(
    ("settings", "new"),
    [
        ("fsdp_offload_params: true", {"offload_params": True, "reshard_after_forward": True}),
        ("fsdp_sharding_strategy: FULL_SHARD", {"reshard_after_forward": True}),  # nothing of it stays
        ("zzz: 1", {"reshard_after_forward": True}),
    ],
)
def test_settings_without_words_get_their_version(settings: str, new: dict[str, Any]) -> None:
    """Nothing of the file says FSDP1, and two edits at its end stood in each other's way."""
    migration = migrated(f"{AROUND}fsdp_config:\n  {settings}\n", to="axolotl")
    values = yaml.safe_load(migration.after)
    assert keys_to_decide(migration) == [STORED] and values["fsdp_version"] == 2
    assert values["fsdp_config"] == new | {"state_dict_type": "FULL_STATE_DICT"}
    assert "base_model: some/llama-8b  # a comment\n" in migration.after


def test_another_systems_run_in_axolotls_words_reads_back() -> None:
    """What --to axolotl writes would shard otherwise than the run that it came from."""
    text = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n"
    text += "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: true\n"
    text += "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    text += "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_dp_replicate_size: 2\n"
    migration = migrate_text(text, "run.yaml", to="axolotl")
    values = yaml.safe_load(migration.after)
    assert keys_to_decide(migration) == [STORED]  # which accelerate upcasts, and axolotl's FSDP2 does not
    assert values["fsdp_config"]["transformer_layer_cls_to_wrap"] == "Block"
    run = run_of(migration.after)
    assert run.config.mesh == MeshSpec.of_degrees(4, 2) and run.config.cpu_offload
    assert run.state_dict_type == "sharded" and run.precision == "amp_bf16" and run.max_grad_norm is None


def test_what_no_word_of_axolotls_holds_is_told() -> None:
    """`exact: the same device mesh`, and a run of two shards was one of as many as there are ranks."""
    text = "fsdp_config: {data_parallel_shard_degree: 2, activation_checkpointing: true}\n"
    found = {each.key: each for each in migrate_text(text, "run.yaml", to="axolotl").sections[0].findings}
    told = [each for each in found.values() if each.outcome is Outcome.APPROXIMATE]
    assert any("as many ranks as it is launched with" in each.reason and each.hint == "launch 2" for each in told)
    assert any("without reentering" in each.reason for each in told)
    (section,) = migrate_text("fsdp_config: {activation_cpu_offload: true}\n", "run.yaml", to="axolotl").sections
    (offload,) = [each for each in section.findings if each.key == "activation_cpu_offload"]
    assert offload.outcome is Outcome.APPROXIMATE and "recomputes" in offload.reason


def test_a_file_without_fsdp_is_no_section() -> None:
    """Most of its files leave fsdp empty; each would be a finding."""
    dialect = AxolotlDialect()
    for keys in ("fsdp:\nfsdp_config:\n", "deepspeed: ds.json\nfsdp:\n", ""):
        assert dialect.sections(yaml.safe_load(AROUND + keys)) == []
