"""What the table of optimizers says beside the state that each optimizer makes in a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from composer_fsdp2 import optimizer_state
from composer_fsdp2.errors import ConfigError

pytestmark = pytest.mark.foundry

# Its step needs a closure, sparse gradients, or a state whose shape is no parameter's.
UNKNOWN = {"LBFGS", "SparseAdam", "Adafactor", "Muon"}
OPTIONS = ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"momentum": 0.9, "centered": True})


def classes() -> Iterator[type[Optimizer]]:
    import composer.optim
    import llmfoundry.optim

    for module in (torch.optim, composer.optim, llmfoundry.optim):
        for each in vars(module).values():
            is_optimizer = isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
            if is_optimizer and each.__name__ not in UNKNOWN:
                yield each


def test_every_installed_optimizer_keeps_what_the_table_says():
    """An optimizer whose state is not what was predicted runs out of memory in its first step."""
    wrong = []
    for each in dict.fromkeys(classes()):
        accepted = inspect.signature(each).parameters
        for options in OPTIONS:
            if not options.keys() <= accepted.keys():
                continue
            model = nn.Linear(10, 7)
            optimizer = each(model.parameters(), **({"lr": 1e-3} if "lr" in accepted else {}), **options)
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
            state = optimizer_state(each.__name__, options)
            expected = sum(state.state_bytes(parameter.numel(), 4) for parameter in model.parameters())
            if expected != (found := sum(tensor.nbytes for tensor in kept)):
                wrong.append(f"{each.__name__} {options}: {found} bytes, not {expected}")
    assert not wrong, wrong


def test_foundrys_names_are_known():
    """A YAML says ``decoupled_lionw``, not a class."""
    from llmfoundry.registry import optimizers

    for name, each in optimizers.get_all().items():
        assert optimizer_state(name).name == each.__name__


def test_an_unknown_optimizer_is_named():
    """A guess in place of what is not known would be a wrong memory."""
    with pytest.raises(ConfigError, match="decoupled_lion keeps is not known; did you mean decoupled_lionw"):
        optimizer_state("decoupled_lion")
