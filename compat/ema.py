"""Composer's EMA for a model sharded by ``fully_shard``: each rank averages its own shards.

Under FSDP1 Composer gathered the whole model for each update, and every rank kept whole averages.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from composer.algorithms.ema.ema import EMAParameters
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.target import Box
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharded import is_sharded, reshard

__all__ = ["replacement_for_compute_ema", "replacement_for_method"]

_DDP = "module."


def replacement_for_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``EMAParameters`` that goes through a model's parameters."""

    @functools.wraps(original)
    def method(self: EMAParameters, model: nn.Module | None = None, **by_name: nn.Module) -> Any:
        [model] = [model] if model is not None else by_name.values()  # one method calls it destination_model
        _lay_out(self, model)
        return original(self, model)

    return method


def replacement_for_compute_ema(original: Callable[..., Any]) -> Callable[..., Any]:
    """``composer.algorithms.ema.ema.compute_ema``."""

    @functools.wraps(original)
    def compute_ema(model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99) -> None:
        if isinstance(ema_model, EMAParameters):
            _lay_out(ema_model, model)
        original(model, ema_model, smoothing)

    return compute_ema


def _lay_out(ema: EMAParameters, model: nn.Module) -> None:
    """Averages that were loaded are whole, under the names of the run that saved them; a sharded model's are not.

    Does not communicate.
    """
    if not is_sharded(model):
        return
    reshard(model)
    ema.named_parameters_dict = _laid_out(ema.named_parameters_dict, dict(model.named_parameters()))
    ema.named_buffers_dict = _laid_out(ema.named_buffers_dict, dict(model.named_buffers()))


def _laid_out(averages: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The averages under the names, and in the layout, of what is averaged."""
    names = _names(averages, live)
    return {names[saved]: _like(saved, average, live[names[saved]]) for saved, average in averages.items()}


def _names(averages: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """From the names in a checkpoint to the model's: without wrappers of FSDP1, checkpointing or DDP, or with them."""
    own = {canonical(name): name for name in live}
    found = {name: own.get(canonical(name), own.get(canonical(name.removeprefix(_DDP)), "")) for name in averages}
    unknown = [name for name, of_model in found.items() if not of_model]
    if unknown:
        raise CheckpointError(
            f"the checkpoint's EMA averages {', '.join(unknown[:5])}{' …' if unknown[5:] else ''}, which the model has "
            "not; load the model that was saved, or begin new averages with load_ignore_keys: [state/algorithms]"
        )
    return found


def _like(name: str, average: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    if isinstance(average, DTensor) or not isinstance(live, DTensor):
        return average
    if average.shape != live.shape:
        raise CheckpointError(
            f"the checkpoint's EMA of {name} has shape {tuple(average.shape)}, the model's parameter "
            f"{tuple(live.shape)}; load the model that was saved"
        )
    box = Box.of(live)
    part = average[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
    return box.rebuilt(torch.empty_like(live.to_local(), dtype=average.dtype).copy_(part))
