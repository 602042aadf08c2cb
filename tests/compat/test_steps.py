"""The Trainer between two batches: clipping, gradient_sync, collective_guard; and its device synchronizations."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full, full_parameters
from support.examples import IS_THOROUGH
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.references import reference
from support.synchronisations import Synchronisations
from support.trainers import Trained, build_model, close, fit, largest_difference, make_trainer, result, with_child
from torch import nn

from composer_fsdp2 import ComposerFSDP2Error, RanksDivergedError, begin_microbatch, prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives

pytestmark = pytest.mark.composer

# --- clipping

BATCHES = 3  # with momentum, the last one depends on the clipped steps of two


def two_roots() -> Any:
    """A model with two direct children, each wrapped and clipped separately by FSDP1."""
    torch.manual_seed(4)
    return with_child(nn.Linear(13, 13), lambda child, x: child(x))


def with_row() -> Any:
    """Untied, with a parameter of one row, whose shard on rank 1 is empty."""
    row = nn.Linear(13, 1, bias=False)
    nn.init.constant_(row.weight, 0.3)
    return with_child(row, lambda row, x: x + x * row(x), tied=False)


CLIPS: dict[str, tuple[Any, dict[str, Any], tuple[str, float]]] = {
    "nearly nothing": (build_model, {"sharding_strategy": "FULL_SHARD"}, ("norm", 1e-6)),
    "two roots": (two_roots, {"sharding_strategy": "SHARD_GRAD_OP"}, ("norm", 0.05)),
    "values of a row, offloaded": (with_row, {"cpu_offload": True}, ("value", 0.01)),
}
if IS_THOROUGH:
    CLIPS["one root"] = (build_model, {"sharding_strategy": "FULL_SHARD"}, ("norm", 0.05))
    CLIPS["values"] = (build_model, {"sharding_strategy": "NO_SHARD"}, ("value", 0.01))


def clipped(under: Under, config: Any, build: Any, clip: tuple[str, float] | None) -> Trained:
    return fit(under, config, model=build(), clip=clip, batches=BATCHES)


@on_ranks(2)
def test_clipping_is_fsdp1s(folder: str):
    """Same norm, same threshold, same losses, also for a model with several roots, which FSDP1 clipped one by one. On
    FSDP2, Composer's clipping found no FSDP1 module and did nothing."""
    from composer.utils import FSDP2Config

    def check(build: Any, keys: dict[str, Any], clip: tuple[str, float]) -> None:
        theirs = clipped(FSDP1, keys if "cpu_offload" not in keys else {}, build, clip)  # FSDP1's Composer refuses that
        unclipped = reference(clipped, FSDP2, {}, build, None)
        assert largest_difference(theirs.losses, unclipped.losses) > 0.01, "clips nothing"
        ours = clipped(FSDP2, FSDP2Config() if clip == ("norm", 1e-6) else keys, build, clip)
        assert close(ours.losses, theirs.losses), f"{ours.losses}, FSDP1 {theirs.losses}"
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-6)

    for_each(check, CLIPS)
    unclipped = reference(clipped, FSDP2, {}, build_model, None)
    assert clipped(FSDP2, {}, build_model, ("norm", 1e6)).losses == unclipped.losses


@on_ranks(2)
def test_the_function_clips_too(folder: str):
    """Training loops without the algorithm call composer.functional, imported before install()."""
    import composer.functional

    model, batch = build_model(), [torch.arange(10).reshape(2, 5)]
    prepare_fully_shard(model, None, {}, device="cpu", precision="fp32")
    for is_fsdp in (True, False):  # users pass either value
        model.zero_grad()
        model.loss(model(batch), batch).backward()
        with FSDP2():
            composer.functional.apply_gradient_clipping(model, "norm", 1e-3, is_fsdp)
        norm = torch.cat([full(parameter.grad).flatten() for parameter in model.parameters()]).norm().item()
        assert norm == pytest.approx(1e-3, rel=0.01), f"fsdp_enabled={is_fsdp}: {norm}"


@on_ranks(2, timeout_s=300)
def test_adaptive_clipping_is_the_whole_models(folder: str):
    """A run with adaptive clipping on one GPU or under DDP has the same losses when it is sharded; FSDP1 refused it."""
    unclipped, whole = (clipped(UNSHARDED, None, with_row, clip) for clip in (None, ("adaptive", 0.01)))
    assert largest_difference(whole.losses, unclipped.losses) > 1e-3, "clips nothing"

    def check(keys: dict[str, Any]) -> None:
        ours = clipped(FSDP2, keys, with_row, ("adaptive", 0.01))
        assert close(ours.losses, whole.losses), f"{ours.losses}, whole {whole.losses}"
        theirs = {name.removeprefix("module."): value for name, value in whole.parameters.items()}
        torch.testing.assert_close(ours.parameters, theirs, rtol=1e-5, atol=1e-6)

    for_each(check, {f"{keys}": (keys,) for keys in ({}, {"cpu_offload": True})})


@on_ranks(2)
def test_a_misspelt_type_is_refused(folder: str):
    """It would train unclipped."""
    model = build_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with FSDP2():
        trainer = make_trainer({}, model=model, clip=("adaptiv", 0.1))
        with pytest.raises(ComposerFSDP2Error, match=r"'adaptiv'.*'norm', 'value' or 'adaptive'") as refusal:
            trainer.fit()
        assert isinstance(refusal.value, ValueError)  # as FSDP1's was
        assert_same(full_parameters(model), before, "a step was made")
        trainer.close()


# --- microbatches

KEYS: dict[str, dict[str, Any]] = {
    "every": {},
    "last": {"gradient_sync": "last"},
    "last, kept": {"gradient_sync": "last", "reshard_after_backward": False},
}
CLIP = ("norm", 0.5)


@on_ranks(2)
def test_the_curve_is_fsdp1s(folder: str):
    """FSDP1 under Composer reduced gradients in every microbatch; gradient_sync reduces communication and trains the
    same."""

    def check(optimizer: str, name: str, num_reductions: int) -> None:
        options = {"optimizer": optimizer, "clip": CLIP, "microbatch": 1, "batches": 2, "eval_interval": "1ba"}
        with Collectives() as sent:
            ours = fit(FSDP2, KEYS[name], **options)
        theirs = reference(fit, FSDP1, {}, **options)
        assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
        assert ours.eval_parameters == [["DTensor"], ["DTensor"]], ours.eval_parameters
        assert_alike(ours.parameters, theirs.parameters, "after training")
        assert sent.counts["_reduce_scatter_base_"]["calls"] == num_reductions

    # Two batches of four microbatches over three units: the Trainer marks the last microbatch.
    cases = (("sgd", "every", 2 * 4 * 3), ("sgd", "last, kept", 2 * 3))
    for_each(check, {name: (optimizer, name, number) for optimizer, name, number in cases})


def fit_after_an_error(under: Under, keys: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
    """The parameters after a batch, if the previous one ended with an error in its second microbatch."""
    with under():
        model = build_model()
        fail_once = mock.Mock(side_effect=itertools.chain([None, ValueError("once")], itertools.repeat(None)))
        if where == "forward":
            model.model.blocks[1].up.register_forward_hook(fail_once)
        else:
            model.model.wte.register_full_backward_hook(fail_once)
        trainer = make_trainer(keys, model=model, microbatch=1, batches=1, optimizer="adamw")
        with pytest.raises(ValueError, match="once"):
            trainer.fit()
        trainer.fit(duration="1ba", reset_time=True)
        parameters = result(trainer).parameters
        trainer.close()
    return parameters


def assert_alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: str) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}")


@on_ranks(2)
def test_a_fit_after_an_error(folder: str):
    """Unreduced gradients of the failed batch would be added to the next batch's, because zero_grad does not clear
    them."""

    def check(where: str, name: str) -> None:
        ours = fit_after_an_error(FSDP2, KEYS[name], where)
        assert_alike(ours, reference(fit_after_an_error, FSDP1, {}, where), where)

    for_each(check, {name: ("forward", name) for name in ("last", "last, kept")})
    every, last = (fit_after_an_error(FSDP2, KEYS[name], "backward") for name in ("every", "last"))
    assert_alike(last, every, "backward")  # FSDP1 itself stays in its backward state then


@on_ranks(2)
def test_composers_own_way_back_from_an_error(folder: str):
    """A script that catches an error and calls Composer's `_fsdp_reshard_and_cleanup` can continue: the model is in its
    state between batches."""
    from composer.trainer import trainer as composer_trainer

    x = torch.randint(0, 13, (2, 6))

    def gradients(fails: bool) -> dict[str, torch.Tensor]:
        model = build_model()
        prepare_fully_shard(model, None, {"gradient_sync": "last"}, device="cpu", precision="fp32")
        if fails:
            begin_microbatch(model, is_last=False)
            model.model(x).sum().backward()  # its gradients wait for the last microbatch
            handle = model.model.blocks[0].up.register_full_backward_hook(lambda *unused: 1 / 0)
            with FSDP2(), pytest.raises(ZeroDivisionError):
                model.model(x).sum().backward()
            handle.remove()
            with FSDP2():
                composer_trainer._fsdp_reshard_and_cleanup(model)
            model.zero_grad()
        model.model(x).sum().backward()
        return {name: full(parameter.grad) for name, parameter in model.named_parameters()}

    assert_same(gradients(fails=True), gradients(fails=False))


# --- collective_guard


@on_ranks(2, timeout_s=180, fresh=True)
def test_a_trainers_ranks_that_part(folder: str):
    """With one microbatch less on one rank, both ranks end with an error that names the position of each."""
    with FSDP2():
        trainer = make_trainer({"collective_guard": 3})
        if dist.get_rank() == 1:
            split = trainer._train_data_spec.split_batch
            trainer._train_data_spec.split_batch = lambda batch, size: split(batch, size)[:1]
        with pytest.raises(RanksDivergedError) as raised:
            trainer.fit()
    assert "rank 1 stands before the end of a training batch" in str(raised.value)
    assert "rank 0 stands before the all-gather of model in forward" in str(raised.value)


# --- synchronisations


def synchronisations(under: Under, parallelism: Any, model: nn.Module) -> Synchronisations:
    """The synchronizations of one batch of two microbatches, once the optimizer has its state, including the start and
    end of fit."""
    with under():
        trainer = make_trainer(parallelism, model=model, optimizer="decoupled_adamw", clip=("norm", 0.05), batches=2)
        trainer.fit()
        with Synchronisations() as found:
            trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch.value == 3
        trainer.close()
    return found


def with_scalars() -> Any:
    """Adds scalars, which are replicated; their gradients are averaged at the end of backward."""
    model = build_model()
    model.model.gain, model.model.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
    forward = model.model.forward
    model.model.forward = lambda x: forward(x) * model.model.gain + model.model.bias
    return model


@on_ranks(2)
def test_a_batch_waits_no_more_often_than_composers_own(folder: str):
    """A GPU would idle while the host waits for it, and then again until the next kernel launches."""
    from composer.utils import FSDP2Config, ParallelismConfig

    own = synchronisations(FSDP2, {}, build_model(tied=False))
    theirs = synchronisations(UNSHARDED, ParallelismConfig(fsdp2=FSDP2Config()), build_model(tied=False))
    of_own, of_theirs = (Counter(map(str, each.found)) for each in (own, theirs))
    assert all(any(each.kind == kind for each in theirs.found) for kind in ("read", "sent")), of_theirs
    assert not of_own - of_theirs, of_own - of_theirs
    # Neither clipping nor the averaging of replicated gradients synchronizes.
    found = synchronisations(FSDP2, {}, with_scalars()).of_packages("composer_fsdp2", "composer_fsdp2.compat")
    assert not found, found
