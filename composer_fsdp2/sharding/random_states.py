"""The states of all RNGs in use, to send them to other ranks and to restore them."""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Copies of the states of torch's CPU and CUDA generators, Python's, and NumPy's if it is imported."""
    return {name: read() for name, (read, _) in _generators().items()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to ``states``, which ``random_states`` returned on this rank earlier, or on another rank."""
    for name, (_, write) in _generators().items():
        if name in states:  # ranks may have imported different packages
            write(states[name])


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "random": (random.getstate, random.setstate),
    }
    if torch.cuda.is_available():
        found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = (numpy.random.get_state, numpy.random.set_state)
    return found
