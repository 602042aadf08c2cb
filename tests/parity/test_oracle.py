"""That these comparisons can fail: the reference is what it claims to be, and a wrong gradient is noticed."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from parity.assertions import parametrize_runs
from parity.cases import REFUSED
from parity.comparison import TOLERANCE, Difference, difference, fsdp1_error
from parity.harness import Run, Sharding, make_optimizer, shard, train
from parity.models import NOISE, build
from support.ranks import run_ranks

pytestmark = pytest.mark.composer


def describe(sharding: Sharding) -> dict[str, set[str]]:
    run = Run()
    model = build(run.model, tied=run.tied)
    shard(run, sharding, model, make_optimizer(run, model))
    return {
        "modules": {cls.__name__ for module in model.modules() for cls in type(module).__mro__},
        "parameters": {type(parameter.data).__name__ for parameter in model.parameters()},
    }


def test_the_reference_is_fsdp1_and_ours_is_not():
    """If both sides ran the same code, or were far apart by permission, every comparison would pass."""
    assert TOLERANCE == 1e-6
    theirs = run_ranks(describe, 2, Sharding.FSDP1)[0]
    ours = run_ranks(describe, 2, Sharding.FSDP2)[0]
    assert "FullyShardedDataParallel" in theirs["modules"] and "FSDPModule" not in theirs["modules"]
    assert "FSDPModule" in ours["modules"] and "FullyShardedDataParallel" not in ours["modules"]
    assert "DTensor" not in theirs["parameters"] and "DTensor" in ours["parameters"]


def differ_by_world_size(run: Run) -> Difference:
    ours = train(run, Sharding.FSDP2, gradient_scale=dist.get_world_size())
    return difference(ours, train(run, Sharding.FSDP1), run)


def test_a_gradient_that_is_world_size_times_too_large_is_noticed():
    """gloo's silent sum in place of a mean (pytorch#162338) is such a mistake; a comparison that lets it pass would let
    it pass to users."""
    found = run_ranks(differ_by_world_size, 2, Run())[0]
    assert found.norms > 0.5 and found.losses > 1e-2 and found.parameters > 1e-2


def test_adamw_alone_would_hide_it():
    """Why SGD is an axis of every set of cases: Adam divides a gradient's scale away."""
    found = run_ranks(differ_by_world_size, 2, Run(optimizer="adamw64", dropout=False))[0]
    assert found.losses < 1e-4 and found.parameters < 1e-4


def noise_and_signal(run: Run) -> list[tuple[str, float, float]]:
    grads = train(run, Sharding.FSDP2).grads
    return [
        (name, grad[part].abs().max().item(), grads[name.replace(".bias", ".weight")].abs().max().item())
        for name, grad in grads.items()
        for ending, part in NOISE[run.model].items()
        if name.endswith(ending)
    ]


@parametrize_runs([Run(model=model, optimizer="adamw", tied=True) for model in NOISE])
def test_what_is_left_out_is_noise(run: Run):
    """Leaving out a gradient that means something would hide a mistake in it."""
    found = run_ranks(noise_and_signal, 2, run)[0]
    assert len(found) == 2, "one for each block"
    for name, noise, signal in found:
        assert noise < 1e-6 * signal, f"{name}: {noise} against {signal}"


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
    """A row of the table that is not true would leave combinations out for nothing."""
    assert any(row.covers(vars(run)) for row in REFUSED)
    for text in run_ranks(fsdp1_error, 2, run):
        assert error in text
