"""When parameters are sharded: at every event of a Trainer but those between a training step's forward and backward.

After a forward without gradients ``fully_shard`` keeps a root's parameters gathered for the next one, as plain tensors.
FSDP1 showed its shards then, and so do we: callbacks and algorithms read DTensors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from composer.callbacks import Generate
from composer.core import Algorithm, Callback, Event, State

from composer_fsdp2.sharded import reshard

__all__ = ["put_to_rest", "replacement_for_run_callbacks"]

# The backward needs what the forward gathered; with reshard_after_backward: false, so does the next microbatch.
_IN_A_STEP = frozenset(
    {
        Event.BEFORE_FORWARD,
        Event.AFTER_FORWARD,
        Event.BEFORE_LOSS,
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
    }
)
# Only for somebody who may look: the next batch of an evaluation would gather again what it finds gathered, and going
# through the modules of a large model takes a millisecond.
_IF_HEARD = frozenset(
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
# Their callbacks and algorithms read no parameters there; of them Generate alone runs the model.
_KNOWN = ("composer", "llmfoundry")


def put_to_rest(state: State, event: Event) -> None:
    """Free gathered parameters before ``event`` runs, where it is between steps. Does not communicate."""
    if event in _IN_A_STEP:
        return
    if event in _IF_HEARD and not any(_listens(each, event) for each in (*state.callbacks, *state.algorithms)):
        return
    reshard(state.model)


def replacement_for_run_callbacks(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine._run_callbacks``: what one callback gathered, the next one does not find."""

    @functools.wraps(original)
    def _run_callbacks(self: Any, event: Event | str, callbacks: Sequence[Callback] | None = None) -> None:
        event = Event(event)
        for callback in self.state.callbacks if callbacks is None else callbacks:
            original(self, event, [callback])
            if isinstance(callback, Generate) or _listens(callback, event):
                put_to_rest(self.state, event)

    return _run_callbacks


def _listens(listener: Callback | Algorithm, event: Event) -> bool:
    """Whether it comes from neither Composer nor Foundry, and may do something at ``event``."""
    kind: Any = type(listener)
    if kind.__module__.split(".")[0] in _KNOWN:
        return False
    if not isinstance(listener, Callback) or kind.run_event is not Callback.run_event:
        return True  # it chooses its events itself
    name = event.value
    return name in vars(listener) or getattr(kind, name) is not getattr(Callback, name)
