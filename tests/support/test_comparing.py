"""What many tests end with: two values that differ are not taken for the same."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from support.comparing import differences

NAN = float("nan")


@dataclass
class Pair:
    one: Any
    other: Any = 0


def differ(found: Any, expected: Any, **options: bool) -> bool:
    return bool(list(differences({"a": [found]}, {"a": [expected]}, **options)))


@pytest.mark.parametrize(
    "value", [NAN, torch.tensor([1, NAN]), numpy.array([NAN]), numpy.float64(NAN), Pair(NAN)], ids=repr
)
def test_nan_is_the_same_in_a_copy_alone(value: Any):
    """A model that became NaN, and a reference that did, would pass for a model that trains rightly."""
    assert differ(value, value)
    assert not differ(value, value, in_bits=True)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (torch.zeros(2), -torch.zeros(2)), (0j, -0j)], ids=repr)
def test_zeros_differ_in_a_copy_alone(one: Any, other: Any):
    """A copy that lost the sign would pass for one to the last bit."""
    assert not differ(one, other)
    assert differ(one, other, in_bits=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ([1], [1, 1]),
        ({"b": 1}, {}),
        ({}, {"b": 1}),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2), torch.tensor([1.0, 2.0])),
        (torch.ones(2), [1.0, 1.0]),
        (numpy.ones(2), numpy.ones(2, dtype="float32")),
        (numpy.ones(2), numpy.array([1.0, 2.0])),
        (Pair(torch.ones(2)), Pair(torch.zeros(2))),
    ],
    ids=repr,
)
def test_classes_keys_and_values_count(one: Any, other: Any):
    """Most tests of checkpoints and of training would say nothing."""
    assert not differ(one, one) and not differ(one, one, in_bits=True)
    assert differ(one, other) and differ(one, other, in_bits=True)


@pytest.mark.parametrize(
    ("one", "other"), [({"b": 1, "c": 2}, {"c": 2, "b": 1}), ({"b": 1}, OrderedDict(b=1))], ids=["keys", "class"]
)
def test_mappings_are_alike_unless_the_order_matters(one: Any, other: Any):
    """A file that is said to be torch.save's would have other keys first."""
    assert not differ(one, other, in_bits=True)
    assert differ(one, other, in_order=True)


def test_a_view_is_compared_as_what_it_shows():
    """Strides, also those of what is empty, are not part of a value."""
    for view in (torch.ones(3, 2).t(), torch.ones(1).expand(4), torch.empty(4).expand(0, 4).t(), torch.ones(3)[:0:2]):
        assert not differ(view, view.clone(), in_bits=True) and not differ(view, torch.ones(view.shape), in_bits=True)
