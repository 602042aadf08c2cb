"""The comparison that ends many tests: different values must not compare equal."""

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
    ("found", "expected", "differs", "differs_in_bits"),
    [
        # A model and a reference that are both NaN must not pass as equal training.
        *((value, value, True, False) for value in (NAN, torch.tensor([1, NAN]), numpy.array([NAN]), Pair(NAN))),
        # A copy that lost the sign must not pass as bit-identical.
        *((zero, -zero, False, True) for zero in (0.0, torch.zeros(2), 0j)),
        (torch.ones(2, 3).t(), torch.ones(3, 2), False, False),
        (torch.ones(3)[:0:2], torch.ones(3)[:0:2].clone(), False, False),
        (torch.empty(4).expand(0, 4).t(), torch.ones(4, 0), False, False),
        *(
            (found, expected, True, True)
            for found, expected in (
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
            )
        ),
    ],
    ids=repr,
)
def test_what_differs(found: Any, expected: Any, differs: bool, differs_in_bits: bool):
    """Otherwise most tests of checkpoints and training would prove nothing."""
    assert (differ(found, expected), differ(found, expected, in_bits=True)) == (differs, differs_in_bits)


@pytest.mark.parametrize(
    ("one", "other"), [({"b": 1, "c": 2}, {"c": 2, "b": 1}), ({"b": 1}, OrderedDict(b=1))], ids=["keys", "class"]
)
def test_mappings_are_alike_unless_the_order_matters(one: Any, other: Any):
    """A file that should match torch.save's could have its keys in another order."""
    assert not differ(one, other, in_bits=True)
    assert differ(one, other, in_order=True)
