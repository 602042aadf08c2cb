"""LLM Foundry's train_from_yaml inside fsdp2(): the YAML of an FSDP1 run trains on FSDP2 as it stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.foundry_runs import (
    BATCHES,
    SAVED_AT,
    YAML,
    TrainedYaml,
    assert_alike,
    read_losses,
    surroundings,
    train,
)
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference

from composer_fsdp2.compat.install import train_from_yaml
from composer_fsdp2.errors import ConfigError

pytestmark = pytest.mark.foundry


# --- MPT from the repository's YAML


def with_evals(folder: str, name: str) -> list[str]:
    return [
        f"save_folder={folder}/{name}",
        "eval_first=true",
        "eval_interval=2ba",
        "eval_subset_num_batches=2",
        "eval_loader={name: text, drop_last: false, num_workers: 1, dataset: {local: "
        + f"{folder}/data/mds, shuffle: false, max_seq_len: 64, eos_token_id: 0}}}}",
    ]


def check_theirs(folder: str) -> TrainedYaml:
    return train(FSDP1, YAML, folder, "fsdp1", *with_evals(folder, "fsdp1"))


@pytest.fixture(scope="module")
def theirs(folder: str) -> TrainedYaml:
    """The YAML under FSDP1; with its checkpoints in ``folder``/fsdp1."""
    return run_ranks(check_theirs, 2, folder)[0]


def check_mpt(folder: str, theirs: TrainedYaml) -> None:
    ours = train(FSDP2, YAML, folder, "fsdp2", *with_evals(folder, "fsdp2"))
    assert_alike(ours, theirs, "the YAML")
    assert "LanguageCrossEntropy" in theirs.metrics
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)

    def check(kind: str) -> None:
        resumed = train(FSDP2, YAML, folder, f"from-{kind}", f"load_path={folder}/{kind}/ep0-ba{SAVED_AT}")
        difference = largest_difference(resumed.losses, theirs.losses[SAVED_AT:])
        assert difference <= 1e-6, f"from {kind}: {resumed.losses}, {theirs.losses}"

    for_each(check, {kind: (kind,) for kind in ("fsdp1", "fsdp2")})  # a checkpoint of either resumes on ours
    with mock.patch.dict("os.environ", {"FSDP_VERSION": "2"}):
        assert_alike(train(FSDP2, YAML, folder, "version2"), theirs, "FSDP_VERSION=2")


def test_yaml_trains_with_fsdp1s_losses(folder: str, theirs: TrainedYaml):
    """MPT with tied embeddings, recomputed blocks, clipping and streaming data: the curve and the checkpoint stay."""
    run_ranks(check_mpt, 2, folder, theirs)
    names = {path.relative_to(f"{folder}/fsdp1") for path in Path(folder, "fsdp1").rglob("*")}
    assert names == {path.relative_to(f"{folder}/fsdp2") for path in Path(folder, "fsdp2").rglob("*")}


def check_policy(folder: str, theirs: TrainedYaml) -> None:
    policy = "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    ends = "fsdp_config.wrap_policy.wrap_embeddings=true"
    for name, overrides in {"policy": [f"{policy}=[MPTBlock]"], "auto": [f"{policy}=auto", ends]}.items():
        units: set[str] = set()
        ours = train(FSDP2, YAML, folder, name, *overrides, after=lambda trainer: units.update(units_of(trainer)))  # noqa: B023
        assert_alike(ours, theirs, name)
        blocks = {f"model.transformer.blocks.{number}" for number in range(3)}
        # MPT sets _fsdp_wrap on its embeddings and its last norm, which takes precedence.
        assert units == {*blocks, "model", *(f"model.transformer.{own}" for own in ("wte", "wpe", "norm_f"))}, units


def units_of(trainer: Any) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    return [name for name, module in trainer.state.model.named_modules() if isinstance(module, FSDPModule)]


def test_a_wrap_policy_in_the_yaml(folder: str, theirs: TrainedYaml):
    """The units stand in the file: the same curve as with those that MPT's fsdp_wrap_fn chose."""
    run_ranks(check_policy, 2, folder, theirs)


def test_frozen_parameters_are_not_trained_on_one_rank(folder: str):
    """LLM Foundry leaves the section out on one rank: a debug run would train what the real one keeps."""
    with pytest.raises(ConfigError, match="freeze on one rank"):
        train_from_yaml(str(YAML), [f"variables.data={folder}", "fsdp_config.freeze=[transformer.wte]"])


def check_mixed(folder: str, theirs: TrainedYaml) -> None:
    # FSDP1 cannot broadcast CPU tensors, so the measure is its run with every rank's model on the CPU.
    def check(state_dict_type: str) -> None:
        overrides = ["model.init_device=mixed", f"fsdp_config.state_dict_type={state_dict_type}"]
        what = f"mixed-{state_dict_type}"
        ours = train(FSDP2, YAML, folder, what, *overrides, f"save_folder={folder}/{what}")
        assert_alike(ours, theirs, what)
        if state_dict_type == "full":  # for which Foundry sets load_monolith_rank0_only
            saved = f"load_path={folder}/{what}/ep0-ba{SAVED_AT}-rank0.pt"
            resumed = train(FSDP2, YAML, folder, "monolith", *overrides, saved)
            difference = largest_difference(resumed.losses, theirs.losses[SAVED_AT:])
            assert difference <= 1e-6, f"{resumed.losses}, {theirs.losses}"

    for_each(check, {kind: (kind,) for kind in ("sharded", "full")})


def test_mixed_initialisation(folder: str, theirs: TrainedYaml):
    """Rank 0 alone builds the model and reads the file, as the YAMLs of large models ask."""
    run_ranks(check_mixed, 2, folder, theirs)


def check_meta(folder: str) -> None:
    theirs = train(FSDP1, YAML, folder, "meta-fsdp1", "model.init_device=meta")
    ours = train(FSDP2, YAML, folder, "meta-fsdp2", "model.init_device=meta")
    assert_alike(ours, theirs, "meta")


def test_meta_initialisation(folder: str):
    """A model that was never built whole begins with the very values that FSDP1 would have drawn."""
    run_ranks(check_meta, 2, folder)


# --- Hugging Face

PROMPT = [5, 17, 200, 3]


def write_llama(folder: str) -> Path:
    """The YAML with a small Llama, built from its configuration; nothing is downloaded."""
    from omegaconf import OmegaConf
    from transformers import LlamaConfig

    place = Path(folder) / "llama"
    config = OmegaConf.load(YAML)
    config.model = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(place),
        "pretrained": False,
        "init_device": "cpu",
        "use_flash_attention_2": False,
    }
    if dist.get_rank() == 0:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=512,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        ).save_pretrained(place)
        OmegaConf.save(config, place / "run.yaml")
    dist.barrier()
    return place / "run.yaml"


def check_llama(folder: str) -> None:
    yaml = write_llama(folder)
    theirs = train(FSDP1, yaml, folder, "llama-fsdp1")

    def check(init_device: str) -> None:
        def generate(trainer: Any) -> None:
            tokens = trainer.state.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
            if dist.get_rank() == 0:
                Path(f"{folder}/llama-{init_device}.json").write_text(json.dumps(tokens.tolist()))

        ours = train(
            FSDP2,
            yaml,
            folder,
            f"llama-{init_device}",
            f"model.init_device={init_device}",
            "fsdp_config.state_dict_type=full",
            f"save_folder={folder}/llama-{init_device}",
            f"callbacks.hf_checkpointer.save_folder={folder}/llama-{init_device}-hf",
            f"callbacks.hf_checkpointer.save_interval={BATCHES}ba",
            after=generate,
        )
        assert_alike(ours, theirs, f"Llama, {init_device}")
        assert {"LlamaForCausalLM", "LlamaDecoderLayer", "LlamaRMSNorm"} <= ours.classes
        assert not [name for name in ours.classes if name.startswith("FSDP")], ours.classes

    for_each(check, {init_device: (init_device,) for init_device in ("cpu", "mixed")})


def check_llamas_files(folder: str) -> None:
    """For one rank: Composer unpacks the tokenizer where ``random`` says, which ranks of one seed do alike."""
    from composer.models import HuggingFaceModel
    from transformers import AutoModelForCausalLM

    os.chdir(folder)  # it unpacks into the working directory, and leaves it there

    def check(init_device: str) -> None:
        path = Path(folder, f"llama-{init_device}", f"ep0-ba{BATCHES}-rank0.pt")
        saved = torch.load(path, weights_only=False)["state"]
        config = saved["integrations"]["huggingface"]["model"]["config"]
        assert config["class"] == "transformers.models.llama.modeling_llama.LlamaForCausalLM", config["class"]
        assert config["content"]["architectures"] == ["LlamaForCausalLM"], config["content"]["architectures"]
        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(str(path))
        assert type(model).__name__ == "LlamaForCausalLM", type(model)
        (exported,) = Path(folder, f"llama-{init_device}-hf").rglob("config.json")
        architectures = json.loads(exported.read_text())["architectures"]
        assert architectures == ["LlamaForCausalLM"], architectures
        again = AutoModelForCausalLM.from_pretrained(exported.parent)
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, saved["model"][f"model.{name}"]), name
        tokens = again.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False).tolist()
        assert tokens == json.loads(Path(folder, f"llama-{init_device}.json").read_text())

    for_each(check, {init_device: (init_device,) for init_device in ("cpu", "mixed")})


def test_hugging_face_model_keeps_its_name(folder: str):
    """What was trained generates, and loads elsewhere: its files say LlamaForCausalLM, and no class of FSDP's."""
    run_ranks(check_llama, 2, folder)
    run_ranks(check_llamas_files, 1, folder)


def check_llama_meta(folder: str) -> None:
    yaml = write_llama(folder)
    theirs = train(FSDP1, yaml, folder, "llama-meta-fsdp1", "model.init_device=meta")
    ours = train(FSDP2, yaml, folder, "llama-meta", "model.init_device=meta")
    assert_alike(ours, theirs, "Llama, meta")


def test_hugging_face_model_from_meta(folder: str):
    """A Hugging Face model that was never built whole draws FSDP1's values, by its own initialisation."""
    run_ranks(check_llama_meta, 2, folder)


def check_llama_by_keys(folder: str) -> None:
    yaml = write_llama(folder)
    frozen = "model._fsdp_wrapped_module.model.embed_tokens.weight"
    theirs = train(FSDP1, yaml, folder, "llama-frozen", f"callbacks.layer_freezing.layer_names=[{frozen}]")
    keys = ("wrap_policy.transformer_layer_cls_to_wrap=auto", "activation_checkpointing_policy=auto")
    freeze = "fsdp_config.freeze=[model.embed_tokens]"
    ours = train(FSDP2, yaml, folder, "llama-by-keys", freeze, *(f"fsdp_config.{key}" for key in keys))
    assert_alike(ours, theirs, "Llama, with units, recomputation and frozen parameters from the section")


def test_hugging_face_model_by_the_sections_keys(folder: str):
    """wrap_policy, activation_checkpointing_policy and freeze say what Foundry's hooks and its callback said."""
    run_ranks(check_llama_by_keys, 2, folder)


# --- the command

FASTER = "optimizer.lr=6.0e-3"


def check_command(folder: str) -> None:
    from composer_fsdp2.cli.main import main
    from composer_fsdp2.compat import is_installed

    theirs = train(FSDP1, YAML, folder, "command-fsdp1", FASTER).losses
    losses = Path(folder) / "command.jsonl"
    arguments = ["composer-fsdp2", "train", str(YAML), *surroundings(folder, losses), FASTER]
    with mock.patch.object(sys, "argv", arguments):
        main()
    assert not is_installed()
    dist.barrier()
    assert_command(losses, theirs)


def assert_command(losses: Path, theirs: list[float]) -> None:
    difference = largest_difference(read_losses(losses), theirs)
    assert difference <= 1e-6, f"{read_losses(losses)}, FSDP1 {theirs}"
    modules = json.loads(losses.read_text().splitlines()[0])["modules"]
    assert modules["FullyShardedDataParallel"] == 0 < modules["FSDPModule"], modules


def test_command_trains_with_overrides(folder: str):
    """``composer-fsdp2 train run.yaml key=value`` takes the place of Foundry's own train script."""
    run_ranks(check_command, 2, folder)


def check_reference(folder: str) -> list[float]:
    return train(FSDP1, YAML, folder, "launched-fsdp1", FASTER).losses


@pytest.mark.slow  # each launched rank imports all of LLM Foundry
def test_launched_command(folder: str):
    """``composer -n 2 -m composer_fsdp2 train run.yaml key=value``: Foundry's launch line, with our word in it."""
    theirs = run_ranks(check_reference, 2, folder)[0]
    losses = Path(folder) / "launched.jsonl"
    command = [Path(sys.executable).parent / "composer", "-n", "2", "-m", "composer_fsdp2", "train", YAML]
    launcher = subprocess.Popen(
        [*map(str, command), *surroundings(folder, losses), FASTER],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=400)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)  # the launcher alone would leave its ranks behind
    assert launcher.returncode == 0, output
    assert_command(losses, theirs)
