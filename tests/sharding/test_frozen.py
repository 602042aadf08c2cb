"""Frozen parameters: the ones that a prefix matches, which stay unchanged while the others train."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full
from support.models import Block, Chain, Model, features, layer, tied_model, tokens
from support.on_ranks import on_ranks
from support.training import FULL, compare_training, named_parameters
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer_fsdp2 import (
    ActivationCheckpointing,
    PlanError,
    ShardingConfig,
    ShardingPlan,
    apply_plan,
    clip_grad_norm_,
    plan_sharding,
    prepare_fully_shard,
)
from composer_fsdp2.sharding.frozen import choose_frozen


def plan_of(model: nn.Module, *prefixes: str) -> ShardingPlan:
    return plan_sharding(model, ShardingConfig(freeze=prefixes))


def two_towers() -> nn.Module:
    """``embed`` in two children, ``embed_norm`` beside one of them."""
    return Chain(
        image=Chain(embed=layer(), head=layer()), text=Chain(embed=layer(), embed_norm=layer(), head=Chain(fc=layer()))
    )


# --- matching names


def test_train_only_leaves_the_names_that_match():
    """A run that should train a head would train all weights; without a match it would silently train none."""
    model = two_towers()

    def frozen(*patterns: str, prefixes: tuple[str, ...] = ()) -> list[str]:
        return list(choose_frozen(model, prefixes, patterns).names)

    names = [name for name, _ in model.named_parameters()]
    # Matches at the start of a name only.
    assert frozen(r"text\.head") == [name for name in names if not name.startswith("text.head")]
    assert frozen(r"text", prefixes=("text.head",)) == [
        name for name in names if name.startswith(("image", "text.head"))
    ]
    with pytest.raises(PlanError, match=r"train_only: no parameter's name matches 'embed'"):
        frozen("embed", "text")
    with pytest.raises(PlanError, match="leave nothing to train"):
        frozen("text", prefixes=("text",))


def test_train_only_knows_the_names_of_the_model_in_a_composer_model():
    """``model\\.`` matches the layers of transformers' model, and not its head too because of the child's name."""
    inner = nn.ModuleDict({"model": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)})
    whole = nn.ModuleDict({"model": inner, "metric": nn.ReLU()})
    assert choose_frozen(whole, (), [r"model\."]).names == ("model.lm_head.weight", "model.lm_head.bias")
    assert choose_frozen(inner, (), [r"model\."]).names == ("lm_head.weight", "lm_head.bias")
    # A tied parameter has its first name only, as in ``named_parameters``, even if the model's child has all.
    inner["lm_head"].weight = inner["model"].weight
    assert choose_frozen(inner, (), [r"lm_head\."]).names == ("model.weight", "model.bias")
    assert choose_frozen(whole, (), [r"lm_head\."]).names == ("model.model.weight", "model.model.bias")


def test_a_prefix_ends_at_a_dot():
    """If ``embed`` also froze ``embed_norm``, a layer would silently not train."""
    model = two_towers()
    for prefix, names in (
        ("text.embed", ["text.embed.weight"]),
        ("text.embed.weight", ["text.embed.weight"]),
        ("text.head", ["text.head.fc.weight"]),
        ("image", ["image.embed.weight", "image.head.weight"]),
        # Relative to the only child, as users of a Hugging Face model know it.
        ("embed_norm", ["text.embed_norm.weight"]),
        ("head.fc", ["text.head.fc.weight"]),
    ):
        assert list(plan_of(model, prefix).frozen) == names, prefix
    assert plan_of(model, "text.head", "image.head").frozen == ("image.head.weight", "text.head.fc.weight")
    assert plan_of(model).frozen == ()


@pytest.mark.parametrize(
    ("prefixes", "words"),
    [
        (["text.embe"], "no parameter is at or under 'text.embe' (a prefix ends at a dot); did you mean text.embed"),
        (["txt.embed"], "did you mean text.embed"),
        (["fc"], "did you mean text.head.fc?"),  # an adapter's base model is deeper, too
        (["zzzz"], "names begin with image, text"),
        (["embed"], "'embed' is in several parts of the model; give the whole name: image.embed or text.embed"),
        (["image", "text"], "freeze leaves nothing to train: "),
        (["text.embed", "nothing.here", "fc"], "'nothing.here' "),
        (["text.embed", "nothing.here", "fc"], "'fc' "),
    ],
)
def test_a_prefix_of_nothing(prefixes: list[str], words: str):
    """A misspelt prefix would train parameters meant to be frozen; the error suggests close names."""
    with pytest.raises(PlanError) as caught:
        plan_of(two_towers(), *prefixes)
    assert words in str(caught.value)


def test_nothing_is_left_of_what_was_trained_before():
    """An adapter's model has most parameters frozen already: freezing the rest leaves nothing to train."""
    model = two_towers()
    model.image.requires_grad_(False)
    with pytest.raises(PlanError, match=r"all 3 parameters of Chain .* begin with text;"):
        plan_of(model, "text")
    model.text.requires_grad_(False)
    with pytest.raises(PlanError, match="no parameter of Chain requires gradients"):
        plan_of(model, "text.head")
    model.text.requires_grad_(True)
    assert plan_of(model, "image", "text.head").frozen[-1] == "text.head.fc.weight"


def test_a_tied_parameter_is_frozen_under_all_its_names():
    """Freezing embeddings freezes a tied head, too, and a note reports it."""
    plan = plan_of(tied_model(), "decoder.embed")
    assert plan.frozen == ("decoder.embed.weight",)
    told = "freeze: decoder.embed.weight is frozen, and decoder.head.weight with it, which is the same parameter"
    assert told in plan.notes and told in plan.explain()
    by_other_name = plan_of(tied_model(), "decoder.head")
    assert by_other_name.frozen == plan.frozen
    assert not plan_of(tied_model(), "decoder.embed", "decoder.head").notes


def test_an_optimizer_of_frozen_parameters_alone():
    """The run would finish without having trained anything."""
    model = two_towers()
    config = ShardingConfig(freeze=("text",))
    held = torch.optim.SGD([{"params": model.text.embed.parameters()}, {"params": model.text.head.parameters()}], lr=1)
    with pytest.raises(PlanError, match=r"holds text\.embed\.weight, text\.head\.fc\.weight, which are frozen"):
        plan_sharding(model, config, optimizers=held)
    plan_sharding(model, ShardingConfig(freeze=("text.embed",)), optimizers=held)
    held.add_param_group({"params": model.image.embed.parameters()})
    plan_sharding(model, config, optimizers=held)
    model.image.embed.requires_grad_(False)
    with pytest.raises(PlanError, match="leaves the optimizer nothing to train"):
        plan_sharding(model, config, optimizers=held)


def test_running_statistics_of_frozen_modules_are_told():
    """Running statistics of a frozen backbone still change, and so do its features; a note reports it."""
    norms = Chain(bn=nn.BatchNorm1d(2), plain=nn.BatchNorm1d(2, affine=False))
    model = Chain(frozen=Chain(norms=norms, fc=layer()), free=Chain(bn=nn.BatchNorm1d(2), fc=layer()))
    told = [note for note in plan_of(model, "frozen").notes if "running statistics" in note]
    assert len(told) == 1 and "of frozen.norms.bn and 1 more go on changing in training mode" in told[0]
    assert any("of free.bn go on" in note for note in plan_of(model, "free.bn.weight").notes)
    norms.bn.running_mean = norms.plain.running_mean = None
    assert not plan_of(model, "frozen", "free.fc").notes


def test_a_prefix_may_have_wrappers_in_it():
    """A layer that the user checkpoints or compiles keeps its name. Names may also come from ``named_parameters`` of
    the model as it is, or of its compiled version."""
    model = Chain(net=Chain(a=checkpoint_wrapper(Block()), b=torch.compile(Block(), backend="eager"), c=Block()))
    written = ["net.a._checkpoint_wrapped_module.fc_in", "net.b._orig_mod.fc_out.weight", "c._orig_mod.fc_in"]
    names = choose_frozen(model, ["net.a.fc_in", "net.b.fc_out.weight", "net.c.fc_in"]).names
    assert choose_frozen(model, written).names == names
    assert names == (
        "net.a._checkpoint_wrapped_module.fc_in.weight",
        "net.a._checkpoint_wrapped_module.fc_in.bias",
        "net.b._orig_mod.fc_out.weight",
        "net.c.fc_in.weight",
        "net.c.fc_in.bias",
    )
    with pytest.raises(PlanError, match=r"at or under 'net\.b\._orig_mod\.fc' "):
        choose_frozen(model, ["net.b._orig_mod.fc"])


def count_calls(run: Callable[[], object]) -> int:
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_many_prefixes_cost_little_more_than_one():
    """A list of layers to freeze in a large model took seconds on every rank."""
    model = Chain(net=nn.ModuleList([layer() for _ in range(400)]), head=layer())
    few, many = (count_calls(lambda n=n: choose_frozen(model, [f"net.{k}" for k in range(n)])) for n in (1, 400))
    assert many < 2 * few


# --- decide, show, do


def test_the_plan_tells_and_changes_nothing():
    """Planning alone must not freeze any parameter."""
    model = Model()
    plan = plan_of(model, "decoder.embed", "decoder.norm")
    line = "  frozen: decoder.embed.weight and 2 more [decoder.embed, decoder.norm]"
    assert line in plan.explain().splitlines()
    assert plan.to_json()["frozen"] == ["decoder.embed.weight", "decoder.norm.weight", "decoder.norm.bias"]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert plan.digest != plan_of(model).digest != plan_of(model, "decoder.norm").digest


def check_apply() -> None:
    model = Model()
    plan = plan_of(model, "decoder.embed")
    other = copy.deepcopy(model)
    other.decoder.embed = nn.Embedding(2, 3)
    with pytest.raises(PlanError, match="planned were"):
        apply_plan(other, plan)
    assert all(parameter.requires_grad for parameter in other.parameters())
    apply_plan(model, plan)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert [name for name, is_trained in trained.items() if not is_trained] == ["decoder.embed.weight"]
    # An existing gradient would be applied; for unsharded parameters it is not removed by sharding.
    model = Model()
    embed = model.decoder.embed
    embed.weight.grad = torch.ones_like(embed.weight)
    apply_plan(model, plan_sharding(model, ShardingConfig(freeze=("decoder.embed",), ignored_modules=(embed,))))
    assert model.decoder.embed.weight is embed.weight
    assert embed.weight.grad is None and not embed.weight.requires_grad


def check_refused() -> None:
    """Different prefixes on ranks, or one wrong prefix of two."""
    for prefixes in ([f"decoder.blocks.{dist.get_rank()}"], ["decoder.embed", "decoder.hea"]):
        model = Model()
        with pytest.raises(PlanError):
            prepare_fully_shard(model, None, {"freeze": prefixes}, device="cpu")
        assert all(parameter.requires_grad for parameter in model.parameters())


@on_ranks(2)
def test_it_is_done_in_apply_on_all_ranks_or_none(folder: str) -> None:
    """Ranks that freeze different parameters would wait for each other's gradients; an error leaves the model
    unchanged."""
    all_of(check_apply, check_refused)


# --- training


def check_trains(config: dict[str, Any], prefixes: list[str], tied: bool) -> None:
    trained = [
        rf"{re.escape(name.removeprefix('decoder.'))}$"  # the only child
        for name, _ in Model(num_blocks=3, tied=tied).named_parameters()
        if not name.startswith(tuple(f"decoder.{prefix}." for prefix in prefixes))
    ]
    for chosen in ({"freeze": prefixes}, {"train_only": trained}):
        check_trains_by(chosen, config, prefixes, tied)


def check_trains_by(chosen: dict[str, list[str]], config: dict[str, Any], prefixes: list[str], tied: bool) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Model(num_blocks=3, tied=tied)
    reference = copy.deepcopy(model)
    before = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    frozen = {name for name in before if name.startswith(tuple(f"decoder.{prefix}." for prefix in prefixes))}
    for name in frozen:
        reference.get_parameter(name).requires_grad_(False)
    # With weight decay, and over all parameters: the script makes the optimizer before freezing.
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, reference))
    prepare_fully_shard(model, ours, FULL | config | chosen, device="cpu")
    compare_training(model, reference, ours, theirs, tokens, rtol=1e-9, atol=1e-12)
    for name, parameter in named_parameters(model).items():
        assert torch.equal(full(parameter), before[name]) is (name in frozen), name


CASES: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "a whole unit and half of another": ({}, ["embed", "blocks.0", "blocks.1.fc_in"], False),
    "tied": ({}, ["embed"], True),
    "recomputed": (
        {"activation_checkpointing": True},
        ["embed", "blocks.1"],
        True,
    ),  # reentrant, Composer's default
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, ["embed", "blocks.0"], False),
    "cpu_offload": ({"cpu_offload": True}, ["embed", "blocks.0"], False),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True}, ["blocks"], False),
}


def check_root(frozen: str) -> None:
    """A root without trainable parameters, before or after the trainable layer."""
    torch.set_default_dtype(torch.float64)
    model = Chain(a=Chain({"x": True}, x=layer(), y=layer()), b=Chain({"x": True}, x=layer(), y=layer()))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    reference = copy.deepcopy(model)
    reference.get_submodule(frozen).requires_grad_(False)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    prepare_fully_shard(model, ours, FULL | {"freeze": [frozen], "collective_guard": 60}, device="cpu")
    compare_training(model, reference, ours, theirs, features)
    model(features(dist.get_rank())).square().mean().backward()
    norms = clip_grad_norm_(model, 1e-3)
    assert [name for name, norm in norms.items() if not norm] == [frozen]


@on_ranks(2)
def test_frozen_parameters_stay_and_the_others_learn_as_in_one_process(folder: str) -> None:
    """Frozen parameters do not change in any bit, with or without weight decay, and no other layer loses its
    gradients."""
    for_each(check_trains, CASES)
    for_each(check_root, {name: (name,) for name in "ab"})


def test_reentrant_recomputation_is_turned_off_beside_frozen_parameters():
    """It computes no gradients for layers whose inputs need none: after frozen embeddings no layer would train."""
    checkpointing = ActivationCheckpointing(checkpoint=True, reentrant=True)
    plan = plan_sharding(Model(), ShardingConfig(freeze=("decoder.embed",), activation_checkpointing=checkpointing))
    assert not plan.config.activation_checkpointing.reentrant
    assert any("activation_checkpointing_reentrant is off" in note for note in plan.notes)
    alone = plan_sharding(Model(), ShardingConfig(activation_checkpointing=checkpointing))
    assert alone.config.activation_checkpointing.reentrant and not alone.notes
