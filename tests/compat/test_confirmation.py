"""A user sees that FSDP2 is active: one line when a model is sharded, a warning if FSDP1 trains instead."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
import torch.distributed as dist
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, few_modules
from support.trainers import make_trainer

from composer_fsdp2 import install_fsdp
from composer_fsdp2.compat import fsdp2

pytestmark = pytest.mark.composer


def printed(*, show_units: bool) -> str:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), few_modules(), fsdp2(show_units=show_units):
        make_trainer({"sharding_strategy": "SHARD_GRAD_OP"}, tied=False)
    return text.getvalue()


@on_ranks(2)
def test_rank_0_prints_what_the_model_was_sharded_into():
    """Exit code 0 and a loss do not show it."""
    summary, units = printed(show_units=False), printed(show_units=True)
    told = "composer_fsdp2: 3 units on FSDP2 (2 ranks, SHARD_GRAD_OP)\n" if dist.get_rank() == 0 else ""
    assert (told in summary and summary.count("composer_fsdp2:") == 1) if told else "composer_fsdp2" not in summary
    assert ("parameters, root" in units) == (dist.get_rank() == 0), units
    assert "parameters, root" not in summary, summary


@on_ranks(2)
def test_units_stay_listed_where_a_library_replaces_fsdp1s_class():
    """``run --show-units`` replaces both, and a library inside may call ``install_fsdp`` itself."""
    with fsdp2(show_units=True), install_fsdp():
        units = printed(show_units=False)
    assert ("parameters, root" in units) == (dist.get_rank() == 0), units
    assert "parameters, root" not in printed(show_units=False)


@on_ranks(2)
def test_a_late_install_warns_that_fsdp1_trains():
    """``install()`` after the Trainer ended with exit code 0, on FSDP1."""
    with FSDP1():
        trainer = make_trainer({}, tied=False, batches=1)
        with FSDP2(), pytest.warns(UserWarning, match="modules of .* on FSDP1 .* call install.. before the Trainer"):
            trainer.fit()


@on_ranks(2)
def test_an_install_in_time_warns_of_nothing():
    with FSDP2(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*FSDP1")
        make_trainer({}, tied=False, batches=1).fit()
