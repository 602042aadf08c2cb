"""LLM Foundry's callbacks on a sharded model, against FSDP1: what they freeze and scale, and what they launch."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import own_name
from support.foundry_runs import YAML, assert_alike, train
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.trainers import build_model, close, make_trainer, result

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
    """A YAML written for FSDP1 names layers with its wrappers, and ended with "layer not found"; or trained them."""
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
    """A curriculum's second dataset is read from where it begins; a first dataset that may be swapped later trains."""
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
    """The rates of all groups, and of the schedule that goes on from the checkpoint."""
    run_ranks(check_scaling, 2, str(tmp_path))


# --- AsyncEval


def launches(under: Under, folder: str, state_dict_type: str, **keys: Any) -> list[tuple[str, str]]:
    """What AsyncEval has launched, rank 0's: checkpoints and their times. The platform is played."""
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
    """Each checkpoint is evaluated once it is whole, under the name that it has; with async_save too."""
    run_ranks(check_async_eval, 2, str(tmp_path))
