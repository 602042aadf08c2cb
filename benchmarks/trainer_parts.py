"""Components of the Trainers in ``trainer.py``; importing this imports Composer."""

from typing import Any

import torch
from by_hand import local
from composer import ComposerModel
from composer.optim import DecoupledAdamW
from models import Decoder, Shape
from torch.nn import functional


class Language(ComposerModel):
    """The benchmarks' decoder as a ComposerModel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.decoder = Decoder(shape)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(batch[0])
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        raise NotImplementedError

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        raise NotImplementedError

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {}


class UpdatesByHand(DecoupledAdamW):
    """An expert's way to run an elementwise update on each rank's local tensors."""

    @staticmethod
    def adamw(*lists: Any, **settings: Any) -> None:
        DecoupledAdamW.adamw(*([local(each) for each in tensors] for tensors in lists), **settings)
