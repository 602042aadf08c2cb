"""A Trainer's batch makes the host wait for a GPU no more often than on Composer's own FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.oracle import FSDP2, UNSHARDED, Under
from support.ranks import run_ranks
from support.synchronisations import Synchronisations
from support.trainers import build_model, make_trainer
from torch import nn

pytestmark = pytest.mark.composer


def synchronisations(under: Under, parallelism: Any, model: nn.Module) -> Synchronisations:
    """Of one batch of two microbatches, once the optimizer has its state, from the beginning of fit to its end."""
    with under():
        trainer = make_trainer(parallelism, model=model, optimizer="decoupled_adamw", clip=("norm", 0.05), batches=2)
        trainer.fit()
        with Synchronisations() as found:
            trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch.value == 3
        trainer.close()
    return found


def with_scalars() -> Any:
    """Every rank holds a scalar unsharded; its gradient is averaged where the backward ends."""
    model = build_model()
    model.model.gain, model.model.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
    forward = model.model.forward
    model.model.forward = lambda x: forward(x) * model.model.gain + model.model.bias
    return model


def check_batch() -> None:
    from composer.utils import FSDP2Config, ParallelismConfig

    own = synchronisations(FSDP2, {}, build_model(tied=False))
    theirs = synchronisations(UNSHARDED, ParallelismConfig(fsdp2=FSDP2Config()), build_model(tied=False))
    of_own, of_theirs = (Counter(map(str, each.found)) for each in (own, theirs))
    assert all(any(each.kind == kind for each in theirs.found) for kind in ("read", "sent")), of_theirs
    assert not of_own - of_theirs, of_own - of_theirs
    # Neither clipping nor the average of what every rank holds unsharded.
    for build in (build_model, with_scalars):
        found = synchronisations(FSDP2, {}, build()).of_packages("composer_fsdp2", "composer_fsdp2.compat")
        assert not found, f"{build.__name__}: {found}"


def test_a_batch_waits_no_more_often_than_composers_own():
    """A GPU would stand still while the host waits for it, and then has yet to launch what comes next."""
    run_ranks(check_batch, 2)
