"""Towers that only some microbatches of some ranks run, through Composer's Trainer, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full_parameters
from support.models import Block
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference, on_gpu
from torch import nn

pytestmark = pytest.mark.composer

WIDTH, ROWS, BATCH = 6, 24, 8
WITH_IMAGES = (3, 6, 13, 21)  # the rows with images
TOWERS = {
    "mixed_precision": "FULL",
    "wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]},
    "idle_towers": ["model.vision", "model.bridge"],
    "collective_guard": 60,
}


class Multimodal(nn.Module):
    """With a ``limit``, rank 0 runs out of memory in training with more rows."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.vision = nn.Sequential(nn.Linear(3, WIDTH), Block(WIDTH), Block(WIDTH))
        self.bridge, self.text = Block(WIDTH), nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.limit = limit

    def forward(self, tokens: torch.Tensor, images: torch.Tensor, has_image: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.limit is not None and self.training and dist.get_rank() == 0 and len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        if has_image.any():
            seen = self.bridge(self.vision(images[has_image].flatten(0, 1))).unflatten(0, (-1, 2)).mean(1)
            x = x.index_add(0, has_image.nonzero()[:, 0], seen[:, None].expand(-1, x.shape[1], -1))
        return self.head(self.text(x))


def loader() -> Any:
    from composer.utils import dist as composer_dist
    from torch.utils.data import DataLoader, TensorDataset

    draw = torch.Generator().manual_seed(1)
    has_image = torch.tensor([row in WITH_IMAGES for row in range(ROWS)])
    tokens = torch.randint(11, (ROWS, 4), generator=draw)
    rows = TensorDataset(tokens, torch.randn(ROWS, 2, 3, generator=draw), has_image)
    return DataLoader(rows, batch_size=BATCH // dist.get_world_size(), sampler=composer_dist.get_sampler(rows))


def train(section: dict[str, Any] | None, microbatch: int | str, limit: int | None) -> tuple[Any, ...]:
    """The losses, the parameters and the final microbatch size. Called on all ranks."""
    from composer import ComposerModel, Trainer
    from composer.algorithms import GradientClipping
    from support.scripts.train_with_trainer import Record

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.model = Multimodal(limit)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.model(*batch)

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return outputs.square().mean()

        def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
            return self.forward(batch)

        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {}

    torch.set_default_dtype(torch.float64)
    model, record = Model(), Record()
    with FSDP2(), on_gpu():
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            train_dataloader=loader(),
            eval_dataloader=loader(),
            eval_interval="1ba",
            max_duration="3ba",
            device="cpu",
            precision="fp32",
            device_train_microbatch_size=microbatch,
            parallelism_config=None if section is None else {"fsdp": TOWERS | section},
            algorithms=[GradientClipping("norm", 0.1)],
            callbacks=[record],
            progress_bar=False,
            log_to_console=False,
            seed=17,
        )
        trainer.fit()
    trained = record.losses, full_parameters(trainer.state.model), trainer.state.device_train_microbatch_size
    trainer.close()
    return trained


def on_two_ranks() -> dict[str, tuple[Any, ...]]:
    last = {"gradient_sync": "last"}
    return for_each(train, {"a row at a time": (last, 1, None), "out of memory": ({}, "auto", 2)})


def test_a_trainer_of_texts_and_images_trains_as_one_process():
    """At any microbatch size, a microbatch may have an image on one rank and none on the other, and the last one before
    gradients are reduced may have none on either."""
    [(losses, parameters, _)] = run_ranks(train, 1, None, BATCH, None)
    found = run_ranks(on_two_ranks, 2)[0]
    assert found["out of memory"][2] == 2
    for name, (ours, values, _) in found.items():
        assert largest_difference(ours, losses) <= 1e-12, name
        torch.testing.assert_close(values, parameters, rtol=0, atol=1e-12)
