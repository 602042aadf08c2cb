"""Make Composer's algorithms work with ``fully_shard``: surgery before sharding, EMA and SAM on shards.

[Note: surgery] Most algorithms that replace modules run at ``Event.INIT``, before a Trainer shards its model. The
optimizer must then be updated, and all ranks must initialise the new weights equally: Composer seeds each rank
differently, and replicas (NO_SHARD, HYBRID_SHARD) all-reduce gradients, but not weights. Surgery on a sharded model is
rejected: new parameters belong to no unit, so their gradients would not be averaged, and ranks would diverge.

EMA and SAM operate on each rank's own shards. With FSDP1, Composer gathered the full model for each update of EMA, and
every rank stored full averages; SAM used the norm of each rank's local gradient.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from composer.algorithms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from composer.algorithms.ema.ema import EMAParameters
from composer.algorithms.sam.sam import SAMOptimizer
from composer.core import Event, Precision, State
from composer.utils import reproducibility
from composer.utils.module_surgery import update_params_in_optimizer
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.checkpoint.names import canonical
from composer_fsdp2.checkpoint.target import LocalBox
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import CheckpointError, UnsupportedError
from composer_fsdp2.sharding.sharded import is_sharded, reshard
from composer_fsdp2.training.clipping import norm_of_gradients

from .seams import seam

_DDP = "module."

# Events at which algorithms may replace modules; at later events they change the batch, the loss or the optimizer.
_SURGERY_EVENTS = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START})


@seam(
    "composer.core.engine",
    "Engine._run_algorithms",
    why="surgery made replicas diverge, and left the optimizer with parameters that are no longer in the model",
)
def run_algorithms(original: Callable[..., Any], self: Any, event: Event) -> Any:
    """Replaces ``Engine._run_algorithms``; see [Note: surgery]."""
    state: State = self.state
    if event not in _SURGERY_EVENTS:
        return original(self, event)
    if not is_sharded(state.model):
        with _surgery(state):
            return original(self, event)
    _refuse_late_norms(state, event)
    before = set(state.model.parameters())
    traces = original(self, event)
    if _is_changed(state.model, before):
        _refuse([trace.name for trace in traces.values()], f"have its method match choose {Event.INIT}")
    return traces


@seam(
    "composer.core.state",
    "State._apply_required_algorithms",
    why="surgery required by a checkpoint was done on a sharded model: each rank trained its own new parameters",
)
def apply_required_algorithms(original: Callable[..., Any], self: State, *args: Any, **kwargs: Any) -> None:
    """Replaces ``State._apply_required_algorithms``; see [Note: surgery]."""
    if not is_sharded(self.model):  # load_monolith_rank0_only
        with _surgery(self):
            original(self, *args, **kwargs)
        return
    reshard(self.model)  # LoadCheckpoint may come after a forward
    algorithms, parameters = set(self.algorithms), set(self.model.parameters())
    error: ValueError | None = None
    try:
        original(self, *args, **kwargs)
    except ValueError as raised:  # Composer raises it for any error of an algorithm
        error = raised
    if error is not None or _is_changed(self.model, parameters):
        added = [repr(each) for each in self.algorithms if each not in algorithms]
        _refuse(
            added,
            f"pass algorithms=[{', '.join(added)}] to the Trainer, as the run that saved the checkpoint did, or leave "
            "them out with load_exclude_algorithms",
            error,
        )


@contextlib.contextmanager
def _surgery(state: State) -> Iterator[None]:
    """Run algorithms that may replace modules in the block, before the model is sharded. Called on all ranks.

    All ranks use the same seed in the block. After it, the optimizer gets the model's new parameters. Does not
    communicate.
    """
    if state.fsdp_config is None:  # DDP broadcasts rank 0's weights, and Composer creates it after surgery
        yield
        return
    before = list(state.model.parameters())
    with reproducibility.seed_context(state.rank_zero_seed):
        yield
    _update_optimizers(state.optimizers, before, list(state.model.parameters()))


def _update_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]
) -> None:
    """Remove parameters that the model no longer has from the optimizer, and add the new ones, as with FSDP1."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    present = {parameter for group in groups for parameter in group["params"]}
    lost = [each for each in before if each in present.difference(after)]
    new = [each for each in after if each not in present.union(before)]
    if lost or (new and len(groups) == 1):  # among several groups, only one that lost parameters can be chosen
        update_params_in_optimizer(old_params=lost, new_params=new, optimizers=optimizers)


def _is_changed(model: nn.Module, before: set[nn.Parameter]) -> bool:
    """Reshard the model, and return whether it has other parameters than ``before``."""
    reshard(model)
    return before != set(model.parameters())


def _refuse_late_norms(state: State, event: Event) -> None:
    """Raise for low-precision norms that are created after sharding: torch cannot copy a sharded weight into a new
    module."""
    norms = [each for each in state.algorithms if isinstance(each, LowPrecisionGroupNorm | LowPrecisionLayerNorm)]
    late = [type(each).__name__ for each in norms if each.apply_at is event]
    if late and state.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        _refuse(late, "leave apply_at at its default, Event.INIT")


def _refuse(algorithms: Sequence[str], way_out: str, cause: Exception | None = None) -> NoReturn:
    raise UnsupportedError(
        f"{', '.join(algorithms)} replaces parameters of a model that is sharded; new ones would be unsharded on every "
        f"rank, and no rank would average their gradients. Change the model before the Trainer shards it: {way_out}"
    ) from cause


@seam(
    "composer.algorithms.ema.ema",
    "EMAParameters.swap_params",
    "EMAParameters.transfer_ema_params",
    "EMAParameters.move_params_to_device",
    why="averages from a checkpoint are full: a resumed run ended with 'mixed torch.Tensor and DTensor'",
)
def with_sharded_averages(
    original: Callable[..., Any], self: EMAParameters, model: nn.Module | None = None, **by_name: nn.Module
) -> Any:
    """Replaces methods of ``EMAParameters`` that iterate over a model's parameters."""
    [model] = [model] if model is not None else by_name.values()  # one method names the argument destination_model
    _shard_averages(self, model)
    return original(self, model)


@seam(
    "composer.algorithms.ema.ema",
    "compute_ema",
    why="averages from a checkpoint are full, and FSDP1's have other names, so they were not used",
)
def compute_ema(
    original: Callable[..., Any], model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99
) -> None:
    """Replaces ``composer.algorithms.ema.ema.compute_ema``."""
    if isinstance(ema_model, EMAParameters):
        _shard_averages(ema_model, model)
    original(model, ema_model, smoothing)


def _shard_averages(ema: EMAParameters, model: nn.Module) -> None:
    """Shard the averages of a loaded EMA as the model.

    A checkpoint has full averages, named as in the run that saved it.

    Does not communicate.
    """
    if not is_sharded(model):
        return
    reshard(model)
    ema.named_parameters_dict = _sharded(ema.named_parameters_dict, dict(model.named_parameters()))
    ema.named_buffers_dict = _sharded(ema.named_buffers_dict, dict(model.named_buffers()))


def _sharded(averages: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The averages with the names and layouts of the model's tensors."""
    names = _names(averages, live)
    return {names[saved]: _shard_like(saved, average, live[names[saved]]) for saved, average in averages.items()}


def _names(averages: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Map each parameter name in a checkpoint to the model's, ignoring prefixes of FSDP1, activation checkpointing and
    DDP.

    Raises:
        CheckpointError: the model has no such parameter.
    """
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


def _shard_like(name: str, average: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
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
    """Replaces EMA's ``get_model_context_manager``: averages of shards need no full parameters."""
    context: AbstractContextManager[Any] = contextlib.nullcontext() if is_sharded(model) else original(model)
    return context


@seam(
    "composer.algorithms.sam.sam",
    "SAMOptimizer._grad_norm",
    why="torch cannot put norms of parameters on different meshes together: split layers, unsharded modules",
)
def grad_norm(original: Callable[..., torch.Tensor], self: SAMOptimizer) -> torch.Tensor:
    """Replaces ``SAMOptimizer._grad_norm``: the norm of full gradients. Called on all ranks."""
    parameters = [parameter for group in self.param_groups for parameter in group["params"]]
    return norm_of_gradients(parameters) if any(isinstance(each, DTensor) for each in parameters) else original(self)
