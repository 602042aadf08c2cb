"""Experts as units: refused if their names show it, otherwise reported."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import Chain
from torch import nn

from composer_fsdp2 import plan_sharding
from composer_fsdp2.config.parallel import IdleExperts
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.wrap import AUTO_EXPERTS, Wrap, WrapKind
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.sharding.plan import ShardingPlan


class Layer(Chain):
    """Attention, and named submodules that a batch may skip."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(attention=nn.Linear(4, 4), **parts)


class Ffn(Chain):
    def __init__(self) -> None:
        super().__init__(up=nn.Linear(4, 4))


def ffns() -> list[Ffn]:
    return [Ffn() for _ in range(3)]


def model_of(**parts: nn.Module) -> nn.Module:
    """Two layers below a root; the second one has the submodules."""
    trunk = nn.Module()
    trunk.layers = nn.ModuleList([Layer(), Layer(**parts)])
    trunk.forward = lambda x: x
    model = nn.Module()
    model.model = trunk
    return model


def plan_of(model: nn.Module, **wrap: Any) -> ShardingPlan:
    return plan_sharding(model, ShardingConfig(wrap=Wrap(**{"kind": WrapKind.CLASSES, **wrap})))


CALLED_EXPERTS = {
    "a list": ({"experts": nn.ModuleList(ffns())}, "experts.0"),
    "another case": ({"Experts": nn.ModuleList(ffns())}, "Experts.0"),
    "a longer name": ({"expert_list": nn.ModuleList(ffns())}, "expert_list.0"),
    "by name": ({"experts": nn.ModuleDict({"code": Ffn(), "prose": Ffn()})}, "experts.code"),
    "Switch Transformers": ({"experts": nn.ModuleDict({"expert_0": Ffn(), "expert_1": Ffn()})}, "experts.expert_0"),
    "a sequence": ({"experts": nn.Sequential(*ffns())}, "experts.0"),
    "a class that holds a list": ({"experts": Chain(local=nn.ModuleList(ffns()))}, "experts.local.0"),
    "a class that holds them": ({"experts": Chain(expert_0=Ffn(), expert_1=Ffn())}, "experts.expert_0"),
    "attributes": ({"expert_0": Ffn(), "Expert1": Ffn()}, "expert_0"),
}


@pytest.mark.parametrize("case", CALLED_EXPERTS)
def test_experts_are_no_units_of_their_own(case: str):
    """Ranks that skip different experts unshard different ones together: wrong gradients, without an error."""
    parts, first = CALLED_EXPERTS[case]
    model = model_of(**parts)
    for wrap in (
        {"classes": ("Layer",), "experts": ("Ffn",)},
        {"classes": ("Ffn",)},
        {"classes": ("Linear",)},
        {"kind": WrapKind.SIZE, "min_num_params": 20},
    ):
        with pytest.raises(UnsupportedError) as caught:
            plan_of(model, **wrap)
        assert f"model.layers.1.{first}" in str(caught.value) and "runs_every_expert = True" in str(caught.value)
    plan = plan_of(model, classes=("Layer",))
    assert [unit.name for unit in plan.units] == ["model.layers.0", "model.layers.1", "model"] and not plan.notes
    model.model.layers[1].runs_every_expert = True
    assert any(
        unit.name == f"model.layers.1.{first}" for unit in plan_of(model, kind=WrapKind.ROOT, experts=("Ffn",)).units
    )


def test_experts_that_an_attribute_keeps_from_being_units():
    """The model's author has excluded them, so the policy for the other modules must not be refused."""
    model = model_of(experts=nn.ModuleList(ffns()), head=Ffn())
    for expert in model.model.layers[1].experts:
        expert._fsdp_wrap = False
    plan = plan_of(model, classes=("Ffn",))
    assert [unit.name for unit in plan.units] == ["model.layers.1.head", "model"]


SEVERAL = {
    "a list": ({"ffns": nn.ModuleList(ffns())}, "ffns.0"),
    "by name": ({"moe": nn.ModuleDict({"a": Ffn(), "b": Ffn()})}, "moe.a"),
    "deeper": ({"mlp": Chain(mlps=nn.ModuleList(ffns()))}, "mlp.mlps.0"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_what_may_be_experts_by_another_name_is_told(case: str):
    """No name shows that ranks skip them, so a note warns before gradients are wrong."""
    parts, first = SEVERAL[case]
    model = model_of(**parts)
    for wrap, path in (
        ({"classes": ("Layer", "Ffn")}, first),
        ({"classes": ("Ffn",)}, first),
        ({"classes": ("Linear",)}, f"{first}.up"),
        ({"kind": WrapKind.SIZE, "min_num_params": 20}, f"{first}.up"),
    ):
        told = [note for note in plan_of(model, **wrap).notes if "one of several of a class" in note]
        assert len(told) == 1 and f"makes units of model.layers.1.{path} and " in told[0]
        assert "choose the layers' classes" in told[0] and "runs_every_expert = True on the module" in told[0]
    assert not plan_of(model, classes=("Layer",)).notes
    model.model.layers[1].runs_every_expert = True
    assert not plan_of(model, classes=("Layer", "Ffn")).notes


def test_what_all_ranks_run_is_neither_refused_nor_told():
    """Shared experts run for all tokens; so do layers, and submodules that are not in a list."""
    for parts in (
        {"shared_expert": Ffn()},
        {"shared_experts": Chain(gate=nn.Linear(4, 4), up=nn.Linear(4, 4))},
        {"shared_expert_0": Ffn()},
        {"experts": Chain(w1=nn.Linear(4, 4), w2=nn.Linear(4, 4))},  # of all experts in one
        {"ffn": nn.Sequential(Ffn(), Ffn())},
        {"parts": nn.ModuleList([Ffn(), Layer()])},  # T5's: attention, attention, feed-forward
        {"experts_of_one": nn.Linear(4, 4)},
    ):
        for classes in (("Layer", "Ffn"), ("Linear", "Layer")):
            used = {type(module).__name__ for module in model_of(**parts).modules()}
            wrap = {"classes": tuple(name for name in classes if name in used)}
            assert not plan_of(model_of(**parts), **wrap).notes, (list(parts), wrap)
    # A list with a single layer inside an outer layer, and a model wrapped in a list of one.
    model = nn.Module()
    model.model = nn.Sequential(model_of().model)
    assert not plan_of(model, classes=("Layer",)).notes
    expert_model = nn.Module()
    expert_model.expert_model = model_of().model
    assert not plan_of(expert_model, classes=("Layer",)).notes


class Parts(nn.ModuleDict):
    """A block that is itself a mapping of its submodules."""

    def forward(self, x: Any) -> Any:
        return x


IN_MAPPINGS: dict[str, nn.Module] = {
    "a model's parts": nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": nn.ModuleList(ffns()), "ln_f": nn.LayerNorm(4)}),
    "two stacks": nn.ModuleDict({"encoder": nn.ModuleList(ffns()), "decoder": nn.ModuleList(ffns())}),
    "two stacks of a class": nn.ModuleDict({"encoder": Chain(a=nn.ModuleList(ffns())), "decoder": Chain(b=Ffn())}),
    "blocks": nn.ModuleList([Parts({"ffn": Ffn(), "other": Ffn()}), Parts({"ffn": Ffn(), "other": Ffn()})]),
}


@pytest.mark.parametrize("case", IN_MAPPINGS)
def test_layers_in_mappings_are_no_experts(case: str):
    """Models with submodules in a mapping (``transformer = nn.ModuleDict(...)``), and blocks that are mappings."""
    for root in (IN_MAPPINGS[case], nn.ModuleDict({"transformer": IN_MAPPINGS[case]})):
        model = nn.Module()
        model.model = root
        root.forward = lambda x: x
        wrap = Wrap(kind=WrapKind.CLASSES, classes=("Ffn",))
        plan = plan_sharding(model, ShardingConfig(wrap=wrap, idle_experts=IdleExperts.IN_ORDER))
        assert not plan.expert_blocks, plan.expert_blocks
        assert not any("one of several of a class" in note for note in plan.notes), plan.notes
        assert any(unit.name for unit in plan.units)


def test_a_shared_expert_is_none_of_those_that_ranks_pass_over():
    """DeepSeek-V3's shared expert has the same class as the others, and runs on every rank."""
    model = model_of(moe=Chain(experts=nn.ModuleList(ffns()), shared_experts=Ffn()))
    wrap = Wrap(kind=WrapKind.CLASSES, classes=("Layer",), experts=("Ffn",))
    plan = plan_sharding(model, ShardingConfig(wrap=wrap, idle_experts=IdleExperts.IN_ORDER))
    moe = "model.layers.1.moe"
    assert f"{moe}.shared_experts" in [unit.name for unit in plan.units]
    assert plan.expert_blocks[0].experts == tuple(f"{moe}.experts.{number}" for number in range(3))


def test_experts_are_found_by_what_the_model_calls_them():
    """``moe_experts: true`` works like ``wrap_embeddings: true``; users do not know class names by heart."""
    model = model_of(moe=Chain(experts=nn.ModuleList(ffns()), shared_expert=Ffn()))
    wrap = Wrap(kind=WrapKind.CLASSES, classes=("Layer",), experts=AUTO_EXPERTS)
    plan = plan_sharding(model, ShardingConfig(wrap=wrap, idle_experts=IdleExperts.IN_ORDER))
    experts = [f"model.layers.1.moe.experts.{number}" for number in range(3)]
    assert [unit.name for unit in plan.units] == ["model.layers.0", *experts, "model.layers.1", "model"]
    assert plan.expert_blocks[0].experts == tuple(experts)
    [note] = plan_sharding(model_of(), ShardingConfig(wrap=wrap)).notes
    assert note == "wrap_policy.moe_experts is auto, and the model has no such module, so it makes no unit"
