"""LLM Foundry's train_from_yaml inside fsdp2(): the YAML of an FSDP1 run trains on FSDP2 unchanged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback
from support.commands import LAUNCHERS, run_all
from support.foundry_runs import (
    BATCHES,
    SAVED_AT,
    YAML,
    TrainedYaml,
    assert_alike,
    evaluating,
    hugging_face_yaml,
    read_losses,
    surroundings,
    train,
)
from support.oracle import FSDP1, FSDP2, Under, few_modules
from support.ranks import run_ranks
from support.trainers import largest_difference

from composer_fsdp2.compat.install import train_from_yaml
from composer_fsdp2.errors import ConfigError

pytestmark = pytest.mark.foundry


# --- MPT from the repository's YAML


def train_and_generate(under: Under, folder: str, name: str) -> tuple[TrainedYaml, list[Any]]:
    """Trains with checkpoints in ``folder``/``name``, evaluations, and texts generated in between."""
    from composer.loggers import Logger

    generating = "{prompts: [The, of any], interval: 2ba, max_new_tokens: 3, do_sample: false, use_cache: true}"
    with mock.patch.object(Logger, "log_table") as log_table:
        trained = train(
            under,
            YAML,
            folder,
            name,
            f"save_folder={folder}/{name}",
            "eval_first=true",
            *evaluating(folder, BATCHES),
            f"callbacks.generate_callback={generating}",
            "callbacks.reader_of_parameters={}",
        )
    return trained, [call.kwargs["rows"] for call in log_table.call_args_list]


def register_reader() -> set[str]:
    """Records the parameter types that a callback sees after the callback that generates, at the same event."""
    from llmfoundry.registry import callbacks

    seen: set[str] = set()
    reader = callback(
        batch_checkpoint=lambda state: seen.update(type(each).__name__ for each in state.model.parameters())
    )
    callbacks.register("reader_of_parameters", func=type(reader))
    return seen


def check_theirs(folder: str) -> tuple[TrainedYaml, list[Any]]:
    register_reader()
    return train_and_generate(FSDP1, folder, "fsdp1")


@pytest.fixture(scope="module")
def of_fsdp1(folder: str) -> tuple[TrainedYaml, list[Any]]:
    """The results of the YAML under FSDP1, and the texts; its checkpoints are in ``folder``/fsdp1."""
    return run_ranks(check_theirs, 2, folder)[0]


def check_mpt(folder: str, theirs: TrainedYaml, their_texts: list[Any]) -> None:
    seen = register_reader()
    ours, texts = train_and_generate(FSDP2, folder, "fsdp2")
    assert_alike(ours, theirs, "the YAML")
    assert "LanguageCrossEntropy" in theirs.metrics
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    assert seen == {"DTensor"}, seen
    if dist.get_rank() == 0:
        assert texts == their_texts and len(texts) >= 2, f"{texts}, FSDP1 {their_texts}"
    resumed = train(FSDP2, YAML, folder, "resumed", f"load_path={folder}/fsdp1/ep0-ba{SAVED_AT}")
    difference = largest_difference(resumed.losses, theirs.losses[SAVED_AT:])
    assert difference <= 1e-6, f"{resumed.losses}, {theirs.losses}"


def test_yaml_trains_with_fsdp1s_losses(folder: str, of_fsdp1: tuple[TrainedYaml, list[Any]]):
    """MPT with tied embeddings, activation checkpointing, clipping and streaming data: losses, checkpoint, metrics and
    generated texts are the same, and FSDP1's checkpoint resumes."""
    run_ranks(check_mpt, 2, folder, *of_fsdp1)
    names = {path.relative_to(f"{folder}/fsdp1") for path in Path(folder, "fsdp1").rglob("*")}
    assert names == {path.relative_to(f"{folder}/fsdp2") for path in Path(folder, "fsdp2").rglob("*")}


def test_frozen_parameters_are_not_trained_on_one_rank(folder: str):
    """LLM Foundry ignores fsdp_config on one rank: a debug run would train parameters that are frozen in the real
    one."""
    with pytest.raises(ConfigError, match="freeze on one rank"):
        train_from_yaml(str(YAML), [f"variables.data={folder}", "fsdp_config.freeze=[transformer.wte]"])


def test_one_rank_is_told_that_nothing_is_sharded(folder: str, capsys: pytest.CaptureFixture[str]):
    """A run intended for FSDP2 silently trained with DDP."""
    with mock.patch("llmfoundry.command_utils.train_from_yaml") as foundrys:
        train_from_yaml(str(YAML), [f"variables.data={folder}"])
    assert foundrys.call_count == 1
    told = capsys.readouterr().err
    assert "one rank" in told and f"composer -n 8 -m composer_fsdp2 train {YAML}" in told


@pytest.mark.parametrize("model", ["mpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_meta_initialisation(folder: str, model: str):
    """A model on the meta device is initialized with the same values as under FSDP1, by MPT's own initialization and by
    a Hugging Face model's."""
    run_ranks(check_meta, 2, folder, model)


def check_meta(folder: str, model: str) -> None:
    yaml = YAML if model == "mpt" else write_llama(folder)
    options = ("model.init_device=meta", "max_duration=1ba")
    theirs = train(FSDP1, yaml, folder, f"{model}-meta-fsdp1", *options)
    assert_alike(train(FSDP2, yaml, folder, f"{model}-meta-fsdp2", *options), theirs, f"{model}, meta")


# --- max_duration in tokens: training ends at FSDP1's batch, with and without a resume

DURATION = "3500tok"  # ends in the middle of a batch's tokens


def run_and_end(under: Under, folder: str, name: str, *overrides: str) -> tuple[TrainedYaml, dict[str, Any]]:
    """A run and its final time. The YAML's schedule ends with the duration, so its learning rates also show the end."""
    ended: dict[str, Any] = {}

    def note(trainer: Any) -> None:
        timestamp = trainer.state.timestamp
        ended.update({unit: getattr(timestamp, unit).value for unit in ("epoch", "batch", "sample", "token")})
        ended["rate"] = trainer.state.optimizers[0].param_groups[0]["lr"]
        ended["elapsed"] = float(trainer.state.get_elapsed_duration())

    return train(under, YAML, folder, name, *overrides, after=note), ended


def check_duration(folder: str) -> None:
    options = [f"max_duration={DURATION}", "save_interval=2ba", "scheduler.t_warmup=0.25dur", "model.n_layers=1"]
    runs, names = {}, {}
    for under in (FSDP1, FSDP2):
        place = Path(folder, f"{DURATION}-{under.__name__}")
        runs[under] = run_and_end(under, folder, place.name, *options, f"save_folder={place}")
        names[under] = {path.relative_to(place) for path in place.rglob("*")}
    (theirs, their_end), (ours, our_end) = runs[FSDP1], runs[FSDP2]
    assert_alike(ours, theirs, DURATION)
    assert our_end == their_end, f"{our_end}, FSDP1 {their_end}"
    assert their_end["elapsed"] >= 1, their_end
    assert names[FSDP2] == names[FSDP1]
    resumed, resumed_end = run_and_end(FSDP2, folder, "resumed", *options, f"load_path={place}/ep0-ba2")
    assert resumed_end == their_end, f"resumed: {resumed_end}, FSDP1 {their_end}"
    assert largest_difference(resumed.losses, theirs.losses[2:]) <= 1e-6


def test_runs_end_where_fsdp1s_end(folder: str):
    """A run that ends a batch earlier or later has another schedule, another last checkpoint and another cost."""
    run_ranks(check_duration, 2, folder)


# --- Hugging Face

PROMPT = [5, 17, 200, 3]


def write_llama(folder: str) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return hugging_face_yaml(folder, "llama-yaml", config)


def check_llama(folder: str) -> None:
    yaml = write_llama(folder)
    theirs = train(FSDP1, yaml, folder, "llama-fsdp1")
    mixed = ("model.init_device=mixed", "fsdp_config.state_dict_type=full", f"save_folder={folder}/llama")

    def generate(trainer: Any) -> None:
        tokens = trainer.state.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
        if dist.get_rank() == 0:
            Path(f"{folder}/llama.json").write_text(json.dumps(tokens.tolist()))

    export = (f"hf_checkpointer.save_folder={folder}/llama-hf", f"hf_checkpointer.save_interval={BATCHES}ba")
    ours = train(FSDP2, yaml, folder, "llama-mixed", *mixed, *(f"callbacks.{key}" for key in export), after=generate)
    assert_alike(ours, theirs, "Llama")
    assert {"LlamaForCausalLM", "LlamaDecoderLayer", "LlamaRMSNorm"} <= ours.classes
    assert not [name for name in ours.classes if name.startswith("FSDP")], ours.classes
    # Foundry sets load_monolith_rank0_only.
    saved = f"load_path={folder}/llama/ep0-ba{SAVED_AT}-rank0.pt"
    resumed = train(FSDP2, yaml, folder, "llama-resumed", *mixed, saved, "save_folder=null")
    difference = largest_difference(resumed.losses, theirs.losses[SAVED_AT:])
    assert difference <= 1e-6, f"{resumed.losses}, {theirs.losses}"


def check_llamas_files(folder: str) -> None:
    """On one rank: Composer unpacks the tokenizer into a folder named by ``random``, which is the same on ranks with
    one seed."""
    from composer.models import HuggingFaceModel
    from transformers import AutoModelForCausalLM

    os.chdir(folder)  # it unpacks into the working directory, without removing the files
    path = Path(folder, "llama", f"ep0-ba{BATCHES}-rank0.pt")
    saved = torch.load(path, weights_only=False)["state"]
    config = saved["integrations"]["huggingface"]["model"]["config"]
    assert config["class"] == "transformers.models.llama.modeling_llama.LlamaForCausalLM", config["class"]
    assert config["content"]["architectures"] == ["LlamaForCausalLM"], config["content"]["architectures"]
    model, _ = HuggingFaceModel.hf_from_composer_checkpoint(str(path))
    assert type(model).__name__ == "LlamaForCausalLM", type(model)
    (exported,) = Path(folder, "llama-hf").rglob("config.json")
    assert json.loads(exported.read_text())["architectures"] == ["LlamaForCausalLM"], exported.read_text()
    again = AutoModelForCausalLM.from_pretrained(exported.parent)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, saved["model"][f"model.{name}"]), name
    tokens = again.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False).tolist()
    assert tokens == json.loads(Path(folder, "llama.json").read_text())


def test_hugging_face_model_keeps_its_name(folder: str):
    """Only rank 0 builds the model and reads the file, as YAMLs of large models require. The trained model generates,
    and other programs load it: its files name LlamaForCausalLM, not a class of FSDP."""
    run_ranks(check_llama, 2, folder)
    run_ranks(check_llamas_files, 1, folder)


# --- the command


def check_command(folder: str) -> None:
    from composer_fsdp2.cli.main import main
    from composer_fsdp2.compat import is_installed

    losses = Path(folder) / "command.jsonl"
    arguments = ["composer-fsdp2", "train", str(YAML), *surroundings(folder, losses)]
    with few_modules(), mock.patch.object(sys, "argv", arguments):
        main()
    assert not is_installed()
    dist.barrier()


def assert_command(losses: Path, theirs: list[float]) -> None:
    difference = largest_difference(read_losses(losses), theirs)
    assert difference <= 1e-6, f"{read_losses(losses)}, FSDP1 {theirs}"
    modules = json.loads(losses.read_text().splitlines()[0])["modules"]
    assert modules["FullyShardedDataParallel"] == 0 < modules["FSDPModule"], modules


def test_command_trains_with_overrides(folder: str, of_fsdp1: tuple[TrainedYaml, list[Any]]):
    """``composer-fsdp2 train run.yaml key=value`` replaces Foundry's own train script."""
    run_ranks(check_command, 2, folder)
    assert_command(Path(folder) / "command.jsonl", of_fsdp1[0].losses)


@pytest.mark.slow  # each launched rank imports all of LLM Foundry
def test_launched_command(folder: str, of_fsdp1: tuple[TrainedYaml, list[Any]]):
    """``composer -n 2 -m composer_fsdp2 train run.yaml key=value``: Foundry's launch line with our module."""
    losses = Path(folder) / "launched.jsonl"
    command = [*LAUNCHERS["composer"], "train", YAML, *surroundings(folder, losses)]
    ended = run_all({"train": command}, Path(folder))["train"]
    assert ended.code == 0, ended
    assert_command(losses, of_fsdp1[0].losses)
