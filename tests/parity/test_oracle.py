"""The comparisons can fail: a wrong gradient is detected, and only noise is excluded."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from parity.assertions import parametrize_runs
from parity.cases import is_refused
from parity.comparison import TOLERANCE, Difference, difference, fsdp1_error
from parity.harness import Run, Sharding, train
from parity.models import NOISE
from support.ranks import run_ranks

pytestmark = pytest.mark.composer


def differ_by_world_size(run: Run) -> Difference:
    ours = train(run, Sharding.FSDP2, gradient_scale=dist.get_world_size())
    return difference(ours, train(run, Sharding.FSDP1), run)


def test_a_gradient_that_is_world_size_times_too_large_is_noticed():
    """gloo's silent sum instead of a mean (pytorch#162338) is such a mistake, and a comparison must detect it. (AdamW
    alone would hide it, because its step does not depend on a gradient's scale.)"""
    assert TOLERANCE == 1e-6
    found = run_ranks(differ_by_world_size, 2, Run())[0]
    assert found.norms > 0.5 and found.losses > 1e-2 and found.parameters > 1e-2


def noise_and_signal(run: Run) -> list[tuple[str, float, float]]:
    grads = train(run, Sharding.FSDP2).grads
    return [
        (name, grad[part].abs().max().item(), grads[name.replace(".bias", ".weight")].abs().max().item())
        for name, grad in grads.items()
        for ending, part in NOISE[run.model].items()
        if name.endswith(ending)
    ]


@parametrize_runs([Run(model=model, optimizer="adamw", tied=True, steps=2) for model in NOISE])
def test_what_is_left_out_is_noise(run: Run):
    """Excluding a significant gradient would hide a mistake in it."""
    found = run_ranks(noise_and_signal, 2, run)[0]
    assert len(found) == 2, "one for each block"
    for name, noise, signal in found:
        assert noise < 1e-6 * signal, f"{name}: {noise} against {signal}"


@pytest.mark.others
@pytest.mark.parametrize(
    ("run", "error"),
    [
        (Run(optimizer="sgd64", clipping="value"), "linalg.vector_norm"),
        (Run(settings="flat", groups="several"), "not supported with use_orig_params=False"),
        (Run(settings="flat", groups="frozen"), "requires_grad"),
    ],
    ids=str,
)
def test_fsdp1_refuses_what_the_table_says(run: Run, error: str):
    """A wrong row of the table would exclude combinations without need."""
    assert is_refused(vars(run))
    for text in run_ranks(fsdp1_error, 2, run):
        assert error in text
