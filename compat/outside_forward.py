"""A ComposerModel's loss and metrics that use parameters, which are sharded there."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from composer.core import Event, State

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.sharding.sharded import is_sharded, sharded_roots
from composer_fsdp2.training.outside_forward import InFull, explain_mixed, full


@contextlib.contextmanager
def allow_full_parameters(trainer: Any) -> Iterator[None]:
    """Within the block, ``loss`` and ``update_metric`` of the Trainer's model may use any parameter of it, and an error
    of torch's for parameters that are used elsewhere names what to write."""
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
        with InFull():
            return function(*args, **kwargs)

    return call


def around_event(state: State, event: Event) -> contextlib.AbstractContextManager[Any]:
    """What algorithms and callbacks run in: those that add a penalty to the loss use parameters as the loss does."""
    is_loss = event is Event.AFTER_LOSS and is_sharded(state.model)
    return InFull() if is_loss else contextlib.nullcontext()


def after_event(state: State, event: Event) -> None:
    """The Trainer adds up several losses, of which one may be a penalty that no plain tensor was added to."""
    if event is Event.BEFORE_BACKWARD:
        state.loss = full(state.loss)
