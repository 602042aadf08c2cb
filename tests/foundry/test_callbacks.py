"""LLM Foundry's callbacks on a sharded model, compared with FSDP1: layers they freeze, rates they scale, runs they
launch and files they save."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full_parameters, own_name
from support.foundry_runs import BATCHES, YAML, assert_alike, evaluating, hugging_face_yaml, train
from support.oracle import FSDP1, FSDP2, FSDP1_saving, Under
from support.ranks import run_ranks
from support.saved import form
from support.trainers import build_model, close, full_optimizer_state, make_trainer, result

pytestmark = pytest.mark.foundry

RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}


# --- LayerFreezing


def frozen_run(under: Under, names: list[str], *, evaluates_first: bool, **keys: Any) -> Any:
    from llmfoundry.callbacks import LayerFreezing

    with under():
        callback = LayerFreezing(names)
        trainer = make_trainer(
            {**RECOMPUTED, **keys}, callbacks=[callback], eval_interval="2ba", optimizer="decoupled_adamw"
        )
        if evaluates_first:
            trainer.eval()
        trainer.fit()
        trained = result(trainer)
        trainer.close()
    return trained


def check_freezing() -> None:
    warnings.simplefilter("ignore")
    with FSDP1():
        trainer = make_trainer(dict(RECOMPUTED))
        theirs = [name for name, _ in trainer.state.model.named_parameters() if re.search("blocks.0.*up|wte", name)]
        trainer.close()
    assert all("_fsdp_wrapped_module." in name for name in theirs), theirs
    spellings = {
        "FSDP1's": theirs,
        "without wrappers": [own_name(name) for name in theirs],
        "without FSDP1's": [name.replace("_fsdp_wrapped_module.", "") for name in theirs],
    }
    initial = {name: value.detach().clone() for name, value in build_model().named_parameters()}

    expected = {first: frozen_run(FSDP1, theirs, evaluates_first=first) for first in (False, True)}

    def check(spelling: str, evaluates_first: bool) -> None:
        strategy = "SHARD_GRAD_OP" if spelling == "without wrappers" else "FULL_SHARD"
        ours = frozen_run(FSDP2, spellings[spelling], evaluates_first=evaluates_first, sharding_strategy=strategy)
        losses = expected[evaluates_first].losses
        assert close(ours.losses, losses), f"{ours.losses}, {losses}"
        for name, value in ours.parameters.items():
            assert torch.equal(value, initial[name]) == (name in spellings["without wrappers"]), name

    for_each(check, {f"{case}": case for case in zip(spellings, (True, False, True), strict=True)})
    with pytest.raises(Exception, match=r"layer not found in model: model\.nowhere"):
        frozen_run(FSDP2, ["model.nowhere"], evaluates_first=False)


def test_layers_freeze_under_either_name():
    """A YAML written for FSDP1 names layers with its wrappers; the run ended with "layer not found", or trained
    them."""
    run_ranks(check_freezing, 2)


# --- CurriculumLearning, DatasetSwap


def check_datasets(folder: str) -> None:
    warnings.simplefilter("ignore")
    unchanged = ["max_duration=2ep"]
    schedule = "schedule: [{duration: 1ep, dataset: {shuffle: false}}]"
    cases = {
        "CurriculumLearning": f"callbacks.curriculum_learning={{duration: 1ep, {schedule}}}",
        "DatasetSwap": "callbacks.dataset_swap={dataset_index: 0}",
    }

    def check(name: str) -> None:
        runs = {}
        for under in (FSDP1, FSDP2):
            place = f"{name}-{under.__name__}"
            options = [*unchanged, cases[name], "save_interval=1ep", f"save_folder={folder}/{place}"]
            runs[under] = train(under, YAML, folder, place, *options)
        assert_alike(runs[FSDP2], runs[FSDP1], name)
        plain = train(FSDP2, YAML, folder, f"{name}-plain", *unchanged, "save_interval=0ba")
        is_changed = not close(runs[FSDP2].losses, plain.losses)
        assert is_changed == (name == "CurriculumLearning"), "the second epoch has the first one's data"

    for_each(check, {name: (name,) for name in cases})


@pytest.mark.slow
def test_datasets_change(folder: str):
    """A curriculum's second dataset is read from its beginning; a first dataset that may be replaced later trains."""
    run_ranks(check_datasets, 2, folder, timeout_s=300)


# --- GlobalLRScaling


def check_scaling(folder: str) -> None:
    warnings.simplefilter("ignore")
    from composer.optim import CosineAnnealingWithWarmupScheduler
    from llmfoundry.callbacks import GlobalLRScaling

    def run(under: Under, callbacks: list[Any], **options: Any) -> tuple[list[float], list[tuple[float, float]]]:
        with under():
            trainer = make_trainer(
                {"state_dict_type": "sharded"},
                optimizer="groups",
                schedulers=CosineAnnealingWithWarmupScheduler("2ba", "1dur"),
                callbacks=callbacks,
                **options,
            )
            trainer.fit()
            groups = [(group["lr"], group["weight_decay"]) for group in trainer.state.optimizers[0].param_groups]
            losses = result(trainer).losses
            trainer.close()
        return losses, groups

    runs = {}
    for under in (FSDP1, FSDP2):
        place = f"{folder}/{under.__name__}"
        run(under, [], save_folder=place, save_interval="2ba")
        runs[under] = run(under, [GlobalLRScaling(0.5, 0.1)], load_path=f"{place}/ep0-ba2")
    unscaled, _ = run(FSDP2, [], load_path=f"{place}/ep0-ba2")
    (ours, our_groups), (theirs, their_groups) = runs[FSDP2], runs[FSDP1]
    assert close(ours, theirs), f"{ours}, {theirs}"
    assert our_groups == their_groups
    assert not close(ours, unscaled), "the scale changes nothing"


def test_learning_rates_are_scaled_on_resumption(tmp_path: Path):
    """The learning rates of all groups, and of the schedule that continues from the checkpoint."""
    run_ranks(check_scaling, 2, str(tmp_path))


# --- AsyncEval


def launches(under: Under, folder: str, state_dict_type: str, **keys: Any) -> list[tuple[str, str]]:
    """The checkpoints that AsyncEval launches on rank 0, and their times. The platform is mocked."""
    from llmfoundry.callbacks import async_eval_callback

    launched: list[tuple[str, str]] = []

    class Evaluation(async_eval_callback.AsyncEval):
        def _get_current_run(self) -> Any:
            return SimpleNamespace(name="evaluation")

        def launch_run(self, checkpoint: str, current_interval: Any) -> Any:
            assert Path(checkpoint).exists(), checkpoint
            launched.append((str(Path(checkpoint).relative_to(folder)), str(current_interval)))
            return SimpleNamespace(name="evaluation")

    def list_objects(place: str) -> list[str]:
        return [str(path) for path in Path(place).rglob("*") if path.is_file() and not path.is_symlink()]

    config = {"save_interval": "2ba", "save_folder": folder, "device_eval_batch_size": 4, "max_seq_len": 5}
    config |= {"model": {"name": "mpt_causal_lm"}, "tokenizer": {"name": "none"}, "eval_loader": {}, "icl_tasks": []}
    with (
        mock.patch.object(async_eval_callback, "list_remote_objects", list_objects),
        mock.patch.object(async_eval_callback, "get_eval_parameters", return_value={}),
        under(),
    ):
        trainer = make_trainer(
            {"state_dict_type": state_dict_type, **keys},
            batches=6,
            save_folder=folder,
            save_interval="2ba",
            callbacks=[Evaluation(config, "2ba")],
        )
        trainer.fit()
        trainer.close()
    dist.barrier()
    return launched


def check_async_eval(folder: str) -> None:
    warnings.simplefilter("ignore")
    theirs = launches(FSDP1, f"{folder}/fsdp1", "sharded")
    assert bool(theirs) == (dist.get_rank() == 0)
    ours = launches(FSDP2, f"{folder}/fsdp2", "sharded")
    assert ours == theirs, f"{ours}, FSDP1 {theirs}"
    whole = launches(FSDP2, f"{folder}/full", "full", async_save=True)  # FSDP1 cannot save it on the CPU
    names = sorted(name.replace("-rank0.pt", "") for name, _ in whole)
    assert names == sorted(name for name, _ in theirs), f"{whole}, FSDP1 {theirs}"


def test_evaluations_of_checkpoints_are_launched(tmp_path: Path):
    """Each checkpoint is evaluated once it is complete, under its own name; with async_save too."""
    run_ranks(check_async_eval, 2, str(tmp_path))


# --- MonolithicCheckpointSaver, which requests full state from FSDP1


def check_saver(folder: str) -> None:
    warnings.simplefilter("ignore")
    from llmfoundry.callbacks.monolithic_ckpt_callback import MonolithicCheckpointSaver

    def check(keep_optimizers: bool) -> None:
        dist.barrier()  # rank 0 has read the last case's files
        files, live = {}, {}
        for who, under in (("FSDP1", FSDP1_saving), ("FSDP2", FSDP2)):
            saver = MonolithicCheckpointSaver(f"{folder}/{who}", 2, keep_optimizers=keep_optimizers)
            config = {"state_dict_type": "sharded", "activation_checkpointing": True}
            with under():
                trainer = make_trainer(config, batches=2, optimizer="adamw", run_name="run", callbacks=[saver])
                trainer.fit()
                live[who] = full_optimizer_state(trainer) if who == "FSDP2" else {}
                trainer.close()
            files[who] = f"{folder}/{who}/ep0-ba2.pt"
        if dist.get_rank() == 0:
            theirs, ours = (torch.load(path, weights_only=False) for path in files.values())
            assert not form(ours).items() ^ form(theirs).items(), form(ours).items() ^ form(theirs).items()
            assert ("optimizers" in ours["state"]) == keep_optimizers
            for name, tensor in theirs["state"]["model"].items():
                torch.testing.assert_close(ours["state"]["model"][name], tensor, msg=name)
            if keep_optimizers:
                [saved], [of_fsdp1] = (each["state"]["optimizers"].values() for each in (ours, theirs))
                assert saved["param_groups"] == of_fsdp1["param_groups"]
                # Compared with its run's own state, because FSDP1 on the CPU also writes exp_avg_sq as exp_avg
                # (torch 2.7).
                torch.testing.assert_close(saved["state"], live["FSDP2"], rtol=0, atol=0)

    for_each(check, {f"keep_optimizers={kept}": (kept,) for kept in (False, True)})


@pytest.mark.filterwarnings("ignore")
def test_its_file_is_fsdp1s(tmp_path: Path):
    """A run that saves sharded checkpoints, and a monolithic file at times, ended in a KeyError."""
    run_ranks(check_saver, 2, str(tmp_path), timeout_s=300)


# --- HuggingFaceCheckpointer: FSDP1's files, which transformers and peft load


@dataclass(frozen=True)
class Case:
    """A model to train, and the expected contents of its files.

    Args:
        model: Replaces the YAML's; None uses the MPT.
        options: Overrides for the FSDP2 run alone.
    """

    architecture: str
    config: dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
SMALL = {"vocab_size": 512, "initializer_range": 0.2}
GPT2 = {**SMALL, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "tie_word_embeddings": True}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES = {
    "mpt": Case("MPTForCausalLM", options=("model.init_device=mixed",)),
    "gpt2": Case("GPT2LMHeadModel", GPT2, options=("fsdp_config.state_dict_type=full",)),
    "lora": Case("LlamaForCausalLM", LLAMA, {"peft_config": LORA}),
}


def write_yaml(folder: str, name: str, case: Case) -> Path:
    from transformers import GPT2Config, LlamaConfig

    if case.config is None:
        return YAML
    kind = GPT2Config if "n_embd" in case.config else LlamaConfig
    config = kind(architectures=[case.architecture], **case.config)
    return hugging_face_yaml(folder, f"{name}-yaml", config, **case.model)


def check_runs(folder: str, name: str) -> None:
    case = CASES[name]
    yaml = write_yaml(folder, name, case)
    # An evaluation at the same batch runs first, and leaves parameters unsharded.
    evals = [
        "optimizer.eps=1.0e-3",  # the key bias has a gradient of rounding noise, which a small eps turns into steps
        *evaluating(folder, BATCHES),
    ]
    runs = {}
    for who, under, options in (("fsdp1", FSDP1_saving, ()), ("fsdp2", FSDP2, case.options)):

        def keep(trainer: Any, place: str = f"{folder}/{name}-{who}") -> None:
            parameters = full_parameters(trainer.state.model)
            if dist.get_rank() == 0:
                torch.save(parameters, f"{place}.pt")

        runs[who] = train(
            under,
            yaml,
            folder,
            f"{name}-{who}",
            *evals,
            *options,
            f"callbacks.hf_checkpointer.save_folder={folder}/{name}-{who}",
            f"callbacks.hf_checkpointer.save_interval={BATCHES}ba",
            after=keep,
        )
    assert_alike(runs["fsdp2"], runs["fsdp1"], name)
    if dist.get_rank() == 0:
        check_files(folder, name)


def check_files(folder: str, name: str) -> None:
    from safetensors.torch import load_file

    case = CASES[name]
    theirs, ours = (Path(folder, f"{name}-{who}") for who in ("fsdp1", "fsdp2"))
    names = {path.relative_to(theirs) for path in theirs.rglob("*")}
    assert {path.relative_to(ours) for path in ours.rglob("*")} == names
    last = Path("huggingface", f"ba{BATCHES}")
    for path in names:
        if path.suffix == ".safetensors":
            assert_tensors(load_file(ours / path), load_file(theirs / path), f"{name}, {path}")
        elif path.suffix == ".json":
            left, right = (json.loads((place / path).read_text()) for place in (ours, theirs))
            for content in (left, right):
                content.pop("init_device", None)
            assert left == right, f"{name}, {path}: {left}, {right}"
    trained = torch.load(f"{ours}.pt")
    loaded = load_with_transformers(ours / last, case, trained)
    assert_tensors(loaded, {key.removeprefix("model."): value for key, value in trained.items()}, name, exact=True)


def load_with_transformers(place: Path, case: Case, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    if case.model:
        from peft import PeftModel
        from transformers import LlamaConfig, LlamaForCausalLM

        base = LlamaForCausalLM(LlamaConfig(**case.config))
        prefix = "model.base_model.model."
        of_base = {k.removeprefix(prefix).replace("base_layer.", ""): v for k, v in trained.items() if "lora" not in k}
        base.load_state_dict(of_base)
        return dict(PeftModel.from_pretrained(base, place).named_parameters())
    config = json.loads((place / "config.json").read_text())
    assert config["architectures"] == [case.architecture], config["architectures"]
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    assert type(model).__name__ == case.architecture
    return dict(model.named_parameters())


def assert_tensors(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str, *, exact: bool = False
) -> None:
    assert ours.keys() == theirs.keys(), f"{what}: {ours.keys() ^ theirs.keys()}"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, **tolerance, msg=lambda text, n=name: f"{what}, {n}: {text}")


@pytest.mark.parametrize("name", ["lora", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mpt", "gpt2"))])
def test_transformers_loads_what_was_trained(folder: str, name: str):
    """The exported model has the final weights, and a class that transformers knows."""
    if name == "lora":
        pytest.importorskip("peft")
    with mock.patch.dict("os.environ", {"HF_MODULES_CACHE": f"{folder}/modules"}):
        run_ranks(check_runs, 2, folder, name)
