"""Compute one microbatch's loss on synthetic inputs, which may be fake tensors.

Each function returns the loss, and the objects that stay alive until the end of backward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.tensor_tree import map_tensors
from composer_fsdp2.errors import ConfigError


def composer_loss(
    model: nn.Module, rows: int, tokens: int, *, keys: Sequence[str] = (), given: Any = None
) -> tuple[torch.Tensor, Any]:
    """As in Composer's Trainer: ``loss(forward(batch), batch)``; ``State.outputs`` references the outputs in backward.

    Args:
        keys: Keys of the batch beside ``input_ids`` and ``labels``.
        given: A batch whose shapes and dtypes are used instead, filled with zeros.
    """
    batch: Any = {name: _ids(model, rows, tokens) for name in ("input_ids", "labels", *keys)}
    if given is not None:
        batch = map_tensors(given, lambda each: torch.zeros(each.shape, dtype=each.dtype))
    outputs = model(batch)
    return _total(model.loss(outputs, batch)), outputs  # type: ignore[operator]


def labels_loss(model: nn.Module, rows: int, tokens: int, *, keeps_outputs: bool) -> tuple[torch.Tensor, Any]:
    """The model computes the loss from the labels.

    Args:
        keeps_outputs: As Composer's Trainer does; a Hugging Face Trainer frees them after the forward.
    """
    outputs = model(input_ids=_ids(model, rows, tokens), labels=_ids(model, rows, tokens))
    loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else None
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the model ({type(getattr(model, 'model', model)).__name__}) returns no loss for input_ids and labels; "
            "--no-activations plans without one"
        )
    return loss, outputs if keeps_outputs else None


def _ids(model: nn.Module, rows: int, tokens: int) -> torch.Tensor:
    """Token ids; their values do not change the memory."""
    device = next(model.parameters()).device
    return torch.zeros(rows, tokens, dtype=torch.long, device=device)


def _total(loss: Any) -> torch.Tensor:
    """Composer reads ``total`` from a dict of losses, and sums a sequence of losses."""
    if isinstance(loss, Mapping):
        return loss["total"]
    return sum(loss) if isinstance(loss, list | tuple) else loss  # type: ignore[return-value]
