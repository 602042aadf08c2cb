"""Classes by name: the modules that a policy chooses, and an error that lists the model's classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import Block, Chain, FakeMetric, Model, features, layer
from support.on_ranks import on_ranks
from support.training import train_alike
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import (
    ActivationCheckpointing,
    ConfigError,
    PlanError,
    ShardingConfig,
    ShardingPlan,
    plan_sharding,
    prepare_fully_shard,
)
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.sharding.classes import classes_named


class SubBlock(Block):
    """A block whose class derives from another block's."""


class Named(Chain):
    """Lists its layer classes as transformers' models do, one class of another release among them."""

    _no_split_modules = ("OldBlock", "Block")


def layers() -> nn.Module:
    return Chain(net=Named(a=Block(), b=SubBlock(), c=layer()), head=layer())


def plan_of(model: nn.Module, *classes: str, wrap: Wrap | None = None, **options: Any) -> ShardingPlan:
    checkpointing = ActivationCheckpointing(**{"checkpoint": True, "reentrant": False, "classes": classes, **options})
    return plan_sharding(model, ShardingConfig(activation_checkpointing=checkpointing, wrap=wrap or Wrap()))


# --- matching classes


def test_a_name_means_its_class_and_those_derived_from_it():
    """As with torch's transformer_auto_wrap_policy, which accelerate passes the classes with these names."""
    assert classes_named(layers(), ["Block"], key="k") == (Block,)
    assert plan_of(layers(), "Block").checkpointed == ("net.a", "net.b")
    assert plan_of(layers(), "SubBlock").checkpointed == ("net.b",)
    assert plan_of(layers(), "Linear", "SubBlock").checkpointed[-3:] == ("net.b", "net.c", "head")
    namesake = type("Block", (Chain,), {})  # a vision tower's class with the same name, from another file
    model = Chain(net=Chain(a=Block(), b=namesake(c=layer())))
    assert plan_of(model, "Block").checkpointed == ("net.a", "net.b")


def test_auto_is_what_the_model_names():
    """Names from another release are not an error, and a nested model is found."""
    assert classes_named(layers(), [], key="k") == (Block,)
    assert plan_of(layers()).checkpointed == ("net.a", "net.b")
    unnamed = Chain(net=Chain(a=Block(), c=layer()))
    by_wrap = Wrap(kind=WrapKind.CLASSES, classes=("Block",))
    assert classes_named(unnamed, [], key="k", otherwise=("Block",)) == (Block,)
    assert plan_of(unnamed, wrap=by_wrap).checkpointed == ("net.a",)
    with pytest.raises(PlanError) as caught:
        plan_of(unnamed)
    assert str(caught.value) == (
        "fsdp_config.activation_checkpointing_policy is auto, and Chain names no classes of its own "
        "(_no_split_modules); list them; it has Block, Chain, Linear"
    )


def test_an_unknown_class_lists_the_models():
    """ROLL silently ignores it, and the run is out of memory. One error lists all unknown names."""
    with pytest.raises(PlanError) as caught:
        plan_of(Model(), "Blok", "Block", "LlamaDecoderLayer")
    classes = "Block, Decoder, Embedding, LayerNorm, Linear, Model, ModuleList"
    assert str(caught.value).splitlines() == [
        "fsdp_config.activation_checkpointing_policy: no module of Model is a Blok; did you mean Block?; it has "
        + classes,
        f"fsdp_config.activation_checkpointing_policy: no module of Model is a LlamaDecoderLayer; it has {classes}",
    ]


# --- checkpointed modules


def test_the_policy_takes_the_place_of_the_models_function():
    """A note reports it, so authors know why their function is not called."""
    plan = plan_of(Model(), "Linear")
    assert plan.checkpointed[:2] == ("decoder.blocks.0.fc_in", "decoder.blocks.0.fc_out")
    assert "decoder.blocks.0" not in plan.checkpointed
    note = "activation_checkpointing_policy replaces the activation_checkpointing_fn of decoder, which is not called"
    assert note in plan.notes and note in plan.explain()
    assert not plan_of(layers(), "Block").notes
    hooked = plan_sharding(Model(), ShardingConfig(activation_checkpointing=ActivationCheckpointing(checkpoint=True)))
    assert hooked.checkpointed == ("decoder.blocks.0", "decoder.blocks.1") and not hooked.notes


def test_a_class_that_is_chosen_in_vain_is_told():
    """Modules that FSDP1 excluded are not checkpointed, and a note explains their memory."""
    model = Chain(net=layer(), left=Chain(a=Block()), metric=FakeMetric())
    model.left._fsdp_wrap = False
    plan = plan_of(model, "Block", "Linear")
    assert plan.checkpointed == ("net",)
    assert [note for note in plan.notes if "names Block, but none is selected" in note]
    # A container has no forward to run again.
    plan = plan_of(Model(), "ModuleList")
    assert plan.checkpointed == () and any("names ModuleList, but none is selected" in note for note in plan.notes)


def test_which_modules_are_chosen():
    """A plan whose configuration is false chooses none. A module marked by its author keeps its setting, as with the
    model's function. A compiled layer is wrapped from outside, because it bypasses a wrapper inside."""
    assert plan_of(Model(), "Linear", checkpoint=False).checkpointed == ()
    assert plan_of(Model(), "Linear", checkpoint=False, cpu_offload=True).checkpointed != ()
    model = layers()
    model.net.a._activation_checkpointing, model.net.c._activation_checkpointing = False, True
    assert plan_of(model, "Block").checkpointed == ("net.b", "net.c")
    plan = plan_of(Chain(net=Chain(a=torch.compile(Block(), backend="eager"), b=Block())), "Block")
    assert plan.checkpointed == ("net.a", "net.b") and not plan.notes


def test_a_policy_is_never_reentrant():
    """A policy may choose modules that get no gradients with the reentrant form: embeddings, or the whole model."""
    asked = ActivationCheckpointing(checkpoint=True, reentrant=True, classes=("Block",))
    plan = plan_sharding(Model(), ShardingConfig(activation_checkpointing=asked))
    assert not plan.config.activation_checkpointing.reentrant
    assert any("activation_checkpointing_reentrant is off" in note for note in plan.notes)


# --- training


class Counting(Block):
    """Counts its forwards."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.count += 1
        return super().forward(x)


def counting_model() -> nn.Module:
    torch.manual_seed(0)
    # Reentrant checkpointing computes a module's gradients only if one of its inputs has some.
    return Chain(net=Chain(stem=layer(), **{name: Counting() for name in "abc"}, head=layer()))


POLICY = {"activation_checkpointing_policy": ["Counting"]}


def check_recomputed(config: dict[str, Any], num_recomputed: int, wrapper: type[nn.Module] | None) -> None:
    model = train_alike(counting_model, {"wrap_policy": None} | config, features)
    Counting.count = 0
    model(features(0)).sum().backward()
    assert Counting.count == 3 + num_recomputed
    if wrapper is not None:
        assert all(isinstance(getattr(model.net, name), wrapper) for name in "abc")


def check_wrong() -> None:
    """Mistakes are found before any module is wrapped."""
    for wrong, error in (
        ({"activation_checkpointing": False}, ConfigError),
        ({"activation_checkpointing": None}, ConfigError),
        ({"activation_checkpointing_policy": ["Blocks"]}, PlanError),
    ):
        untouched = Model()
        with pytest.raises(error):
            prepare_fully_shard(untouched, None, {"activation_checkpointing": True} | POLICY | wrong, device="cpu")
        assert not any(isinstance(module, CheckpointWrapper | FSDPModule) for module in untouched.modules())


@pytest.mark.any_torch
@on_ranks(2)
def test_each_chosen_module_runs_once_more_and_the_numbers_stay(folder: str) -> None:
    """Losses, gradients and parameters equal those of one process, with and without checkpointing; a layer runs again
    once."""
    check_wrong()
    on = {"activation_checkpointing": True}
    check_recomputed(on, 0, None)  # no hooks: nothing
    check_recomputed(on | POLICY, 3, CheckpointWrapper)
    check_recomputed(on | POLICY | {"activation_checkpointing_reentrant": False}, 3, CheckpointWrapper)
    check_recomputed({"activation_cpu_offload": True} | POLICY, 0, OffloadWrapper)
