"""Batches, steps and the optimizer of a run, whose keys are outside the sharding section."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import yaml
from composer.optim import DecoupledAdamW
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from composer_fsdp2.migration import training
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import OF_TRAINING
from tests.migration.file_cases import (
    APPROXIMATE,
    EXACT,
    NEEDS_DECISION,
    UNNEEDED,
    UNSUPPORTED,
    Case,
    each_case,
    read_first,
)

TRAINER = """\
fsdp: full_shard auto_wrap
fsdp_config: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 1000
num_train_epochs: 3
learning_rate: 2e-5
weight_decay: 0.1
output_dir: out
"""
AXOLOTL = """\
base_model: m
datasets: [{path: d, type: alpaca}]
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
learning_rate: 0.0002
adam_beta2: 0.95
bf16: true
fsdp_version: 2
dp_shard_size: 4
dp_replicate_size: 2
fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap: LlamaDecoderLayer}
"""
TORCHTITAN = """\
[parallelism]
data_parallel_shard_degree = 8

[training]
local_batch_size = 2
global_batch_size = 64
steps = 1000

[optimizer]
name = "AdamW"
lr = 3e-4
"""
ROLL = """\
actor_train:
  model_args: {model_type: llama}
  training_args:
    learning_rate: 1.0e-6
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 32
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 8}
  device_mapping: list(range(0,8))
"""
COMPOSER = """\
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, data_parallel_shard_degree: 8}
device_train_microbatch_size: 2
global_train_batch_size: 64
max_duration: 1000ba
optimizer: {name: decoupled_adamw, lr: 3.0e-4, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 3.0e-05}
"""
FILES = {
    "huggingface": (TRAINER, "run.yaml"),
    "axolotl": (AXOLOTL, "run.yaml"),
    "torchtitan": (TORCHTITAN, "run.toml"),
    "roll": (ROLL, "run.yaml"),
    "composer": (COMPOSER, "run.yaml"),
}
ADAMW = {"name": "decoupled_adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
REST = "batches, steps and optimizer"

CASES = {
    "a Trainer's run would begin with another batch, length and optimizer": Case(
        file=TRAINER,
        blocking=[],
        says={
            "device_train_microbatch_size": 4,
            "max_duration": "1000ba",
            "optimizer": {**ADAMW, "lr": 2e-5, "weight_decay": 2e-6},
            "learning_rate": None,
            "num_train_epochs": None,
            "output_dir": "out",
        },
        told={
            "num_train_epochs": (UNNEEDED, "max_steps"),
            # 4 rows x 2 microbatches on each rank, for any number of ranks.
            "microbatches of a step": (APPROXIMATE, "global_train_batch_size", "times 2 times"),
            "weight decay": (APPROXIMATE, "biases", "param_groups"),
            "LLM Foundry": (APPROXIMATE, "model, tokenizer, train_loader, scheduler, max_seq_len", "output_dir"),
        },
    ),
    "where the file has the number of ranks, so it has the global batch": Case(
        file=AXOLOTL,
        blocking=[],
        says={
            "device_train_microbatch_size": 2,
            "global_train_batch_size": 2 * 4 * 8,
            "max_duration": "3ep",
            "optimizer": {**ADAMW, "lr": 2e-4, "betas": [0.9, 0.95]},
            "micro_batch_size": None,
        },
        untold=("microbatches of a step", "weight decay"),
    ),
    "TorchTitan's own defaults hold for what is implicit": Case(
        file=TORCHTITAN,
        name="run.toml",
        blocking=[],
        says={
            "device_train_microbatch_size": 2,
            "global_train_batch_size": 64,
            "max_duration": "1000ba",
            "optimizer": {**ADAMW, "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 3e-5},  # 0.1 x 3e-4
        },
        told={"optimizer.lr": (EXACT,), "training.steps": (EXACT,)},
    ),
    "TorchTitan's global batch of -1 is one microbatch of each rank": Case(
        file=TORCHTITAN.replace("= 64", "= -1"), name="run.toml", says={"global_train_batch_size": 2 * 8}
    ),
    "a ROLL worker's training_args": Case(
        file=ROLL,
        says={
            "actor_train.device_train_microbatch_size": 1,
            "actor_train.global_train_batch_size": 1 * 32 * 8,
            "actor_train.optimizer": {**ADAMW, "lr": 1e-6},
        },
        told={"LLM Foundry": (APPROXIMATE, "max_duration")},
    ),
    "a ROLL worker that infers has none": Case(
        file=ROLL.replace("fsdp2_train", "fsdp2_infer"), says={"actor_train.optimizer": None}, blocking=[]
    ),
    "state in 8 bits is not LLM Foundry's": Case(
        file=AXOLOTL.replace("adamw_torch", "paged_adamw_8bit"),
        blocking=[],
        says={"optimizer.name": "decoupled_adamw"},
        told={"optimizer": (APPROXIMATE, "paged_adamw_8bit", "memory")},
    ),
    "an optimizer that LLM Foundry lacks stays for the user to carry over": Case(
        file=f"{TRAINER}optim: adafactor\n",
        blocking=[],
        says={"optimizer": None, "optim": "adafactor", "learning_rate": "2e-5"},
        told={"(optimizer)": (APPROXIMATE, "adafactor", "lr: ...")},
        untold=("optim", "learning_rate"),
    ),
    "no AdamW, whatever its name": Case(file=f"{TRAINER}optim: galore_adamw\n", says={"optimizer": None}),
    "Composer refuses half an epoch": Case(
        file=TRAINER.replace("max_steps: 1000", "max_steps: -1").replace("epochs: 3", "epochs: 2.5"),
        says={"max_duration": None, "num_train_epochs": 2.5},
        told={"duration": (APPROXIMATE, "2.5ep", "ba")},
    ),
    "a value that only the command knows stops nothing": Case(
        file=ROLL.replace("1.0e-6", "${oc.env:A_RATE_THAT_IS_UNSET}").replace("size: 1\n", "size: ${rows}\n"),
        blocking=[],
        says={"actor_train.optimizer": None, "actor_train.device_train_microbatch_size": None},
    ),
    "nor does auto": Case(
        file=TRAINER.replace("size: 4", "size: auto"), blocking=[], says={"device_train_microbatch_size": None}
    ),
    "an optimizer that stood beside the section is told": Case(
        file=ROLL.replace("  model_args:", "  optimizer: mine\n  model_args:"),
        says={"actor_train.optimizer": {**ADAMW, "lr": 1e-6}},
        told={"(optimizer)": (APPROXIMATE, "stood there already")},
    ),
    **{
        f"weights in {bits} bits are never carried over in silence": Case(
            file=f"{TRAINER}load_in_{bits}bit: true\n",
            blocking=["quantized weights"],
            told={"quantized weights": (UNSUPPORTED, "fully_shard")},
        )
        for bits in (4, 8)
    },
    "axolotl takes a Trainer's own": Case(
        file=TRAINER,
        to="axolotl",
        says={
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 1000,
            "optimizer": "adamw_torch",
            "learning_rate": 2e-5,
            "weight_decay": 0.1,
        },
        untold=(REST, "weight decay"),
        keeps=OF_TRAINING,
    ),
    "axolotl counts microbatches": Case(
        file=TORCHTITAN,
        name="run.toml",
        to="axolotl",
        says={"gradient_accumulation_steps": 4, "max_steps": 1000, "weight_decay": 0.1, "adam_beta2": 0.95},
        told={"weight decay": (APPROXIMATE, "norms")},
        untold=(REST,),
    ),
    "TorchTitan counts rows": Case(
        file=COMPOSER,
        to="torchtitan",
        has=("local_batch_size = 2\n", "global_batch_size = 64\n", "steps = 1000\n", 'name = "AdamW"\nlr = 0.0003\n'),
        untold=(REST,),
        keeps=OF_TRAINING,
    ),
    "TorchTitan trains for no epochs": Case(
        file=COMPOSER.replace("1000ba", "3ep"), to="torchtitan", told={REST: (APPROXIMATE, "training.steps")}
    ),
    **{
        f"{to} has none of it in a file, in one line of the report": Case(
            file=COMPOSER, to=to, told={REST: (APPROXIMATE, place)}, untold=("optimizer", "duration")
        )
        for to, place in (("accelerate", "script"), ("roll", "training_args"))
    },
    "what stays in a Trainer's file is not told": Case(
        file=TRAINER,
        to="accelerate",
        blocking=[],
        says={"per_device_train_batch_size": 4, "learning_rate": "2e-5", "max_steps": 1000},
        untold=("per_device_train_batch_size", "max_steps", "learning_rate", "weight_decay", REST, "weight decay"),
    ),
    "nor in axolotl's": Case(
        file=AXOLOTL,
        to="axolotl",
        after="file",
        untold=("micro_batch_size", "num_epochs", "optimizer", "learning_rate", "adam_beta2", REST),
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("of", FILES)
def test_composers_own_reader_finds_what_is_written(of: str):
    """A field that is written and not read back would be reported as lost; one that is neither would be missing
    silently."""
    text, name = FILES[of]
    before, after = read_first(text, name).run, read_first(migrate_text(text, name, to="composer").after).run
    assert before is not None and after is not None
    for field in {*OF_TRAINING} - {"num_microbatches", "undecayed"}:
        if getattr(before.with_batches(), field) is not None:
            assert getattr(after, field) == getattr(before.with_batches(), field), field


def test_decoupled_weight_decay_is_torchs():
    """Composer's option of the same name would decay 50,000 times as much at this learning rate."""
    given = read_first(TRAINER).run
    assert given is not None and given.optimizer is not None
    written = yaml.safe_load(migrate_text(TRAINER, to="composer").after)["optimizer"]
    options = {name: value for name, value in written.items() if name != "name"}
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float64)) for _ in range(2))
    optimizers: list[torch.optim.Optimizer] = [
        DecoupledAdamW([ours], **options),
        torch.optim.AdamW([theirs], lr=2e-5, weight_decay=0.1),  # a Trainer's other defaults are torch's
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, 20) for each in optimizers]
    for step in range(20):
        for parameter, optimizer, schedule in zip((ours, theirs), optimizers, schedules, strict=True):
            parameter.grad = torch.sin(parameter.detach() * (step + 1))
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_defaults_are_transformers():
    """Implicit defaults are written explicitly, since Composer's differ."""
    defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(TrainingArguments)}
    found = {option: defaults[key] for key, option in training.OF_TRAINERS.items()}
    assert {**found, "name": None} == {**training.DEFAULTS, "name": None}
    of_others = {"adamw_hf", "AdamW", "decoupled_adamw"}  # transformers before 4.46, TorchTitan, LLM Foundry
    assert {training.ADAMW, *training._ALIKE} - of_others <= {each.value for each in OptimizerNames}


def test_every_system_has_a_file_here():
    assert set(FILES) == set(DIALECTS)


# --- effects of other keys

SHARED = COMPOSER.replace("shard_degree: 8", "shard_degree: 8, context_parallel_degree: 2, broadcast_batch: first")
UNFROZEN = AXOLOTL + "unfrozen_parameters: [lm_head.weight$]\n"
CASES_BESIDE = {
    "axolotl takes the accumulation from a rank's batch": Case(
        file=AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 32"),
        says={"global_train_batch_size": 32 * 8},
    ),
    "axolotl fills the ranks that are left with replicas": Case(
        file=AXOLOTL.replace("dp_replicate_size: 2\n", ""),
        says={"fsdp_config.data_parallel_shard_degree": 4},
        run={"config.mesh.shape": (-1, 4)},
        has=("data_parallel_replicate_degree: -1",),
    ),
    "a Trainer's older name goes before": Case(
        file=TRAINER + "per_gpu_train_batch_size: 2\n", says={"device_train_microbatch_size": 2}
    ),
    "accelerate's number of microbatches": Case(
        file=TRAINER.replace(
            "gradient_accumulation_steps: 2", "accelerator_config: {gradient_accumulation_kwargs: {num_steps: 4}}"
        ),
        run={"num_microbatches": 4},
    ),
    "AdamW by one learning rate is another run": Case(
        file=AXOLOTL + "embedding_lr: 1.0e-5\n",
        says={"optimizer": "adamw_torch"},
        told={"optimizer": (APPROXIMATE, "adamw_torch with embedding_lr")},
    ),
    "rows of ranks that share a batch count once": Case(file=SHARED, to="torchtitan", has=("global_batch_size = 32",)),
    "groups of parameters": Case(
        file=COMPOSER.replace("3.0e-05}", "3.0e-05, disable_grad: [embed]}"),
        to="torchtitan",
        told={"(batches, steps and optimizer)": (APPROXIMATE, "AdamW")},
    ),
    "a rate that is not known here": Case(
        file=COMPOSER.replace("lr: 3.0e-4", 'lr: "${oc.env:NO_SUCH_VARIABLE}"'),
        to="torchtitan",
        told={"(batches, steps and optimizer)": (APPROXIMATE,)},
    ),
    "a batch that is not known here": Case(
        file=COMPOSER.replace("batch_size: 64", "batch_size: ${oc.env:NO_SUCH_VARIABLE}"),
        to="torchtitan",
        told={"global_train_batch_size": (NEEDS_DECISION, "cannot be resolved")},
    ),
    "in its own system nothing of it changes": Case(
        file=COMPOSER.replace("microbatch_size: 2", "microbatch_size: auto"), untold=("device_train_microbatch_size",)
    ),
    "axolotl requires a rate": Case(file=TRAINER.replace("2e-5", "5e-5"), to="axolotl", says={"learning_rate": 5e-5}),
    "options of another library's optimizer": Case(
        file=TRAINER + "optimizer: {type: AdamW, params: {lr: auto}}\n",
        has=("name: decoupled_adamw",),
        says={"optimizer.type": None, "optimizer.params": None},
    ),
    "a plugin chooses what is trained": Case(
        file=AXOLOTL + "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n",
        told={"trained parameters": (NEEDS_DECISION, "train_only")},
    ),
    "axolotl trains what matches beside an adapter": Case(
        file=UNFROZEN + "adapter: lora\n", told={"unfrozen_parameters": (NEEDS_DECISION, "adapter")}
    ),
    "a pattern that axolotl would read otherwise": Case(
        file="fsdp_config: {train_only: ['.*norm']}\n", to="axolotl", told={"train_only": (NEEDS_DECISION, "dot")}
    ),
    "a pattern in axolotl's form": Case(
        file="fsdp_config: {train_only: ['model\\.norm']}\n",
        to="axolotl",
        says={"unfrozen_parameters": ["model.norm"]},
        keeps=("config.train_only",),
    ),
}


@each_case(CASES_BESIDE)
def test_beside_other_keys(case: Case) -> None:
    case.check()
