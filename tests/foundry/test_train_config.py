"""The root-level keys of a training file that LLM Foundry itself accepts, compared with the report of ``migrate``."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
import yaml
from omegaconf import MissingMandatoryValue
from support.known_runs import FOLDER, FOUNDRY

from composer_fsdp2.config.findings import Origin
from composer_fsdp2.migration.dialects.composer.launch import MANDATORY, TRAIN_CONFIG
from composer_fsdp2.migration.migrate import migrate_text
from tests.migration.test_whole_runs import FILES

pytestmark = pytest.mark.foundry

FILE = """\
model: {{name: mpt_causal_lm, max_seq_len: 8, seed_of_init: {seed}}}
tokenizer: {{name: gpt2, kwargs: {{model_max_length: 8}}}}
train_loader: {{name: text, dataset: {{max_seq_len: 8}}}}
scheduler: {{name: constant_with_warmup}}
optimizer: {{name: decoupled_adamw}}
max_seq_len: 8
max_duration: 10ba
eval_interval: 5ba
seed: {seed}
global_train_batch_size: 8
device_eval_batch_size: 1
device_train_microbatch_size: 1
precision: amp_bf16
fsdp_config: {{sharding_strategy: FULL_SHARD}}
progress_bar: false
callbacks: {{lr_monitor: {{}}}}
"""
# Root-level keys of LLM Foundry's own files besides those above, by file, and the keys that 0.22 refuses.
REFUSED: dict[str, dict[str, Any]] = {
    "examples/llm/yamls/mosaic_gpt/7b": {
        "data_local": "x",
        "data_remote": None,
        "tokenizer_name": "gpt2",
        "global_seed": 17,
    },
    "scripts/train/yamls/pretrain/mpt-125m": {"data_local": "x", "data_remote": None, "global_seed": 17},
    "scripts/train/yamls/pretrain/mpt-125m-realistic": {
        "data_local": "x",
        "data_remote": "y",
        "global_seed": 17,
        "eos_token_id": 0,
        "num_canonical_nodes": 128,
    },
    "scripts/train/yamls/pretrain/mpt-70b-gaudi2": {"device": "hpu", "data_local": "x", "global_seed": 17},
    "scripts/train/yamls/finetune/mpt-30b-instruct": {
        "tokenizer_name": "gpt2",
        "icl_max_seq_len": 2048,
        "global_seed": 17,
    },
    "scripts/train/finetune_example/mpt-7b-arc-easy--gpu": {"global_seed": 17},
    "mcli/mcli-gauntlet-train": {
        "global_seed": 17,
        "eos_token_id": 0,
        "num_canonical_nodes": 128,
        "model_gauntlet": "x.yaml",
    },
    "a file of 2023 with adapters": {"global_seed": 17, "lora": {"args": {"r": 8}}},
    "scripts/train/yamls/finetune/dbrx-lora-ft": {},
}
TAKEN: dict[str, Any] = {
    "icl_seq_len": 8,
    "icl_subset_num_batches": 2,
    "eval_first": False,
    "eval_subset_num_batches": -1,
    "max_split_size_mb": 512,
    "dist_timeout": 3600,
    "autoresume": False,
    "load_weights_only": True,
    "save_overwrite": True,
    "save_num_checkpoints_to_keep": 1,
    "save_interval": "1ep",
    "save_folder": "x",
    "save_filename": "y",
    "python_log_level": "DEBUG",
    "log_to_console": True,
    "console_log_interval": "1ba",
    "loggers": {},
    "algorithms": {},
    "metadata": {"run_group": "x"},
    "code_paths": [],
    "icl_tasks": "eval/yamls/tasks.yaml",
    "eval_loader": [{"name": "text"}],
    "load_path": None,
    "load_ignore_keys": None,
    "save_ignore_keys": None,
    "log_config": True,
    "only_hf_checkpoint": False,
    "only_composer_checkpoint": False,
    "accumulate_train_batch_on_tokens": True,
    "run_name": None,
    "variables": {"lr": 1},
}


def config_of(text: str) -> dict[str, Any]:
    """The configuration at the start of LLM Foundry's train().

    Raises:
        ValueError: Raised by LLM Foundry.
    """
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS, TrainConfig, make_dataclass_and_log_config
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return make_dataclass_and_log_config(config, TrainConfig, TRAIN_CONFIG_KEYS, transforms="all")[0]


def refused_by_foundry(text: str) -> set[str]:
    try:
        config_of(text)
    except ValueError as error:
        _, names, _ = re.split(r"Unused parameters (\[.*?\])", str(error))
        return set(ast.literal_eval(names))
    return set()


def refused_here(text: str) -> dict[str, str]:
    """For each refused key, its replacement in the report."""
    findings = migrate_text(text, to="composer").sections[0].findings
    return {each.key: each.target for each in findings if each.origin is Origin.WRITING}


def test_table_is_llm_foundrys():
    """A release with another field would make the report wrong."""
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    assert TRAIN_CONFIG == TRAIN_CONFIG_KEYS


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_llm_foundry_refuses(name: str):
    """The run would fail at its start, after waiting for machines."""
    given = REFUSED[name]
    text = FILE.format(seed='"${global_seed}"' if "global_seed" in given else 17)
    text += yaml.safe_dump(given | TAKEN)
    assert refused_by_foundry(text) == set(refused_here(text)) == set(given)


@pytest.mark.parametrize("name", [name for name, given in REFUSED.items() if "global_seed" in given])
def test_way_out(name: str):
    """The replacement in the report is accepted, and configures the same run."""
    text = FILE.format(seed='"${global_seed}"')
    before = text + yaml.safe_dump(REFUSED[name])
    values = yaml.safe_load(before)
    for key, target in refused_here(before).items():
        value = values.pop(key)
        outer, _, inner = target.rpartition(".")
        (values.setdefault(outer, {}) if outer else values)[inner] = value
    after = yaml.safe_dump(values).replace("${global_seed}", "${variables.global_seed}")
    config = config_of(after)
    assert config["seed"] == config["model"]["seed_of_init"] == 17
    assert refused_here(after) == {}


@pytest.mark.parametrize("name", FOUNDRY)
@pytest.mark.parametrize("side", ["fsdp1", "fsdp2"])
def test_files_of_this_repository(name: str, side: str):
    """yamls/README.md claims that LLM Foundry accepts both sides."""
    text = (FOLDER / f"{name}-{side}.yaml").read_text()
    assert refused_by_foundry(text) == set(refused_here(text)) == set()
    assert "launch" in {each.key for each in migrate_text(text, to="composer").sections[0].findings}


# --- files of other systems

# Values of the right type for the keys that a user adds.
ADDED: dict[str, Any] = {
    "model": {"name": "mpt_causal_lm", "max_seq_len": 8},
    "tokenizer": {"name": "gpt2", "kwargs": {"model_max_length": 8}},
    "train_loader": {"name": "text", "dataset": {"max_seq_len": 8}},
    "optimizer": {"name": "decoupled_adamw"},
    "scheduler": {"name": "constant_with_warmup"},
    "max_duration": "10ba",
    "max_seq_len": 8,
    "global_train_batch_size": 8,
    "device_train_microbatch_size": 1,
}


def migrated(of: str) -> tuple[dict[str, Any], list[str]]:
    """The mapping with the new section, and the keys that the report lists as missing."""
    text, name = FILES[of]
    migration = migrate_text(text, name, to="composer")
    (told,) = [each for each in migration.sections[0].findings if each.key == "LLM Foundry"]
    values = yaml.safe_load(migration.after)
    values = values.get("actor_train", values)
    others = [key for key in values if key not in TRAIN_CONFIG]
    assert all(key in told.hint for key in others[:4]) and bool(others) == bool(told.hint)
    return {key: value for key, value in values.items() if key not in others}, told.target.split(", ")


@pytest.mark.parametrize("of", ["huggingface", "axolotl", "torchtitan", "roll"])
def test_other_systems_files_train_with_the_keys_that_the_report_names(of: str):
    """Each of these keys is necessary, and no other is: without one, the run would fail at its start."""
    values, missing = migrated(of)
    whole = values | {key: ADDED[key] for key in missing}
    config = config_of(yaml.safe_dump(whole))
    assert config["optimizer"]["lr"] == values["optimizer"]["lr"]
    assert config["device_train_microbatch_size"] == values["device_train_microbatch_size"]
    for key in MANDATORY:
        with pytest.raises((KeyError, MissingMandatoryValue)):
            config_of(yaml.safe_dump({name: value for name, value in whole.items() if name != key}))


@pytest.mark.parametrize("of", ["huggingface", "axolotl", "torchtitan", "roll"])
def test_the_optimizer_is_llm_foundrys(of: str):
    """Its registry has another name for the optimizer, or its class lacks such an option."""
    from llmfoundry.utils.builders import build_optimizer

    options = dict(migrated(of)[0]["optimizer"])
    optimizer = build_optimizer(torch.nn.Linear(2, 2), options.pop("name"), options)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in ("lr", "eps", "weight_decay")} == {
        name: migrated(of)[0]["optimizer"][name] for name in ("lr", "eps", "weight_decay")
    }
