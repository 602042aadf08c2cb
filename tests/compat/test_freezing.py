"""``freeze`` in a Trainer's run: frozen parameters are unchanged bit for bit, the others train as in the unsharded
run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same
from support.on_ranks import on_ranks
from support.oracle import FSDP2, UNSHARDED
from support.trainers import Trained, build_model, fit, largest_difference, make_trainer, optimizer_state, result
from support.training import named_parameters

pytestmark = pytest.mark.composer

SAVED_AT, LAST = 1, 3
# Under the names of the model's child, as its author uses; with the child's name as prefix they are equivalent.
PREFIXES = ["wte", "model.blocks.0", "blocks.1.ln"]
FROZEN = {
    "model.wte.weight",
    *(f"model.blocks.0.{layer}.{kind}" for layer in ("ln", "up", "down") for kind in ("weight", "bias")),
}
FROZEN |= {"model.blocks.1.ln.weight", "model.blocks.1.ln.bias"}


def frozen_model() -> Any:
    model = build_model(tied=False)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


OPTIONS: dict[str, Any] = {
    "batches": LAST,
    "microbatch": 2,  # of 4
    "optimizer": "decoupled_adamw",  # with weight decay, over all parameters
    "clip": ("norm", 0.05),
    "eval_interval": "2ba",
}


def check_run(theirs: Trained, folder: str, keys: dict[str, Any]) -> None:
    from composer.algorithms import EMA

    before = {name: parameter.detach().clone() for name, parameter in build_model(tied=False).named_parameters()}
    config = {"mixed_precision": "FULL", "freeze": PREFIXES, **keys}
    ours = fit(FSDP2, dict(config), tied=False, save_folder=folder, save_interval=f"{SAVED_AT}ba", **OPTIONS)
    assert largest_difference(ours.losses, theirs.losses) <= 1e-12, f"{ours.losses}, {theirs.losses}"
    expected = {name.removeprefix("module."): value for name, value in theirs.parameters.items()}  # DDP's
    for name, value in ours.parameters.items():
        assert torch.equal(value, before[name]) is (name in FROZEN), name
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    kind = "" if keys.get("state_dict_type") == "sharded" else "-rank0.pt"
    with FSDP2():
        trainer = make_trainer(dict(config), tied=False, load_path=f"{folder}/ep0-ba{SAVED_AT}{kind}", **OPTIONS)
        trainer.fit()
        resumed = result(trainer)
        model = trainer.state.model
        state = optimizer_state(model, trainer.state.optimizers[0])
        assert {name for name, each in named_parameters(model).items() if not each.requires_grad} == FROZEN
        trainer.close()
    assert not FROZEN & {name for name, each in state.items() if each}, state.keys()
    assert resumed.losses == ours.losses[SAVED_AT:]
    assert_same(resumed.parameters, ours.parameters)
    if not keys:  # averages include frozen weights
        fit(FSDP2, dict(config), tied=False, algorithms=[EMA(half_life="2ba")], **{**OPTIONS, "batches": 1})


CASES: dict[str, dict[str, Any]] = {
    "full checkpoints": {},
    "sharded, kept for the backward, gradients communicated once": {
        "state_dict_type": "sharded",
        "sharding_strategy": "SHARD_GRAD_OP",
        "gradient_sync": "last",
        "activation_checkpointing": True,
    },
}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_a_run_with_frozen_parameters(folder: str):
    """Microbatches, clipping, weight decay, evaluations, averages of weights and a resumed run never change frozen
    parameters. The others train as in Composer's own unsharded run that froze them by hand."""
    torch.set_default_dtype(torch.float64)
    theirs = fit(UNSHARDED, None, model=frozen_model(), **OPTIONS)
    for_each(check_run, {name: (theirs, f"{folder}/{name}", keys) for name, keys in CASES.items()})
