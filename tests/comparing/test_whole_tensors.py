"""Sums of the ranks' parts."""

from __future__ import annotations

import math

from composer_fsdp2.comparing import whole_tensors


def test_parts_that_are_infinite_both_ways_have_a_sum():
    """A diverged run ended the comparison with Python's ValueError, without a verdict."""
    assert math.isnan(whole_tensors._sum([math.inf, -math.inf]))
    assert whole_tensors._sum([1e308, 1e308]) == math.inf
    assert whole_tensors._sum([0.1] * 10) == 1.0
