"""One microbatch's loss as the run computes it, on inputs that it makes itself; fake tensors are enough.

Each gives the loss, and what else lives until backward has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.passing import with_tensors
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnBatch:
    """A loss that makes its own batch.

    Args:
        num_experts: Of a layer; tokens are taken to go to each as often.
    """

    num_experts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposerLoss(_OwnBatch):
    """As Composer's Trainer: ``loss(forward(batch), batch)``, with the outputs kept as ``State.outputs`` keeps them.

    Args:
        keys: Of the batch, beside ``input_ids`` and ``labels``: what else the model looks for.
    """

    keys: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, rows: int, tokens: int) -> tuple[torch.Tensor, Any]:
        batch = {name: _ids(model, rows, tokens) for name in ("input_ids", "labels", *self.keys)}
        outputs = model(batch)
        return _total(model.loss(outputs, batch)), outputs  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsLoss(_OwnBatch):
    """The model is given the labels, and computes the loss itself.

    Args:
        keeps_outputs: As in Composer's Trainer; a Hugging Face Trainer lets go of them after the forward.
    """

    keeps_outputs: bool = False

    def __call__(self, model: nn.Module, rows: int, tokens: int) -> tuple[torch.Tensor, Any]:
        outputs = model(input_ids=_ids(model, rows, tokens), labels=_ids(model, rows, tokens))
        loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else None
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"the model ({type(getattr(model, 'model', model)).__name__}) returns no loss when it is given "
                "input_ids and labels; --no-activations plans without one"
            )
        return loss, outputs if self.keeps_outputs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoss(_OwnBatch):
    """As ``ComposerLoss``, on a batch like one that was there, whatever rows and tokens are asked for.

    Args:
        batch: Its tensors' shapes and dtypes count; numbers are zeros.
    """

    batch: Any

    def __call__(self, model: nn.Module, rows: int, tokens: int) -> tuple[torch.Tensor, Any]:
        batch = with_tensors(self.batch, lambda each: torch.zeros(each.shape, dtype=each.dtype))
        outputs = model(batch)
        return _total(model.loss(outputs, batch)), outputs  # type: ignore[operator]


def _ids(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    """Token ids; of which tokens says nothing of memory."""
    device = next(model.parameters()).device
    return torch.zeros(rows, tokens, dtype=torch.long, device=device)


def _total(loss: Any) -> torch.Tensor:
    """Composer takes a dict of losses by its ``total``, and sums a sequence of them."""
    if isinstance(loss, Mapping):
        return loss["total"]
    return sum(loss) if isinstance(loss, list | tuple) else loss  # type: ignore[return-value]
