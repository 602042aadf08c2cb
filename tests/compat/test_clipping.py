"""GradientClipping on a sharded model clips, and by FSDP1's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import full_parameters
from support.oracle import FSDP1, FSDP2, UNSHARDED
from support.ranks import run_ranks
from support.trainers import Trained, build_model, fit, largest_difference, make_trainer
from torch import nn

pytestmark = pytest.mark.composer

NO_MOMENTUM_LR = 0.1
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


BUILDS = {"one root": build_model, "two roots": two_roots, "a row": with_row}
# One that clips these models' gradients (the test sees to it), and one that does not.
THRESHOLDS = {"norm": (0.05, 1e6), "value": (0.01, 1e6)}


def check_like_fsdp1() -> None:
    unclipped = {name: fit(FSDP2, {}, model=build(), batches=BATCHES).losses for name, build in BUILDS.items()}

    def check(name: str, kind: str, strategy: str) -> None:
        keys, clip = {"sharding_strategy": strategy}, (kind, THRESHOLDS[kind][0])
        theirs, ours = (
            fit(under, dict(keys), model=BUILDS[name](), clip=clip, batches=BATCHES) for under in (FSDP1, FSDP2)
        )
        assert largest_difference(theirs.losses, unclipped[name]) > 0.01, "clips nothing"
        difference = largest_difference(ours.losses, theirs.losses)
        assert difference <= 1e-6, f"{difference}: {ours.losses}, FSDP1 {theirs.losses}"
        for parameter, value in theirs.parameters.items():
            torch.testing.assert_close(ours.parameters[parameter], value, rtol=1e-5, atol=1e-6)

    def check_free(name: str, kind: str) -> None:
        free = fit(FSDP2, {}, model=BUILDS[name](), clip=(kind, THRESHOLDS[kind][1]), batches=BATCHES)
        assert free.losses == unclipped[name]

    pairs = list(itertools.product(BUILDS, THRESHOLDS))
    strategies = dict.fromkeys(BUILDS, ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")) | {"a row": ("FULL_SHARD",)}
    for_each(check, {f"{(*pair, each)}": (*pair, each) for pair in pairs for each in strategies[pair[0]]})
    for_each(check_free, {f"{pair}": pair for pair in pairs})


def test_clipping_is_fsdp1s():
    """Same norm, same threshold, same curve, also where a model has several roots, which FSDP1 clipped one by one."""
    run_ranks(check_like_fsdp1, 2)


def moved(keys: dict[str, Any], clip: tuple[str, float] | None) -> float:
    """How far one step of plain gradient descent moves the parameters."""
    model = build_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=NO_MOMENTUM_LR)
    trained = fit(FSDP2, keys, model=model, optimizer=optimizer, clip=clip, batches=1)
    steps = [(trained.parameters[name] - value).flatten() for name, value in before.items()]
    return torch.cat(steps).norm().item()


def check_tiny_threshold() -> None:
    from composer.utils import FSDP2Config

    def check(keys: Any) -> None:
        free = moved(keys, None)
        assert free > 1e-3, free
        for threshold in (1e-6, 1e-3):
            far = moved(keys, ("norm", threshold))
            # The norm is divided by itself plus 1e-6, as FSDP1 did, and parameters are rounded to fp32.
            assert far == pytest.approx(NO_MOMENTUM_LR * threshold, rel=0.05, abs=2e-8), far

    configs = ({}, {"sharding_strategy": "NO_SHARD"}, {"cpu_offload": True}, FSDP2Config())
    for_each(check, {f"{keys}": (keys,) for keys in configs})


def test_a_tiny_threshold_stops_the_model():
    """With an FSDPConfig over FSDP2, Composer's clipping looked for FSDP1's modules, found none and did nothing."""
    run_ranks(check_tiny_threshold, 2)


def check_offload() -> None:
    def check(*clip: Any) -> None:
        on_device = fit(FSDP2, {}, clip=clip, eval_interval="2ba")
        offloaded = fit(FSDP2, {"cpu_offload": True}, clip=clip, eval_interval="2ba")
        assert offloaded.losses == on_device.losses
        for name, parameter in on_device.parameters.items():
            assert torch.equal(offloaded.parameters[name], parameter), name

    for_each(check, {f"{clip}": clip for clip in (("norm", 0.05), ("value", 0.01))})


def test_clipping_with_cpu_offload():
    """Gradients that lie in host memory are clipped as the others are."""
    run_ranks(check_offload, 2)


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


def check_adaptive_run(keys: dict[str, Any], threshold: float, whole: Trained) -> None:
    ours = fit(FSDP2, dict(keys), model=with_row(), clip=("adaptive", threshold))
    difference = largest_difference(ours.losses, whole.losses)
    assert difference <= 1e-6, f"{difference}: {ours.losses}, whole {whole.losses}"
    for name, value in whole.parameters.items():
        actual = ours.parameters[name.removeprefix("module.")]
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6, msg=name)


def check_adaptive() -> None:
    last = fit(UNSHARDED, None, model=with_row())
    others = [{"sharding_strategy": "NO_SHARD"}, {"cpu_offload": True}]
    for threshold, variants in ((0.5, [{}]), (0.01, [{}, *others])):
        whole = fit(UNSHARDED, None, model=with_row(), clip=("adaptive", threshold))
        assert largest_difference(whole.losses, last.losses) > 1e-3, f"{threshold} changes nothing"
        last = whole
        for_each(check_adaptive_run, {f"{keys}, {threshold}": (keys, threshold, whole) for keys in variants})


def test_adaptive_clipping_is_the_whole_models():
    """A run that clipped adaptively on one GPU, or under DDP, keeps its curve when it is sharded; FSDP1 refused it."""
    run_ranks(check_adaptive, 2, timeout_s=300)


def check_unknown() -> str:
    from composer_fsdp2 import ComposerFSDP2Error

    with FSDP2():
        trainer = make_trainer({}, clip=("adaptiv", 0.1))
        before = full_parameters(trainer.state.model)
        with pytest.raises(ComposerFSDP2Error) as refusal:
            trainer.fit()
        assert isinstance(refusal.value, ValueError)  # as FSDP1's was
        after = full_parameters(trainer.state.model)
        assert all(torch.equal(after[name], value) for name, value in before.items()), "a step was made"
        trainer.close()
    return str(refusal.value)


def test_a_misspelt_type_is_refused():
    """It would train unclipped."""
    for message in run_ranks(check_unknown, 2):
        assert "'adaptiv'" in message and "'norm', 'value' or 'adaptive'" in message
