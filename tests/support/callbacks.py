"""Composer callbacks and algorithms in one line each, ``callback(batch_end=lambda state: ...)``, and one with a state
to
save.

Imports Composer only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def callback(**functions: Callable[[Any], Any]) -> Any:
    """A callback whose methods of these names call the functions with the state; runs before the checkpoint saver."""
    from composer import Callback

    def method(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda self, state, logger: function(state)

    return type("Watch", (Callback,), {name: method(function) for name, function in functions.items()})()


def algorithm(name: str, event: str, apply: Callable[[Any], Any]) -> Any:
    """An algorithm with this class name that calls ``apply`` with the state at one event."""
    from composer import Algorithm, Event

    methods = {"match": lambda self, at, state: at is Event(event), "apply": lambda self, at, state, log: apply(state)}
    return type(name, (Algorithm,), methods)()


def stateful(name: str, state: dict[Any, Any]) -> Any:
    """A callback with this class name in checkpoints; its state is ``state``, or the loaded one."""
    from composer import Callback

    class Stateful(Callback):
        def __init__(self) -> None:
            self.state = state

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = state

    Stateful.__qualname__ = name
    return Stateful()
