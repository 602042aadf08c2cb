"""Which modules become units; the expectations are how Composer 0.32.1 wrapped for FSDP1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.models import Block, Chain, FakeMetric, Model, layer, tie
from torch import nn

from composer_fsdp2 import PlanError, ShardingConfig, plan_sharding
from composer_fsdp2.config.choices import UnitOverrides
from composer_fsdp2.errors import UnknownKeyError
from composer_fsdp2.fsdp1.hooks import read_hooks
from composer_fsdp2.sharding.select import Selection
from composer_fsdp2.sharding.select import select_units as select_chosen

pytestmark = pytest.mark.any_torch

BELOW = {"shard_below_unwrapped": True}

# A wrap function's {"reshard_after_forward": False}, as parsed.
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


def roots_of(selection: Selection) -> list[str]:
    return ["+".join(unit.paths) for unit in selection.units if unit.is_root]


def marked(model: nn.Module, **paths: bool) -> nn.Module:
    """With ``_fsdp_wrap`` on modules; a path has ``_`` for each dot."""
    for path, value in paths.items():
        model.get_submodule(path.replace("_", "."))._fsdp_wrap = value  # type: ignore[assignment]
    return model


def tied(model: nn.Module, *paths: str) -> nn.Module:
    tie(*map(model.get_submodule, paths))
    return model


def having(model: nn.Module, **members: Any) -> nn.Module:
    for name, member in members.items():
        setattr(model, name, member)
    return model


def normed() -> nn.Module:
    return Chain(child=Chain({}, first=layer(), norm=nn.BatchNorm1d(6)))


def in_two_places() -> nn.Module:
    shared = layer()
    return Chain(child=Chain({"a": True}, a=shared, b=Chain(again=shared), rest=layer()))


def registered_twice() -> nn.Module:
    first, second = layer(), layer()
    return Chain(fc1=first, fc2=second, module=Chain(first=first, second=second))


def sharing_its_own() -> nn.Module:
    model = Chain(child=Chain({"inner": True}, inner=layer(), tied=layer()))
    return having(model, own=model.child.tied.weight)


def chained() -> nn.Module:
    parts = {name: Chain(left=layer(), right=layer()) for name in "abc"}
    tie(parts["a"].right, parts["b"].left)
    tie(parts["b"].right, parts["c"].left)
    return Chain(child=Chain(dict.fromkeys(parts, True), **parts, rest=layer()))


def across_levels() -> nn.Module:
    inner = Chain(middle=Chain(tied=layer()), deep=Chain(rest=layer()))
    answers = dict.fromkeys(("inner", "inner.middle", "inner.deep", "head"), True)
    return tied(
        Chain(child=Chain(answers, inner=inner, head=layer(), rest=layer())), "child.head", "child.inner.middle.tied"
    )


ABC = dict.fromkeys("abc", True)
INNER = {"inner": True}
LIST = nn.ModuleList
BLOCKS = ("decoder.blocks.0", "decoder.blocks.1")


@dataclass(kw_only=True)
class Case:
    """A model and its expected units, in order: groups joined by '+', each with its parameters if listed. Optionally
    its roots, the excluded modules with reasons, and a part of a note."""

    build: Callable[[], nn.Module]
    units: dict[str, list[str]] | list[str]
    roots: list[str] | None = None
    left: dict[str, str] | list[str] | None = None
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)


# --- FSDP1's units

CASES: dict[str, Case] = {
    # A ComposerModel's own methods may call its children one by one, so each is a root.
    "direct children are the roots": Case(
        build=lambda: Chain(first=layer(), second=Chain(inner=layer())),
        units={"first": ["first.weight"], "second": ["second.inner.weight"]},
        roots=["first", "second"],
    ),
    # Children before parents, as FSDP1 wrapped them.
    "blocks that the direct child's function chooses": Case(
        build=lambda: Model(num_blocks=2),
        units={
            **{path: [f"{path}.{name}" for name, _ in Block().named_parameters()] for path in BLOCKS},
            "decoder": [f"decoder.{name}" for name in ("embed.weight", "norm.weight", "norm.bias", "head.weight")],
        },
        roots=["decoder"],
    ),
    "a function is not asked about its own child": Case(
        build=lambda: Chain(child=Chain({"": True, "inner": False}, inner=layer())), units=["child"]
    ),
    "functions further down are not asked": Case(
        build=lambda: Chain(child=Chain(inner=Chain({"deep": True}, deep=layer()))), units=["child"]
    ),
    # FSDP1 read an empty dict as False; one with settings wraps.
    "answers": Case(
        build=lambda: Chain(
            child=Chain({"a": {}, "b": {"reshard_after_forward": False}, "c": False}, a=layer(), b=layer(), c=layer())
        ),
        units=["child.b", "child"],
    ),
    # PEFT and Foundry mark single modules; the mark takes precedence over the model's function.
    "marks go before the function": Case(
        build=lambda: marked(
            Chain(child=Chain({"a": True}, a=layer(), b=layer(), c=layer())), child_a=False, child_b=True
        ),
        units=["child.b", "child"],
    ),
    "marks without a function": Case(
        build=lambda: marked(Chain(child=nn.Sequential(layer(), layer())), child_1=True), units=["child.1", "child"]
    ),
    "None is no function": Case(
        build=lambda: Chain(child=having(layer(), fsdp_wrap_fn=None)), units=["child"]
    ),
    "an excluded child with all below it": Case(
        build=lambda: marked(
            Chain(kept=layer(), left=Chain({"inner": True}, inner=layer())), left=False, left_inner=True
        ),
        units=["kept"],
        left={"left.inner.weight": "left: _fsdp_wrap is False on it"},
    ),
    "the model's own parameters": Case(
        build=lambda: having(Chain(child=layer()), own=layer().weight),
        units=["child"],
        left={"own": "the model's own parameter: only its children are sharded, as under FSDP1"},
    ),
    # Metrics with state (an LPIPS network) are neither sharded nor moved.
    "metrics": Case(
        build=lambda: Chain(net=layer(), metric=type("Accuracy", (FakeMetric,), {})()),
        units=["net"],
        left={"metric.inner.weight": "metric: a metric"},
    ),
    "a user's own class of that name": Case(
        build=lambda: nn.ModuleDict({"metric": type("Metric", (nn.Linear,), {})(2, 2)}), units=["metric"]
    ),
    # A ModuleList has no forward and fully_shard refuses it, so its members are units.
    "members of a container are the roots": Case(
        build=lambda: Chain(towers=LIST([layer(), nn.ModuleDict({"a": Chain(INNER, inner=layer())})])),
        units={"towers.0": ["towers.0.weight"], "towers.1.a": ["towers.1.a.inner.weight"]},
        roots=["towers.0", "towers.1.a"],
        note="towers (ModuleList) has no forward",
    ),
    # FSDP1 only warned.
    "a chosen container stays in the unit above": Case(
        build=lambda: Chain(
            child=Chain({"blocks": True, "blocks.0": True}, rest=layer(), blocks=LIST([layer(), layer()]))
        ),
        units={"child.blocks.0": ["child.blocks.0.weight"], "child": ["child.rest.weight", "child.blocks.1.weight"]},
        note="child.blocks (ModuleList) was chosen, but has no forward",
    ),
    # A ParameterList is never called, so its parameters are unsharded in the model's own forward.
    "a container with parameters of its own": Case(
        build=lambda: Chain(bias=nn.ParameterList([layer().weight]), inner=layer()),
        units={"inner": ["inner.weight"], "": ["bias.0"]},
        roots=[""],
    ),
    "modules without parameters are no units": Case(
        build=lambda: Chain(
            child=Chain({"act": True, "empty": True}, act=nn.Tanh(), empty=Chain(), rest=layer()), only=nn.Tanh()
        ),
        units=["child"],
    ),
    # Without it each block would be a root, which torch does not reshard after forward.
    "a root above units only": Case(
        build=lambda: Chain(child=Chain({"a": True, "b": True}, a=layer(), b=layer())),
        units={"child.a": ["child.a.weight"], "child.b": ["child.b.weight"], "child": []},
        roots=["child"],
    ),
    # The output of a first child is bf16, as with FSDP1's root.
    "a root without parameters casts its inputs": Case(
        build=lambda: Chain(scale=nn.Tanh(), net=layer()), units=["scale", "net"], options={"low_precision": True}
    ),
    # Running statistics stay in fp32 (FSDP1's MixedPrecision._module_classes_to_ignore); fp32 needs no unit.
    "a batch norm": Case(build=normed, units=["child"]),
    "a batch norm in low precision": Case(
        build=normed, units=["child.norm", "child"], options={"low_precision": True}
    ),
    "a module in two places of one child": Case(
        build=in_two_places, units={"child.a": ["child.a.weight"], "child": ["child.rest.weight"]}
    ),
    # `self.fc1 = fc1` beside `Sequential(fc1, ...)`, as in Composer's own examples: the model is the root, and
    # `summon_full_params` and `_fsdp_wrapped_module` still work on the child.
    "a direct child whose modules are all registered twice": Case(
        build=registered_twice, units={"fc1": ["fc1.weight"], "fc2": ["fc2.weight"], "module": [], "": []}, roots=[""]
    ),
    # --- ties
    "a tie with the unit above": Case(
        build=lambda: tied(
            Chain(child=Chain(INNER, inner=Chain(deep=layer(), more=layer()), head=layer())),
            "child.head", "child.inner.deep",
        ),
        units={"child": ["child.inner.deep.weight", "child.inner.more.weight"]},
        note="child.inner is not a unit of its own",
    ),
    # Embedding and head are one group; the layers between them are not in it.
    "tied siblings are a group": Case(
        build=lambda: tied(
            Chain(child=Chain(ABC, a=layer(), b=layer(), c=layer(), rest=layer())), "child.a", "child.c"
        ),
        units={
            "child.b": ["child.b.weight"], "child.a+child.c": ["child.a.weight"], "child": ["child.rest.weight"]
        },
    ),
    # It would add no parameters to the group.
    "tied siblings with nothing beside them are their parent": Case(
        build=lambda: tied(
            Chain(child=Chain({"pair.a": True, "pair.b": True}, pair=Chain(a=layer(), b=layer()), rest=layer())),
            "child.pair.a", "child.pair.b",
        ),
        units={"child.pair": ["child.pair.a.weight"], "child": ["child.rest.weight"]},
    ),
    "a common ancestor without forward": Case(
        build=lambda: tied(
            Chain(child=Chain({"blocks.0": True, "blocks.1": True}, blocks=LIST([layer(), layer()]))),
            "child.blocks.0", "child.blocks.1",
        ),
        units={"child": ["child.blocks.0.weight"]},
    ),
    "a tie of three": Case(
        build=lambda: tied(
            Chain(child=Chain(ABC, a=layer(), b=layer(), c=layer(), rest=layer())), "child.a", "child.b", "child.c"
        ),
        units={"child.a+child.b+child.c": ["child.a.weight"], "child": ["child.rest.weight"]},
    ),
    "a chain of ties": Case(build=chained, units=["child.a+child.b+child.c", "child"]),
    # Two roots cannot share a parameter; the model itself is the root for both.
    "a tie across direct children": Case(
        build=lambda: tied(
            Chain(a=Chain(INNER, inner=layer(), tied=layer()), b=Chain(tied=layer()), c=layer()), "a.tied", "b.tied"
        ),
        units={"a.inner": ["a.inner.weight"], "c": ["c.weight"], "": ["a.tied.weight"]},
        roots=[""],
    ),
    "a tie with the model's own parameter": Case(
        build=sharing_its_own, units={"child.inner": ["child.inner.weight"], "": ["own"]}, left={}
    ),
    "a tie with an excluded child": Case(
        build=lambda: tied(
            marked(Chain(kept=Chain(tied=layer()), left=Chain(tied=layer(), alone=layer())), left=False),
            "kept.tied", "left.tied",
        ),
        units={"": ["kept.tied.weight"]},
        left=["left.alone.weight"],
    ),
    "a tie inside an excluded child": Case(
        build=lambda: tied(
            marked(Chain(kept=layer(), left=Chain(a=layer(), b=layer())), left=False), "left.a", "left.b"
        ),
        units=["kept"],
        left=["left.a.weight"],
    ),
    # A unit between the two places remains a unit, inside the group's span.
    "a tie across levels of nesting": Case(
        build=across_levels,
        units={
            "child.inner.deep": ["child.inner.deep.rest.weight"],
            "child.inner.middle+child.head": ["child.inner.middle.tied.weight"],
            "child": ["child.rest.weight"],
        },
    ),
    # --- FSDP2's configuration: the outermost chosen modules below `_fsdp_wrap = False` are roots
    "FSDP2: no unit in a metric": Case(
        build=lambda: Chain(child=layer(), metric=FakeMetric()), units=["child"], options=BELOW
    ),
    "FSDP2: a unit inside of a chosen one": Case(
        build=lambda: marked(
            Chain(
                child=Chain(
                    {"outer": True, "outer.inner.deep": True},
                    outer=Chain(inner=Chain(deep=layer(), other=layer()), last=layer()),
                    beside=layer(),
                )
            ),
            child=False,
        ),
        units=["child.outer.inner.deep", "child.outer"],
        roots=["child.outer"],
        options=BELOW,
    ),
    "FSDP2: blocks of a child that is not wrapped": Case(
        build=lambda: marked(Model(num_blocks=2), decoder=False, decoder_head=True),
        units=[*BLOCKS, "decoder.head"],
        roots=[*BLOCKS, "decoder.head"],
        left=["decoder.embed.weight", "decoder.norm.weight", "decoder.norm.bias"],
        options=BELOW,
    ),
    # The model itself is the root; Composer's FSDP2 refuses it.
    "FSDP2: an unwrapped child that shares with a unit": Case(
        build=lambda: tied(
            marked(Chain(child=Chain(INNER, inner=layer(), outer=layer())), child=False), "child.inner", "child.outer"
        ),
        units={"": ["child.inner.weight"]},
        options=BELOW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_units(name: str):
    """Another choice would cost memory or speed, unshard too late, or train modules that must stay as they are."""
    case = CASES[name]
    units, selection = units_of(case.build(), **case.options), select_units(case.build(), **case.options)
    assert list(units) == list(case.units)
    assert not isinstance(case.units, dict) or units == case.units
    assert case.roots is None or roots_of(selection) == case.roots
    left = {name: left.reason for left in selection.left_out for name in left.names}
    assert case.left is None or left == case.left or list(left) == case.left
    assert any(case.note in note for note in selection.notes) or not case.note


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("yes", r"fsdp_wrap_fn returned 'yes' \(str\) for module 'child.inner'.*True, False or a dict"),
        (None, "returned None"),
        (1, "returned 1"),
    ],
)
def test_a_wrap_function_that_returns_something_else(answer: object, message: str):
    """A wrap function without a return statement raises at once and names the module; FSDP1 raised too."""
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
    """Records the modules that its wrap function is called with."""

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        self.__dict__.setdefault("asked", []).append(module)
        return super().fsdp_wrap_fn(module)


BAD = {"shard_strategy": "FULL_SHARD"}


def test_settings_that_nothing_becomes_of_are_not_read():
    """Models whose function returns settings for a ModuleList trained; only those of a unit must be valid."""
    model = Chain(child=Chain({"blocks": BAD, "act": BAD}, blocks=nn.ModuleList([layer()]), act=nn.Tanh()))
    plan = plan_sharding(model, ShardingConfig())
    assert [unit.name for unit in plan.units] == ["child"]
    assert any("blocks (ModuleList) was chosen" in note and "(shard_strategy)" in note for note in plan.notes)
    with pytest.raises(UnknownKeyError, match=r"'child\.inner'; did you mean sharding_strategy"):
        plan_sharding(Chain(child=Chain({"inner": BAD}, inner=layer())), ShardingConfig())


def test_settings_of_a_container_of_roots_are_its_members():
    """Below a child that Composer's FSDP2 did not shard, a chosen ModuleList passes its settings on, valid or not."""
    for settings, is_bad in (({"reshard_after_forward": False}, False), (BAD, True)):
        model = Chain(child=Chain({"blocks": settings}, blocks=nn.ModuleList([layer()])))
        model.child._fsdp_wrap = False
        with pytest.raises(UnknownKeyError) if is_bad else contextlib.nullcontext():
            (unit,) = plan_sharding(model, ShardingConfig(shard_below_unwrapped=True)).units
            assert unit.name == "child.blocks.0"


def test_roots_are_not_asked_about():
    """Members of a container replace it. A wrap function that expects only modules inside them is not called with
    them."""
    inner = layer()
    towers = nn.ModuleList([Chain(inner=inner), layer()])
    asked: list[nn.Module] = []
    towers.fsdp_wrap_fn = lambda module: bool(asked.append(module))  # type: ignore[func-returns-value, assignment]
    assert list(units_of(Chain(towers=towers))) == ["towers.0", "towers.1"]
    assert asked == [inner]


def test_a_unit_of_one_child_is_not_asked_about_by_the_next():
    """An encoder's layer that the decoder also calls is the encoder's unit; the decoder's function may not know it."""
    shared = layer()
    first = Asked({"a": True}, a=shared, b=layer())
    second = Asked({"again": "no answer"}, again=shared, own=layer())
    units = units_of(Chain(first=first, second=second))
    assert "first.a" in units
    assert first.asked == [shared, first.b] and second.asked == [second.own]


# --- ties


def test_groups_inside_each_other_fall_back_to_ancestors():
    """Two crossing ties (a with d's inside, b with c's inside) still result in units that can be ordered."""
    a, b = Chain(x=layer(), y=layer()), Chain(x=layer(), y=layer())
    answers = {"a": True, "a.x": True, "b": True, "b.x": True}
    model = Chain(child=Chain(answers, a=a, b=b, rest=layer()))
    tie(a.x, b.y)  # a.x's unit with b
    tie(b.x, a.y)  # b.x's unit with a
    assert sum(len(names) for names in units_of(model).values()) == len(list(model.parameters()))


def settings_of_group(first: dict[str, Any], second: dict[str, Any]) -> tuple[UnitOverrides, tuple[str, ...]]:
    model = Chain(child=Chain({"a": first, "c": second}, a=layer(), b=layer(), c=layer()))
    tie(model.child.a, model.child.c)
    selection = select_units(model)
    (group,) = [unit for unit in selection.units if len(unit.paths) == 2]
    return group.overrides, selection.notes


def test_settings_of_a_group():
    """Tied modules with equal settings get these, in whatever order they are written, and invalid settings raise. If
    the settings differ, the model's own apply and a note reports it."""
    same, both = {"reshard_after_forward": False}, {"reshard_after_forward": False, "cpu_offload": False}
    bad = {"reshard_after_forward": "no"}
    assert settings_of_group(same, dict(same)) == (KEPT, ())
    overrides, notes = settings_of_group(both, dict(reversed(both.items())))
    assert overrides.reshard_after_forward is False and not notes
    assert "true, false or an integer" in str(settings_of_group(bad, dict(bad))[0].refused)
    for other in (same, {"reshard_after_forward": "yes"}):
        overrides, notes = settings_of_group(bad, other)
        assert overrides == UnitOverrides() and "their own settings differ" in notes[0]


def test_settings_of_a_group_from_one_dict():
    """A wrap function that refills the same dict for each module gets the settings of each module, not of the last."""

    settings: dict[str, Any] = {}

    class Refilling(Chain):
        def fsdp_wrap_fn(self, module: nn.Module) -> bool | dict[str, Any]:
            settings["reshard_after_forward"] = module is self.a
            return module is not self.b and settings

    model = Chain(child=Refilling(a=layer(), b=layer(), c=layer()))
    tie(model.child.a, model.child.c)
    assert any("their own settings differ" in note for note in select_units(model).notes)


def test_nothing_is_read_twice_from_a_changing_function():
    """A wrap function with state (a counter of blocks) is called once for each module, in module order."""
    child = Asked(a=layer(), b=Chain(c=layer()))
    select_units(Chain(child=child))
    assert child.asked == [child.a, child.b, child.b.c]
