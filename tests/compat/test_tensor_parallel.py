"""Tensor parallelism through the real Trainer: Composer's ``parallelism_config.tp`` on FSDP2."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from support.callbacks import callback
from support.cases import for_each
from support.commands import run_forked
from support.comparing import assert_same as assert_same_values
from support.examples import IS_THOROUGH
from support.language import layer_plan, sequence_plan
from support.language_trainer import Run, grouped, train
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.saved import read
from support.trainers import largest_difference, objects_of_ranks
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from composer_fsdp2 import ComposerFSDP2Error

pytestmark = pytest.mark.composer

FULL = {"mixed_precision": "FULL"}
TENSOR = 2


def split(config: dict[str, Any] | None = None, plan: Any = layer_plan, degree: int = TENSOR) -> dict[str, Any]:
    from composer.utils import TPConfig

    tensor: Any = {"tensor_parallel_degree": degree, "layer_plan": plan()}
    return {"fsdp": FULL | (config or {}), "tp": TPConfig(**tensor) if plan is layer_plan else tensor}


def alone(options: dict[str, Any]) -> Run:
    """One process, under ``FSDP2()`` because of the checkpoint seams."""
    with FSDP2():
        return train(None, **options)


def under_tensor_parallelism(options: dict[str, Any], parallelism: dict[str, Any], version: str = "1") -> Run:
    """``version`` is a value of Composer's FSDP_VERSION, or FSDP2Config for an object."""
    from composer.utils import FSDP2Config

    given = split(**parallelism)
    if version == "FSDP2Config":
        given["fsdp"], version = FSDP2Config(**given["fsdp"]), "1"
    with FSDP2(), mock.patch.dict(os.environ, FSDP_VERSION=version):
        return train(given, tensor_degree=TENSOR, **options)


def runs(logger: Any = None) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Runs by name: arguments of ``train`` and ``split``, and the version. ``logger`` records the norms of the second
    run."""
    from composer.algorithms import EMA, SAM
    from composer.callbacks import OptimizerMonitor

    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    watching: dict[str, Any] = {
        "tied": True,
        "algorithms": (EMA(half_life="2ba", update_interval="1ba"),),
        "callbacks": (OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1),),
        "loggers": [logger],
    }
    climbing = {"make": grouped, "algorithms": (SAM(rho=0.5),), "num_microbatches": 2}
    recomputed = {"plan": sequence_plan, "config": {"activation_checkpointing": True}}
    return {
        "several groups, norm clipped, SAM": (climbing, {}, "1"),
        "tied, sequence, recomputed, norms and averages of weights": (watching, recomputed, "FSDP2Config"),
        "adaptive clipping, replicas": ({"clip": ("adaptive", 0.02)}, {"config": replicas}, "2"),
    }


def runs_alone() -> tuple[list[Run], dict[str, float]]:
    from composer.loggers import InMemoryLogger

    logger = InMemoryLogger()
    return [alone(options) for options, *_ in runs(logger).values()], norms_in(logger)


def runs_split() -> tuple[dict[str, Run], dict[str, float]]:
    from composer.loggers import InMemoryLogger

    logger = InMemoryLogger()
    return for_each(under_tensor_parallelism, runs(logger)), norms_in(logger)


def norms_in(logger: Any) -> dict[str, float]:
    """The norms of the last batch."""
    return {name: float(values[-1][1]) for name, values in logger.data.items() if name.startswith("l2_norm")}


def assert_same(found: Run, expected: Run, what: str) -> None:
    assert largest_difference(found.losses, expected.losses) <= 1e-12, what
    torch.testing.assert_close(found.eval_loss, expected.eval_loss, rtol=0, atol=1e-6)  # fp32 metrics
    torch.testing.assert_close(
        found.parameters, expected.parameters, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def test_a_trainer_splits_layers_and_trains_as_one_process():
    """Tensor parallelism with combinations that Composer refuses: several groups, tied weights, clipping and SAM by the
    correct norm, in each form of Composer's configuration. Composer's own FSDP2 raises with tensor parallelism. Logged
    and averaged values are of full parameters."""
    [(expected, norms_alone)] = run_ranks(runs_alone, 1)
    split_runs, norms = run_ranks(runs_split, 4)[0]
    for (name, found), wanted in zip(split_runs.items(), expected, strict=True):
        assert_same(found, wanted, name)
        # Composer sums over ranks, also over ranks that read the same samples, so a batch's samples are counted TENSOR
        # times, as under FSDP1.
        assert found.num_samples == TENSOR * wanted.num_samples
    assert len(norms) > 20
    assert norms == pytest.approx(norms_alone, rel=1e-9)


def copies_after_dropping(how: str) -> dict[str, torch.Tensor]:
    """A rank's copies of the parameters that are replicated along the tensor axis, after steps with dropout.

    Under ``gather`` the ranks read different data, and in this test also draw random numbers for it.
    """

    def batch_end(state: Any) -> None:
        if how == "gather":
            number = torch.distributed.get_rank() + 1
            _ = torch.rand(number), numpy.random.rand(number), [random.random() for _ in range(number)]

    def drop(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.3) * (0.5 + numpy.random.rand()) * (0.5 + random.random())

    dropping = callback(
        fit_start=lambda state: state.model.model.layers[0].register_forward_hook(lambda _, args, out: drop(out)),
        batch_end=batch_end,
    )
    degree = TENSOR if how == "false" else 1
    with FSDP2():
        parallelism = split({"broadcast_batch": how} if degree == 1 else None)
        run = train(parallelism, tensor_degree=degree, callbacks=(dropping,))
    return {name: value for name, value in run.parameters.items() if "norm" in name}


@on_ranks(2)
def test_ranks_that_split_layers_draw_the_same_numbers(folder: str):
    """Composer seeds each rank differently, so a dropout between TP-sharded layers made the replicated parameters
    diverge; GyroDropout uses numpy's generator."""
    for how in ("false", "gather"):
        first, second = objects_of_ranks(copies_after_dropping(how))
        assert_same_values(second, first, how, in_bits=True)


# --- checkpoints

FORMS: dict[str, dict[str, Any]] = {
    "full": {"state_dict_type": "full"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}


def save_in_each_form(folder: str) -> dict[str, Run]:
    """One run for each form of checkpoint, saving after every batch."""

    def save(form: str) -> Run:
        options = {"save_folder": f"{folder}/{form}", "save_interval": "1ba", "make": grouped}
        with FSDP2():
            return train(split(FORMS[form]), tensor_degree=TENSOR, keep_optimizer=True, **options)

    return for_each(save, {form: (form,) for form in FORMS})


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The folder of the runs, and the results of the run with full checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    found = run_ranks(save_in_each_form, 4, str(folder))[0]
    assert_same_values(found["async"].parameters, found["full"].parameters)
    assert_same_values(found["async"].optimizer, found["full"].optimizer)
    return folder, found["full"]


def saved(folder: str | Path, form: str, batch: int = 1) -> str:
    """The Trainer's checkpoint after ``batch`` batches."""
    [path] = [path for path in Path(folder, form).iterdir() if path.name.startswith(f"ep0-ba{batch}")]
    return str(path)


# For each world size, the form of the checkpoint and the tensor parallel degree.
RESUMED = {4: (("async", TENSOR),), 2: (*((("full", TENSOR),) if IS_THOROUGH else ()), ("async", 1))}


def resume(folder: str, cases: tuple[tuple[str, int], ...]) -> dict[str, Run]:
    def resumed(form: str, degree: int) -> Run:
        parallelism = {"fsdp": FULL | FORMS[form]} if degree == 1 else split(FORMS[form])
        with FSDP2():
            return train(parallelism, tensor_degree=degree, make=grouped, load_path=saved(folder, form))

    return for_each(resumed, {f"{form}, split over {degree}": (form, degree) for form, degree in cases})


def test_a_checkpoint_of_split_layers_goes_on_anywhere(saved_runs: tuple[Path, Run]):
    """Sharded checkpoints, saved in the background, and full ones load with the optimizer's groups: on the same ranks,
    on fewer, without tensor parallelism, and in one process."""
    folder, uninterrupted = saved_runs
    resumed = {"full, one process": run_ranks(alone, 1, {"make": grouped, "load_path": saved(folder, "full")})[0]}
    for world_size, cases in RESUMED.items():
        resumed |= run_ranks(resume, world_size, str(folder), cases)[0]
    for name, run in resumed.items():
        assert largest_difference(run.losses, uninterrupted.losses[1:]) <= 1e-12, name
        torch.testing.assert_close(run.parameters, uninterrupted.parameters, rtol=0, atol=1e-12)


# --- the commands


def commands(folder: Path, path: str) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shapes that ``composer-fsdp2 checkpoint inspect`` prints, and the state in ``convert``'s monolithic file."""
    arguments = {"inspect": ["inspect", "--json", path], "convert": ["convert", path, "whole.pt", "--to", "monolithic"]}
    ended = run_forked({name: ["checkpoint", *each] for name, each in arguments.items()}, folder)
    for name, each in ended.items():
        assert each.code == 0, f"{name}: {each.out}{each.err}"
    shapes = {each["name"]: tuple(each["shape"]) for each in json.loads(ended["inspect"].out)["tensors"]}
    return shapes, torch.load(folder / "whole.pt", weights_only=False)["state"]


def test_every_command_sees_split_layers_whole(saved_runs: tuple[Path, Run], tmp_path: Path):
    """inspect prints the shapes of the unsharded model; convert writes the trained values and the optimizer's state."""
    folder, run = saved_runs
    shapes, whole = commands(tmp_path, saved(folder, "async", batch=2))
    prefix = "state.model."
    told = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    assert told == {name: tuple(value.shape) for name, value in run.parameters.items()}
    assert_same_values(whole["model"], run.parameters, in_bits=True)
    [optimizer] = whole["optimizers"].values()
    assert_same_values(optimizer["state"], run.optimizer, in_bits=True)


# --- compared with Composer's own


def under_fsdp1(folder: str) -> Run:
    parallelism = split({"state_dict_type": "sharded"}, body_plan)
    with FSDP1():
        return train(
            parallelism, tensor_degree=TENSOR, **UNCLIPPED, save_folder=f"{folder}/sharded", save_interval="1ba"
        )


def under_fsdp2(folder: str) -> dict[str, Run]:
    def fit(load_path: str | None) -> Run:
        with FSDP2():
            parallelism = split({"state_dict_type": "sharded"}, body_plan)
            return train(parallelism, tensor_degree=TENSOR, load_path=load_path, **UNCLIPPED)

    return for_each(fit, {"whole": (None,), "resumed": (saved(folder, "sharded"),)})


def body_plan() -> Any:
    return layer_plan(ends=False)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


# FSDP1 clipped by the norm of one rank's shard.
UNCLIPPED: dict[str, Any] = {"dtype": torch.float32, "clip": None, "make": adamw}


def test_it_is_what_composer_trained_under_fsdp1(tmp_path: Path):
    """The losses equal those under FSDP1 where FSDP1 was correct, and its checkpoints load: sharded, or converted."""
    theirs = run_ranks(under_fsdp1, 4, str(tmp_path))[0]
    ours = run_ranks(under_fsdp2, 4, str(tmp_path))[0]
    old = saved(tmp_path, "sharded")
    shapes, whole = commands(tmp_path, old)
    assert shapes["state.model.model.layers.0.mlp.down.weight"] == (16, 32)
    assert_same_values(whole["model"], read(old)["state"]["model"])
    [ours["converted"]] = run_ranks(alone, 1, {**UNCLIPPED, "load_path": str(tmp_path / "whole.pt")})
    for name, run in ours.items():
        assert largest_difference(run.losses, theirs.losses[-len(run.losses) :]) <= 1e-6, name


BAD_VALUES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "a path that matches nothing": ({}, {"layer_plan": {"model.haed": None}}, "layer_plan['model.haed'] is None"),
    "a style on a container": (
        {},
        {"layer_plan": {"model.layers": SequenceParallel()}},
        "SequenceParallel on 'model.layers'",
    ),
    "the plan of another model": ({}, {"layer_plan": {"layers.*.mlp.up": ColwiseParallel()}}, "did you mean model."),
    "a degree in quotes": ({"context_parallel_degree": "2"}, {}, "context_parallel_degree is '2'"),
    "a number for a flag": ({"check_data": 1}, {}, "check_data is 1"),
    # Composer's own error, which names the section to add: nothing would shard the model or average its gradients.
    "no section": (None, {}, "requires FSDP to be enabled"),
}


def refuse_bad_value(section: dict[str, Any] | None, tensor: dict[str, Any], says: str) -> None:
    parallelism: dict[str, Any] = {} if section is None else {"fsdp": FULL | section}
    parallelism["tp"] = {"tensor_parallel_degree": TENSOR, "layer_plan": layer_plan()} | tensor
    error = ValueError if section is None else ComposerFSDP2Error
    with FSDP2(), pytest.raises(error, match=re.escape(says)):
        train(parallelism, tensor_degree=TENSOR)


@on_ranks(2)
def test_bad_values_are_errors_of_the_trainer_on_every_rank(folder: str):
    """Composer passes the mappings on unchanged, so its Trainer raises the errors of prepare_fully_shard."""
    for_each(refuse_bad_value, BAD_VALUES)


@on_ranks(2)
def test_activations_of_split_layers_are_not_logged(folder: str):
    """Each rank would log the norms of its own part, or fail with an error of torch that names no callback."""
    from composer.callbacks import ActivationMonitor

    says = r"ActivationMonitor: model.embedding and \d+ more: TP-sharded.*; remove ActivationMonitor"
    for plan in (layer_plan, sequence_plan):
        with FSDP2(), pytest.raises(ComposerFSDP2Error, match=says):
            train(split(plan=plan), tensor_degree=TENSOR, callbacks=(ActivationMonitor(interval="10ba"),))
