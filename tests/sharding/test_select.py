"""Which modules become units; the expectations are how Composer 0.32.1 wrapped for FSDP1."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.models import Chain, FakeMetric, Model, layer, tie
from torch import nn

from composer_fsdp2 import PlanError, ShardingConfig, plan_sharding
from composer_fsdp2.config.choices import UnitOverrides
from composer_fsdp2.errors import UnknownKeyError
from composer_fsdp2.fsdp1.hooks import read_hooks
from composer_fsdp2.sharding.select import Selection
from composer_fsdp2.sharding.select import select_units as select_chosen

pytestmark = pytest.mark.any_torch

# What a wrap function's {"reshard_after_forward": False} becomes.
KEPT = UnitOverrides(reshard_after_forward=False, given={"reshard_after_forward": False})


def select_units(model: nn.Module, *, low_precision: bool = False, shard_below_unwrapped: bool = False) -> Selection:
    choices = read_hooks(model, ShardingConfig(shard_below_unwrapped=shard_below_unwrapped))
    return select_chosen(model, choices, low_precision=low_precision)


def units_of(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    """The units in order, groups joined by '+', each with its parameters."""
    selection = select_units(model, **options)
    return {
        "+".join(unit.paths): [selection.uses[i].name for i in members]
        for unit, members in zip(selection.units, selection.members, strict=True)
    }


def left_out_of(model: nn.Module) -> dict[str, str]:
    return {name: left.reason for left in select_units(model).left_out for name in left.names}


def roots_of(selection: Selection) -> list[str]:
    return ["+".join(unit.paths) for unit in selection.units if unit.is_root]


# --- what FSDP1 chose


def test_direct_children_are_the_roots():
    """A ComposerModel's own methods may call its children one by one: each gathers its parameters by itself."""
    model = Chain(first=layer(), second=Chain(inner=layer()))
    assert units_of(model) == {"first": ["first.weight"], "second": ["second.inner.weight"]}
    assert roots_of(select_units(model)) == ["first", "second"]


def test_wrap_function_of_the_direct_child_decides_below_it():
    """A model's blocks are units of their own, children before parents, as FSDP1 wrapped them."""
    model = Model(num_blocks=2)
    units = units_of(model)
    assert list(units) == ["decoder.blocks.0", "decoder.blocks.1", "decoder"]
    assert units["decoder.blocks.1"] == [f"decoder.blocks.1.{n}" for n, _ in model.decoder.blocks[1].named_parameters()]
    assert units["decoder"] == [
        "decoder.embed.weight",
        "decoder.norm.weight",
        "decoder.norm.bias",
        "decoder.head.weight",
    ]
    assert roots_of(select_units(model)) == ["decoder"]


def test_wrap_function_is_never_asked_about_its_own_child():
    """FSDP1 did not ask about the direct child itself; a function that says True there makes no second unit."""
    model = Chain(child=Chain({"": True, "inner": False}, inner=layer()))
    assert list(units_of(model)) == ["child"]


def test_wrap_functions_further_down_are_not_asked():
    """Only the direct child's function counts, as under FSDP1."""
    model = Chain(child=Chain(inner=Chain({"deep": True}, deep=layer())))
    assert list(units_of(model)) == ["child"]


@pytest.mark.parametrize(
    ("answer", "is_unit"), [(True, True), (False, False), ({}, False), ({"reshard_after_forward": False}, True)]
)
def test_answers_of_a_wrap_function(answer: Any, is_unit: bool):
    """An empty dict was False to FSDP1, one with settings wraps."""
    model = Chain(child=Chain({"inner": answer}, inner=layer(), other=layer()))
    assert list(units_of(model)) == (["child.inner", "child"] if is_unit else ["child"])


def test_settings_of_a_wrap_function_are_the_units_own():
    """One module's keyword arguments reach that module, and no other."""
    text = {"reshard_after_forward": False}
    model = Chain(child=Chain({"inner": text, "other": True}, inner=layer(), other=layer(), rest=layer()))
    by_path = {unit.paths[0]: unit for unit in select_units(model).units}
    assert by_path["child.inner"].overrides == KEPT
    assert by_path["child.other"].overrides == by_path["child"].overrides == UnitOverrides()


@pytest.mark.parametrize(("attribute", "answer", "is_unit"), [(True, False, True), (False, True, False)])
def test_attribute_goes_before_the_function(attribute: bool, answer: bool, is_unit: bool):
    """PEFT and Foundry mark single modules; the mark wins over the model's function."""
    model = Chain(child=Chain({"inner": answer}, inner=layer(), other=layer()))
    model.child.inner._fsdp_wrap = attribute
    assert ("child.inner" in units_of(model)) is is_unit


def test_attribute_works_without_a_function():
    """A plain nn.Module with marks needs no hook."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0][1]._fsdp_wrap = True
    assert list(units_of(model)) == ["0.1", "0"]


def test_excluded_child_is_skipped_with_all_below_it():
    """`_fsdp_wrap = False` on a direct child leaves it whole, what it would wrap included, and the report says so."""
    model = Chain(kept=layer(), left=Chain({"inner": True}, inner=layer()))
    model.left._fsdp_wrap = False
    model.left.inner._fsdp_wrap = True
    assert list(units_of(model)) == ["kept"]
    assert left_out_of(model) == {"left.inner.weight": "left: _fsdp_wrap is False on it"}


def test_own_parameters_of_the_model_are_left_out():
    """FSDP1 wrapped children only; a parameter on the model itself stays whole and is reported."""
    model = Model()
    model.own = nn.Parameter(nn.init.ones_(layer().weight.data))
    assert "decoder" in units_of(model)
    assert left_out_of(model) == {"own": "the model's own parameter: only its children are sharded, as under FSDP1"}


def test_metrics_are_skipped():
    """Metrics that keep state (an LPIPS network, say) are neither sharded nor moved."""
    metric = type("Accuracy", (FakeMetric,), {})()
    model = Chain(net=layer())
    model.add_module("metric", metric)
    assert list(units_of(model)) == ["net"]
    assert left_out_of(model) == {"metric.inner.weight": "metric: a metric"}


def test_a_users_metric_class_is_a_module_like_others():
    """Only torchmetrics' own classes are skipped, not any class that is called Metric."""
    own = type("Metric", (nn.Linear,), {})(2, 2)
    assert list(units_of(nn.ModuleDict({"metric": own}))) == ["metric"]


def test_members_of_a_container_are_the_roots():
    """A ModuleList has no forward to gather in, and fully_shard refuses it: its members take its place."""
    model = Chain()
    model.towers = nn.ModuleList([layer(), nn.ModuleDict({"a": Chain({"inner": True}, inner=layer())})])
    assert units_of(model) == {"towers.0": ["towers.0.weight"], "towers.1.a": ["towers.1.a.inner.weight"]}
    assert roots_of(select_units(model)) == ["towers.0", "towers.1.a"]
    assert any("towers (ModuleList) has no forward" in note for note in select_units(model).notes)


def test_a_chosen_container_stays_in_the_unit_above():
    """A wrap function that picks a ModuleList does not stop the run; FSDP1 only warned."""
    model = Chain(child=Chain({"blocks": True, "blocks.0": True}, rest=layer()))
    model.child.blocks = nn.ModuleList([layer(), layer()])
    assert units_of(model) == {
        "child.blocks.0": ["child.blocks.0.weight"],
        "child": ["child.rest.weight", "child.blocks.1.weight"],
    }
    assert any("child.blocks (ModuleList) was chosen, but has no forward" in note for note in select_units(model).notes)


def test_container_with_parameters_of_its_own_needs_the_model():
    """Nobody calls a ParameterList, so only the model's own forward can gather what it holds."""
    model = Chain()
    model.bias = nn.ParameterList([nn.Parameter(layer().weight.data)])
    model.inner = layer()
    assert units_of(model) == {"inner": ["inner.weight"], "": ["bias.0"]}
    assert roots_of(select_units(model)) == [""]


def test_modules_without_parameters_are_no_units():
    """An activation function that the wrap function picks costs no call."""
    model = Chain(child=Chain({"act": True, "empty": True}, act=nn.Tanh(), empty=Chain(), rest=layer()), only=nn.Tanh())
    assert list(units_of(model)) == ["child"]


def test_root_above_units_only_stays_a_root():
    """Without a root above them, blocks would each be one: torch keeps a root's parameters gathered after forward, so
    a model that is nothing but chosen blocks would need the memory of the whole model."""
    model = Chain(child=Chain({"a": True, "b": True}, a=layer(), b=layer()))
    assert units_of(model) == {"child.a": ["child.a.weight"], "child.b": ["child.b.weight"], "child": []}
    assert roots_of(select_units(model)) == ["child"]


def test_root_without_parameters_still_casts_its_inputs():
    """In bf16 a first child without parameters hands bf16 on, as FSDP1's root did."""
    assert list(units_of(Chain(scale=nn.Tanh(), net=layer()), low_precision=True)) == ["scale", "net"]


def test_batch_norms_are_units_of_their_own_in_low_precision():
    """Running statistics are kept in fp32 (FSDP1's MixedPrecision._module_classes_to_ignore); fp32 needs no unit."""
    model = Chain(child=Chain({}, first=layer(), norm=nn.BatchNorm1d(6)))
    assert list(units_of(model)) == ["child"]
    assert list(units_of(model, low_precision=True)) == ["child.norm", "child"]
    assert [unit.full_precision for unit in select_units(model, low_precision=True).units] == [True, False]


def test_module_in_two_places_of_one_child_is_one_unit():
    """A layer that is called twice is gathered under one unit, wherever it is called."""
    shared = layer()
    model = Chain(child=Chain({"a": True}, a=shared, b=Chain(again=shared), rest=layer()))
    assert units_of(model) == {"child.a": ["child.a.weight"], "child": ["child.rest.weight"]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("yes", r"fsdp_wrap_fn returned 'yes' \(str\) for module 'child.inner'.*True, False or a dict"),
        (None, "returned None"),
        (1, "returned 1"),
    ],
)
def test_a_wrap_function_that_returns_something_else(answer: object, message: str):
    """A function that forgets its return is found at once, by module; FSDP1 raised too."""
    with pytest.raises(PlanError, match=message):
        select_units(Chain(child=Chain({"inner": answer}, inner=layer())))


def test_a_wrap_function_that_raises():
    """The error names the module and keeps the cause."""

    class Broken(Chain):
        def fsdp_wrap_fn(self, module: nn.Module) -> bool:
            raise KeyError("no such layer")

    with pytest.raises(
        PlanError, match=r"raised KeyError for module 'child.inner' \(Linear\).*no such layer"
    ) as caught:
        select_units(Chain(child=Broken(inner=layer())))
    assert isinstance(caught.value.__cause__, KeyError)


class Asked(Chain):
    """Notes which modules its function was asked about."""

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        self.__dict__.setdefault("asked", []).append(module)
        return super().fsdp_wrap_fn(module)


BAD = {"shard_strategy": "FULL_SHARD"}


def test_settings_that_nothing_becomes_of_are_not_read():
    """A model whose function gives a ModuleList settings trained; only a unit's own have to be right."""
    model = Chain(child=Chain({"blocks": BAD, "act": BAD}, blocks=nn.ModuleList([layer()]), act=nn.Tanh()))
    plan = plan_sharding(model, ShardingConfig())
    assert [unit.name for unit in plan.units] == ["child"]
    assert any("blocks (ModuleList) was chosen" in note and "(shard_strategy)" in note for note in plan.notes)
    with pytest.raises(UnknownKeyError, match=r"'child\.inner'; did you mean sharding_strategy"):
        plan_sharding(Chain(child=Chain({"inner": BAD}, inner=layer())), ShardingConfig())


def test_settings_of_a_container_of_roots_are_its_members():
    """Below a child that Composer's FSDP2 did not shard a chosen ModuleList hands its settings on, good or bad."""
    for settings, is_bad in (({"reshard_after_forward": False}, False), (BAD, True)):
        model = Chain(child=Chain({"blocks": settings}, blocks=nn.ModuleList([layer()])))
        model.child._fsdp_wrap = False
        with pytest.raises(UnknownKeyError) if is_bad else contextlib.nullcontext():
            (unit,) = plan_sharding(model, ShardingConfig(shard_below_unwrapped=True)).units
            assert unit.name == "child.blocks.0"


def test_roots_are_not_asked_about():
    """Members of a container take its place; a function that knows only what lies in them was never asked there."""
    inner = layer()
    towers = nn.ModuleList([Chain(inner=inner), layer()])
    asked: list[nn.Module] = []
    towers.fsdp_wrap_fn = lambda module: bool(asked.append(module))  # type: ignore[func-returns-value, assignment]
    assert list(units_of(Chain(towers=towers))) == ["towers.0", "towers.1"]
    assert asked == [inner]


def test_a_unit_of_one_child_is_not_asked_about_by_the_next():
    """An encoder's layer that the decoder calls, too, is the encoder's unit; the decoder's function may not know it."""
    shared = layer()
    first = Asked({"a": True}, a=shared, b=layer())
    second = Asked({"again": "no answer"}, again=shared, own=layer())
    units = units_of(Chain(first=first, second=second))
    assert "first.a" in units
    assert first.asked == [shared, first.b] and second.asked == [second.own]


def test_what_cannot_be_called_is_no_wrap_function():
    """A model that sets the attribute to None has no function, as under FSDP1."""
    model = Chain(child=layer())
    model.child.fsdp_wrap_fn = None
    assert list(units_of(model)) == ["child"]


# --- ties


def test_tie_with_the_unit_above_stays_there():
    """An embedding shared with the head of the root: the block that holds it is gathered with the root."""
    model = Chain(child=Chain({"inner": True}, inner=Chain(deep=layer(), more=layer()), head=layer()))
    tie(model.child.head, model.child.inner.deep)
    assert units_of(model) == {"child": ["child.inner.deep.weight", "child.inner.more.weight"]}
    assert any("child.inner is not a unit of its own" in note for note in select_units(model).notes)


def test_tied_siblings_become_one_group():
    """Embedding and head, each chosen as a unit, are gathered together, and the layers between them are not."""
    model = Chain(child=Chain({"a": True, "b": True, "c": True}, a=layer(), b=layer(), c=layer(), rest=layer()))
    tie(model.child.a, model.child.c)
    assert units_of(model) == {
        "child.b": ["child.b.weight"],
        "child.a+child.c": ["child.a.weight"],
        "child": ["child.rest.weight"],
    }


def test_tied_siblings_with_nothing_beside_them_become_their_parent():
    """Where the common parent would gather no more than the group, it is the unit, which is the simpler call."""
    pair = Chain(a=layer(), b=layer())
    model = Chain(child=Chain({"pair.a": True, "pair.b": True}, pair=pair, rest=layer()))
    tie(pair.a, pair.b)
    assert units_of(model) == {"child.pair": ["child.pair.a.weight"], "child": ["child.rest.weight"]}


def test_common_ancestor_without_forward_is_passed_over():
    """Members of a ModuleList cannot meet in the list itself, which nobody calls."""
    model = Chain(child=Chain({"blocks.0": True, "blocks.1": True}))
    model.child.blocks = nn.ModuleList([layer(), layer()])
    tie(*model.child.blocks)
    units = units_of(model)
    assert list(units.values()) == [["child.blocks.0.weight"]]
    assert "child.blocks" not in units


def test_ties_of_three():
    """A chain of ties ends in one unit, not in two."""
    answers = {"a": True, "b": True, "c": True}
    model = Chain(child=Chain(answers, a=layer(), b=layer(), c=layer(), rest=layer()))
    tie(model.child.a, model.child.b, model.child.c)
    assert units_of(model) == {"child.a+child.b+child.c": ["child.a.weight"], "child": ["child.rest.weight"]}


def test_ties_that_chain_through_a_shared_neighbour():
    """a and b share one parameter, b and c another: all three are gathered together."""
    parts = {name: Chain(left=layer(), right=layer()) for name in "abc"}
    model = Chain(child=Chain(dict.fromkeys(parts, True), **parts, rest=layer()))
    tie(parts["a"].right, parts["b"].left)
    tie(parts["b"].right, parts["c"].left)
    assert list(units_of(model)) == ["child.a+child.b+child.c", "child"]


def test_tie_across_direct_children_makes_the_model_the_unit():
    """Two roots cannot share a parameter; the model's own forward gathers it for both."""
    model = Chain(a=Chain({"inner": True}, inner=layer(), tied=layer()), b=Chain(tied=layer()), c=layer())
    tie(model.a.tied, model.b.tied)
    assert units_of(model) == {"a.inner": ["a.inner.weight"], "c": ["c.weight"], "": ["a.tied.weight"]}
    assert roots_of(select_units(model)) == [""]


def test_tie_with_the_models_own_parameter():
    """A weight registered on the model and in a child is sharded with the model, not left out and not twice."""
    model = Chain(child=Chain({"inner": True}, inner=layer(), tied=layer()))
    model.own = model.child.tied.weight
    assert units_of(model) == {"child.inner": ["child.inner.weight"], "": ["own"]}
    assert left_out_of(model) == {}


def test_tie_with_an_excluded_child():
    """What an excluded child shares is sharded with the model; the rest of that child stays out."""
    model = Chain(kept=Chain(tied=layer()), left=Chain(tied=layer(), alone=layer()))
    model.left._fsdp_wrap = False
    tie(model.kept.tied, model.left.tied)
    assert units_of(model) == {"": ["kept.tied.weight"]}
    assert list(left_out_of(model)) == ["left.alone.weight"]


def test_tie_inside_an_excluded_child_stays_out():
    """A tie that FSDP1 never saw makes no unit."""
    model = Chain(kept=layer(), left=Chain(a=layer(), b=layer()))
    model.left._fsdp_wrap = False
    tie(model.left.a, model.left.b)
    assert list(units_of(model)) == ["kept"]
    assert list(left_out_of(model)) == ["left.a.weight"]


def test_tie_across_levels_of_nesting():
    """A unit between the two places of a tie stays a unit, gathered by itself inside the group's or ancestor's span."""
    inner = Chain(middle=Chain(tied=layer()), deep=Chain(rest=layer()))
    model = Chain(
        child=Chain(
            {"inner": True, "inner.middle": True, "inner.deep": True, "head": True},
            inner=inner,
            head=layer(),
            rest=layer(),
        )
    )
    tie(model.child.head, inner.middle.tied)
    units = units_of(model)
    assert units["child.inner.deep"] == ["child.inner.deep.rest.weight"]
    (owner,) = [name for name, names in units.items() if "child.inner.middle.tied.weight" in names]
    assert owner == "child.inner.middle+child.head"


def test_groups_inside_each_other_fall_back_to_ancestors():
    """Two ties that cross (a with d's inside, b with c's inside) still end in units that can be ordered."""
    a, b = Chain(x=layer(), y=layer()), Chain(x=layer(), y=layer())
    answers = {"a": True, "a.x": True, "b": True, "b.x": True}
    model = Chain(child=Chain(answers, a=a, b=b, rest=layer()))
    tie(a.x, b.y)  # a.x's unit with b
    tie(b.x, a.y)  # b.x's unit with a
    assert sum(len(names) for names in units_of(model).values()) == len(list(model.parameters()))


def test_settings_of_a_group():
    """Tied modules that want the same get it; if they differ, the model's own settings hold and a note says so."""
    same = {"reshard_after_forward": False}
    for answers, expected in ((dict.fromkeys("ac", same), KEPT), ({"a": same, "c": True}, UnitOverrides())):
        model = Chain(child=Chain(dict(answers), a=layer(), b=layer(), c=layer()))
        tie(model.child.a, model.child.c)
        selection = select_units(model)
        (group,) = [unit for unit in selection.units if len(unit.paths) == 2]
        assert group.overrides == expected
        assert any("their own settings differ" in note for note in selection.notes) == (expected != KEPT)


def settings_of_group(first: dict[str, Any], second: dict[str, Any]) -> tuple[UnitOverrides, tuple[str, ...]]:
    model = Chain(child=Chain({"a": first, "c": second}, a=layer(), b=layer(), c=layer()))
    tie(model.child.a, model.child.c)
    selection = select_units(model)
    (group,) = [unit for unit in selection.units if len(unit.paths) == 2]
    return group.overrides, selection.notes


def test_settings_of_a_group_in_another_order():
    """Two modules whose wrap functions write the same keys in another order want the same."""
    overrides, notes = settings_of_group(
        {"reshard_after_forward": False, "cpu_offload": False}, {"cpu_offload": False, "reshard_after_forward": False}
    )
    assert overrides.reshard_after_forward is False and not notes


def test_bad_settings_of_a_group():
    """Two that want the same bad thing are told of it; where they differ the model's hold, and neither matters."""
    bad = {"reshard_after_forward": "no"}
    assert "true, false or an integer" in str(settings_of_group(bad, dict(bad))[0].refused)
    overrides, notes = settings_of_group(bad, {"reshard_after_forward": "yes"})
    assert overrides.refused is None and "their own settings differ" in notes[0]


def test_settings_of_a_group_from_one_dict():
    """A wrap function that fills the same dict anew for each module wants what it said of each."""

    settings: dict[str, Any] = {}

    class Refilling(Chain):
        def fsdp_wrap_fn(self, module: nn.Module) -> bool | dict[str, Any]:
            settings["reshard_after_forward"] = module is self.a
            return module is not self.b and settings

    model = Chain(child=Refilling(a=layer(), b=layer(), c=layer()))
    tie(model.child.a, model.child.c)
    assert any("their own settings differ" in note for note in select_units(model).notes)


def test_nothing_is_read_twice_from_a_changing_function():
    """A wrap function with state (a counter of blocks) is asked once about each module, in the order of the modules."""

    asked = []

    class Counting(Chain):
        def fsdp_wrap_fn(self, module: nn.Module) -> bool:
            asked.append(module)
            return False

    child = Counting(a=layer(), b=Chain(c=layer()))
    select_units(Chain(child=child))
    assert asked == [child.a, child.b, child.b.c]


# --- FSDP2's configuration


def below_unwrapped(model: nn.Module) -> dict[str, list[str]]:
    return units_of(model, shard_below_unwrapped=True)


def test_fsdp2_shards_below_a_child_that_is_not_wrapped():
    """Under FSDP2's configuration the outermost chosen modules below `_fsdp_wrap = False` are roots; under FSDP1's the
    child is left out whole."""
    model = Model(num_blocks=2)
    model.decoder._fsdp_wrap = False
    assert units_of(model) == {}
    assert list(below_unwrapped(model)) == ["decoder.blocks.0", "decoder.blocks.1"]
    selection = select_units(model, shard_below_unwrapped=True)
    assert roots_of(selection) == ["decoder.blocks.0", "decoder.blocks.1"]
    [left] = selection.left_out
    assert left.names == ("decoder.embed.weight", "decoder.norm.weight", "decoder.norm.bias", "decoder.head.weight")
    model.decoder.head._fsdp_wrap = True
    assert "decoder.head" in below_unwrapped(model)


def test_fsdp2_shards_inside_the_roots_below_an_unwrapped_child_as_anywhere():
    """A chosen module below a chosen one is a unit inside of it, with settings of its own."""
    inner = Chain(deep=layer(), other=layer())
    answers = {"outer": {"reshard_after_forward": False}, "outer.inner.deep": True}
    child = Chain(answers, outer=Chain(inner=inner, last=layer()), beside=layer())
    child._fsdp_wrap = False
    model = Chain(child=child)
    assert list(below_unwrapped(model)) == ["child.outer.inner.deep", "child.outer"]
    selection = select_units(model, shard_below_unwrapped=True)
    assert roots_of(selection) == ["child.outer"]
    assert [unit.overrides for unit in selection.units] == [UnitOverrides(), KEPT]


def test_a_metric_is_no_unit_for_fsdp2_either():
    """Composer's FSDP2 looks for nothing in a metric."""
    model = Chain(child=layer(), metric=FakeMetric())
    assert list(below_unwrapped(model)) == ["child"]


def test_an_unwrapped_child_that_shares_with_a_unit():
    """A weight that a block shares with what lies outside of any unit is gathered by the model itself; Composer's FSDP2
    refuses the model."""
    child = Chain({"inner": True}, inner=layer(), outer=layer())
    child._fsdp_wrap = False
    tie(child.inner, child.outer)
    assert below_unwrapped(Chain(child=child)) == {"": ["child.inner.weight"]}


# --- what scripts ask for


def test_a_direct_child_whose_parameters_all_lie_in_modules_registered_twice():
    """`self.fc1 = fc1` beside `Sequential(fc1, ...)`, as in Composer's own examples: the model gathers, and the child
    is still one that `summon_full_params` and `_fsdp_wrapped_module` are found on."""
    first, second = layer(), layer()
    model = Chain(fc1=first, fc2=second, module=Chain(first=first, second=second))
    units = units_of(model)
    assert units["module"] == []
    assert roots_of(select_units(model)) == [""]
