"""Let a ComposerModel's loss and metrics use parameters, which are sharded outside of the forward."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from composer.core import Event, State

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.sharding.sharded import is_sharded, sharded_roots
from composer_fsdp2.training.outside_forward import FullTensorMode, explain_mixed, full_tensors


@contextlib.contextmanager
def allow_full_parameters(trainer: Any) -> Iterator[None]:
    """In the block, let ``loss`` and ``update_metric`` of the Trainer's model use any of its parameters.

    If other code uses a parameter, torch's error is extended by the necessary change to that code.
    """
    model = trainer._original_model
    if not sharded_roots(model):
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("loss", "update_metric"):
            stack.enter_context(replaced(model, name, _with_full_parameters(getattr(model, name))))
        try:
            yield
        except RuntimeError as error:
            explain_mixed(model, error)
            raise


def _with_full_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with FullTensorMode():
            return function(*args, **kwargs)

    return call


def around_event(state: State, event: Event) -> contextlib.AbstractContextManager[Any]:
    """Return a context for algorithms and callbacks at ``event``.

    After the loss, it lets them compute penalties on full parameters.
    """
    is_loss = event is Event.AFTER_LOSS and is_sharded(state.model)
    return FullTensorMode() if is_loss else contextlib.nullcontext()


def after_event(state: State, event: Event) -> None:
    """Convert losses that are DTensors to full tensors before backward: an algorithm's penalty may be one."""
    if event is Event.BEFORE_BACKWARD:
        state.loss = full_tensors(state.loss)
