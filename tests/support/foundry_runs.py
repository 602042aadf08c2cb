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
from support.trainers import largest_difference

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "yamls" / "mpt-tiny-fsdp1.yaml"
BATCHES, SAVED_AT = 4, 2


@dataclass(frozen=True)
class Trained:
    """What a run left behind; the same on every rank."""

    losses: list[float]
    shards: set[str]  # FSDPModule, FullyShardedDataParallel
    classes: set[str]  # of the model's modules
    metrics: dict[str, float]  # of the last eval


def train(
    under: Under,
    yaml: Path,
    folder: str,
    name: str,
    *overrides: str,
    after: Callable[[Any], None] = lambda trainer: None,
) -> Trained:
    """One run of Foundry's training, to its end, and ``after(trainer)``. Called on all ranks."""
    from llmfoundry.command_utils import train_from_yaml
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    losses = Path(folder) / f"{name}.jsonl"
    with under():
        trainer = train_from_yaml(str(yaml), [*surroundings(folder, losses), *overrides])
        modules = list(trainer.state.model.modules())
        metrics = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics.get("eval", {}).items()}
        after(trainer)
        trainer.close()
    dist.barrier()
    kinds = {
        kind.__name__ for kind in (FSDPModule, FullyShardedDataParallel) if any(isinstance(m, kind) for m in modules)
    }
    return Trained(read_losses(losses), kinds, {type(module).__name__ for module in modules}, metrics)


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


def assert_alike(ours: Trained, theirs: Trained, what: str) -> None:
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
