"""Matching of optimizer state: by parameter, and against the state that the optimizer would create itself."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import assert_same
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composer_fsdp2 import CheckpointError, load_checkpoint
from composer_fsdp2.checkpoint.inspect import inspect_checkpoint
from composer_fsdp2.checkpoint.load.load_plan import LoadPlan, plan_load
from tests.checkpoint.test_load import composer_state


def make_model() -> nn.Module:
    """Parameters of no, one, two and four dimensions, some of equal sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 3, 2), nn.LayerNorm(1))
    model.register_parameter("gain", nn.Parameter(torch.tensor(2.0)))
    return model


def make_optimizer(model: nn.Module, cls: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return cls(model.parameters(), **options)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def planned(root: dict[str, Any], folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoadPlan:
    torch.save(root, folder / "file.pt")
    return plan_load(inspect_checkpoint(folder / "file.pt"), model, optimizer)


CLASSES = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {},
    "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.5}, "Rprop": {}, "SGD": {"momentum": 0.5, "lr": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_expected_state_is_what_the_first_step_makes(name: str, tmp_path: Path):
    """State of the expected form is not refused; a missing, additional or different entry is, before any step."""
    model, fresh = make_model(), make_model()
    optimizer, own = (make_optimizer(each, getattr(torch.optim, name), **CLASSES[name]) for each in (model, fresh))
    stepped(model, optimizer)
    root = composer_state(model, optimizer)
    assert planned(root, tmp_path, fresh, own).differences == ()

    entries = root["state"]["optimizers"][name]["state"]
    for parameter, key in (("0.weight", next(iter(entries["0.weight"]))), ("1.weight", [*entries["1.weight"]][-1])):
        whole = entries[parameter].pop(key)
        for changed, kind in ((None, "missing"), (torch.zeros(3, 5, dtype=whole.dtype), "shape"), ("text", "type")):
            entries[parameter].update({} if changed is None else {key: changed})
            plan = planned(root, tmp_path, fresh, own)
            if not entries[parameter]:  # as for a parameter without a gradient so far
                assert plan.differences == ()
                assert [name.split(" (")[0] for name in plan.kept] == [f"the state of {parameter}"]
                continue
            [difference] = plan.differences
            assert (difference.kind.value, difference.name) == (kind, f"optimizer {name}: {key} of {parameter}")
        entries[parameter][key] = whole
    entries["gain"]["invented"] = torch.zeros(())
    [difference] = planned(root, tmp_path, fresh, own).differences
    assert (difference.kind.value, difference.name) == ("surplus", f"optimizer {name}: invented of gain")


def test_finding_out_leaves_no_trace(tmp_path: Path):
    """The expected state is found on a copy: the optimizer gets no state, no scheduler counts a step, and no user's
    hook runs."""
    model = make_model()
    optimizer = make_optimizer(model)
    stepped(model, optimizer)
    root = composer_state(model, optimizer)
    fresh = make_model()
    own = make_optimizer(fresh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)
    called: list[str] = []
    own.register_step_pre_hook(lambda *_: called.append("own"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    before = copy.deepcopy(fresh.state_dict())
    count = scheduler.state_dict()["_step_count"]
    try:
        assert planned(root, tmp_path, fresh, own).differences == ()
    finally:
        for handle in handles:
            handle.remove()
    assert called == [] and not own.state
    assert scheduler.state_dict()["_step_count"] == count
    assert_same(fresh.state_dict(), before, in_bits=True)
    assert all(parameter.grad is None for parameter in fresh.parameters())


class NeedsClosure(torch.optim.SGD):
    """Cannot step without a closure, so its expected state is unknown."""

    def step(self, closure: Any = None) -> Any:
        closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.detach().sum(dim=-1)


def test_optimizer_that_cannot_be_asked(tmp_path: Path):
    """Its state is loaded unchanged, which is better than refusing a user's valid checkpoint."""
    model = make_model()
    optimizer = make_optimizer(model, NeedsClosure, lr=0.1)
    optimizer.step(lambda: None)
    torch.save(composer_state(model, optimizer), tmp_path / "file.pt")
    fresh = make_model()
    own = make_optimizer(fresh, NeedsClosure, lr=0.1)
    load_checkpoint(tmp_path / "file.pt", fresh, own)
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.state[ours]["rows"], optimizer.state[theirs]["rows"])


DAMAGED_GROUPS: dict[str, Any] = {
    "a number": 3,
    "a list of numbers": [1, 2],
    "parameters that are a number": [{"lr": 0.1, "params": 5}],
    "parameters that are lists": [{"lr": 0.1, "params": [[0], [1]]}],
}


@pytest.mark.parametrize("name", DAMAGED_GROUPS)
def test_groups_that_are_none(name: str, tmp_path: Path):
    """A manually edited file is refused with an explanation, not by a TypeError."""
    model = make_model()
    root = composer_state(model, optimizer := make_optimizer(model))
    root["state"]["optimizers"]["AdamW"]["param_groups"] = DAMAGED_GROUPS[name]
    with pytest.raises(CheckpointError, match="param_groups of AdamW"):
        planned(root, tmp_path, model, optimizer)


def test_without_groups(tmp_path: Path):
    """State keyed by name needs no groups: hyperparameters are unchanged, and the report mentions it. State by position
    needs them."""
    model, fresh = make_model(), make_model()
    optimizer, own = make_optimizer(model), make_optimizer(fresh, lr=0.123)
    stepped(model, optimizer)
    root = composer_state(model, optimizer)
    del root["state"]["optimizers"]["AdamW"]["param_groups"]
    torch.save(root, tmp_path / "file.pt")
    load_checkpoint(tmp_path / "file.pt", fresh, own)
    assert own.param_groups[0]["lr"] == 0.123
    assert all(own.state[parameter]["step"].item() == 1 for parameter in fresh.parameters())
    root["state"]["optimizers"]["AdamW"] = {"state": optimizer.state_dict()["state"]}
    torch.save(root, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="keyed by position"):
        load_checkpoint(tmp_path / "file.pt", fresh, own)


def test_hyperparameters_of_other_kinds(tmp_path: Path):
    """A bool is not a number, nor is a pair; a learning rate as a tensor is one."""
    model = make_model()
    optimizer = make_optimizer(model)
    stepped(model, optimizer)
    root = composer_state(model, optimizer)
    [group] = root["state"]["optimizers"]["AdamW"]["param_groups"]
    changes: dict[str, Any] = {"lr": True, "betas": 0.9, "amsgrad": 1, "eps": "small"}
    group |= changes
    plan = planned(root, tmp_path, model, optimizer)
    assert {d.name for d in plan.differences} == {f"optimizer AdamW: group 0: {key}" for key in changes}
    assert all(d.kind.is_fatal for d in plan.differences)
    group |= {"lr": torch.tensor(0.25), "betas": (0.5, 0.6), "amsgrad": False, "eps": 1e-3}
    torch.save(root, tmp_path / "file.pt")
    load_checkpoint(tmp_path / "file.pt", model, optimizer)
    assert optimizer.param_groups[0]["lr"].item() == 0.25 and math.isclose(optimizer.param_groups[0]["eps"], 1e-3)
