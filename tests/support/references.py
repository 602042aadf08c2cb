"""Results that several tests compare with, trained once: ``reference(fit, FSDP1, {}, optimizer="adamw")``.

A pool of ranks caches them for its lifetime, so later checks on the same ranks, from any test file, reuse the first
result. They are not stored in files.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch

_results: dict[Hashable, Any] = {}


def reference(train: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A copy of the result of ``train(*arguments, **options)``, which runs once for each pool of ranks.

    Args:
        train: A module's function that seeds its random numbers, and whose result depends on its arguments only.
        arguments: Values: numbers, strings, None, functions and classes of a module, and collections of these.
    Raises:
        TypeError: an argument is of another kind, and its contents could not be part of the key. Called on all ranks,
            with the same arguments: all train or none, since the ranks of a pool live equally long. Do not call it
            within patches or changed variables, which are not part of the key.
    """
    key = _key((train, arguments, options))
    if key not in _results:
        with torch.random.fork_rng(devices=[]):  # torch's next draw is the same in any case.
            _results[key] = train(*copy.deepcopy(arguments), **copy.deepcopy(options))
    return copy.deepcopy(_results[key])


def _key(value: Any) -> Hashable:
    """Equal for equal values only: 1, 1.0 and True are three keys."""
    match value:
        case dict():
            return "dict", frozenset((_key(name), _key(each)) for name, each in value.items())
        case list() | tuple():
            return type(value), tuple(map(_key, value))
        case None | bool() | int() | float() | str():
            return type(value), value
        case FunctionType() | type() if "<" not in value.__qualname__:
            return value.__module__, value.__qualname__
        case functools.partial():
            return functools.partial, _key((value.func, value.args, value.keywords))
    raise TypeError(f"{value!r} is no key of a reference: what it holds is not part of its name")
