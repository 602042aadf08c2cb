"""The value of a run without a machine."""

from __future__ import annotations

import dataclasses

import pytest

from composer_fsdp2.preflight.preflight_run import OptimizerChoice


def test_a_choice_stays_as_it_was_read():
    """A value that a search changes in place is another run's the next time."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerChoice(name="adamw", options={}).name = "sgd"  # type: ignore[misc]
