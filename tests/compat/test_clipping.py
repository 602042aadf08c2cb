"""GradientClipping on a sharded model clips, and by FSDP1's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.oracle import FSDP1, FSDP2, UNSHARDED
from support.ranks import run_ranks
from support.trainers import Trained, build_model, close, fit, largest_difference, make_trainer
from torch import nn

from composer_fsdp2 import ComposerFSDP2Error

pytestmark = pytest.mark.composer

BATCHES = 3  # with momentum, the last one has the clipped steps of two


def two_roots() -> Any:
    """A model with two direct children, which FSDP1 wrapped, and clipped, each for itself."""
    model = build_model()
    torch.manual_seed(4)
    model.scale = nn.Linear(13, 13)
    forward = model.forward
    model.forward = lambda batch: model.scale(forward(batch))
    return model


def with_row() -> Any:
    """Untied, with a parameter of one row, of which rank 1 holds nothing."""
    model = build_model(tied=False)
    model.row = nn.Linear(13, 1, bias=False)
    nn.init.constant_(model.row.weight, 0.3)
    forward = model.forward
    model.forward = lambda batch: (x := forward(batch)) + x * model.row(x)
    return model


CLIPS: dict[str, tuple[Any, dict[str, Any], tuple[str, float]]] = {
    "one root": (build_model, {"sharding_strategy": "FULL_SHARD"}, ("norm", 0.05)),
    "nearly nothing": (build_model, {"sharding_strategy": "FULL_SHARD"}, ("norm", 1e-6)),
    "values": (build_model, {"sharding_strategy": "NO_SHARD"}, ("value", 0.01)),
    "two roots": (two_roots, {"sharding_strategy": "SHARD_GRAD_OP"}, ("norm", 0.05)),
    "values of a row, offloaded": (with_row, {"cpu_offload": True}, ("value", 0.01)),
}


def check_like_fsdp1() -> None:
    from composer.utils import FSDP2Config

    def check(build: Any, keys: dict[str, Any], clip: tuple[str, float]) -> None:
        def run(under: Any, config: Any, clip: tuple[str, float] | None) -> Trained:
            return fit(under, config, model=build(), clip=clip, batches=BATCHES)

        theirs = run(FSDP1, keys if "cpu_offload" not in keys else {}, clip)  # which Composer's FSDP1 refuses
        unclipped = run(FSDP2, keys, None)
        assert largest_difference(theirs.losses, unclipped.losses) > 0.01, "clips nothing"
        for config in (keys, FSDP2Config()) if clip == ("norm", 1e-6) else (keys,):
            ours = run(FSDP2, config, clip)
            assert close(ours.losses, theirs.losses), f"{ours.losses}, FSDP1 {theirs.losses}"
            torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-6)
        assert run(FSDP2, keys, (clip[0], 1e6)).losses == unclipped.losses

    for_each(check, CLIPS)


def test_clipping_is_fsdp1s():
    """Same norm, same threshold, same curve, also where a model has several roots, which FSDP1 clipped one by one. Over
    FSDP2, Composer's clipping looked for FSDP1's modules, found none and did nothing."""
    run_ranks(check_like_fsdp1, 2)


def check_function() -> None:
    """composer.functional.apply_gradient_clipping, in a training loop of the user's own."""
    import composer.functional

    with FSDP2():
        trainer = make_trainer({})
        model = trainer.state.model
        batch = [torch.arange(10).reshape(2, 5)]
        for is_fsdp in (True, False):  # what people pass here depends on what they think they run
            model.zero_grad()
            model.loss(model(batch), batch).backward()
            composer.functional.apply_gradient_clipping(model, "norm", 1e-3, is_fsdp)
            grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
            norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
            assert norm == pytest.approx(1e-3, rel=0.01), f"fsdp_enabled={is_fsdp}: {norm}"
        trainer.close()


def test_the_function_clips_too():
    """Training loops without the algorithm call composer.functional, imported before the shim came."""
    run_ranks(check_function, 2)


def check_adaptive() -> None:
    unclipped, whole = (fit(UNSHARDED, None, model=with_row(), clip=clip) for clip in (None, ("adaptive", 0.01)))
    assert largest_difference(whole.losses, unclipped.losses) > 1e-3, "clips nothing"

    def check(keys: dict[str, Any]) -> None:
        ours = fit(FSDP2, keys, model=with_row(), clip=("adaptive", 0.01))
        assert close(ours.losses, whole.losses), f"{ours.losses}, whole {whole.losses}"
        theirs = {name.removeprefix("module."): value for name, value in whole.parameters.items()}
        torch.testing.assert_close(ours.parameters, theirs, rtol=1e-5, atol=1e-6)

    for_each(check, {f"{keys}": (keys,) for keys in ({}, {"cpu_offload": True})})


def test_adaptive_clipping_is_the_whole_models():
    """A run that clipped adaptively on one GPU, or under DDP, keeps its curve when it is sharded; FSDP1 refused it."""
    run_ranks(check_adaptive, 2, timeout_s=300)


def check_unknown() -> None:
    model = build_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with FSDP2():
        trainer = make_trainer({}, model=model, clip=("adaptiv", 0.1))
        with pytest.raises(ComposerFSDP2Error, match=r"'adaptiv'.*'norm', 'value' or 'adaptive'") as refusal:
            trainer.fit()
        assert isinstance(refusal.value, ValueError)  # as FSDP1's was
        assert_same(full_parameters(model), before, "a step was made")
        trainer.close()


def test_a_misspelt_type_is_refused():
    """It would train unclipped."""
    run_ranks(check_unknown, 2)
