"""A resumed run's state beside weights and optimizer: schedulers, callbacks, datasets, from every layout."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.callbacks import stateful
from support.cases import for_each
from support.comparing import assert_same
from support.fsdp1_checkpoints import Layout, _save, _state_as_old_composer, _writing
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.saved import form
from support.trainers import make_trainer
from torch import nn

pytestmark = pytest.mark.composer

STEPS = 2  # before the save; the milestones come after it


def schedulers() -> list[Any]:
    """One torch scheduler for each kind of state, among those that Composer steps, each with an optimizer of its own.

    Composer converts its own schedulers to LambdaLR; a checkpoint has one entry for each class.
    """
    from torch.optim import lr_scheduler as of_torch

    class Falling:  # LambdaLR saves the attributes of such a function
        def __init__(self) -> None:
            self.rates = {0: 1.0, 3: 0.5, 4: 0.25, 5: 0.125}
            self.empty: dict[str, float] = {}

        def __call__(self, step: int) -> float:
            assert self.empty == {}
            return self.rates.get(step, 1.0)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)

    def in_sequence(one: Any) -> Any:
        parts = [of_torch.ConstantLR(one, 0.5, 2), of_torch.MultiStepLR(one, [1, 2], 0.1)]
        return of_torch.SequentialLR(one, parts, milestones=[4])

    def chained(one: Any) -> Any:
        return of_torch.ChainedScheduler([of_torch.ExponentialLR(one, 0.9), of_torch.MultiStepLR(one, [3, 5], 0.1)])

    return [
        of_torch.MultiStepLR(optimizer(), [3, 3, 5], 0.1),
        of_torch.LambdaLR(optimizer(), Falling()),
        of_torch.MultiplicativeLR(optimizer(), Falling()),
        of_torch.StepLR(optimizer(), 3),
        of_torch.LinearLR(optimizer()),
        of_torch.CosineAnnealingLR(optimizer(), 6),
        of_torch.CosineAnnealingWarmRestarts(optimizer(), 3),
        of_torch.OneCycleLR(optimizer(), 0.2, total_steps=12),
        of_torch.CyclicLR(optimizer(), 0.1, 0.2, step_size_up=3),
        in_sequence(optimizer()),
        chained(optimizer()),
    ]


def next_rates(scheduler: Any, steps: int) -> list[float]:
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR steps its parts by number, which torch deprecates
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step()
            rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def state_of_callback(number: int) -> dict[Any, Any]:
    """Containers that DCP's flattening loses: empty ones, integer keys, tuples."""
    return {
        3: f"three {number}",
        "3a": number,
        (0, 1): number,
        "empty": {},
        "list": [{}, {"a": number}, [{}], {}],
        "lists": [[{}, {}], {"a": number}, [{}, [{}]]],
        "far": [*({} for _ in range(1500)), {"a": number}],
        "tuple": (number, {2: number}),
        "counts": Counter({5: number}),
        "grouped": defaultdict(list, {7: [number]}),
        "ordered": OrderedDict([("b", number), ("a", {})]),
        "tensors": [torch.full((2,), float(number)), {4: torch.tensor(number)}],
        "none": None,
    }


def assert_alike(found: Any, expected: Any, where: str) -> None:
    """Checks equality, including classes and keys."""
    assert_same(found, expected, where)
    assert form(found) == form(expected), where


@contextlib.contextmanager
def a_run(config: dict[str, Any], number: int, **options: Any) -> Iterator[Any]:
    """A Trainer with all of this state; ``number`` in its callbacks' states identifies the run that saved them."""
    from composer.callbacks import SpeedMonitor

    growing = {} if number == 0 else {number: {"seen": number}}
    callbacks = [stateful("All", state_of_callback(number)), stateful("Growing", growing), stateful("Stateless", {})]
    monitor = SpeedMonitor()
    monitor.total_eval_wct = float(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = make_trainer(config, callbacks=[*callbacks, monitor], optimizer="adamw", batches=1, **options)
    trainer.state.schedulers = schedulers()
    dataset = trainer.state.train_dataloader.dataset
    dataset.state_dict = lambda num_samples, from_beginning: {"seen": num_samples, "shards": {2: number}, "rest": {}}
    dataset.loaded = None
    dataset.load_state_dict = lambda state: setattr(dataset, "loaded", state)
    trainer.dataset = dataset
    yield trainer
    trainer.close()


def save(trainer: Any, folder: Path) -> dict[str, Path]:
    """Saves a run in every layout of FSDP1, or in every layout of ours."""
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel  # with the seams, too

    is_fsdp1 = isinstance(trainer.state.model.model, FullyShardedDataParallel)
    paths: dict[str, Path] = {}
    for layout in (Layout.FULL, Layout.SHARDED):
        paths[layout.name] = folder / layout.name / ("ep0-ba1-rank0.pt" if layout is Layout.FULL else "ep0-ba1")
        _save(trainer, layout, paths[layout.name])
    if is_fsdp1:
        state = trainer.state.state_dict()
        old = _state_as_old_composer(trainer.state, Layout.RANK_FILES)
        old["state"] |= {key: state[key] for key in ("schedulers", "callbacks", "dataset_state", "timestamp")}
        paths["RANK_FILES"] = folder / "RANK_FILES" / "ep0-ba1-rank0.pt"
        paths["RANK_FILES"].parent.mkdir(parents=True, exist_ok=True)
        torch.save(old, paths["RANK_FILES"].with_name(f"ep0-ba1-rank{dist.get_rank()}.pt"))
    dist.barrier()
    return paths


def load(trainer: Any, path: Path) -> None:
    from composer.utils import checkpoint

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load_checkpoint(str(path), trainer.state, trainer.logger)
    missing = [text for each in caught if "is not in the state_dict" in (text := str(each.message))]
    assert [text for text in missing if "Scaler" not in text] == []


@on_ranks(2, timeout_s=240)
def test_schedulers_callbacks_and_datasets_go_on_where_they_were(folder: str):
    """A learning rate that decays at step 3 does so after a resume from every layout. A callback or dataset receives
    the state that it saved: integer keys, empty dicts, list positions, dict classes."""
    # On the CPU FSDP1 frees or reuses the tensors that it moves there: _writing.
    fsdp1 = {"process_group": "mod1", "use_orig_params": False, "state_dict_type": "sharded"}
    rates: dict[str, list[float]] = {}
    paths: dict[str, Path] = {}
    lrs: dict[str, float] = {}
    for under, config, name in ((_writing, fsdp1, "FSDP1"), (FSDP2, {"state_dict_type": "sharded"}, "ours")):
        with under(), a_run(dict(config), 5) as trainer:
            trainer.fit()
            trainer.state.schedulers = schedulers()
            num_samples = int(trainer.state.timestamp.sample_in_epoch)
            for scheduler in trainer.state.schedulers:
                next_rates(scheduler, STEPS)
                kind = type(scheduler).__name__
                lrs[kind] = scheduler.optimizer.param_groups[0]["lr"]
            paths |= {f"{name} {kind}": path for kind, path in save(trainer, Path(folder, name)).items()}
            going_on = {type(each).__name__: next_rates(each, 6) for each in trainer.state.schedulers}
            assert rates in ({}, going_on)
            rates = going_on

    def resumed_rates(trainer: Any) -> dict[str, list[float]]:
        for scheduler in trainer.state.schedulers:  # of optimizers that are not the Trainer's
            scheduler.optimizer.param_groups[0]["lr"] = lrs[type(scheduler).__name__]
        return {type(each).__name__: next_rates(each, 6) for each in trainer.state.schedulers}

    def check(path: Path) -> None:
        with FSDP2(), a_run({"state_dict_type": "sharded"}, 0) as trainer:
            load(trainer, path)
            assert resumed_rates(trainer) == rates
            callbacks = {type(each).__qualname__: each for each in trainer.state.callbacks}
            assert_alike(callbacks["All"].state, state_of_callback(5), "All")
            assert callbacks["All"].state["grouped"].default_factory is list
            assert_alike(callbacks["Growing"].state, {5: {"seen": 5}}, "Growing")
            assert_alike(callbacks["Stateless"].state, {}, "Stateless")
            assert callbacks["SpeedMonitor"].total_eval_wct == 5.0
            dataset = {"seen": num_samples, "shards": {2: 5}, "rest": {}}
            assert_alike(trainer.dataset.loaded, dataset, "dataset")
            assert_alike(trainer.state.dataset_state, {"train": None, "eval": {}}, "dataset_state")

    for_each(check, {name: (path,) for name, path in paths.items()})


def test_a_copied_state_counts_what_it_counted():
    """An asynchronous save, or one with EMA's shards, wrote milestones of MultiStepLR twice: the resumed run decayed
    its learning rate by gamma squared."""
    from composer_fsdp2.checkpoint.trees import mapped

    state = {"milestones": Counter({3: 1}), "grouped": defaultdict(list, {7: [1]}), "ordered": OrderedDict(b=(1, [2]))}
    copied = mapped(state, lambda part, path: part)
    assert_alike(copied, state, "state")
    assert copied["grouped"].default_factory is list
