"""Access to full parameters in a ComposerModel's loss and metrics, where they are sharded."""

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
    """Let ``loss`` and ``update_metric`` of the Trainer's model use any of its parameters in the block.

    For parameters used elsewhere, torch's error is extended by the necessary change.
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
    """A context for algorithms and callbacks, which may use parameters for a penalty after the loss."""
    is_loss = event is Event.AFTER_LOSS and is_sharded(state.model)
    return FullTensorMode() if is_loss else contextlib.nullcontext()


def after_event(state: State, event: Event) -> None:
    """The Trainer sums several losses; one may be a penalty that is still a DTensor."""
    if event is Event.BEFORE_BACKWARD:
        state.loss = full_tensors(state.loss)
