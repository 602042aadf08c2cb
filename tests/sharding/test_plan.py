"""The plan as a value: the settings of each unit, and models that cannot be planned.

test_plan_properties.py covers that planning is read-only and deterministic.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import Block, Chain, Model, layer, tie
from torch import nn
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2 import (
    ActivationCheckpointing,
    MeshSpec,
    MixedPrecision,
    PlanError,
    Prefetch,
    ShardingConfig,
    ShardingPlan,
    ShardUnit,
    UnsupportedError,
    plan_sharding,
)
from composer_fsdp2.config.sharding import GradientDtype
from composer_fsdp2.sharding.dtypes import mixed_precision_policy

pytestmark = pytest.mark.any_torch

BF16 = torch.bfloat16
FLOAT, HALF, BFLOAT = "float32", "float16", "bfloat16"
LOW = MixedPrecision(param_dtype=BFLOAT, reduce_dtype=FLOAT)


def plan_of(model: nn.Module, **fields: Any) -> ShardingPlan:
    return plan_sharding(model, ShardingConfig(**fields), precision="amp_bf16")


def unit_at(plan: ShardingPlan, path: str) -> ShardUnit:
    (unit,) = [unit for unit in plan.units if path in unit.modules]
    return unit


# --- a value


def test_every_part_of_a_plan_is_in_its_digest():
    """Ranks with different plans raise, instead of waiting for each other in a collective."""
    plan = plan_of(Model(tied=True), activation_checkpointing=ActivationCheckpointing(checkpoint=True))
    unit = plan.units[0]
    changed_units = [
        replace(unit, reshard_after_forward=False),
        replace(unit, mixed_precision=LOW),
        replace(unit, mixed_precision=MixedPrecision(output_dtype=BFLOAT)),
        replace(unit, cpu_offload=True),
        replace(unit, forward_prefetch=("decoder",)),
        replace(unit, backward_prefetch=()),
        replace(unit, mixed_precision=MixedPrecision(buffer_dtype=BFLOAT)),
        replace(unit, is_root=True),
        replace(unit, modules=("decoder.norm",)),
        replace(unit, parameters=unit.parameters[1:]),
        replace(unit, parameters=(replace(unit.parameters[0], dtype=BFLOAT), *unit.parameters[1:])),
        replace(unit, parameters=(replace(unit.parameters[0], shape=(1,)), *unit.parameters[1:])),
    ]
    changed_fields = {
        "mesh": MeshSpec.of_degrees(replicate=1),
        "activation_checkpointing": ActivationCheckpointing(checkpoint=True, reentrant=False),
        "sync_module_states": True,
        "ignored_modules": ("decoder.norm",),
    }
    changed = [replace(plan, units=(other, *plan.units[1:])) for other in changed_units]
    changed += [
        replace(plan, units=plan.units[::-1]),
        *(replace(plan, config=replace(plan.config, **{name: value})) for name, value in changed_fields.items()),
        replace(plan, tie_groups=()),
        replace(plan, checkpointed=()),
    ]
    digests = [other.digest for other in changed]
    assert plan.digest not in digests and len(set(digests)) == len(digests)


def test_a_plan_is_json():
    """Tools read the plan as data: one entry a unit, with names, shapes and dtypes."""
    plan = plan_of(Model(tied=True), mixed_precision=LOW, mesh=MeshSpec.of_degrees(shard=4))
    read = json.loads(json.dumps(plan.to_json()))
    assert [unit["modules"] for unit in read["units"]] == [["decoder.blocks.0"], ["decoder.blocks.1"], ["decoder"]]
    embedding = read["units"][-1]["parameters"][0]
    assert embedding == {
        "names": ["decoder.embed.weight", "decoder.head.weight"],
        "shape": [11, 6],
        "dtype": "float32",
        "tensor_placement": None,
        "expert_degree": 1,
        "is_trained": True,
    }
    assert read["config"]["mesh"]["axes"][0]["size"] == 4
    assert read["units"][0]["mixed_precision"]["param_dtype"] == "bfloat16"


def test_explain_shows_units_ties_and_what_is_left_out():
    """The printed plan lists units and their sizes, and shared, unsharded and checkpointed modules and parameters."""
    model = Model(tied=True)
    model.own = nn.Parameter(torch.ones(2))
    plan = plan_of(
        model, mesh=MeshSpec.of_degrees(shard=4), activation_checkpointing=ActivationCheckpointing(checkpoint=True)
    )
    text = str(plan)
    assert text == plan.explain()
    total = sum(parameter.numel() for parameter in model.parameters()) - 2
    for part in (
        f"3 units, {total} parameters on cpu mesh, data_parallel_shard 4",
        "decoder.blocks.0: 162 parameters, reshard True [fsdp_wrap_fn]",
        "tied: decoder.embed.weight = decoder.head.weight",
        "left out: own [the model's own parameter",
        "recomputed (reentrant): 2 modules, first decoder.blocks.0",
    ):
        assert part in text


# --- settings of a unit


def test_roots_keep_their_parameters_and_others_follow_the_setting():
    """Backward uses a root's parameters at once, so the root does not reshard after forward; nor did FSDP1's."""
    for reshard in (True, False, 2):
        plan = plan_of(Model(), reshard_after_forward=reshard)
        assert unit_at(plan, "decoder.blocks.0").reshard_after_forward is reshard
        assert unit_at(plan, "decoder").reshard_after_forward is False


def test_only_roots_cast_their_inputs():
    """A float mask passed to a block stays float, as under FSDP1; FSDP2's default would cast it at every unit."""
    plan = plan_of(Model(), mixed_precision=LOW)
    assert [unit.mixed_precision.cast_forward_inputs for unit in plan.units] == [False, False, True]
    assert {unit.mixed_precision.param_dtype for unit in plan.units} == {BFLOAT}
    at_no_unit = plan_of(Model(), mixed_precision=replace(LOW, cast_root_inputs=False))
    assert not any(unit.mixed_precision.cast_forward_inputs for unit in at_no_unit.units)
    everywhere = MixedPrecision(param_dtype=BFLOAT, cast_forward_inputs=True)
    at_every_unit = plan_of(Model(), mixed_precision=everywhere)
    assert all(unit.mixed_precision == everywhere for unit in at_every_unit.units)


def test_batch_norms_compute_in_fp32():
    """Running statistics do not degrade in bf16: their unit takes and returns bf16 and computes in fp32. As under
    FSDP1, dtypes from its wrap function are overridden and its other settings apply. This includes a block in bf16; in
    an fp32 model, a batch norm is not a unit."""
    expected = MixedPrecision(param_dtype=FLOAT, output_dtype=BFLOAT, cast_forward_inputs=True)
    written = {"mixed_precision": "PURE", "reshard_after_forward": False}
    for answers in ({}, {"norm": written}):
        model = Chain(child=Chain(answers, first=layer(), norm=nn.BatchNorm1d(6)))
        unit = unit_at(plan_of(model, mixed_precision=LOW), "child.norm")
        assert unit.mixed_precision == expected and unit.reshard_after_forward is not bool(answers)
    blocks = {name: Chain(first=layer(), norm=nn.BatchNorm1d(6)) for name in "ab"}
    plan = plan_of(Chain(child=Chain({"a": {"mp_policy": mixed_precision_policy(LOW)}, "b": True}, **blocks)))
    assert [unit.name for unit in plan.units] == ["child.a.norm", "child.a", "child.b", "child"]
    assert unit_at(plan, "child.a.norm").mixed_precision == expected


def test_settings_of_single_units():
    """A wrap function's settings for a module apply to that module only."""
    answers = {
        "a": {"reshard_after_forward": False},
        "b": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
        "c": {"cpu_offload": True, "backward_prefetch": "NONE"},
        "d": {"mixed_precision": FSDP1MixedPrecision(buffer_dtype=torch.float16)},
        "e": True,
    }
    model = Chain(child=Chain(answers, **{name: layer() for name in "abcde"}, rest=layer()))
    plan = plan_of(model, mixed_precision=replace(LOW, buffer_dtype=BFLOAT))
    a, b, c, d, e = (unit_at(plan, f"child.{name}") for name in "abcde")
    assert (a.reshard_after_forward, e.reshard_after_forward) == (False, True)
    assert (b.mixed_precision.param_dtype, e.mixed_precision.param_dtype) == (HALF, BFLOAT)
    assert [unit.mixed_precision.buffer_dtype for unit in (b, d, e)] == [BFLOAT, HALF, BFLOAT]
    assert d.mixed_precision.param_dtype is None
    assert (c.cpu_offload, e.cpu_offload) == (True, False)
    assert (c.backward_prefetch, e.backward_prefetch) == (("child.c",), None)


def test_prefetch_of_single_units():
    """A module can prefetch where the model does not, or not prefetch where the model does, independently of the
    others."""
    answers = {"a": {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True}, "b": True}
    model = Chain(child=Chain(answers, a=layer(), b=layer(), rest=layer()))
    plan = plan_of(model, prefetch=Prefetch(backward=0))
    a, b = unit_at(plan, "child.a"), unit_at(plan, "child.b")
    assert (a.backward_prefetch, b.backward_prefetch) == (None, ("child.b",))
    assert (a.forward_prefetch, b.forward_prefetch) == (("child.b",), ())


def test_settings_without_effect_are_in_the_notes():
    """A wrap function's settings that FSDP2 does not need are reported once, with the modules concerned."""
    unneeded = {"limit_all_gathers": False, "mixed_precision": {"keep_low_precision_grads": True}}
    answers = {"a": unneeded, "b": unneeded, "c": {"backward_prefetch": "BACKWARD_POST"}, "d": {"cpu_offload": True}}
    child = Chain(answers, **{name: layer() for name in "abc"}, d=nn.ModuleList([layer()]), rest=layer())
    notes = plan_of(Chain(child=child)).notes
    assert [note for note in notes if "child.a and 1 more: limit_all_gathers is not needed" in note]
    assert [note for note in notes if "child.a and 1 more: mixed_precision.keep_low_precision_grads" in note]
    assert [note for note in notes if "child.c: backward_prefetch BACKWARD_POST is BACKWARD_PRE here" in note]
    assert [note for note in notes if "child.d (ModuleList)" in note and "its settings (cpu_offload)" in note]
    assert len(notes) == 4
    tied = Chain(child=Chain({"inner": {"cpu_offload": True}}, inner=layer(), rest=layer()))
    tied.child.rest.weight = tied.child.inner.weight
    (note,) = plan_of(tied).notes
    assert "child.inner is not a unit of its own" in note and "its own settings (cpu_offload) have no effect" in note


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        (Prefetch(), [(), (), ()], [None, None, None]),
        (Prefetch(backward=0), [(), (), ()], [("child.a",), ("child.b",), ("child",)]),
        (Prefetch(forward=1), [("child.b",), (), ("child.a",)], [None, None, None]),
        (
            Prefetch(forward=2, backward=2),
            [("child.b",), (), ("child.a", "child.b")],
            [("child.a",), ("child.a",), ("child.b", "child.a")],
        ),
    ],
)
def test_prefetch_lists(prefetch: Prefetch, forward: list[tuple[str, ...]], backward: list[Any]):
    """forward_prefetch prefetches the next units, NONE prefetches nothing (a unit that names itself), and a limit of
    two prefetches two. The root runs first in forward and first in backward."""
    model = Chain(child=Chain({"a": True, "b": True}, rest=layer(), a=layer(), b=layer()))
    plan = plan_of(model, prefetch=prefetch)
    assert [unit.name for unit in plan.units] == ["child.a", "child.b", "child"]
    assert [unit.forward_prefetch for unit in plan.units] == forward
    assert [unit.backward_prefetch for unit in plan.units] == backward


# --- models that cannot be planned


def test_two_dtypes_in_one_unit():
    """A LoRA adapter in fp32 inside a bf16 block gets a separate unit, instead of failing in the first forward."""
    model = Chain(child=Chain(base=nn.Linear(6, 8).to(BF16), adapter=layer()))
    plan = plan_of(model)
    assert [(unit.name, unit.is_root) for unit in plan.units] == [("child.adapter", False), ("child", True)]
    assert "its parameters are float32, those of child bfloat16" in plan.units[0].reason
    assert [{spec.dtype for spec in unit.parameters} for unit in plan.units] == [{FLOAT}, {BFLOAT}]


def test_many_of_another_dtype():
    """A tower of another dtype is one unit. In a container, which has no forward, each member is one. Units inside
    remain units."""
    tower = Chain(a=layer().to(BF16), b=layer().to(BF16))
    listed = nn.ModuleDict({"x": layer().to(BF16), "y": layer().to(BF16)})
    inside = Chain(c=layer().to(BF16), d=layer().to(BF16))
    inside.c._fsdp_wrap = True
    model = Chain(child=Chain(big=nn.Linear(6, 60), tower=tower, listed=listed, inside=inside))
    names = {unit.name for unit in plan_of(model).units}
    assert names == {"child", "child.tower", "child.listed.x", "child.listed.y", "child.inside", "child.inside.c"}


def test_tied_parameters_of_another_dtype():
    """A tie is preserved where the dtypes of its modules separate them from the rest."""
    model = Chain(child=Chain(big=nn.Linear(6, 60), a=layer().to(BF16), b=layer().to(BF16)))
    model.child.b.weight = model.child.a.weight
    plan = plan_of(model, mixed_precision=MixedPrecision(param_dtype=HALF))
    (holder,) = (unit for unit in plan.units if any("child.b.weight" in spec.names for spec in unit.parameters))
    assert holder.modules == ("child.a", "child.b")
    assert holder.mixed_precision.cast_forward_inputs, "what comes in has the dtype of the modules around"


def test_two_dtypes_in_one_module():
    """A parameter that no module separates is not sharded, and the report names it."""
    model = Chain(child=nn.Linear(6, 8))
    model.child.bias = nn.Parameter(model.child.bias.to(BF16))
    plan = plan_of(model)
    assert [spec.name for spec in plan.replicated] == ["child.bias"]
    assert "replicated: child.bias [bfloat16 beside another dtype]: unsharded on every rank" in plan.explain()
    with pytest.raises(PlanError, match=r"child\.bias is bfloat16.*float32.*computes in float16"):
        plan_of(model, mixed_precision=MixedPrecision(param_dtype=HALF))


def test_scalar_parameters():
    """A 0-dim parameter cannot be sharded. It stays replicated, without changes to the model or its checkpoints."""
    model = Chain(child=layer())
    model.child.temperature = nn.Parameter(torch.tensor(1.0))
    plan = plan_of(model)
    assert [spec.names for spec in plan.replicated] == [("child.temperature",)]
    assert "child.temperature" not in [spec.name for unit in plan.units for spec in unit.parameters]
    assert "replicated: child.temperature [a scalar]: unsharded on every rank, gradients averaged" in plan.explain()


def test_parameters_that_are_not_contiguous():
    """The report names the parameter whose copy is sharded in its place."""
    model = Chain(child=Chain(a=layer(), b=layer()))
    for linear in (model.child.a, model.child.b):
        linear.weight = nn.Parameter(linear.weight.detach().t())
    (note,) = plan_of(model).notes
    assert note.startswith("child.a.weight and 1 more not contiguous")


def test_ignored_modules():
    """Ignored modules are in no unit, with their descendants and the parameters that they share. No unit is created
    inside."""
    model = Chain(child=Chain({"kept": True, "inner": True}, kept=Chain(inner=layer()), rest=layer(), tied=layer()))
    model.child.tied.weight = model.child.kept.inner.weight
    plan = plan_of(model, ignored_modules=(model.child.kept,))
    assert [unit.name for unit in plan.units] == ["child"]
    assert plan.config.ignored_modules == ("child.kept",)
    assert plan.ignored == ("child.kept.inner.weight", "child.tied.weight")
    assert [spec.name for spec in plan.units[0].parameters] == ["child.rest.weight"]
    assert "ignored: child.kept (2 parameters): unsharded on every rank" in plan.explain()
    assert plan_sharding(model, plan.config) == plan, "a plan's own configuration names modules by path"


def test_ignored_modules_that_cannot_be():
    """Modules of another model, and the model itself, raise instead of being skipped."""
    with pytest.raises(PlanError, match=r"ignored_modules\[0\] \(Linear\) is not part of the model"):
        plan_of(Chain(child=layer()), ignored_modules=(layer(),))
    model = Chain(child=layer())
    with pytest.raises(PlanError, match="the model itself"):
        plan_of(model, ignored_modules=(model,))
    with pytest.raises(PlanError, match="nothing to shard"):
        plan_of(model, ignored_modules=(model.child,))
    with pytest.raises(PlanError, match=r"ignored_modules\[0\] \('chil'\) is not part of the model"):
        plan_of(model, ignored_modules=("chil",))


def test_gradients_in_low_precision():
    """Gradients have the dtype of their parameters where possible. Elsewhere the report warns the user before
    training."""
    low = MixedPrecision(param_dtype=BFLOAT, reduce_dtype=BFLOAT, gradients=GradientDtype.AS_REDUCED)
    plan_of(Chain(child=layer().to(BF16)), mixed_precision=low)
    plan_of(Chain(child=layer()), mixed_precision=MixedPrecision(gradients=GradientDtype.AS_REDUCED))
    model = Chain(child=layer())
    with pytest.raises(UnsupportedError, match=r"child\.weight is float32.*reduced in bfloat16") as caught:
        plan_of(model, mixed_precision=low)
    assert caught.value.keys == ("keep_low_precision_grads",) and "leave the key out" in str(caught.value)
    model.child.requires_grad_(False)
    plan_of(model, mixed_precision=low)


def test_units_with_ranks_of_their_own():
    """A module's process group or strategy sets the mesh of its unit, and the report lists parameters that are no
    longer averaged."""
    groups = {"a": {"process_group": "set2"}, "b": {"sharding_strategy": "NO_SHARD"}}
    model = Chain(child=Chain(groups, a=layer(), b=layer(), rest=layer()))
    plan = plan_of(model, mesh=MeshSpec.of_degrees(shard=4))
    by_name = {unit.name: unit for unit in plan.units}
    assert by_name["child.a"].mesh.shape == (2,)
    assert by_name["child.b"].mesh == MeshSpec.of_degrees(replicate=4, shard=1)
    assert by_name["child.b"].reshard_after_forward is False
    assert by_name["child"].mesh == plan.mesh == MeshSpec.of_degrees(shard=4)
    assert [note for note in plan.notes if "child.a on groups of ranks (set2)" in note]
    assert "child.a: 36 parameters, reshard True, cpu mesh, data_parallel_shard 2 (ranks: set2)" in plan.explain()


def test_resolving_where_each_unit_has_ranks_of_its_own():
    """The plan's own mesh is resolved even if no unit uses it."""
    child = Chain({"a": {"process_group": [0]}}, a=layer())
    child._fsdp_wrap = False
    plan = plan_sharding(Chain(child=child), ShardingConfig(shard_below_unwrapped=True))
    assert plan.units[0].mesh != plan.mesh and not plan.mesh.is_resolved
    assert plan.resolve(4).mesh == MeshSpec.of_degrees(shard=4)


# --- time


def many_blocks(num_blocks: int) -> Model:
    model = Model(num_blocks=0, device="meta")
    model.decoder.blocks.extend(Block(device="meta") for _ in range(num_blocks))
    return model


def seconds_to_plan(model: nn.Module, config: ShardingConfig) -> float:
    """CPU time, which other processes on the machine do not affect."""
    begin_s = time.process_time()
    plan_sharding(model, config)
    return time.process_time() - begin_s


def test_planning_time_grows_with_the_model_and_not_faster():
    """Planning a model of 2000 modules takes under 2 s; minutes would be wasted on every GPU of a large job."""
    config = ShardingConfig(prefetch=Prefetch(forward=2, backward=2))
    small, large = many_blocks(165), many_blocks(660)
    assert sum(1 for _ in large.modules()) > 1950
    seconds_to_plan(small, config)
    small_s, large_s = (min(seconds_to_plan(model, config) for _ in range(2)) for model in (small, large))
    assert large_s < 2, f"{large_s:.1f} s"  # about 0.1 s on the machine where this was written
    assert large_s < 10 * small_s, f"4 times the modules take {large_s / small_s:.1f} times as long"


def test_planning_many_ties_takes_no_longer():
    """Planning time does not grow quadratically with the number of tied layers (an ALBERT-like model)."""

    def tied(num_layers: int) -> nn.Module:
        layers = {f"layer{i}": Chain(tied=layer(2), own=layer(2)) for i in range(num_layers)}
        child = Chain(dict.fromkeys(layers, False), **layers)
        tie(*(module.tied for module in layers.values()))
        for module in layers.values():
            module._fsdp_wrap = True
        return Chain(child=child)

    assert seconds_to_plan(tied(200), ShardingConfig()) < 4
