"""What real FSDP1 wrote goes on under FSDP2: the same bits, and the same next losses.

[Note: losses at another world size] Ranks share each batch, so another number of them adds up gradients in another
order: a few units in the last place of fp32 in each of five steps. Measured: at most 4e-7 of a loss. Step counts that
were counted twice, for comparison, gave 4e-3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parity.cases import Axes, pairwise
from support.fsdp1_checkpoints import Layout, Run, compare, write
from support.ranks import run_ranks

pytestmark = pytest.mark.composer

AXES: Axes = {
    "world_size": (1, 2, 4),
    "model": ("small", "mpt"),
    "parameters": ("orig", "groups", "flat"),
    "mesh": (True, False),
    "optimizer": ("adam", "decoupled_adamw", "decoupled_lionw"),
}
# Moments and step counts of flat parameters in files that hold no names.
RUNS = [
    *(Run(**case) for case in pairwise(AXES)),
    Run(world_size=2, model="mpt", parameters="flat", mesh=False, optimizer="adam"),
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


def check_write(folder: str, runs: Sequence[Run]) -> None:
    for run in runs:
        write(run, Path(folder))


def check_load(folder: str, runs: Sequence[Run], world_size: int, all_configs: bool) -> float:
    """Returns the largest difference of losses at another world size than the writing run's."""
    worst = 0.0
    configs = itertools.cycle(CONFIGS[world_size])
    for run in runs:
        for layout in run.layouts:
            for config in CONFIGS[world_size] if all_configs else [next(configs)]:
                difference = compare(run, layout, Path(folder), config)
                bound = SAME_WORLD_SIZE if run.world_size == world_size else OTHER_WORLD_SIZE
                assert difference <= bound, f"{run}, {layout.value}, {config}: losses differ by {difference}"
                if run.world_size != world_size:
                    worst = max(worst, difference)
    return worst


def write_all(folder: Path, runs: Sequence[Run]) -> None:
    for world_size in AXES["world_size"]:
        if chosen := [run for run in runs if run.world_size == world_size]:
            run_ranks(check_write, world_size, str(folder), chosen, timeout_s=1800)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp1")
    write_all(folder, RUNS)
    return folder


def test_the_runs_save_every_layout():
    """A layout that no run saves would be proved by nothing."""
    assert {layout for run in RUNS for layout in run.layouts} == set(Layout)


@pytest.mark.parametrize("world_size", CONFIGS)
def test_fsdp1s_checkpoints_load(written: Path, world_size: int):
    """Whatever an FSDP1 run saved, on however many ranks, goes on: not one bit of weights or moments is another."""
    [worst, *_] = run_ranks(check_load, world_size, str(written), RUNS, world_size, False, timeout_s=600)
    print(f"on {world_size} ranks, of another number: losses differ by at most {worst:.1e}")


def check_trainer(folder: str, runs: Sequence[Run]) -> None:
    for run in runs:
        for layout in (Layout.FULL, Layout.SHARDED):
            difference = compare(run, layout, Path(folder), {}, by_trainer=True)
            assert difference <= OTHER_WORLD_SIZE, f"{run}, {layout.value}: losses differ by {difference}"


def test_the_trainer_loads_fsdp1s_checkpoints(written: Path):
    """The same by ``load_path``, which is how a run in flight moves over."""
    run_ranks(check_trainer, 2, str(written), RUNS, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", AXES["model"])
@pytest.mark.parametrize("world_size", AXES["world_size"])
def test_every_combination_loads(tmp_path: Path, model: str, world_size: int):
    """A combination of three or more settings that goes wrong would reach a user first."""
    axes = {**AXES, "world_size": (world_size,), "model": (model,)}
    runs = [Run(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    write_all(tmp_path, runs)
    for readers in CONFIGS:
        [worst, *_] = run_ranks(check_load, readers, str(tmp_path), runs, readers, True, timeout_s=7000)
        print(f"{model} of {world_size} ranks on {readers}: losses differ by at most {worst:.1e}")
