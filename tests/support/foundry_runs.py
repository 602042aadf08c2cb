"""Runs of LLM Foundry's training on the ranks: ``from support.foundry_runs import train``.

Imports Foundry only when called, so that collecting the tests stays cheap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.oracle import Under
from support.trainers import Outcome, largest_difference, shards

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "yamls" / "mpt-tiny-fsdp1.yaml"
BATCHES, SAVED_AT = 4, 2


@dataclass(frozen=True)
class TrainedYaml(Outcome):
    """What a run of Foundry's left behind."""

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
    """One run of Foundry's training, to its end, and ``after(trainer)``. Called on all ranks."""
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
    """Where the YAML finds its data and leaves its losses, and how long it trains."""
    return [
        f"variables.data={folder}/data",
        f"variables.losses={losses}",
        f"code_paths=[{ROOT}/demo/record_loss.py]",
        f"max_duration={BATCHES}ba",
        f"save_interval={SAVED_AT}ba",
    ]


def read_losses(path: Path) -> list[float]:
    return [record["loss"] for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]


def assert_alike(ours: TrainedYaml, theirs: TrainedYaml, what: str) -> None:
    assert theirs.shards == {"FullyShardedDataParallel"}, f"{what}: the reference is sharded by {theirs.shards}"
    assert ours.shards == {"FSDPModule"}, f"{what}: sharded by {ours.shards}"
    difference = largest_difference(ours.losses, theirs.losses)
    assert difference <= 1e-6, f"{what}: {difference}: {ours.losses}, FSDP1 {theirs.losses}"


def make_data_of_runs(folder: str) -> None:
    """A tokenizer and a streaming dataset, as the demo makes them."""
    sys.path.append(str(ROOT / "demo"))
    from data import make_data

    if dist.get_rank() == 0:
        make_data(Path(folder) / "data", [ROOT / "LICENSE"], vocabulary=512, length=64)
