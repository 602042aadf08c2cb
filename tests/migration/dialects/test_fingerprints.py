"""Files of systems that are recognized but not migrated, whose section has the same name as another system's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.commands import run_here

from composer_fsdp2.migration.dialects.fingerprints import FOREIGN_SYSTEMS, foreign_system
from composer_fsdp2.migration.files import Destination, migrate_files, sources_of
from composer_fsdp2.migration.migrate import ForeignSystemError, migrate_text

# A small file of each, with the keys of the system's examples.
FILES = {
    "veRL": """
actor_rollout_ref:
  actor:
    strategy: fsdp2
    fsdp_config: {fsdp_size: -1, param_offload: false, optimizer_offload: false}
""",
    "torchtune": """
model:
  _component_: torchtune.models.llama3.llama3_8b
fsdp_cpu_offload: false
fsdp_reshard_after_forward: true
""",
    "Lightning": """
trainer:
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {sharding_strategy: FULL_SHARD, cpu_offload: false}
""",
    "DeepSpeed": '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}\n',
    "DeepSpeed without ZeRO": '{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}}\n',
    "axolotl with DeepSpeed": """
base_model: some/model
datasets: [{path: some/data, type: alpaca}]
micro_batch_size: 1
deepspeed: deepspeed_configs/zero3_bf16.json
fsdp:
""",
    "ROLL with DeepSpeed or Megatron": """
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1}
actor_infer:
  strategy_args: {strategy_name: vllm}
""",
    "accelerate without FSDP": """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 8
""",
    "axolotl without FSDP": """
base_model: some/model
datasets: [{path: some/data, type: alpaca}]
micro_batch_size: 1
fsdp:
deepspeed:
""",
    "LLM Foundry without fsdp_config": """
max_seq_len: 2048
model: {name: mpt_causal_lm, d_model: 64}
max_duration: 10ba
global_train_batch_size: 8
""",
    "a Trainer of transformers with DeepSpeed": """
output_dir: out
per_device_train_batch_size: 1
deepspeed: ds_config.json
""",
    "a Trainer of transformers without fsdp": """
output_dir: out
per_device_train_batch_size: 1
bf16: true
""",
}
# Without keys of FSDP or DeepSpeed: in a folder they are never opened.
NOT_OPENED = {"Lightning", "LLM Foundry without fsdp_config", "a Trainer of transformers without fsdp"}
OTHERS = {
    "veRL": [
        "model: {strategy: fsdp, fsdp_config: {model_dtype: fp32, wrap_policy: {min_num_params: 0}}}",
        "_target_: verl.workers.config.FSDPEngineConfig\nfsdp_size: -1",
    ],
    "Lightning": [
        "trainer: {strategy: fsdp, devices: 8}",
        "strategy: {_target_: pytorch_lightning.strategies.FSDPStrategy}",
        "trainer: {strategy: {class_path: FSDPStrategy}}",
        "trainer: {strategy: FSDPStrategy}",
        "fit: {trainer: {strategy: fsdp}}",
    ],
    "torchtune": ["model: {_component_: torchtune.models.llama3.llama3_8b}"],
}


def test_each_is_refused_by_name_with_a_way_out() -> None:
    """The error 'fsdp_size: did you mean fsdp_tp_size?' pointed veRL users to a Composer key."""
    assert set(FILES) == {system.name for system in FOREIGN_SYSTEMS}
    for name, text in [*FILES.items(), *((name, text) for name, texts in OTHERS.items() for text in texts)]:
        with pytest.raises(ForeignSystemError) as raised:
            migrate_text(text, "run.yaml", allow_unreferenced=False)
        advice = next(system.advice for system in FOREIGN_SYSTEMS if system.name == name)
        message = f"run.yaml:1:1: this is a configuration of {name}, which is not read here: {advice}"
        assert str(raised.value) == message and "\n" not in message


def test_who_says_whose_file_it_is_is_believed() -> None:
    """A fingerprint can be wrong, so an explicit dialect takes precedence."""
    text = "fsdp_config: {sharding_strategy: FULL_SHARD}\nlogger: {_component_: torchtune.logger}\n"
    assert migrate_text(text, dialect="composer").exit_code == 0
    with_theirs = migrate_text("fsdp_config: {sharding_strategy: FULL_SHARD, fsdp_size: 2}\n", dialect="composer")
    assert [each.place for each in with_theirs.sections] == ["fsdp_config"]


def test_a_file_of_ours_is_nobody_elses() -> None:
    """Otherwise files that can be migrated would be refused."""
    root = Path(__file__).resolve().parents[3] / "yamls"
    for path in root.rglob("*.yaml"):
        assert foreign_system(yaml.safe_load(path.read_text())) is None, path
    for values in (
        {"deepspeed_config": {"train_micro_batch_size_per_gpu": 1}, "distributed_type": "DEEPSPEED"},
        {"train_micro_batch_size_per_gpu": 1, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
        {"fit": {"trainer": {"strategy": "ddp"}}, "trainer": {"strategy": {"class_path": "DDPStrategy"}}},
        {"strategy": "fsdp", "class_path": "FSDPStrategy"},
        {"actor_train": {"strategy_name": "fsdp2_train"}, "reference": {"strategy_name": "megatron_train"}},
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}},
        {"base_model": "m", "fsdp": ["full_shard"], "deepspeed": "zero3.json"},
        {"output_dir": "out", "per_device_train_batch_size": 1, "fsdp": "full_shard", "deepspeed": "zero3.json"},
    ):
        assert foreign_system(values) is None, values
    for values in ([], None, "text", {}, {1: 2}, {"trainer": None}, {"trainer": {"strategy": None}}):
        assert foreign_system(values) is None


def test_in_a_folder_they_are_told_of_and_end_nothing(tmp_path: Path) -> None:
    """A file of another system must neither fail a CI job on a folder, nor be skipped as if it were migrated."""
    texts = [*FILES.values(), *(text for others in OTHERS.values() for text in others)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text("fsdp_config: {sharding_strategy: FULL_SHARD}\n")
    results = {Path(each.path).name: each for each in migrate_files(sources_of([tmp_path]), Destination())}
    assert max(each.exit_code for each in results.values()) == 0
    told = [each.error.partition(" of ")[2].partition(", which")[0] for each in results.values() if each.is_foreign]
    assert Counter(told) == {name: 1 + len(OTHERS.get(name, ())) for name in FILES if name not in NOT_OPENED}
    of_folder = run_here(tmp_path, "migrate", tmp_path, "--check")
    assert of_folder.code == 0 and "this is a configuration of veRL" in of_folder.err
    of_file = run_here(tmp_path, "migrate", tmp_path / "0.yaml", "--check")
    assert of_file.code == 2 and "strategy: fsdp2" in of_file.err
