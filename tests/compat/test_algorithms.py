"""EMA on a sharded model: its averages equal the unsharded run's in training, evaluations and checkpoints of every
layout."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.callbacks import callback
from support.cases import for_each
from support.comparing import full, full_parameters, own_name
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.saved import named, read
from support.trainers import close, largest_difference, make_trainer, result
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.composer

BATCHES, SAVED_AT = 2, 1
# Activation checkpointing adds a wrapper's prefix to the blocks' parameter names.
CONFIG: dict[str, Any] = {"activation_checkpointing": True}


@dataclass(frozen=True)
class Averaged:
    """The results of a run; the same on every rank."""

    losses: list[float]
    evaluations: list[float]  # a sum over the outputs of each evaluation batch of this rank
    parameters: dict[str, torch.Tensor]  # at the end of the evaluation, or of training if nothing is saved
    averages: dict[str, torch.Tensor]
    types: set[str]  # types of the averages on a rank


def module_model() -> Any:
    """The script's model as a child called ``module``, the attribute in which Composer's EMA expects FSDP1."""
    from support.scripts.train_with_trainer import Model

    class ModuleModel(Model):
        def __init__(self) -> None:
            super().__init__()
            self.module = self._modules.pop("model")

        @property
        def model(self) -> nn.Module:
            return self.module

    return ModuleModel()


def make(parallelism: Any, **options: Any) -> tuple[Any, Any, list[float]]:
    """A Trainer, its EMA, and the list that records each evaluation batch."""
    from composer.algorithms import EMA

    warnings.simplefilter("ignore")
    evaluations: list[float] = []

    look = callback(eval_after_forward=lambda state: evaluations.append(state.outputs.double().square().sum().item()))
    ema = EMA(half_life="2ba", ema_start=options.pop("ema_start", "0.0dur"))
    options = {"model": module_model(), "batches": BATCHES, "eval_interval": "1ba", "optimizer": "adamw"} | options
    return make_trainer(parallelism, algorithms=[ema], callbacks=[look], **options), ema, evaluations


def averaged(under: Under, parallelism: Any, **options: Any) -> Averaged:
    """Trains, closes the Trainer, and returns the results. Called on all ranks."""
    with under():
        trainer, ema, evaluations = make(parallelism, **options)
        trainer.fit()
        types = {type(value).__name__ for value in ema.ema_model.named_parameters_dict.values()}
        parameters = {own(name): value for name, value in full_parameters(trainer.state.model).items()}
        left = Averaged(result(trainer).losses, evaluations, parameters, averages_of(ema), types)
        trainer.close()
    return left


def averages_of(ema: Any) -> dict[str, torch.Tensor]:
    """The averages under the model's own names. Called on all ranks."""
    return {own(name): full(value) for name, value in ema.ema_model.named_parameters_dict.items()}


def own(name: str) -> str:
    """The name without DDP's prefix, which equals the attribute's name."""
    return own_name(name).replace("module.module.", "module.")


def assert_alike(ours: Averaged, theirs: Averaged, what: str, *, since: int = 0) -> None:
    """Checks that a run resumed at batch ``since`` has the remaining evaluations of the reference."""
    assert close(ours.losses, theirs.losses[since:]), f"{what}: {ours.losses}, {theirs.losses}"
    assert len(ours.evaluations) * len(theirs.losses) == len(theirs.evaluations) * len(ours.losses)
    difference = largest_difference(ours.evaluations, theirs.evaluations[-len(ours.evaluations) :])
    assert difference <= 1e-5, f"{what}: evaluations differ by {difference}"
    for kind in ("parameters", "averages"):
        assert_values(getattr(ours, kind), getattr(theirs, kind), f"{what}, {kind}")


def assert_values(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


# --- training and evaluations


@on_ranks(2)
def test_evaluations_see_the_averages():
    """A run with EMA is judged by its evaluations, which use averaged weights and restore the trained ones
    afterwards."""
    theirs = averaged(UNSHARDED, None)
    ours = averaged(FSDP2, {**CONFIG, "sharding_strategy": "SHARD_GRAD_OP"})
    assert_alike(ours, theirs, "SHARD_GRAD_OP")
    for name, value in ours.averages.items():
        assert not torch.allclose(value, ours.parameters[name]), f"{name}: the average is the parameter itself"
    assert ours.types == {"DTensor"}, f"a rank keeps full averages: {ours.types}"


# --- checkpoints


def saving(folder: str, kind: str) -> dict[str, Any]:
    return {"save_folder": f"{folder}/{kind}", "save_interval": f"{SAVED_AT}ba"}


def averages_in(path: str) -> dict[str, torch.Tensor]:
    """EMA's tensors in a checkpoint, read by torch."""
    [(name, ema)] = read(path)["state"]["algorithms"]
    assert name == "EMA"
    assert ema["ema_started"] is True
    assert ema["ema_weights_active"] is True  # the checkpoint's model is the average; here are the trained weights
    return {own(name): value for name, value in ema["ema_model"]["named_parameters_dict"].items()}


KINDS: dict[str, tuple[Under, dict[str, Any] | None]] = {
    "full, async": (FSDP2, {**CONFIG, "async_save": True}),
    "sharded, async, own planner": (
        FSDP2,
        {**CONFIG, "state_dict_type": "sharded", "async_save": True, "save_planner": DefaultSavePlanner()},
    ),
    "FSDP1": (FSDP1, {**CONFIG, "state_dict_type": "sharded"}),
    "DDP": (UNSHARDED, None),
}


def path_of(folder: str, kind: str) -> str:
    is_sharded = "sharded" in kind or kind == "FSDP1"
    return f"{folder}/{kind}/{named('sharded' if is_sharded else 'full', SAVED_AT)}"


@on_ranks(2)
def test_checkpoints_of_every_layout_resume(folder: str):
    """A resumed run continues with its averages from a checkpoint of ours in each layout, of FSDP1, or without FSDP."""
    theirs = averaged(*KINDS["DDP"], **saving(folder, "DDP"))
    dist.barrier()
    expected = averages_in(path_of(folder, "DDP"))
    # In a run that has just saved, the averages and the trained parameters are exchanged.
    swapped = replace(theirs, parameters=theirs.averages, averages=theirs.parameters)

    def check(kind: str) -> None:
        if kind != "DDP":
            assert_alike(averaged(*KINDS[kind], **saving(folder, kind)), theirs, kind)
            dist.barrier()
        saved = averages_in(path_of(folder, kind)) if dist.get_rank() == 0 else expected
        assert {type(value) for value in saved.values()} == {torch.Tensor}, kind
        assert_values(saved, expected, f"{kind}: what is saved")
        resumed = averaged(FSDP2, dict(CONFIG), load_path=path_of(folder, kind))
        assert_alike(resumed, swapped, f"from {kind}", since=SAVED_AT)

    for_each(check, {kind: (kind,) for kind in KINDS})


@on_ranks(2)
def test_evaluation_before_training_goes_on(folder: str):
    """An evaluation right after a load uses the averages; averages of another model are an error."""
    from composer_fsdp2.compat import saving as saver

    with mock.patch.object(saver, "_unsharded", side_effect=AssertionError("a full file was gathered on a rank")):
        theirs = averaged(FSDP2, {}, **saving(folder, "full"))
    with FSDP2():
        trainer, ema, evaluations = make({}, load_path=path_of(folder, "full"))
        trainer.eval()
        at_save = theirs.evaluations[: len(evaluations)]
        assert len(at_save) == len(theirs.evaluations) * SAVED_AT // BATCHES
        assert close(evaluations, at_save), f"{evaluations}, {at_save}"
        trainer.fit()
        assert close(result(trainer).losses, theirs.losses[SAVED_AT:])
        trainer.close()
        trainer, ema, _ = make({}, load_path=path_of(folder, "full"))
        averages = ema.ema_model.named_parameters_dict
        averages["module.head.weight"] = averages.pop("module.wte.weight")
        with pytest.raises(CheckpointError, match=r"(?s)(?=.*module\.head\.weight).*load_ignore_keys"):
            trainer.fit()
        trainer.close()


@on_ranks(2)
def test_checkpoint_from_before_the_first_average(folder: str):
    """Before ema_start, EMA has the model as the script built it, which most ranks may have on the meta device."""
    options: dict[str, Any] = {"ema_start": "2ba", "optimizer": "sgd", "batches": 3}
    theirs = averaged(FSDP2, {}, **options)

    def check(kind: str, is_mixed: bool) -> None:
        config = {"state_dict_type": kind, "sync_module_states": is_mixed}
        with torch.device("meta" if is_mixed and dist.get_rank() else "cpu"):
            model = module_model()
        place = f"{folder}/{kind}, {is_mixed}"
        averaged(FSDP2, config, **{**options, "batches": SAVED_AT}, model=model, **saving(place, kind))
        resumed = averaged(FSDP2, config, **options, load_path=path_of(place, kind))
        assert_alike(resumed, theirs, "resumed", since=SAVED_AT)

    for_each(check, {"sharded": ("sharded", False), "full, mixed initialisation": ("full", True)})
