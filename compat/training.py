"""Adapt a Trainer's steps and events: microbatches, resharding between steps, and gradient clipping.

After a forward without gradients, ``fully_shard`` leaves a root's parameters unsharded, as plain tensors. FSDP1
resharded them, and so does this module: callbacks and algorithms read DTensors at every event of a Trainer, except
between forward and backward of a training step.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.callbacks import Generate
from composer.core import Algorithm, Callback, Event, State
from torch import nn

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.sharding.sharded import is_sharded, reshard
from composer_fsdp2.training.clipping import clip_grad_adaptive_, clip_grad_norm_
from composer_fsdp2.training.guard import check_guard
from composer_fsdp2.training.microbatches import begin_microbatch

from . import auto_microbatch, batches, monitors, outside_forward
from .context_parallel import refuse_tasks, weighted_microbatch
from .preflight import name_layers_to_freeze, refuse_copies
from .seams import seam
from .sharding import warn_of_fsdp1

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# Events


# Events that all ranks reach together, for any model: the guard detects a rank with fewer batches here.
_SYNC_EVENTS = {
    Event.BEFORE_TRAIN_BATCH: "a training batch",
    Event.AFTER_TRAIN_BATCH: "the end of a training batch",
    Event.EVAL_BATCH_START: "an evaluation batch",
    Event.EVAL_END: "the end of an evaluation",
    Event.FIT_END: "the end of fit",
}


@seam(
    "composer.core.engine",
    "Engine.run_event",
    why="callbacks read plain tensors after an eval; copies of the model, and matches of FSDP1's names, failed late",
)
def run_event(original: Callable[..., Any], self: Any, event: Event | str) -> Any:
    event = Event(event)
    if event in (Event.INIT, Event.FIT_START):
        refuse_copies(self.state)
    _free_parameters(self.state, event)
    if event is Event.FIT_START:
        warn_of_fsdp1(self.state.model)
    if event is Event.FIT_START and is_sharded(self.state.model):
        name_layers_to_freeze(self.state)
        refuse_tasks(self.state)
    auto_microbatch.before_event(self.state, event)
    if event in _SYNC_EVENTS:
        check_guard(self.state.model, _SYNC_EVENTS[event])
    batches.before_event(self.state, event)
    with outside_forward.around_event(self.state, event):
        result = original(self, event)
    outside_forward.after_event(self.state, event)
    batches.after_event(self.state, event)
    auto_microbatch.after_event(self.state, event)
    return result


# Backward needs the parameters that forward gathered; with reshard_after_backward: false, so does the next microbatch.
_WITHIN_STEP = frozenset(
    {
        Event.BEFORE_FORWARD,
        Event.AFTER_FORWARD,
        Event.BEFORE_LOSS,
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
    }
)
# Events at which parameters are resharded only if a callback or algorithm may read them: otherwise the next evaluation
# batch would gather them again, and iterating over the modules of a large model takes a millisecond.
_IF_OBSERVED = frozenset(
    {
        Event.EVAL_BATCH_START,
        Event.EVAL_BEFORE_FORWARD,
        Event.EVAL_AFTER_FORWARD,
        Event.EVAL_BATCH_END,
        Event.PREDICT_BATCH_START,
        Event.PREDICT_BEFORE_FORWARD,
        Event.PREDICT_AFTER_FORWARD,
        Event.PREDICT_BATCH_END,
        Event.BEFORE_DATALOADER,
        Event.AFTER_DATALOADER,
        Event.BATCH_START,
        Event.BEFORE_TRAIN_BATCH,
        Event.AFTER_TRAIN_BATCH,
    }
)
# Packages whose callbacks and algorithms do not read parameters at these events; only Generate runs the model.
_KNOWN_PACKAGES = ("composer", "llmfoundry")


def _free_parameters(state: State, event: Event) -> None:
    """Reshard parameters before an ``event`` between steps. Does not communicate."""
    if event in _WITHIN_STEP:
        return
    if event in _IF_OBSERVED and not any(_is_observer(each, event) for each in (*state.callbacks, *state.algorithms)):
        return
    reshard(state.model)


@seam(
    "composer.core.engine",
    "Engine._run_callbacks",
    why="after a callback that runs the model (Generate), the next one read plain tensors",
)
def _run_callbacks(
    original: Callable[..., Any], self: Any, event: Event | str, callbacks: Sequence[Callback] | None = None
) -> None:
    """Replaces ``Engine._run_callbacks``: runs one callback at a time, and reshards parameters that it unsharded."""
    event = Event(event)
    for callback in self.state.callbacks if callbacks is None else callbacks:
        original(self, event, [callback])
        if isinstance(callback, Generate) or _is_observer(callback, event):
            _free_parameters(self.state, event)


def _is_observer(listener: Callback | Algorithm, event: Event) -> bool:
    """Whether a callback or algorithm of another package handles ``event``."""
    kind: Any = type(listener)
    if kind.__module__.split(".")[0] in _KNOWN_PACKAGES:
        return False
    if not isinstance(listener, Callback) or kind.run_event is not Callback.run_event:
        return True  # it handles all events
    name = event.value
    return name in vars(listener) or getattr(kind, name) is not getattr(Callback, name)


# ---------------------------------------------------------------------------------------------------------------------
# Microbatches and gradients


@seam(
    "composer.trainer.trainer",
    "Trainer._train_microbatch",
    why="gradient_sync and reshard_after_backward: which microbatch of a batch is the last",
)
def train_microbatch(
    original: Callable[..., Any],
    self: Any,
    use_grad_scaling: bool,
    current_batch_size: float,
    is_final_microbatch: bool,
) -> dict[str, torch.Tensor]:
    begin_microbatch(self.state.model, is_last=is_final_microbatch)
    with weighted_microbatch(self), outside_forward.allow_full_parameters(self):
        losses: dict[str, torch.Tensor] = original(self, use_grad_scaling, current_batch_size, is_final_microbatch)
    return losses


@seam(
    "composer.utils.dist",
    "all_reduce",
    why="the eval loop's all-reduce of out-of-memory flags is the last vote of its batch; and torch's raises for "
    "DTensors, such as the norms in the step of adaptive Lion",
)
def all_reduce(original: Callable[..., Any], tensor: torch.Tensor, reduce_operation: str = "SUM") -> None:
    if not auto_microbatch.replaced_by_vote(tensor, reduce_operation) and not monitors.is_reduced(tensor):
        auto_microbatch.vote_before_reduction()
        original(tensor, reduce_operation)


@seam(
    "composer.algorithms.gradient_clipping.gradient_clipping",
    "apply_gradient_clipping",
    why="with an FSDPConfig it searches for FSDP1 modules, finds none and clips nothing",
)
def apply_gradient_clipping(
    original: Callable[..., Any], model: nn.Module, clipping_type: str, clipping_threshold: float, fsdp_enabled: bool
) -> None:
    if not is_sharded(model):
        original(model, clipping_type, clipping_threshold, fsdp_enabled)
    elif clipping_type == "norm":
        clip_grad_norm_(model, clipping_threshold)
    elif clipping_type == "value":
        _warn_value_clips_norm()
        clip_grad_norm_(model, clipping_threshold, math.inf)
    elif clipping_type == "adaptive":
        clip_grad_adaptive_(model, clipping_threshold)
    else:
        raise ConfigError(f"clipping_type is {clipping_type!r}; it is 'norm', 'value' or 'adaptive'")


@functools.cache
def _warn_value_clips_norm() -> None:
    log.warning(
        "clipping_type 'value' scales all gradients by their largest absolute value, as Composer did under FSDP1; "
        "it does not clip element by element"
    )
