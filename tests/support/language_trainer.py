"""The language model of ``support.language`` through the real Trainer: in one process, under FSDP1 or FSDP2, with or
without TP.

Imports Composer only when called, to keep test collection fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from support.comparing import full_parameters
from support.language import Decoder, batch
from support.trainers import full_optimizer_state
from torch import nn

NUM_SAMPLES, GLOBAL_BATCH = 64, 8


@dataclass(frozen=True)
class Run:
    """Results of a run, equal on every rank."""

    losses: list[float]  # of every batch, averaged over ranks
    eval_loss: float
    parameters: dict[str, torch.Tensor]  # full, by the model's own names
    num_samples: int  # as Composer counts them
    optimizer: dict[str, dict[str, Any]]  # full, by the parameter's own name, if requested


def composer_model(build: Callable[[], nn.Module]) -> Any:
    from composer import ComposerModel
    from composer.metrics import LanguageCrossEntropy

    class LanguageModel(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(9)
            self.model = build()
            self.metric = LanguageCrossEntropy()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.model(batch[0][:, :-1])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[0][:, 1:].flatten())

        def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
            return outputs if outputs is not None else self.forward(batch)

        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {} if is_train else {"loss": self.metric}

        def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
            metric.update(outputs, batch[0][:, 1:].contiguous())

    return LanguageModel()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices only, and half the rate for the rest; Composer refuses groups with tensor
    parallelism."""
    parameters = list(model.parameters())
    rest = {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.05}
    matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.SGD([matrices, rest], lr=0.1, momentum=0.9)


def loader(num_samples: int, place: Mapping[str, int]) -> Any:
    """Sequences in order, as a strided subset for each of ``num_replicas`` readers."""
    from composer.utils import dist
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(batch(0, num_samples))
    sampler = dist.get_sampler(dataset, **place)
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // place["num_replicas"], sampler=sampler)


def train(
    parallelism: Mapping[str, Any] | None,
    *,
    tensor_degree: int = 1,
    tied: bool = False,
    build: Callable[[], nn.Module] | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    clip: tuple[str, float] | None = ("norm", 0.5),
    num_microbatches: int | str = 1,
    dtype: torch.dtype = torch.float64,
    algorithms: tuple[Any, ...] = (),
    callbacks: tuple[Any, ...] = (),
    keep_optimizer: bool = False,
    **options: Any,
) -> Run:
    """Train on the same eight sequences a batch on any number of ranks, with an eval at the end and a decaying learning
    rate.

    TP ranks of a group read the same sequences. Called on all ranks.

    Args:
        build: Makes a model from tokens to logits; None: a small decoder, ``tied`` or not.
    """
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.optim import CosineAnnealingScheduler
    from support.scripts.train_with_trainer import Record

    torch.set_default_dtype(dtype)
    model = composer_model(build or partial(Decoder, tied=tied, num_layers=1))
    num_readers = torch_dist.get_world_size() // tensor_degree
    place = {"num_replicas": num_readers, "rank": torch_dist.get_rank() // tensor_degree}
    # Or "auto".
    size = GLOBAL_BATCH // num_readers // num_microbatches if isinstance(num_microbatches, int) else num_microbatches
    trainer = Trainer(
        model=model,
        optimizers=make(model),
        schedulers=CosineAnnealingScheduler(t_max="8ba"),
        train_dataloader=loader(NUM_SAMPLES, place),
        eval_dataloader=loader(GLOBAL_BATCH, place),
        eval_interval="2ba",
        max_duration="2ba",
        device="cpu",
        device_train_microbatch_size=size,
        parallelism_config=None if parallelism is None else dict(parallelism),
        algorithms=[*([GradientClipping(*clip)] if clip else []), *algorithms],
        callbacks=[Record(), *callbacks],
        progress_bar=False,
        log_to_console=False,
        seed=17,
        **options,
    )
    trainer.fit()
    record = next(each for each in trainer.state.callbacks if isinstance(each, Record))
    evaluated = trainer.state.eval_metrics["eval"]["loss"].compute()
    run = Run(
        losses=record.losses,
        eval_loss=float(evaluated),
        parameters=full_parameters(trainer.state.model),
        num_samples=int(trainer.state.timestamp.sample),
        optimizer=full_optimizer_state(trainer) if keep_optimizer else {},
    )
    trainer.close()
    return run
