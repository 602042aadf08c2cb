"""Composer's EMA and SAM for a model sharded by ``fully_shard``: each rank averages and moves its own shards.

Under FSDP1 Composer gathered the full model for each update of EMA, and every rank kept full averages; SAM climbed by
the norm of each rank's part of the gradient.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from composer.algorithms.ema.ema import EMAParameters
from composer.algorithms.sam.sam import SAMOptimizer
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.sharding.sharded import is_sharded, reshard
from composer_fsdp2.training.clipping import norm_of_gradients

from .seams import seam

_DDP = "module."


@seam(
    "composer.algorithms.ema.ema",
    "EMAParameters.swap_params",
    "EMAParameters.transfer_ema_params",
    "EMAParameters.move_params_to_device",
    why="averages from a checkpoint are full: a resumed run ended with 'mixed torch.Tensor and DTensor'",
)
def with_averages_laid_out(
    original: Callable[..., Any], self: EMAParameters, model: nn.Module | None = None, **by_name: nn.Module
) -> Any:
    """A method of ``EMAParameters`` that goes through a model's parameters."""
    [model] = [model] if model is not None else by_name.values()  # one method calls it destination_model
    _lay_out(self, model)
    return original(self, model)


@seam(
    "composer.algorithms.ema.ema",
    "compute_ema",
    why="averages from a checkpoint are full, and FSDP1's have other names, so that they were left alone",
)
def compute_ema(
    original: Callable[..., Any], model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99
) -> None:
    """``composer.algorithms.ema.ema.compute_ema``."""
    if isinstance(ema_model, EMAParameters):
        _lay_out(ema_model, model)
    original(model, ema_model, smoothing)


def _lay_out(ema: EMAParameters, model: nn.Module) -> None:
    """Averages that were loaded are full, under the names of the run that saved them; a sharded model's are not.

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
    """The model's name for each one in a checkpoint, with or without wrappers of FSDP1, checkpointing or DDP."""
    own = {canonical(name): name for name in live}
    found = {name: own.get(canonical(name), own.get(canonical(name.removeprefix(_DDP)), "")) for name in averages}
    unknown = [name for name, of_model in found.items() if not of_model]
    if unknown:
        raise CheckpointError(
            f"the checkpoint's EMA averages {and_more(unknown, 5)}, which this model "
            "does not have; load the model that was saved, or begin new averages with "
            "load_ignore_keys: [state/algorithms]"
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
    box = LocalBox.of(live)
    part = average[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
    return box.rebuilt(torch.empty_like(live.to_local(), dtype=average.dtype).copy_(part))


@seam(
    "composer.algorithms.ema.ema",
    "get_model_context_manager",
    why="it would gather the full model for EMA, which averages shards here",
)
def get_model_context_manager(original: Callable[..., Any], model: nn.Module) -> AbstractContextManager[Any]:
    """``get_model_context_manager`` of EMA, which averages shards here."""
    context: AbstractContextManager[Any] = contextlib.nullcontext() if is_sharded(model) else original(model)
    return context


@seam(
    "composer.algorithms.sam.sam",
    "SAMOptimizer._grad_norm",
    why="torch cannot put norms of parameters on different meshes together: split layers, unsharded modules",
)
def grad_norm(original: Callable[..., torch.Tensor], self: SAMOptimizer) -> torch.Tensor:
    """``SAMOptimizer._grad_norm``, of the full gradients. Called on all ranks."""
    parameters = [parameter for group in self.param_groups for parameter in group["params"]]
    return norm_of_gradients(parameters) if any(isinstance(each, DTensor) for each in parameters) else original(self)
