"""Runs of the real Composer Trainer on the ranks: ``from support.trainers import fit, make_trainer``.

Imports Composer only when called, to keep test collection fast.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.comparing import full, full_parameters, own_name
from support.oracle import Under
from torch import nn


@dataclass(frozen=True)
class Outcome:
    """Results of every run; equal on all ranks."""

    losses: list[float]  # of every batch, averaged over ranks
    shards: set[str]  # FSDP's base classes found in the model: FSDPModule, FullyShardedDataParallel


@dataclass(frozen=True)
class Trained(Outcome):
    """Results of a Trainer of ``make_trainer``."""

    eval_parameters: list[list[str]]  # the types of the parameters at the end of each eval
    parameters: dict[str, torch.Tensor]  # full, by the model's own names


def make_trainer(
    parallelism: Any,
    *,
    model: nn.Module | None = None,
    tied: bool = True,
    optimizer: str | torch.optim.Optimizer = "sgd",
    clip: tuple[str, float] | None = None,
    batches: int = 4,
    microbatch: int | str = 2,
    eval_interval: str | None = None,
    algorithms: Iterable[Any] = (),
    callbacks: Iterable[Any] = (),
    device: str = "cpu",
    **options: Any,
) -> Any:
    """A Trainer over the model and data of ``scripts/train_with_trainer.py``, two microbatches to a batch of 4.

    ``parallelism`` is an fsdp_config (a dict or an object), or a ParallelismConfig. Called on all ranks.
    """
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.utils import ParallelismConfig
    from composer.utils.dist import get_sampler
    from support.scripts.train_with_trainer import Record, data
    from torch.utils.data import DataLoader

    model = build_model(tied=tied) if model is None else model
    train, evaluation = data(), data(16)
    return Trainer(
        model=model,
        optimizers=build_optimizer(optimizer, model) if isinstance(optimizer, str) else optimizer,
        train_dataloader=DataLoader(train, batch_size=4, sampler=get_sampler(train, shuffle=True, drop_last=True)),
        eval_dataloader=DataLoader(evaluation, batch_size=4, sampler=get_sampler(evaluation))
        if eval_interval
        else None,
        eval_interval=eval_interval or 1,
        max_duration=f"{batches}ba",
        device=device,
        device_train_microbatch_size=microbatch,
        parallelism_config=parallelism if isinstance(parallelism, ParallelismConfig) else {"fsdp": parallelism},
        algorithms=[*([GradientClipping(*clip)] if clip else []), *algorithms],
        callbacks=[Record(), *callbacks],
        progress_bar=False,
        log_to_console=False,
        seed=17,
        **options,
    )


def eval_loader(num_samples: int = 16) -> Any:
    """The script's data, in batches of 4."""
    from composer.utils import dist
    from support.scripts.train_with_trainer import data
    from torch.utils.data import DataLoader

    evaluation = data(num_samples)
    return DataLoader(evaluation, batch_size=4, sampler=dist.get_sampler(evaluation))


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    """Runs device_train_microbatch_size 'auto' without its check for a GPU."""
    from composer.trainer import trainer

    with (
        mock.patch.object(trainer, "_is_auto_microbatching", lambda size, device: size == "auto"),
        mock.patch.object(trainer, "_validate_evaluator"),
    ):
        yield


def build_model(*, tied: bool = True) -> Any:
    """The script's model, with or without its tie."""
    from support.scripts.train_with_trainer import Model

    model = Model()
    if not tied:
        model.model.lm_head.weight = nn.Parameter(model.model.lm_head.weight.detach().clone())
    return model


def with_child(child: nn.Module, apply: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, tied: bool = True) -> Any:
    """The script's model with a second direct child; ``apply`` computes from the child and the logits."""
    model = build_model(tied=tied)
    model.child, forward = child, model.forward
    model.forward = lambda batch: apply(model.child, forward(batch))
    return model


def build_on_rank_0() -> Any:
    """The script's model; on the other ranks it is on the meta device."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        return build_model()


def build_unlike_on_rank_1() -> Any:
    """The script's model with different values on rank 1, which shows whether rank 0's were broadcast."""
    model = build_model()
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
    return model


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """``adamw``, ``sgd`` or another optimizer of this name; ``groups`` is Composer's own AdamW with matrices, and the
    rest undecayed at half the rate."""
    from composer.optim import DecoupledAdamW, DecoupledSGDW

    parameters = list(model.parameters())
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2)
        case "decoupled_sgdw":
            return DecoupledSGDW(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
        case "decoupled_adamw":
            return DecoupledAdamW(parameters, lr=1e-2, weight_decay=1e-3)
        case "groups":
            matrices = [parameter for parameter in parameters if parameter.ndim > 1]
            rest = {"params": [p for p in parameters if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0}
            return DecoupledAdamW([{"params": matrices}, rest], lr=1e-2, weight_decay=1e-3)
    raise ValueError(f"no optimizer {name!r}")


def fit(under: Under, parallelism: Any, **options: Any) -> Trained:
    """Train under FSDP1 or FSDP2, close the Trainer, and return its results. Called on all ranks."""
    with under():
        trainer = make_trainer(parallelism, **options)
        trainer.fit()
        trained = result(trainer)
        trainer.close()
    return trained


def result(trainer: Any) -> Trained:
    """The results of a Trainer after ``fit``. Called on all ranks."""
    record = next(callback for callback in trainer.state.callbacks if type(callback).__name__ == "Record")
    model = trainer.state.model
    return Trained(record.losses, shards(model), record.parameter_types, full_parameters(model))


def shards(model: nn.Module) -> set[str]:
    """The names of FSDP's base classes found in the model."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel  # under the shim, too

    return {
        kind.__name__
        for module in model.modules()
        for kind in (FSDPModule, FullyShardedDataParallel)
        if isinstance(module, kind)
    }


def full_optimizer_state(trainer: Any) -> dict[str, dict[str, Any]]:
    """The full optimizer state of a Trainer with one optimizer. Called on all ranks."""
    [optimizer] = trainer.state.optimizers
    return optimizer_state(trainer.state.model, optimizer)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Every parameter's full optimizer state, by the parameter's own name. Called on all ranks."""
    return {
        own_name(name): {
            key: full(value).clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def as_machines_of_one_rank() -> mock._patch_dict:
    """Within the block, Composer treats each rank as a separate machine."""
    return mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(dist.get_rank())})


def objects_of_ranks(value: Any) -> list[Any]:
    """The value of each rank, in rank order. Called on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def checkpoint_error_of(action: Callable[[], Any]) -> str:
    """This rank's CheckpointError, where every rank must raise one. Called on all ranks."""
    from composer_fsdp2.errors import CheckpointError

    written: str | None = None
    try:
        action()
    except CheckpointError as error:
        written = str(error)
    raised = objects_of_ranks(written is not None)
    assert written is not None and all(raised), f"raised by rank: {raised}"
    return written


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two curves; infinite if a value is not finite."""
    assert len(ours) == len(theirs) > 0, f"{ours} and {theirs}"
    if not all(map(math.isfinite, (*ours, *theirs))):  # max() ignores NaN.
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def close(ours: list[float], theirs: list[float], tolerance: float = 1e-6) -> bool:
    return largest_difference(ours, theirs) <= tolerance
