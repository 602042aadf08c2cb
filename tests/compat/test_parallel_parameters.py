"""Algorithms and callbacks that read and write all parameters, with expert parallelism or tiled MLPs, compared with one
process.

Beside split layers: ``test_tensor_parallel.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.experts import Decoder as ExpertDecoder
from support.language import Decoder
from support.language_trainer import Run, grouped, train
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference

pytestmark = pytest.mark.composer

FULL = {"mixed_precision": "FULL"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "experts on two ranks each": (partial(ExpertDecoder, 4, 6, 2), {"expert_parallel_degree": 2}),
    "experts on all ranks": (partial(ExpertDecoder, 4, 6, 2), {"expert_parallel_degree": 4}),
    "tiled": (partial(Decoder, tied=True, num_layers=1), {"tiled_mlp": {"classes": ["MLP"], "chunks": 2}}),
}


def decoupled(model: torch.nn.Module) -> torch.optim.Optimizer:
    from composer.optim import DecoupledAdamW

    return DecoupledAdamW(model.parameters(), lr=1e-2, eps=1e-4)


def options() -> dict[str, dict[str, Any]]:
    """Cases by the features that they combine."""
    from composer.algorithms import EMA, SAM
    from composer.callbacks import NaNMonitor, OptimizerMonitor

    averages = EMA(half_life="2ba", update_interval="1ba")
    monitors = (OptimizerMonitor(log_optimizer_metrics=True, batch_log_interval=1), NaNMonitor())
    return {
        "averages, norms": {"make": decoupled, "algorithms": (averages,), "callbacks": monitors},
        "SAM, groups": {"make": grouped, "algorithms": (SAM(rho=0.5),), "num_microbatches": 2},
        "adaptive": {"clip": ("adaptive", 0.02)},
    }


def trained(kind: str, name: str, *, alone: bool) -> tuple[Run, dict[str, float]]:
    """The results of a run, and the norms logged for the last batch."""
    from composer.loggers import InMemoryLogger

    build, config = KINDS[kind]
    logger = InMemoryLogger()
    with FSDP2():
        run = train(None if alone else {"fsdp": FULL | config}, build=build, loggers=[logger], **options()[name])
    return run, {key: float(values[-1][1]) for key, values in logger.data.items() if key.startswith("l2_norm")}


def all_of_them(alone: bool) -> dict[str, tuple[Run, dict[str, float]]]:
    cases = {f"{kind}: {name}": (kind, name) for kind in KINDS for name in options()}
    return for_each(partial(trained, alone=alone), cases)


def test_parameters_are_read_and_written_whole():
    """Otherwise averages would be of other weights, norms of shards, and SAM or clipping would use a shard's norm."""
    [expected] = run_ranks(all_of_them, 1, True)
    for name, (run, norms) in run_ranks(all_of_them, 4, False)[0].items():
        wanted, norms_alone = expected[name]
        assert largest_difference(run.losses, wanted.losses) <= 1e-12, name
        # With EMA, the averages.
        assert abs(run.eval_loss - wanted.eval_loss) <= 1e-6, name
        torch.testing.assert_close(
            run.parameters, wanted.parameters, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert norms == pytest.approx(norms_alone, rel=1e-9), name
        assert bool(norms) is ("norms" in name)
