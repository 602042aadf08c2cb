"""Checkpoints of real FSDP1 resume under FSDP2: the same bits, and the same next losses.

[Note: losses at another world size] Ranks share each batch, so another world size sums gradients in another order: a
few units in the last place of fp32 in each step. Measured over five steps: at most 4e-7 of a loss. For comparison, step
counts that were counted twice changed it by 4e-3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.cases import for_each
from support.fsdp1_checkpoints import Layout, Run, compare, write
from support.ranks import run_ranks

pytestmark = pytest.mark.composer

AXES: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 4),
    "model": ("small", "mpt"),
    "parameters": ("orig", "groups", "flat"),
    "mesh": (True, False),
    "optimizer": ("adam", "decoupled_adamw", "decoupled_lionw"),
}
# Every value of every axis; every layout and each kind of parameters with several world sizes.
FEW = [
    # Moments and step counts of flat parameters in files without names.
    Run(world_size=2, model="mpt", parameters="flat", mesh=False, optimizer="adam"),
    Run(world_size=1, model="small", parameters="groups", mesh=True, optimizer="decoupled_adamw"),
    Run(world_size=4, model="small", parameters="groups", mesh=True, optimizer="decoupled_lionw"),
    Run(world_size=2, model="small", parameters="orig", mesh=False, optimizer="decoupled_adamw"),
]
CONFIGS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"activation_checkpointing": True}],
    2: [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"activation_checkpointing": True}],
    4: [
        {},
        {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2},
        {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True},
    ],
}
SAME_WORLD_SIZE = 1e-6
OTHER_WORLD_SIZE = 2e-6


def check_load(folder: str, runs: Sequence[Run], world_size: int, is_whole: bool) -> float:
    """If ``is_whole``, each layout with every world size and configuration; otherwise each with one of both, in turn.

    Returns the largest difference of losses at another world size than the writing run's.
    """
    layouts = [(run, layout) for run in runs for layout in run.layouts]
    configs = itertools.cycle(CONFIGS[world_size])
    cases = {
        f"{run}, {layout.value}, {config}": (Path(folder), run, layout, config)
        for run, layout in (layouts if is_whole else layouts[[*CONFIGS].index(world_size) :: len(CONFIGS)])
        for config in (CONFIGS[world_size] if is_whole else [next(configs)])
    }
    differences = for_each(check_one, cases)
    others = [differences[name] for name, (_, run, *_) in cases.items() if run.world_size != world_size]
    return max(others, default=0.0)


def check_one(folder: Path, run: Run, layout: Layout, config: dict[str, Any], by_trainer: bool = False) -> float:
    difference = compare(run, layout, folder, config, by_trainer=by_trainer)
    bound = SAME_WORLD_SIZE if run.world_size == dist.get_world_size() else OTHER_WORLD_SIZE
    assert difference <= bound, f"losses differ by {difference}"
    return difference


def write_all(folder: Path, runs: Sequence[Run]) -> None:
    for world_size in AXES["world_size"]:
        if chosen := {f"{run}": (run, folder) for run in runs if run.world_size == world_size}:
            run_ranks(for_each, world_size, write, chosen, timeout_s=1800)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp1")
    write_all(folder, FEW)
    return folder


@pytest.mark.parametrize("world_size", CONFIGS)
def test_fsdp1s_checkpoints_load(written: Path, world_size: int):
    """Any checkpoint of an FSDP1 run, on any number of ranks, resumes with identical bits of weights and moments."""
    [worst, *_] = run_ranks(check_load, world_size, str(written), FEW, world_size, False, timeout_s=600)
    print(f"on {world_size} ranks, of another number: losses differ by at most {worst:.1e}")


def test_the_trainer_loads_fsdp1s_checkpoints(written: Path):
    """The same through ``load_path``, with which a user moves an unfinished run."""
    cases = {"full": (written, FEW[0], Layout.FULL, {}, True), "sharded": (written, FEW[2], Layout.SHARDED, {}, True)}
    run_ranks(for_each, 2, check_one, cases, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", AXES["model"])
@pytest.mark.parametrize("world_size", AXES["world_size"])
def test_every_combination_loads(tmp_path: Path, model: str, world_size: int):
    """Otherwise a user would be the first to run a faulty combination of three or more settings."""
    axes = {**AXES, "world_size": (world_size,), "model": (model,)}
    runs = [Run(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    write_all(tmp_path, runs)
    for readers in CONFIGS:
        [worst, *_] = run_ranks(check_load, readers, str(tmp_path), runs, readers, True, timeout_s=7000)
        print(f"{model} of {world_size} ranks on {readers}: losses differ by at most {worst:.1e}")
