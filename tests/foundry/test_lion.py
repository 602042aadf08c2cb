"""LLM Foundry's adaptive Lion, which sums norms over ranks inside its step, on models sharded by ``fully_shard``."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import for_each
from support.comparing import full_parameters, own_name
from support.examples import IS_THOROUGH
from support.oracle import FSDP1, FSDP2, UNSHARDED
from support.ranks import run_ranks
from torch import nn

pytestmark = pytest.mark.foundry

BATCHES = 6


class Units(nn.Module):
    """Each parameter is a unit and divides evenly. Only in such a model did each rank of FSDP1 have a shard of every
    parameter, without which adaptive Lion's step hung."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.wte, self.head = nn.Embedding(14, 8), nn.Linear(8, 14, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wte(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | nn.Embedding)


def train(under: Any, keys: dict[str, Any] | None, optimizer_name: str, model_name: str) -> tuple[list[float], Any]:
    """The losses, and by parameter its value and its optimizer state about outliers."""
    import llmfoundry.optim
    from support.trainers import build_model, make_trainer, result

    model = build_model(tied=False)
    if model_name == "units":
        model.model = Units()
    # With this threshold and learning rate, some gradients are outliers, and some are not.
    optimizer = getattr(llmfoundry.optim, optimizer_name)(model.parameters(), lr=3e-3, outlier_threshold=1.0)
    with under():
        trainer = make_trainer(keys, model=model, optimizer=optimizer, batches=BATCHES)
        trainer.fit()
        state = {
            own_name(name).removeprefix("module."): (
                optimizer.state[parameter].get("outlier_timestamp"),
                float(optimizer.state[parameter].get("clipped_batches", 0)),
            )
            for name, parameter in trainer.state.model.named_parameters()
        }
        parameters = {n.removeprefix("module."): p for n, p in full_parameters(trainer.state.model).items()}
        losses = result(trainer).losses
        trainer.close()
    return losses, (parameters, state)


def check_step(optimizer_name: str) -> None:
    warnings.simplefilter("ignore")
    from llmfoundry.optim import adaptive_lion
    from llmfoundry.optim.outlier_detection import OutlierDetector
    from support.trainers import largest_difference

    # An outlier is relative to the last 500 to 1000 steps; here to two.
    detector = functools.partial(OutlierDetector, delay_interval=2)
    with (
        mock.patch.object(adaptive_lion, "OutlierDetector", detector),
        mock.patch.object(OutlierDetector, "get_slow_mva", OutlierDetector.get_delayed_mva, create=True),
    ):

        def check(under: Any, theirs_keys: dict[str, Any] | None, model: str, keys: dict[str, Any]) -> None:
            theirs, (their_parameters, their_state) = train(under, theirs_keys, optimizer_name, model)
            outliers = [len(timestamps or ()) + clipped for timestamps, clipped in their_state.values()]
            assert 0 < sum(outliers) < len(outliers) * BATCHES, outliers

            ours, (our_parameters, our_state) = train(FSDP2, keys, optimizer_name, model)
            assert our_state == their_state
            assert largest_difference(ours, theirs) <= 1e-5, f"{ours}, {theirs}"
            for name, parameter in their_parameters.items():
                torch.testing.assert_close(our_parameters[name], parameter, rtol=1e-5, atol=1e-6, msg=name)

        for_each(check, {f"{optimizer_name}, {case[2]} model": case for case in CASES[optimizer_name]})


OF_FSDP1 = (FSDP1, {}, "units", {})
CASES = {
    "DecoupledAdaLRLion": [(UNSHARDED, None, "script's", {}), OF_FSDP1],
    "DecoupledClipLion": [
        (UNSHARDED, None, "script's", {"sharding_strategy": "NO_SHARD"}),
        *([OF_FSDP1] if IS_THOROUGH else []),
    ],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", CASES)
def test_its_step_is_the_whole_models(optimizer: str):
    """It raised in the first step ("found no DeviceMesh"), and hung under FSDP1; outliers are judged by norms of full
    parameters."""
    run_ranks(check_step, 2, optimizer, timeout_s=300)


@pytest.mark.others
def test_foundrys_clip_lion_fails_at_its_first_outlier():
    """Not our fault: LLM Foundry 0.22.0 calls a method of its detector that it renamed. Once this test fails, the
    guide's warning and ``get_slow_mva`` above can be removed."""
    from llmfoundry.optim.adaptive_lion import DecoupledClipLion
    from llmfoundry.optim.outlier_detection import OutlierDetector

    assert ".get_slow_mva(" in inspect.getsource(DecoupledClipLion)
    assert not hasattr(OutlierDetector, "get_slow_mva")
