"""The pairs of ``yamls/composer``: configurations of scripts that make Composer's Trainer themselves."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from composer_fsdp2 import plan_sharding, translate
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.migration.migrate import migrate_text

pytestmark = pytest.mark.composer

FOLDER = Path(__file__).resolve().parents[2] / "yamls" / "composer"
LEFT, RIGHT = (FOLDER / f"gpt2-script-fsdp{version}.yaml" for version in (1, 2))
SECTIONS = ("trainer", "evaluation")  # the second one is an alias of the first


def section(path: Path, place: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())[place]["parallelism_config"]["fsdp"]
    return values


def config_of(path: Path, place: str) -> ShardingConfig:
    config = translate(section(path, place), precision="amp_fp16", device="cpu").config
    assert config is not None
    return config


def test_left_side_becomes_the_right_side():
    """A section that two Trainers share through an anchor is rewritten once, and stays shared."""
    migration = migrate_text(LEFT.read_text(), LEFT.name)
    assert migration.exit_code == 0, str(migration)
    assert [report.place for report in migration.sections] == [f"{at}.parallelism_config.fsdp" for at in SECTIONS]
    assert migration.after == RIGHT.read_text(), migration.diff()
    again = migrate_text(migration.after, RIGHT.name)
    assert (again.exit_code, again.is_changed) == (0, False), again.diff()


def test_comments_are_kept():
    """Why a number is what it is stands in a comment."""
    left, right = (re.findall(r"(?:^|\s)(#.*)$", path.read_text(), re.MULTILINE) for path in (LEFT, RIGHT))
    assert len(left) > 2
    assert right == left


@pytest.mark.parametrize("place", SECTIONS)
def test_both_sides_ask_for_the_same(place: str):
    """The run is the one that was."""
    assert config_of(LEFT, place) == config_of(RIGHT, place)


def test_composer_takes_the_left_side():
    """A left side that Composer itself refuses would be nobody's run."""
    from composer.utils import FSDPConfig, ParallelismConfig

    config = ParallelismConfig(fsdp=FSDPConfig(**section(LEFT, "trainer")))
    assert config.fsdp is not None
    names = {name for name in section(LEFT, "trainer") if not hasattr(FSDPConfig(), name)}
    assert names == set()


def test_right_side_plans_on_its_model():
    """GPT-2's twelve blocks are units, and its tied embedding is one parameter in the unit above them."""
    from composer.models import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        inner = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=32, n_head=4, vocab_size=128, n_positions=64))
    inner.fsdp_wrap_fn = inner.activation_checkpointing_fn = lambda module: type(module).__name__ == "GPT2Block"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no tokenizer
        model = HuggingFaceModel(inner)
    plan = plan_sharding(model, config_of(RIGHT, "trainer"))
    blocks = [f"model.transformer.h.{number}" for number in range(12)]
    assert [unit.name for unit in plan.units] == [*blocks, "model"]
    names = [name for unit in plan.units for spec in unit.parameters for name in spec.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert plan.tie_groups == (("model.transformer.wte.weight", "model.lm_head.weight"),)
    assert list(plan.checkpointed) == blocks
    assert {unit.mixed_precision.reduce_dtype for unit in plan.units} == {"float16"}
    assert {unit.mixed_precision.buffer_dtype for unit in plan.units} == {"float32"}


# --- with layers split by the script's plan

SPLIT_LEFT, SPLIT_RIGHT = (FOLDER / f"llama-tp-script-fsdp{version}.yaml" for version in (1, 2))


def test_layers_split_by_a_script_stay_split():
    """A script's own plan is Composer's word as before: the file needs no decision, and says the same."""
    migration = migrate_text(SPLIT_LEFT.read_text(), SPLIT_LEFT.name)
    assert migration.exit_code == 0 and migration.after == SPLIT_RIGHT.read_text(), migration.diff()
    again = migrate_text(migration.after, SPLIT_RIGHT.name)
    assert (again.exit_code, again.is_changed) == (0, False), again.diff()
    before, after = (yaml.safe_load(path.read_text())["trainer"] for path in (SPLIT_LEFT, SPLIT_RIGHT))
    assert before["parallelism_config"]["tp"] == after["parallelism_config"]["tp"] == {"tensor_parallel_degree": 2}
    assert config_of(SPLIT_LEFT, "trainer") == config_of(SPLIT_RIGHT, "trainer")


def test_right_side_plans_its_split_layers():
    """Sixteen layers are units, on a mesh whose last axis splits what the script's plan names."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    with torch.device("meta"):
        inner = LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, **sizes))
    inner.fsdp_wrap_fn = lambda module: type(module).__name__ == "LlamaDecoderLayer"
    model = torch.nn.ModuleDict({"model": inner})
    degree = yaml.safe_load(SPLIT_RIGHT.read_text())["trainer"]["parallelism_config"]["tp"]["tensor_parallel_degree"]
    given = section(SPLIT_RIGHT, "trainer")
    config = translate(given, precision="amp_bf16", device="cpu", world_size=8, tensor_parallel_degree=degree).config
    assert config is not None and config.mesh.shape == (4, 2)
    mlp = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    layer_plan = {f"model.model.layers.*.mlp.{name}": style for name, style in mlp.items()}
    plan = plan_sharding(model, config, tensor_parallel=layer_plan)
    layers = [f"model.model.layers.{number}" for number in range(16)]
    assert [unit.name for unit in plan.units] == [*layers, "model"]
    assert sorted(each.path for each in plan.split) == sorted(f"{path}.mlp.{name}" for path in layers for name in mlp)
