"""That these comparisons can fail: a wrong gradient is noticed."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from parity.comparison import TOLERANCE, Difference, difference
from parity.harness import Run, Sharding, train
from support.ranks import run_ranks

pytestmark = pytest.mark.composer


def differ_by_world_size(run: Run) -> Difference:
    ours = train(run, Sharding.FSDP2, gradient_scale=dist.get_world_size())
    return difference(ours, train(run, Sharding.FSDP1), run)


def test_a_gradient_that_is_world_size_times_too_large_is_noticed():
    """gloo's silent sum in place of a mean (pytorch#162338) is such a mistake; a comparison that lets it pass would let
    it pass to users. (AdamW alone would hide it: it divides a gradient's scale away.)"""
    assert TOLERANCE == 1e-6
    found = run_ranks(differ_by_world_size, 2, Run())[0]
    assert found.norms > 0.5 and found.losses > 1e-2 and found.parameters > 1e-2
