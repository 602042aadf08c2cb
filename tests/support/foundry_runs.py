"""Runs of LLM Foundry's training on the ranks: ``from support.foundry_runs import train``.

Imports Foundry only when called, to keep test collection fast.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.oracle import Under
from support.trainers import Outcome, largest_difference, shards
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "yamls" / "mpt-tiny-fsdp1.yaml"
BATCHES, SAVED_AT = 4, 2
# Workers of a loader. A worker forked from a rank with threads may never end, and torch waits for it for 5 s.
WITHOUT_WORKERS = {"num_workers": "0", "persistent_workers": "false", "prefetch_factor": "null"}


@dataclass(frozen=True)
class TrainedYaml(Outcome):
    """Results of a Foundry run."""

    classes: set[str]  # of the model's modules
    metrics: dict[str, float]  # of the last eval


def train(
    under: Under,
    yaml: Path,
    folder: str,
    name: str,
    *overrides: str,
    after: Callable[[Any], None] = lambda trainer: None,
) -> TrainedYaml:
    """One complete run of Foundry's training, and ``after(trainer)``. Called on all ranks."""
    from llmfoundry.command_utils import train_from_yaml

    losses = Path(folder) / f"{name}.jsonl"
    with under():
        trainer = train_from_yaml(str(yaml), [*surroundings(folder, losses), *overrides])
        model = trainer.state.model
        metrics = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics.get("eval", {}).items()}
        after(trainer)
        trainer.close()
    dist.barrier()
    classes = {type(module).__name__ for module in model.modules()}
    return TrainedYaml(read_losses(losses), shards(model), classes, metrics)


def surroundings(folder: str, losses: Path) -> list[str]:
    """The YAML's data folder, loss file and duration."""
    return [
        f"variables.data={folder}/data",
        f"variables.losses={losses}",
        f"code_paths=[{ROOT}/demo/record_loss.py]",
        f"max_duration={BATCHES}ba",
        f"save_interval={SAVED_AT}ba",
        *(f"train_loader.{name}={value}" for name, value in WITHOUT_WORKERS.items()),
    ]


def read_losses(path: Path) -> list[float]:
    return [record["loss"] for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]


def evaluating(folder: str, interval: int) -> tuple[str, ...]:
    """Overrides: evaluate so many batches at each interval, on the training data."""
    dataset = f"dataset: {{local: {folder}/data/mds, shuffle: false, max_seq_len: 64, eos_token_id: 0}}"
    return (
        f"eval_interval={interval}ba",
        "eval_subset_num_batches=1",
        f"eval_loader={{name: text, drop_last: false, {dataset}}}",
        *(f"eval_loader.{name}={value}" for name, value in WITHOUT_WORKERS.items()),
    )


def assert_alike(ours: TrainedYaml, theirs: TrainedYaml, what: str) -> None:
    assert theirs.shards == {"FullyShardedDataParallel"}, f"{what}: the reference is sharded by {theirs.shards}"
    assert ours.shards == {"FSDPModule"}, f"{what}: sharded by {ours.shards}"
    difference = largest_difference(ours.losses, theirs.losses)
    assert difference <= 1e-6, f"{what}: {difference}: {ours.losses}, FSDP1 {theirs.losses}"


def hugging_face_yaml(folder: str, name: str, config: Any, **model: Any) -> Path:
    """The YAML with a Hugging Face model, built from its configuration; nothing is downloaded. Called on all ranks."""
    from omegaconf import OmegaConf

    place = Path(folder) / name
    written = OmegaConf.load(YAML)
    written.model = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(place),
        "pretrained": False,
        "init_device": "cpu",
        "use_flash_attention_2": False,
        **model,
    }
    if dist.get_rank() == 0:
        config.save_pretrained(place)
        OmegaConf.save(written, place / "run.yaml")
    dist.barrier()
    return place / "run.yaml"


def make_data_of_runs(folder: str) -> None:
    """A tokenizer and a streaming dataset, like the demo's."""
    sys.path.append(str(ROOT / "demo"))
    from data import make_data

    if dist.get_rank() == 0:
        make_data(Path(folder) / "data", [ROOT / "LICENSE"], vocabulary=512, length=64)


# --- without training


@dataclass(frozen=True, kw_only=True)
class Foundry:
    """A file as LLM Foundry's train() has it before building the model: resolved, checked, with Foundry's own
    changes."""

    model: dict[str, Any]
    fsdp: dict[str, Any]
    tensor: dict[str, Any] | None
    precision: str


class _HasRead(Exception):
    pass


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Around Foundry's code, which warns of its own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def as_foundry_reads(path: Path, num_ranks: int) -> Foundry:
    """Through the real ``train_from_yaml``, up to building the model, as one of so many ranks."""
    training = importlib.import_module("llmfoundry.command_utils.train")
    prepare, validate = training.process_init_device, training.validate_config
    read: dict[str, Any] = {}

    def process_init_device(model: Any, fsdp: Any, tp: Any) -> None:
        prepare(model, fsdp, tp)
        read.update(model=model, fsdp=fsdp, tensor=tp)
        raise _HasRead

    def validate_config(config: Any) -> None:
        read.update(precision=config.precision)
        validate(config)

    with (
        mock.patch.object(training, "process_init_device", process_init_device),
        mock.patch.object(training, "validate_config", validate_config),
        mock.patch.object(training, "_initialize_dist_with_barrier"),
        mock.patch("composer.utils.dist.get_world_size", return_value=num_ranks),
        mock.patch.dict(os.environ),
        without_warnings(),
        contextlib.suppress(_HasRead),
    ):
        training.train_from_yaml(str(path), ["python_log_level=null"])
    return Foundry(**read)


def build_without_weights(model: dict[str, Any]) -> nn.Module:
    """Foundry's own model from the file's values, as on ranks > 0 with init_device mixed, and on all ranks with
    meta."""
    from llmfoundry.models.utils import init_empty_weights
    from llmfoundry.utils.builders import build_composer_model

    given = copy.deepcopy(model)  # Foundry changes its argument
    name, dtype, device = given.pop("name"), given.pop("master_weights_dtype", None), given["init_device"]
    context = {
        "meta": init_empty_weights,
        "mixed": contextlib.nullcontext,
        "cpu": lambda: torch.device("meta"),  # the context for empty weights would break T5's ties
    }[device]()
    given["init_device"] = "meta" if device == "mixed" else device
    with without_warnings():
        return build_composer_model(name, given, None, context, dtype)
