"""For every model, each parameter has one place in the plan, and every rank makes the same plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import IS_THOROUGH, examples
from support.random_models import Tree, build, found, ignored_modules, trees
from support.ranks import run_ranks
from torch import nn

from composer_fsdp2 import (
    ActivationCheckpointing,
    MixedPrecision,
    PlanError,
    Prefetch,
    ShardingConfig,
    ShardingPlan,
    plan_sharding,
)

pytestmark = pytest.mark.any_torch

LOW = MixedPrecision(param_dtype="bfloat16")
CONFIGS = st.builds(
    ShardingConfig,
    reshard_after_forward=st.sampled_from([True, False, 2]),
    mixed_precision=st.sampled_from([LOW, MixedPrecision()]),
    prefetch=st.builds(
        Prefetch, forward=st.sampled_from([None, None, 1, 2]), backward=st.sampled_from([None, None, 0, 1, 3])
    ),
    activation_checkpointing=st.sampled_from([ActivationCheckpointing(), ActivationCheckpointing(checkpoint=True)]),
)
LEFT_OUT, IGNORED = "left out", "ignored"
DTYPES = (("float64", "float32"), ("float32", "bfloat16"))


def any_tree() -> st.SearchStrategy[Tree]:
    return trees(batch_norms=True, checkpointed=True, dtypes=DTYPES)


def plan_of(tree: Tree, config: ShardingConfig, model: nn.Module | None = None) -> ShardingPlan | None:
    """The plan, or None where an error is correct."""
    model = build(tree) if model is None else model
    ignored = ignored_modules(tree, model)
    try:
        return plan_sharding(model, dataclasses.replace(config, ignored_modules=tuple(ignored)))
    except PlanError as error:
        if config.mixed_precision.param_dtype is not None and "give it a module of its own" in str(error):
            return None  # one module with two dtypes, and a third one for compute
        assert "nothing to shard" in str(error)  # noqa: PT017  the only other valid error
        assert not list(wrapped_parameters(model, ignored))
        return None


def wrapped_parameters(model: nn.Module, ignored: list[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters to shard: FSDP1 wrapped the children, and a scalar has no dimension to shard."""
    outside = {parameter for module in ignored for parameter in module.parameters()}
    for child in model.children():
        if getattr(child, "_fsdp_wrap", True):
            yield from (p for p in child.parameters() if p.dim() and p not in outside)


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
    return names


def places(model: nn.Module, plan: ShardingPlan) -> list[tuple[str, tuple[str, ...]]]:
    """Each mention of a parameter in the plan: its place and its names."""
    found = [
        (f"unit {unit.name!r}", spec.names) for unit in plan.units for spec in (*unit.parameters, *unit.replicated)
    ]
    found += [(LEFT_OUT, (name,)) for left in plan.left_out for name in left.names]
    ignored = set(plan.ignored)
    assert len(ignored) == len(plan.ignored)
    for names in names_by_parameter(model).values():
        if written := tuple(name for name in names if name in ignored):
            found.append((IGNORED, written))
            ignored -= set(written)
    assert not ignored, f"no parameters: {ignored}"
    return found


def footprint(model: nn.Module) -> list[Any]:
    """State that planning must not change: modules and tensors by identity, and every attribute of a module."""
    return [
        *((path, id(module), type(module), _frozen(vars(module))) for path, module in model.named_modules()),
        *(
            (name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad)
            for name, tensor in model.state_dict(keep_vars=True).items()
        ),
    ]


def _frozen(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in attributes.items()}


@given(any_tree(), CONFIGS)
@found(lambda tree: (tree, ShardingConfig()))
@examples(20)
def test_every_tree_has_a_plan_that_can_be_carried_out(tree: Tree, config: ShardingConfig):
    """For every combination of nesting, sharing, ties and ignored or chosen modules, mistakes would raise no error: a
    forgotten parameter trains separately on each rank, one in two units diverges, and units in the wrong order are
    lost."""
    model = build(tree)
    if (plan := plan_of(tree, config, model)) is None:
        return
    check_places(model, plan)
    check_ties(model, plan)
    check_units_gather_what_runs_in_them(model, plan)
    check_what_torch_takes(model, plan)
    check_roots(model, plan)


def check_places(model: nn.Module, plan: ShardingPlan) -> None:
    """Every parameter is in exactly one unit, or reported as ignored or excluded."""
    names = names_by_parameter(model)
    parameter_of = {name: parameter for parameter, all_names in names.items() for name in all_names}
    place_of: dict[nn.Parameter, str] = {}
    for place, written in places(model, plan):
        parameter = parameter_of[written[0]]
        assert parameter not in place_of, f"{written} is in {place_of[parameter]} and in {place}"
        known = names[parameter][:1] if place == LEFT_OUT else names[parameter]
        assert written == known, f"{place} has {written}, the parameter is {known}"
        place_of[parameter] = place
    assert place_of.keys() == names.keys(), f"{[names[p] for p in names.keys() - place_of.keys()]} have no place"


def check_ties(model: nn.Module, plan: ShardingPlan) -> None:
    """Tie groups are complete: a missing name is not tied again after sharding."""
    place_of = {written[0]: place for place, written in places(model, plan)}
    tied = {names for names in names_by_parameter(model).values() if len(names) > 1}
    assert set(plan.tie_groups) == {names for names in tied if place_of[names[0]] != IGNORED}
    assert len(set(plan.tie_groups)) == len(plan.tie_groups)


def check_units_gather_what_runs_in_them(model: nn.Module, plan: ShardingPlan) -> None:
    """A unit unshards the parameters of its modules and of the modules that run in them, up to the next unit; a
    parameter of another unit would be a shard when used. This applies to each place where a module or a parameter is
    registered."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of = {modules[path]: unit for unit in plan.units for path in unit.modules}
    assert len(unit_of) == sum(len(unit.modules) for unit in plan.units), "a module is in two units"
    for unit in plan.units:
        for spec in (*unit.parameters, *unit.replicated):
            for name in spec.names:
                above = next(
                    unit_of[modules[path]] for path in at_or_above(name.rpartition(".")[0]) if modules[path] in unit_of
                )
                assert above is unit, f"{name} is in {unit.name!r}, and {above.name!r} is around it"


def check_what_torch_takes(model: nn.Module, plan: ShardingPlan) -> None:
    """fully_shard, called unit by unit, takes exactly the plan's parameters: children come before parents, which get
    the parameters left over by their children.

    Its rule (torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _get_managed_modules): all modules below its arguments,
    except those below a module of an earlier call, and ignored ones.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    by_name = dict(model.named_parameters(remove_duplicate=False))
    outside = {name for left in plan.left_out for name in left.names} | set(plan.ignored)
    outside |= {spec.name for spec in plan.replicated}
    ignored = {by_name[name] for name in outside}
    sharded: set[nn.Module] = set()
    for unit in plan.units:
        heads = [modules[path] for path in unit.modules]
        waiting, seen = list(heads), set(heads)
        while waiting:
            for child in waiting.pop().children():
                if child not in seen and child not in sharded:
                    seen.add(child)
                    waiting.append(child)
        taken = {parameter for module in seen for parameter in module.parameters(recurse=False)} - ignored
        assert taken == {by_name[spec.name] for spec in unit.parameters}, f"{unit.modules} takes other parameters"
        sharded.update(heads)


def check_roots(model: nn.Module, plan: ShardingPlan) -> None:
    """torch finds the root in the first forward. A group as root, a container without forward, or a module below two
    roots would end the run in its first step. Prefetched units must be below the same root, too."""
    modules = dict(model.named_modules(remove_duplicate=False))
    root_of: dict[str, str] = {}
    for unit in plan.units:
        for path in unit.modules:
            assert type(modules[path]).forward is not nn.Module.forward, f"{path} cannot be called"
        heads = {modules[path] for path in unit.modules}
        roots = [root.name for root in plan.roots if not heads.isdisjoint(modules[root.name].modules())]
        assert len(roots) == 1, f"{unit.modules} is below the roots {roots}"
        assert not unit.is_root or len(unit.modules) == 1, f"{unit.modules} is a group, and a root"
        root_of[unit.name] = roots[0]
        for path, module in modules.items():
            above = {modules[outer] for outer in at_or_above(path)}
            assert module not in heads or modules[roots[0]] in above, f"{path} runs outside of its root {roots[0]!r}"
    for unit in plan.units:
        for name in (*unit.forward_prefetch, *(unit.backward_prefetch or ())):
            assert root_of.get(name) == root_of[unit.name], f"{unit.name!r} gathers {name!r} ahead, of another root"


def at_or_above(path: str) -> list[str]:
    """The paths of a module and its ancestors, innermost first; the model itself, '', is last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


@given(any_tree(), CONFIGS)
@examples(10)
def test_planning_only_reads_and_repeats_itself(tree: Tree, config: ShardingConfig):
    """A plan can be inspected before sharding. Planning again, or for the same model built again with or without
    values, results in the same plan."""
    model = build(tree)
    before = footprint(model)
    if (plan := plan_of(tree, config, model)) is None:
        assert plan_of(tree, config, model) is None
        return
    again = plan_of(tree, config, model)
    assert footprint(model) == before
    for other in (again, plan_of(tree, config), plan_of(tree, config, build(tree, "meta"))):
        assert other == plan
        assert other is not None and other.digest == plan.digest
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert plan.explain() == str(plan)


def some_cases() -> list[tuple[Tree, ShardingConfig]]:
    cases: list[tuple[Tree, ShardingConfig]] = []

    @given(any_tree(), CONFIGS)
    @examples(40)
    def collect(tree: Tree, config: ShardingConfig) -> None:
        cases.append((tree, config))

    collect()
    return cases


def digests_of(cases: list[tuple[Tree, ShardingConfig]]) -> list[str | None]:
    plans = (plan_of(*case) for case in cases)
    return [None if plan is None else plan.digest for plan in plans]


def test_ranks_make_the_same_plan():
    """Ranks with different plans would wait for each other forever. Memory addresses and hashes differ between
    processes, so an order taken from a set of modules would differ."""
    cases = some_cases()[-400 if IS_THOROUGH else -20 :]  # the first ones are the simplest
    here = digests_of(cases)
    for digests in run_ranks(digests_of, 2, cases):
        differing = [case for case, ours, theirs in zip(cases, here, digests, strict=True) if ours != theirs]
        assert not differing, f"a rank plans something else for {differing[0]}"
