"""Support ``device_train_microbatch_size: auto``, and that of evaluators, for models sharded by ``fully_shard``.

Composer halves the microbatch and repeats the batch if a rank runs out of memory; its hooks support only FSDP1 modules.
Here ranks vote ([Note: votes] in ``training/out_of_memory.py``), and everything that the batch changed is restored.

Once gradients are clipped or used in a step, the batch cannot be repeated (``_Recovery.is_committed``). A rank that
runs out of memory then raises, which ends the run on all ranks.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from composer.core import Evaluator, Event, State
from composer.devices import Device
from composer.trainer import trainer as composer_trainer
from composer.utils import ParallelismConfig, get_device
from torchmetrics import Metric

from composer_fsdp2._torch.scaler import after_unscaling
from composer_fsdp2.sharding.sharded import is_sharded
from composer_fsdp2.training.control import DEFAULT_TIMEOUT
from composer_fsdp2.training.out_of_memory import (
    OutOfMemoryVote,
    PeerOutOfMemoryError,
    batch_snapshot,
    is_out_of_memory,
    reset,
)

from .outside_forward import allow_full_parameters
from .seams import seam

log = logging.getLogger(__name__)

# Votes end after this number of consecutive batches without an error, as Composer's hooks do.
_CLEAN_BATCHES = 3


class _Recovery:
    """The votes of a model's ranks on whether one ran out of memory, and whether the current batch can still be
    repeated."""

    def __init__(self, state: State, timeout: timedelta) -> None:
        self.votes = OutOfMemoryVote(state.model, timeout)
        self.is_training = False
        self.is_committed = False
        self._num_clean = 0

    def begin_batch(self, model: torch.nn.Module, metrics: Mapping[str, Metric]) -> Callable[[], None] | None:
        """Start the votes of a batch, and return a function that restores the state from before it.

        Returns None, and copies nothing, once votes have ended: after several batches without an error.
        """
        if self._num_clean >= _CLEAN_BATCHES:
            return None
        self.votes.start()
        return _snapshot(model, metrics)

    def commit(self) -> None:
        """Vote for the last time in this batch: after the step that follows, the batch can no longer be repeated.

        Called on all ranks.
        """
        if self.votes.is_on and not self.is_committed:
            self.votes.check("the end of the last microbatch")
        self.is_committed = True

    def note_clean(self) -> None:
        self._num_clean += 1
        if self._num_clean >= _CLEAN_BATCHES:
            self.votes.stop()

    def restart_count(self) -> None:
        """Called when memory use may change."""
        self._num_clean = 0


# By model: the Trainer's dist_timeout, and the recovery once it is needed.
_timeouts: WeakKeyDictionary[torch.nn.Module, timedelta] = WeakKeyDictionary()
_recoveries: WeakKeyDictionary[torch.nn.Module, _Recovery] = WeakKeyDictionary()


def _recovery_of(state: State) -> _Recovery:
    """Called on all ranks; the first call creates a process group."""
    if state.model not in _recoveries:
        _recoveries[state.model] = _Recovery(state, _timeouts.get(state.model, DEFAULT_TIMEOUT))
    return _recoveries[state.model]


@seam("composer.trainer.trainer", "Trainer.__init__", why="device_train_microbatch_size 'auto' was refused with FSDP2")
def init_trainer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``Trainer.__init__``, which rejects 'auto' with FSDP2. Passes None instead, then enables 'auto'."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_auto = given["device_train_microbatch_size"] == "auto" and _will_be_sharded(given["parallelism_config"])
    if is_auto:
        _refuse_as_composer(given)
        given["device_train_microbatch_size"] = None
    original(*bound.args, **bound.kwargs)
    if is_sharded(self.state.model):
        _timeouts[self.state.model] = timedelta(seconds=given["dist_timeout"])
        _recoveries.pop(self.state.model, None)
    if is_auto:
        self.state.auto_microbatching = True


def _will_be_sharded(config: Any) -> bool:
    if isinstance(config, Mapping):
        return any(config.get(name) is not None for name in ("fsdp", "fsdp2"))
    return isinstance(config, ParallelismConfig) and (config.fsdp is not None or config.fsdp2 is not None)


def _refuse_as_composer(given: Mapping[str, Any]) -> None:
    """Raise the errors of ``Trainer.__init__`` where 'auto' is not possible."""
    device = given["device"]
    composer_trainer._is_auto_microbatching("auto", device if isinstance(device, Device) else get_device(device))
    if given["profiler"] is not None:
        raise ValueError("device_train_microbatch_size='auto' is not compatible with the profiler")
    if hasattr(given["train_dataloader"], "seq_parallel_world_size"):
        raise ValueError("device_train_microbatch_size='auto' is not compatible with sequence parallelism")


@seam(
    "composer.trainer.trainer",
    "Trainer.fit",
    "Trainer.eval",
    "Trainer.predict",
    why="after an error that a script caught, the next step used gradients that were not communicated",
)
def run(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Trainer.fit``, ``eval`` and ``predict``: on an error, resets the sharded model to its state between
    batches.

    A script may catch the error and continue.
    """
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        if is_sharded(self.state.model):
            reset(self.state.model)
        if (recovery := _recoveries.get(self.state.model)) is not None:
            recovery.votes.stop()
        raise


@seam(
    "composer.trainer.trainer",
    "Trainer._train_batch",
    why="with 'auto', a rank out of memory made the others hang, and left the model within a forward",
)
def _train_batch(original: Callable[..., Any], self: Any, use_grad_scaling: bool) -> dict[str, torch.Tensor]:
    """Replaces ``Trainer._train_batch``: disables Composer's retries, and repeats the batch here."""
    state: State = self.state
    if not state.auto_microbatching or not is_sharded(state.model):
        losses: dict[str, torch.Tensor] = original(self, use_grad_scaling)
        return losses
    return _train_until_it_fits(self, _recovery_of(state), lambda: original(self, use_grad_scaling))


def _train_until_it_fits(
    trainer: Any, recovery: _Recovery, attempt: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    state: State = trainer.state
    batch, first_size, retries = state.batch, state.device_train_microbatch_size, trainer.cumulative_alloc_retries
    restore_batch = recovery.begin_batch(state.model, state.train_metrics or {})
    results: list[dict[str, torch.Tensor]] = []

    def run() -> None:
        try:
            results.append(attempt())
        except RuntimeError as error:
            if (restore_batch is None or recovery.is_committed) and is_out_of_memory(error):
                # No vote: the other ranks may be in a collective without a vote, and would hang.
                why = _WITHOUT_VOTES if restore_batch is None else _TOO_LATE
                raise RuntimeError(why.format(key="train", size=state.device_train_microbatch_size)) from error
            raise

    while True:
        recovery.is_committed = False
        with _without_composer_retries(state, recovery):
            is_done = recovery.votes.succeeded(run)
        if is_done:
            break
        assert restore_batch is not None, "raised above"
        composer_trainer._adjust_device_train_microbatch_size(state)
        restore_batch()
        state.batch = batch
        recovery.restart_count()
    if first_size == state.device_train_microbatch_size:
        recovery.note_clean()
        _watch_thrashing(trainer, recovery, retries)
    return results[-1]


_INSTEAD = "the batch cannot be repeated. Set device_{key}_microbatch_size below {size}, or save memory elsewhere"
_TOO_LATE = f"out of memory after backward (in clipping, an algorithm or the optimizer's step): {_INSTEAD}"
_WITHOUT_VOTES = (
    f"out of memory after {_CLEAN_BATCHES} consecutive batches had enough memory, after which the ranks' votes ended: "
    f"{_INSTEAD}"
)


@contextmanager
def _without_composer_retries(state: State, recovery: _Recovery) -> Iterator[None]:
    global _training
    state.auto_microbatching, recovery.is_training, _training = False, True, recovery
    scaler = state.scaler  # fp16: all-reduces overflows before the event that ends a batch
    try:
        with nullcontext() if scaler is None else after_unscaling(scaler, recovery.commit):
            yield
    finally:
        state.auto_microbatching, recovery.is_training, _training = True, False, None


def _watch_thrashing(trainer: Any, recovery: _Recovery, retries_before: int) -> None:
    """Halve the next microbatch if the allocator had to free memory and retry in two consecutive batches.

    Composer repeats the batch in this case, although the optimizer has already stepped.
    """
    if not _has_allocator():
        return
    state = trainer.state
    count = composer_trainer._update_num_consecutive_thrashes(state, trainer.num_consecutive_thrashes, retries_before)
    trainer.num_consecutive_thrashes = count
    if count >= 2 and state.device_train_microbatch_size > 1:
        # Not Composer's function, which clears the gradients and the loss that callbacks read next.
        state.device_train_microbatch_size = max(state.device_train_microbatch_size // 2, 1)
        log.warning(
            "the allocator freed its memory and tried again in two batches in a row; from the next batch on "
            "device_train_microbatch_size is %s",
            state.device_train_microbatch_size,
        )
        trainer.num_consecutive_thrashes = 0
        recovery.restart_count()


def _has_allocator() -> bool:
    return torch.cuda.is_available()


def after_event(state: State, event: Event) -> None:
    """Start and end the votes of each evaluation batch, and stop all votes at the end of a fit.

    Called on all ranks after each event.
    """
    recovery = _recoveries.get(state.model)
    if recovery is None:
        return
    evaluation = _evaluation if _evaluation is not None and _evaluation.recovery is recovery else None
    if event is Event.EVAL_BATCH_START and evaluation is not None:
        evaluation.begin_batch()
    elif event is Event.EVAL_BATCH_END and evaluation is not None:
        evaluation.end_batch()
    elif event is Event.FIT_END:
        recovery.votes.stop()


def before_event(state: State, event: Event) -> None:
    """Vote for the last time in a batch, before gradients are clipped. Called on all ranks before each event."""
    recovery = _recoveries.get(state.model)
    if recovery is not None and recovery.is_training and event is Event.AFTER_TRAIN_BATCH:
        recovery.commit()


@dataclass(slots=True)
class _Evaluation:
    """An evaluation with device_eval_microbatch_size 'auto'."""

    state: State
    recovery: _Recovery
    evaluator: Evaluator
    metrics: dict[str, Any]
    restore: Callable[[], None] | None = None
    is_in_batch: bool = False
    found_out_of_memory: bool = False

    def begin_batch(self) -> None:
        self.restore = self.recovery.begin_batch(self.state.model, self.metrics)
        self.is_in_batch, self.found_out_of_memory = True, False

    def end_batch(self) -> None:
        self.restore, self.is_in_batch = None, False
        self.recovery.note_clean()

    def note(self, error: BaseException) -> bool:
        """Return whether to repeat the batch after this error, and notify the other ranks.

        Raises:
            RuntimeError: this rank ran out of memory after the votes had ended.
        """
        if not is_out_of_memory(error):
            return False
        if self.restore is None:
            size = self.evaluator.device_eval_microbatch_size
            raise RuntimeError(_WITHOUT_VOTES.format(key="eval", size=size)) from error
        if not isinstance(error, PeerOutOfMemoryError):
            self.recovery.votes.report()
        self.found_out_of_memory = True
        return True

    def vote_into(self, found: torch.Tensor) -> None:
        """Vote instead of Composer's all-reduce of out-of-memory flags, and set the flag ``found``.

        Called on all ranks.

        A rank that ran out of memory has already voted.
        """
        if not self.found_out_of_memory:
            try:
                self.recovery.votes.check("the end of the batch")
            except PeerOutOfMemoryError:
                self.found_out_of_memory = True
        found.fill_(int(self.found_out_of_memory))

    def restore_batch(self) -> None:
        """Restore the state before the batch."""
        assert self.restore is not None, "noted"
        reset(self.state.model)
        self.restore()
        self.found_out_of_memory = False
        self.recovery.restart_count()
        self.recovery.votes.start()


def _snapshot(model: torch.nn.Module, metrics: Mapping[str, Metric]) -> Callable[[], None]:
    """Return a function that restores what a batch changes in the model and in ``metrics``, including nested
    metrics."""
    restore_model = batch_snapshot(model)
    every = [metric for outer in metrics.values() for metric in outer.modules() if isinstance(metric, Metric)]
    before = [(metric, copy.deepcopy(_values(metric))) for metric in every]

    def restore() -> None:
        restore_model()
        for metric, values in before:
            for attribute, value in copy.deepcopy(values).items():
                setattr(metric, attribute, value)

    return restore


def _values(metric: Metric) -> dict[str, Any]:
    """Return the attributes that a metric's update changes: its state, and attributes of plain types."""
    own = {name: value for name, value in vars(metric).items() if name[0] != "_" and isinstance(value, _PLAIN)}
    return {**own, **metric.metric_state, "_update_count": metric._update_count, "_computed": metric._computed}


_PLAIN = (int, float, str, list, dict, set, torch.Tensor)

# The evaluation in progress. A global, because Composer's functions below do not receive the model.
_evaluation: _Evaluation | None = None
# The recovery of the batch in training.
_training: _Recovery | None = None


@seam(
    "composer.trainer.trainer",
    "Trainer._eval_loop",
    why="with 'auto', a rank out of memory in an evaluation made the others hang; metrics counted a batch twice",
)
def _eval_loop(
    original: Callable[..., Any], self: Any, evaluator: Evaluator, metrics: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``Trainer._eval_loop``."""
    with allow_full_parameters(self):
        return _evaluate(original, self, evaluator, metrics, *args, **kwargs)


def _evaluate(
    original: Callable[..., Any], self: Any, evaluator: Evaluator, metrics: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    global _evaluation
    if not is_sharded(self.state.model) or not (evaluator.auto_microbatching or self.state.auto_microbatching):
        return original(self, evaluator, metrics, *args, **kwargs)
    recovery = _recovery_of(self.state)
    recovery.restart_count()
    if not evaluator.auto_microbatching:
        return original(self, evaluator, metrics, *args, **kwargs)
    outer, _evaluation = _evaluation, _Evaluation(self.state, recovery, evaluator, metrics)
    try:
        return original(self, evaluator, metrics, *args, **kwargs)
    finally:
        _evaluation = outer
        recovery.votes.stop()
        recovery.restart_count()  # training follows


@seam(
    "composer.trainer.trainer",
    "_is_cuda_oom",
    why="when Composer catches the error of one rank, the others must be notified",
)
def _is_cuda_oom(original: Callable[..., Any], error: RuntimeError) -> bool:
    """Replaces ``composer.trainer.trainer._is_cuda_oom``: also notifies the other ranks of an out-of-memory error."""
    if _evaluation is not None:
        return _evaluation.note(error)
    return bool(original(error))


@seam(
    "composer.trainer.trainer",
    "_adjust_device_eval_microbatch_size",
    why="the batch is evaluated again, with metrics, buffers and RNG states as before",
)
def _adjust_device_eval_microbatch_size(original: Callable[..., Any], evaluator: Evaluator) -> None:
    """Replaces Composer's function: also restores metrics, which would otherwise count the repeated batch twice."""
    original(evaluator)
    if _evaluation is not None:
        _evaluation.restore_batch()


@seam(
    "composer.trainer.trainer",
    "_fsdp_reshard_and_cleanup",
    why="after an error that a script caught, it searched for FSDP1's modules only, and left units in the middle of a "
    "pass",
)
def _fsdp_reshard_and_cleanup(original: Callable[..., Any], model: torch.nn.Module) -> None:
    """Replaces the function of ``composer.trainer.trainer``: restores the model after an error."""
    original(model)
    if is_sharded(model):
        reset(model)


@seam(
    "composer.trainer.trainer",
    "_readd_fsdp_sync_hooks",
    why="it patches FSDP1, with a function that torch 2.7.1 and later lack",
)
def _readd_fsdp_sync_hooks(
    original: Callable[..., Any], fsdp_modules: dict[str, torch.nn.Module], sync_hook: Any
) -> list[Any]:
    """Replaces Composer's function: does nothing, and does not patch FSDP1, if the run has no FSDP1 modules."""
    return list(original(fsdp_modules, sync_hook)) if fsdp_modules else []


def vote_before_reduction() -> None:
    """Vote before an all-reduce of the Trainer or a script within a batch, such as that of the batch size.

    Otherwise a rank that ran out of memory would not join the all-reduce, and the others would wait. Called on all
    ranks.
    """
    if _training is not None and _training.votes.is_on and not _training.is_committed:
        _training.votes.check("a reduction of composer.utils.dist")


def replaced_by_vote(tensor: torch.Tensor, reduce_operation: str) -> bool:
    """If an all-reduce is that of the eval loop's out-of-memory flag, vote in its place and return True; else return
    False.

    Called on all ranks. See [Note: votes] in ``training/out_of_memory.py``.
    """
    is_out_of_memory_check = _evaluation is not None and _evaluation.is_in_batch
    if is_out_of_memory_check and tensor.dtype == torch.uint8 and tensor.shape == (1,) and reduce_operation == "MAX":
        assert _evaluation is not None
        _evaluation.vote_into(tensor)
        return True
    return False
