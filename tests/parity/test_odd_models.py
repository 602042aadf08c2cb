"""Ours against Composer's FSDP1 on models that are not a plain stack of blocks."""

from __future__ import annotations

import pytest
from parity.assertions import assert_parity, parametrize_runs
from parity.harness import Run

pytestmark = pytest.mark.composer

# Between them: each optimizer, clipping or none, one microbatch or three, an evaluation or none, two kinds of groups.
# The first is equal bit for bit.
WAYS = (
    {"optimizer": "sgd"},
    {"optimizer": "adamw", "clipping": "value", "evaluate": True, "groups": "frozen"},
    {"optimizer": "sgd", "clipping": "norm", "evaluate": True, "microbatches": 3},
    {"optimizer": "adamw64", "microbatches": 3, "checkpointing": "non-reentrant"},
)


def each_way(model: str) -> pytest.MarkDecorator:
    return parametrize_runs([Run(model=model, **way) for way in WAYS])


@each_way("skipped")
def test_a_child_that_opts_out(run: Run):
    """A direct child with `_fsdp_wrap = False` would be sharded, synchronised or clipped, which FSDP1 did not do."""
    assert_parity(run, 2)


@each_way("unused")
def test_parameters_that_no_forward_reads(run: Run):
    """Weight decay would act on other parameters than before: FSDP1 gave those in a used unit a gradient of zero, and
    those of an unused unit none."""
    assert_parity(run, 2)


@each_way("branch")
def test_parameters_that_some_ranks_do_not_read(run: Run):
    """The gradient of one parameter on one rank would be added to that of another on the next, without an error: a
    model with branches or experts would train on garbage."""
    assert_parity(run, 2)


@each_way("nested")
def test_units_within_units(run: Run):
    """A wrap function that chooses modules inside chosen modules, or returns settings for one, would fail or train
    otherwise."""
    assert_parity(run, 2)


@each_way("ownbuffers")
def test_buffers_in_the_dtype_of_their_unit(run: Run):
    """A unit with its own MixedPrecision would compute with buffers in the model's dtype: its buffer_dtype was lost."""
    assert_parity(run, 2)


@parametrize_runs([Run(model="mpt-kwargs", tied=tied, evaluate=True) for tied in (True, False)])
def test_settings_on_the_module_itself(run: Run):
    """What LLM Foundry writes on a module (`_fsdp_kwargs_dict`, for its experts) would be dropped, or refused."""
    assert_parity(run, 2)


@each_way("twice")
def test_two_forwards_before_one_backward(run: Run):
    """Preference training (a chosen and a rejected answer in one loss) would miss or repeat a gradient."""
    assert_parity(run, 2)


@each_way("convolution")
def test_channels_last(run: Run):
    """Vision runs with Composer's ChannelsLast would fail, since fully_shard takes contiguous parameters only."""
    assert_parity(run, 2)
