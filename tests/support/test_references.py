"""The memo of references: a run is trained again unless everything that decides it is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import references
from support.ranks import run_ranks
from support.references import reference

calls: list[Any] = []


def train(*arguments: Any, **options: Any) -> list[torch.Tensor]:
    calls.append((arguments, options))
    return [torch.rand(2)]


def test_it_is_trained_once(monkeypatch: pytest.MonkeyPatch):
    """A check that changes what it was given would change another check's reference."""
    monkeypatch.setattr(references, "_results", {})
    state = torch.get_rng_state()
    first = reference(train, {"a": [1], "b": None}, under=run_ranks)
    expected = first[0].clone()
    first[0].zero_()
    assert torch.equal(reference(train, {"b": None, "a": [1]}, under=run_ranks)[0], expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_run_is_another_reference(monkeypatch: pytest.MonkeyPatch):
    """Runs that differ in one argument would be compared with each other's curve; two objects that print alike may
    hold different weights."""
    monkeypatch.setattr(references, "_results", {})
    others: list[Any] = [
        ((1,), {}),
        ((True,), {}),
        ((1.0,), {}),
        (("1",), {}),
        (([1],), {}),
        ((), {"a": 1}),
        ((1, 1), {}),
    ]
    calls.clear()
    for _ in range(2):
        for arguments, options in others:
            reference(train, *arguments, **options)
    assert calls == others
    for value in (object(), torch.ones(1), lambda: 1, {"a": {2, 3}}):
        with pytest.raises(TypeError, match="no key of a reference"):
            reference(train, value)
