"""When parameters are sharded: at every event of a Trainer but those between a training step's forward and backward.

After a forward without gradients ``fully_shard`` keeps a root's parameters gathered for the next one, as plain tensors.
FSDP1 showed its shards then, and so do we: callbacks and algorithms read DTensors.
"""

from collections.abc import Iterable
from typing import Any

from composer.core import Algorithm, Callback, Event, State

from composer_fsdp2.sharded import reshard

__all__ = ["put_to_rest"]

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
# The next batch would gather again what it finds gathered, so only for somebody who may look.
_BETWEEN_FORWARDS = frozenset(
    {
        Event.EVAL_BATCH_START,
        Event.EVAL_BEFORE_FORWARD,
        Event.EVAL_AFTER_FORWARD,
        Event.EVAL_BATCH_END,
        Event.PREDICT_BATCH_START,
        Event.PREDICT_BEFORE_FORWARD,
        Event.PREDICT_AFTER_FORWARD,
        Event.PREDICT_BATCH_END,
    }
)
# Their callbacks and algorithms read no parameters there.
_KNOWN = ("composer", "llmfoundry")


def put_to_rest(state: State, event: Event) -> None:
    """Free gathered parameters before ``event`` runs, where it is between steps. Does not communicate."""
    if event in _IN_A_STEP:
        return
    if event in _BETWEEN_FORWARDS and not _is_heard([*state.callbacks, *state.algorithms], event):
        return
    reshard(state.model)


def _is_heard(present: Iterable[Callback | Algorithm], event: Event) -> bool:
    return any(_listens(each, event.value) for each in present if type(each).__module__.split(".")[0] not in _KNOWN)


def _listens(listener: Callback | Algorithm, name: str) -> bool:
    kind: Any = type(listener)
    if not isinstance(listener, Callback) or kind.run_event is not Callback.run_event:
        return True  # it chooses its events itself
    return name in vars(listener) or getattr(kind, name) is not getattr(Callback, name)
