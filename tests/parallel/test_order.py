"""What may be combined with what: each row of the two tables of legality, on the torch that runs.

A row is carried out, and then equals one process, or it is refused on every rank, by a message that names the module or
the key and a way out, before anything was touched.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.cases import for_each
from support.comparing import full_parameters
from support.examples import examples
from support.language import MLP, Language, Layer, batch, layer_plan, loss_of
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from composer_fsdp2 import (
    ComposerFSDP2Error,
    PlanError,
    apply_plan,
    clip_grad_norm_,
    plan_sharding,
    prepare_fully_shard,
    translate,
)
from composer_fsdp2._torch.slices import needs_even_shards
from composer_fsdp2.parallel.tensor import split_model

TENSOR = 2


@dataclass(frozen=True)
class Refused:
    """One row that is refused.

    Args:
        says: Parts of the message: what is wrong, and the way out.
        prepare: What the script did to the model before.
    """

    says: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    plan: Callable[[], dict[str, Any]] | None = layer_plan
    degree: Any = TENSOR
    build: Callable[[], nn.Module] = Language
    prepare: Callable[[nn.Module], None] = lambda model: None
    do: Callable[[nn.Module], Any] | None = None


def with_plan(**changes: ParallelStyle | None) -> Callable[[], dict[str, Any]]:
    """The layer plan with entries changed, or left out; double underscores are dots."""

    def make() -> dict[str, Any]:
        plan: dict[str, Any] = layer_plan() | {key.replace("__", "."): style for key, style in changes.items()}
        return {key: style for key, style in plan.items() if style is not None}

    return make


def only(**styles: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {key.replace("__", "."): style for key, style in styles.items()}


def tied() -> Language:
    return Language(tied=True)


def own_mesh(model: nn.Module) -> None:
    wrap_first_layer(model, {"process_group": "self"})


def own_int(model: nn.Module) -> None:
    wrap_first_layer(model, {"reshard_after_forward": 2})


def wrap_first_layer(model: nn.Module, settings: dict[str, Any]) -> None:
    first = model.model.layers[0]
    model.model.fsdp_wrap_fn = lambda module: settings if module is first else isinstance(module, Layer)


def sharded_by_hand(model: nn.Module) -> None:
    fully_shard(model.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def split_by_script(*names: str, shape: tuple[int, ...] = (2, 2)) -> Callable[[nn.Module], None]:
    """Split along the last of the names, in a mesh of the others."""

    def split(model: nn.Module) -> None:
        along, *axes = names
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes))
        parallelize_module(model, mesh[along] if len(shape) > 1 else mesh, layer_plan())

    return split


def after_sharding(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    split_model(model, None, layer_plan(), mesh["tensor"])


REFUSED: dict[str, Refused] = {
    # The degree.
    "degree below 1": Refused(("tensor_parallel_degree is 0", "1 or more"), degree=0),
    "degree of another type": Refused(("tensor_parallel_degree is '2'", "number of ranks"), degree="2"),
    "degree does not divide the ranks": Refused(
        ("world size 4 is not a multiple of tensor_parallel_degree 3", "1, 2 or 4"), degree=3
    ),
    "degrees make too many ranks": Refused(
        ("data_parallel_shard_degree 4 x tensor_parallel_degree 2 makes 8 ranks",),
        {"data_parallel_shard_degree": 4},
    ),
    # The layer plan.
    "no layer plan": Refused(("layer_plan is None", "mapping"), plan=lambda: None),
    "a plan of another type": Refused(("layer_plan is ['a']", "mapping"), plan=lambda: ["a"]),
    "a style of another type": Refused(("layer_plan['model.norm'] is 'colwise'",), plan=only(model__norm="colwise")),
    "a path that matches nothing": Refused(
        ("no module 'model.embeding'", "did you mean model.embedding"),
        plan=with_plan(model__embeding=ColwiseParallel()),
    ),
    "a style on a container": Refused(
        ("ColwiseParallel on 'model.layers'", "nn.Linear and nn.Embedding"), plan=only(model__layers=ColwiseParallel())
    ),
    "an input of a list": Refused(
        ("on 'model.layers'", "never called"),
        plan=only(model__layers=PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())),
    ),
    "a sequence style on a container": Refused(
        ("SequenceParallel on 'model.layers.0'", "single layer"), plan=lambda: {"model.layers.0": SequenceParallel()}
    ),
    "a module in two styles": Refused(
        ("two styles for 'model.layers.0.mlp.up'", "keep one"),
        plan=lambda: layer_plan() | {"model.layers.0.mlp.up": ColwiseParallel()},
    ),
    "hidden width that the ranks do not divide": Refused(
        ("model.layers.0.mlp.up.weight has 31 in dimension 0", "leave the module out"),
        build=lambda: Language(hidden=31),
    ),
    "heads that the ranks do not divide": Refused(
        ("model.layers.0.attention.query has 3 heads of 4",), build=lambda: Language(width=12)
    ),
    "a tie with one side planned": Refused(
        ("one parameter, tied", "model.head.weight unsplit"), build=tied, plan=with_plan(model__head=None)
    ),
    "a tie split in two ways": Refused(
        ("one parameter, tied", "Shard(dim=1)", "Shard(dim=0)"),
        build=tied,
        plan=with_plan(model__embedding=ColwiseParallel()),
    ),
    "split and ignored": Refused(
        ("model.norm.bias and 1 more", "no unit"),
        {"ignored_modules": "norm"},
        plan=lambda: layer_plan() | {"model.norm": SequenceParallel()},
    ),
    # What fully_shard cannot do beside it.
    "an integer for reshard_after_forward": Refused(
        ("an integer for reshard_after_forward", "true or false"), {"reshard_after_forward": 2}
    ),
    "an integer of a unit": Refused(("model.layers.0 reshards to 2", "true or false"), prepare=own_int),
    "process_group": Refused(("process_group", "data_parallel_shard_degree"), {"process_group": "set2"}),
    "a unit's own group": Refused(("model.layers.0 has a mesh or process_group of its own",), prepare=own_mesh),
    "NO_SHARD": Refused(("NO_SHARD", "SHARD_GRAD_OP"), {"sharding_strategy": "NO_SHARD"}),
    "load_monolith_rank0_only": Refused(
        ("load_monolith_rank0_only is not compatible with tensor parallelism (TP)",), {"load_monolith_rank0_only": True}
    ),
    "two wrong keys at once": Refused(
        ("NO_SHARD", "process_group"), {"sharding_strategy": "NO_SHARD", "process_group": "set2"}
    ),
    # The order, and meshes.
    "sharded before": Refused(("sharded already, by FSDP2",), prepare=sharded_by_hand),
    "sharded, then split": Refused(("sharded already, by FSDP2",), prepare=sharded_by_hand, do=after_sharding),
    "split, and a layer plan": Refused(
        ("split by parallelize_module already", "leave the plan out"),
        prepare=split_by_script("tensor", "shard", "tensor"),
    ),
    "split along a mesh of its own": Refused(
        ("the model is split along", "one mesh of all ranks"),
        plan=None,
        prepare=split_by_script("tensor", "tensor", shape=(4,)),
    ),
}


def state_of(model: nn.Module) -> list[Any]:
    """What a refusal must leave alone: parameters, their values, classes and hooks of modules."""
    parameters = [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]
    hooks = [
        (path, type(module), len(module._forward_pre_hooks), len(module._forward_hooks))
        for path, module in model.named_modules()
    ]
    return [parameters, hooks]


def check_refused(row: Refused) -> None:
    torch.manual_seed(0)
    model = row.build()
    row.prepare(model)
    before = state_of(model)
    config = FULL | row.config
    if config.get("ignored_modules") == "norm":
        config["ignored_modules"] = [model.model.norm]
    tensor = None if row.plan is None else {"tensor_parallel_degree": row.degree, "layer_plan": row.plan()}
    with pytest.raises(ComposerFSDP2Error) as caught:
        row.do(model) if row.do else prepare_fully_shard(model, None, config, device="cpu", tensor_parallel=tensor)
    missing = [text for text in row.says if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert state_of(model) == before


def check_all_refused() -> None:
    for_each(check_refused, {name: (row,) for name, row in REFUSED.items()})


def test_what_cannot_be_combined_is_refused_before_anything_is_touched():
    """One row each: an error on all ranks in our words, instead of torch's from within, or of wrong numbers."""
    run_ranks(check_all_refused, 4)


# --- rows whose outcome depends on the torch


def check_first_axis() -> str:
    """torch 2.7 splits along the last axis alone, by its own words; later ones along any."""
    row = Refused(("the model is split along", "the tensor axis last"), plan=None)
    model = Language()
    try:
        split_by_script("tensor", "tensor", "shard")(model)
    except RuntimeError as error:
        return str(error)
    check_refused(replace(row, build=lambda: model))
    return "refused by us"


def test_layers_split_along_an_axis_that_is_not_the_last():
    """Where torch takes it, the ranks that split a layer are not those that we take for such."""
    [outcome] = set(run_ranks(check_first_axis, 4))
    assert ("innermost" if torch.__version__.startswith("2.7") else "refused by us") in outcome


def check_uneven_rows() -> str:
    """Rows of an embedding that the ranks of both axes do not divide evenly: refused where torch cannot."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language(vocabulary=22)
    reference = copy.deepcopy(model)
    tensor = {"tensor_parallel_degree": TENSOR, "layer_plan": layer_plan()}
    if needs_even_shards():
        with pytest.raises(ComposerFSDP2Error, match="22 rows, which this torch must divide evenly into 4"):
            prepare_fully_shard(model, None, FULL, device="cpu", tensor_parallel=tensor)
        return "refused"
    prepare_fully_shard(model, None, FULL, device="cpu", tensor_parallel=tensor)
    assert_one_step_is_that_of_one_process(model, reference, vocabulary=22)
    return "trained"


def test_rows_that_are_not_divided_evenly():
    """torch 2.7 refuses such a weight itself, with half of the model sharded; 2.13 pads it."""
    outcomes = set(run_ranks(check_uneven_rows, 4))
    assert outcomes == {"refused" if torch.__version__.startswith("2.7") else "trained"}


# --- any plan


def assert_one_step_is_that_of_one_process(model: nn.Module, reference: nn.Module, *, vocabulary: int) -> None:
    groups = dist.get_world_size() // TENSOR
    # Of another length for each vocabulary: torch 2.7 takes the gradients of two embeddings that it lays out alike for
    # of one size, if their indices are.
    tokens = batch(0, 2 * groups)[:, : 5 + vocabulary % 7] % vocabulary
    loss_of(reference, tokens).backward()
    loss_of(model, tokens.chunk(groups)[dist.get_rank() // TENSOR]).backward()
    norm = clip_grad_norm_(model, 0.1)["model"]
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=0, atol=1e-12)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.1).step()
    wanted = dict(reference.named_parameters())
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-12, msg=lambda t, n=name: n + t)


def drawn_plan(draw: random.Random) -> dict[str, ParallelStyle]:
    """Parts of the plan, alone where torch can take them alone, sometimes on what they do not fit."""
    alone = {"output_layouts": Replicate()}
    parts: list[dict[str, ParallelStyle]] = [
        {path: style for path, style in layer_plan().items() if ".mlp." in path},
        {path: style for path, style in layer_plan().items() if ".attention." in path},
        {"model.layers.1.mlp.down": RowwiseParallel(input_layouts=Replicate())},
        {"model.layers.0.attention.out": ColwiseParallel(**alone)},
        {"model.embedding": RowwiseParallel(input_layouts=Replicate())},
        {"model.embedding": ColwiseParallel(**alone)},
        {"model.head": ColwiseParallel(**alone)},
        {"model.head": RowwiseParallel(input_layouts=Replicate())},
        {"model.norm": SequenceParallel()} if draw.random() < 0.2 else {},
        {"model.layers": ColwiseParallel()} if draw.random() < 0.1 else {},
        {"model.layers.2.mlp.up": ColwiseParallel()} if draw.random() < 0.1 else {},
    ]
    chosen: dict[str, ParallelStyle] = {}
    for part in draw.sample(parts, draw.randint(1, 4)):
        chosen |= part
    return chosen or dict(parts[0])


def check_drawn(seed: int) -> str:
    draw = random.Random(seed)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    choices = {"vocabulary": (24, 28, 24, 28, 22, 25), "hidden": (32, 30, 32, 30, 31), "width": (16, 16, 16, 12)}
    sizes = {name: draw.choice(of_name) for name, of_name in choices.items()}
    model = Language(tied=draw.random() < 0.4, **sizes)
    reference = copy.deepcopy(model)
    config: dict[str, Any] = {"sharding_strategy": draw.choice(("FULL_SHARD", "SHARD_GRAD_OP") * 4 + ("NO_SHARD",))}
    config |= draw.choice(({}, {}, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}))
    others: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}, {"cpu_offload": True}] * 3
    config |= draw.choice([*others, {"reshard_after_forward": 2}])
    if "reshard_after_forward" in config:
        del config["sharding_strategy"]
    plan = drawn_plan(draw)
    before = state_of(model)
    refusal: ComposerFSDP2Error | None = None
    try:
        tensor = {"tensor_parallel_degree": TENSOR, "layer_plan": plan}
        prepare_fully_shard(model, None, FULL | config, device="cpu", tensor_parallel=tensor)
    except ComposerFSDP2Error as error:
        refusal = error
    if refusal is not None:
        named = [*plan, *config, *(path for path, _ in reference.named_modules() if path)]
        assert any(name in str(refusal) for name in named), f"names nothing: {refusal}"
        assert state_of(model) == before
        return "refused"
    # A sequence that is not divided before a norm is a plan of another model's: nothing here divides it.
    if "model.norm" in plan:
        return "not run"
    assert_one_step_is_that_of_one_process(model, reference, vocabulary=sizes["vocabulary"])
    return "exact"


def check_all_drawn(seeds: list[int]) -> list[str]:
    return list(for_each(check_drawn, {f"seed {seed}": (seed,) for seed in seeds}).values())


OUTCOMES: set[str] = set()


@examples(3)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=8, max_size=8, unique=True))
def test_any_plan_is_refused_by_name_or_exact(seeds: list[int]):
    """Over parts of a layer plan, shapes, ties and strategies, there is nothing in between."""
    OUTCOMES.update(run_ranks(check_all_drawn, 4, seeds)[0])


def test_plans_of_both_kinds_were_drawn():
    """Else the property above would say nothing of one of them."""
    if not OUTCOMES:
        pytest.skip("the property above was not run")
    assert {"refused", "exact"} <= OUTCOMES


# --- the plan as a value


def check_plan_as_a_value() -> str:
    torch.manual_seed(0)
    model = Language()
    config = translate(FULL, device="cpu", world_size=4, tensor_parallel_degree=TENSOR).config
    assert config is not None
    plan = plan_sharding(model, config, tensor_parallel=layer_plan())
    same = plan_sharding(copy.deepcopy(model), config, tensor_parallel=layer_plan())
    assert plan == same and plan.digest == same.digest
    other = plan_sharding(model, config, tensor_parallel=layer_plan(ends=False))
    assert plan != other and plan.digest != other.digest
    apply_plan(model, plan)
    return plan.explain()


def test_a_plan_says_where_each_parameter_lies():
    """Its text names the modules that are split and how, and ranks that plan differently notice it by the digest."""
    text = run_ranks(check_plan_as_a_value, 4)[0]
    assert "model.layers.*.mlp.up (2 modules): weight Shard(dim=0), bias Shard(dim=0)" in text
    assert "model.layers.*.mlp.down (2 modules): weight Shard(dim=1), bias Replicate()" in text
    assert "tensor_parallel 2" in text


# --- what is found out late


class WithoutInitializer(nn.Module):
    """A parameter of its own on the meta device, which nothing fills: found out where values are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(MLP(16, 32), Scale())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))


def check_untouched_by_a_late_refusal() -> None:
    with torch.device("meta"):
        model = WithoutInitializer()
    before = [(state_of(model), sorted(vars(module))) for module in model.modules()]
    config = FULL | {"tiled_mlp": {"classes": ["MLP"], "chunks": 2}}
    with pytest.raises(PlanError, match="has no reset_parameters"):
        prepare_fully_shard(model, None, config, device="cpu")
    assert [(state_of(model), sorted(vars(module))) for module in model.modules()] == before


def test_a_model_whose_values_nobody_gives_is_not_divided_either():
    """Who catches the error, and builds that part on the CPU, would have its MLPs cut twice."""
    run_ranks(check_untouched_by_a_late_refusal, 2)
