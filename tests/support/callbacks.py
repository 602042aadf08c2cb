"""Composer callbacks of a line each: ``callback(batch_end=lambda state: ...)``. Imports Composer only when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def callback(**functions: Callable[[Any], Any]) -> Any:
    """One whose methods of these names call the functions with the state; it runs before the checkpoint saver."""
    from composer import Callback

    def method(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda self, state, logger: function(state)

    return type("Watch", (Callback,), {name: method(function) for name, function in functions.items()})()
