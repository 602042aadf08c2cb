"""Compute the loss of one microbatch on synthetic inputs, which may be fake tensors.

Each function returns the loss, and the objects that the trainer references until the end of backward.
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
    """Compute ``model.loss(model(batch), batch)`` as Composer's Trainer, which references the outputs during backward.

    Args:
        keys: Further keys of the batch, besides ``input_ids`` and ``labels``. Their values are integer tensors of the
            same shape.
        given: A batch to imitate: its tensors are replaced by zeros of the same shapes and dtypes.
    """
    batch: Any = {name: _ids(model, rows, tokens) for name in ("input_ids", "labels", *keys)}
    if given is not None:
        batch = map_tensors(given, lambda each: torch.zeros(each.shape, dtype=each.dtype))
    outputs = model(batch)
    return _total(model.loss(outputs, batch)), outputs  # type: ignore[operator]


def labels_loss(model: nn.Module, rows: int, tokens: int, *, keeps_outputs: bool) -> tuple[torch.Tensor, Any]:
    """Call a model that computes the loss from ``labels``.

    Args:
        keeps_outputs: Whether outputs are referenced during backward, as by Composer's Trainer. A Hugging Face Trainer
            frees them after the forward.

    Raises:
        ConfigError: the model returns no loss.
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
    """Reduce a model's losses to one as Composer: ``total`` of a dict, the sum of a sequence."""
    if isinstance(loss, Mapping):
        return loss["total"]
    return sum(loss) if isinstance(loss, list | tuple) else loss  # type: ignore[return-value]
