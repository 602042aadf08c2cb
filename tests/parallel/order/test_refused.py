"""Unsupported combinations: each refused row of the two legality tables, on every torch.

The error names the module or the key and a way out, on every rank, before anything changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.experts import MoELanguage
from support.language import MLP, Language, layer_plan
from support.legality import TENSOR, Refused, check_refused, only, split_by_script, with_experts, with_plan, wrap
from support.on_ranks import on_ranks
from support.reader import Holder
from support.reader import layer_plan as reader_plan
from support.training import FULL
from support.translations import config_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, SequenceParallel

from composer_fsdp2 import (
    apply_activation_checkpointing,
    apply_plan,
    plan_sharding,
    prepare_fully_shard,
    tile_mlp,
)
from composer_fsdp2._torch.capabilities import needs_even_shards
from composer_fsdp2.parallel.tensor import parallelize_model
from composer_fsdp2.sharding.plan import ShardingPlan

CONTEXT, EXPERTS = {"context_parallel_degree": 2}, {"expert_parallel_degree": 2}


def tied() -> Language:
    return Language(tied=True)


def with_scale(model: nn.Module) -> None:
    model.model.layers[0].mlp.up.scale = nn.Parameter(torch.ones(1))


def without_values() -> Language:
    """A model with its own parameter on the meta device, without initialisation: detected when values are checked."""
    with torch.device("meta"):
        model = Language()
        model.model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
    return model


def parametrized(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up)


def sharded_child(model: nn.Module) -> None:
    fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_root(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_by_us(model: nn.Module) -> None:
    prepare_fully_shard(model, None, FULL, device="cpu")


def after_sharding(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_model(model, None, layer_plan(), mesh["tensor"])


GATHERED = "ColwiseParallel(output_layouts=Replicate())"


def fused(name: str, *, width: int = 32) -> Any:
    """An additional layer that no forward calls."""

    def build() -> Language:
        model = Language(num_layers=1)
        setattr(model.model.layers[0].mlp, name, nn.Linear(16, 2 * width))
        return model

    return build


def with_head_count(model: nn.Module) -> None:
    """Like LLM Foundry's attention, whose reshaping uses the number of heads."""
    model.model.layers[0].attention.n_heads = 4


def first_layer(settings: Any) -> Any:
    return wrap(lambda decoder: {decoder.layers[0]: settings})


def apply_changed(model: nn.Module, *, plan: dict[str, Any] | None = None, **changes: Any) -> None:
    """A plan for any world size, or one changed by a script, is checked again when it is applied."""
    degree = TENSOR if plan else 1
    config = config_of(FULL, world_size=None, tensor_parallel_degree=degree)
    apply_plan(model, replace(plan_sharding(model, config, tensor_parallel=plan), **changes))


def root_before_child(model: nn.Module) -> None:
    plan: ShardingPlan = plan_sharding(model, config_of(FULL, world_size=None))
    apply_plan(model, replace(plan, units=plan.units[::-1]))


def meshes(*shape: int, names: tuple[str, ...] = ("a", "b", "c")) -> Any:
    return lambda model: prepare_fully_shard(
        model,
        None,
        {"device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])},
        device="cpu",
    )


split = partial(Refused, plan=layer_plan)

SPLIT: dict[str, Refused] = {
    # Degrees.
    "degree does not divide the ranks": split(
        says=("world size 4 is not a multiple of tensor_parallel_degree 3", "1, 2 or 4"), degree=3
    ),
    "degree does not divide the ranks of a replica": split(
        says=("data_parallel_replicate_degree 2 x tensor_parallel_degree 4", "1, 2 or 4"),
        config={"data_parallel_replicate_degree": 2},
        degree=4,
    ),
    "degrees make too many ranks": split(
        says=("data_parallel_shard_degree 4 x tensor_parallel_degree 2 makes 8 ranks",),
        config={"data_parallel_shard_degree": 4},
    ),
    # Layer plans.
    "a path that matches nothing": split(
        says=("no module 'model.embeding'", "did you mean model.embedding"),
        plan=with_plan(model__embeding=ColwiseParallel()),
    ),
    "a style on a container": split(
        says=("ColwiseParallel on 'model.layers'", "nn.Linear and nn.Embedding"),
        plan=only(model__layers=ColwiseParallel()),
    ),
    "one style for the whole model": split(
        says=("ColwiseParallel on 'the model'", "nn.Linear and nn.Embedding"), plan=lambda: ColwiseParallel()
    ),
    "an input of a list": split(
        says=("on 'model.layers'", "never called"),
        plan=only(model__layers=PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())),
    ),
    "a sequence style on a container": split(
        says=("SequenceParallel on 'model.layers.0'", "single layer"),
        plan=lambda: {"model.layers.0": SequenceParallel()},
    ),
    "a module in two styles": split(
        says=("two styles for 'model.layers.0.mlp.up'", "keep one"),
        plan=lambda: layer_plan() | {"model.layers.0.mlp.up": ColwiseParallel()},
    ),
    "a linear layer with more parameters": split(
        says=("on 'model.layers.0.mlp.up' (Linear)", "it has scale", "leave the module out"), prepare=with_scale
    ),
    "a parametrized linear layer": split(
        says=("on 'model.layers.0.mlp.up'", "it has parametrizations.weight.original0"), prepare=parametrized
    ),
    "hidden width that the ranks do not divide": split(
        says=("model.layers.0.mlp.up.weight has 31 in dimension 0", "leave the module out"),
        build=lambda: Language(hidden=31),
    ),
    "heads that the ranks do not divide": split(
        says=("model.layers.0.attention.query has 3 heads of 4",), build=lambda: Language(width=12)
    ),
    "a layer that holds two projections": split(
        says=("model.layers.0.mlp.gate_up", "several projections", "(64 columns)", GATHERED),
        build=fused("gate_up"),
        plan=with_plan(model__layers__0__mlp__gate_up=ColwiseParallel()),
    ),
    "one that is known by its name": split(
        says=("model.layers.0.mlp.kv_proj", "several projections", "(16 columns)", GATHERED),
        build=fused("kv_proj", width=8),
        plan=with_plan(model__layers__0__mlp__kv_proj=ColwiseParallel()),
    ),
    "heads of half the width": split(
        says=("model.layers.0.attention.query: Attention", "n_heads = 4", GATHERED), prepare=with_head_count
    ),
    "a tie with one side planned": split(
        says=("one parameter, tied", "model.head.weight unsplit"), build=tied, plan=with_plan(model__head=None)
    ),
    "a tie split in two ways": split(
        says=("one parameter, tied", "Shard(dim=1)", "Shard(dim=0)"),
        build=tied,
        plan=with_plan(model__embedding=ColwiseParallel()),
    ),
    "split and ignored": split(
        says=("model.norm.bias and 1 more", "no unit"),
        config={"ignored_modules": lambda model: [model.model.norm]},
        plan=lambda: layer_plan() | {"model.norm": SequenceParallel()},
    ),
    # Combinations that fully_shard does not support.
    "an integer for reshard_after_forward": split(
        says=("an integer for reshard_after_forward", "true or false"), config={"reshard_after_forward": 2}
    ),
    "an integer of a unit": split(
        says=("model.layers.0 reshards to 2", "true or false"), prepare=first_layer({"reshard_after_forward": 2})
    ),
    "process_group": split(says=("process_group", "data_parallel_shard_degree"), config={"process_group": "set2"}),
    "a unit's own group": split(
        says=("model.layers.0 has a mesh or process_group of its own", "leave it out"),
        prepare=first_layer({"process_group": "self"}),
    ),
    "NO_SHARD": split(says=("NO_SHARD", "SHARD_GRAD_OP"), config={"sharding_strategy": "NO_SHARD"}),
    "load_monolith_rank0_only": split(
        says=("load_monolith_rank0_only is not compatible with tensor parallelism (TP)",),
        config={"load_monolith_rank0_only": True},
    ),
    "two wrong keys at once": split(
        says=("NO_SHARD", "process_group"), config={"sharding_strategy": "NO_SHARD", "process_group": "set2"}
    ),
    # The order of calls, and meshes.
    "sharded, then split": split(
        says=("sharded already, by FSDP2",), prepare=sharded_child, do=after_sharding, plan=None
    ),
    "sharded before": split(says=("sharded already, by FSDP2",), prepare=sharded_child),
    "split, and a layer plan": split(
        says=("split by parallelize_module already", "leave the plan out"),
        prepare=split_by_script("tensor", "shard", "tensor"),
    ),
    "split along a mesh of its own": split(
        says=("the model is split along", "one mesh of all ranks"),
        plan=None,
        prepare=split_by_script("tensor", "tensor", shape=(4,)),
    ),
}


SHARDED: dict[str, Refused] = {
    # Rows that need no other axis.
    "fully_shard twice": Refused(
        says=("module 'model.layers.0' is sharded already, by FSDP2", "as it was built"), prepare=sharded_child
    ),
    "prepared twice": Refused(says=("'model' is sharded already, by FSDP2", "as it was built"), prepare=sharded_by_us),
    "the root sharded by hand, before its children": Refused(
        says=("the model is sharded already, by FSDP2", "as it was built"), prepare=sharded_root
    ),
    "a plan with a root before its child": Refused(
        says=("unit model.layers.0 comes after model, which it lies in", "bottom-up"), do=root_before_child
    ),
    "an integer that is no factor of the ranks": Refused(
        says=("reshard_after_forward 3 does not divide the 4 ranks", "1, 2 or 4"), config={"reshard_after_forward": 3}
    ),
    "an integer of a unit that is no factor": Refused(
        says=("model.layers.0", "reshard_after_forward 3 does not divide", "1, 2 or 4"),
        prepare=first_layer({"reshard_after_forward": 3}),
    ),
    "a mesh of three axes": Refused(says=("device_mesh", "3 axes"), do=meshes(2, 2, 1)),
    "a mesh of some of the ranks": Refused(
        says=("device_mesh", "does not contain this rank", "one of all ranks"), do=meshes(2)
    ),
    "recomputed after sharding": Refused(
        says=("'model' is sharded already", "before sharding"),
        prepare=sharded_by_us,
        do=apply_activation_checkpointing,
    ),
    "values that nobody gives, and MLPs that would be cut twice by who catches the error": Refused(
        says=("has no reset_parameters",),
        config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}},
        build=without_values,
    ),
    "a plan that names what is not there": Refused(
        says=("no module 'model.layers.0.missing'",), do=partial(apply_changed, exchanging=("model.layers.0.missing",))
    ),
    # The model's plan has no world size.
    "a plan for no world size, with an integer beside split layers": Refused(
        says=("model.layers.0 reshards to 2", "true or false"),
        prepare=first_layer({"reshard_after_forward": 2}),
        do=partial(apply_changed, plan=layer_plan()),
    ),
}


def reader(**options: Any) -> Any:
    return partial(Holder, **options)


CONTEXTS: dict[str, Refused] = {
    "heads that the context ranks do not divide": Refused(
        says=("model.layers.0.attention and 1 more: its 6 heads", "4 ranks (context x tensor degree)"),
        config={"context_parallel_degree": 4},
        build=reader(width=24),
    ),
    "heads that context and tensor ranks do not divide together": Refused(
        says=("its 6 heads cannot be divided over 4 ranks (context x tensor degree)",),
        config=CONTEXT,
        plan=reader_plan,
        build=reader(width=24),
    ),
    "more context and tensor ranks than there are": Refused(
        says=("world size 4 is not a multiple of the 8 ranks", "let the product be 1, 2 or 4"),
        config={"context_parallel_degree": 4},
        plan=reader_plan,
        build=reader(width=32),
    ),
    "attention dropout": Refused(
        says=("attention dropout of 0.1", "set it to 0"), config=CONTEXT, build=reader(dropout=0.1)
    ),
    "an attention that nobody knows": Refused(
        says=("no attention of Language is known", "Leave the key out"), config=CONTEXT
    ),
    "context and groups of ranks": Refused(
        says=("context_parallel_degree", "leave process_group out"),
        config=CONTEXT | {"process_group": "set2"},
        build=Holder,
    ),
}


PARTS: dict[str, Refused] = {
    "experts that the ranks do not divide": Refused(
        says=("has 6 experts, which expert_parallel_degree 4 does not divide", "1, 2, 3 or 6"),
        config={"expert_parallel_degree": 4},
        build=lambda: MoELanguage(num_experts=6),
    ),
    "experts over more ranks than a replica has": Refused(
        says=("sharded over 2 ranks, which is not a multiple of expert_parallel_degree 4", "use 1 or 2"),
        config={"expert_parallel_degree": 4, "data_parallel_replicate_degree": 2},
        build=MoELanguage,
    ),
    "experts in the layer plan, too": Refused(
        says=("model.layers.0.moe.experts.mlp", "split by experts", "take it out of the plan"),
        config=EXPERTS,
        plan=lambda: {"model.layers.0.moe.experts.mlp": SequenceParallel()},
        build=MoELanguage,
    ),
    "split experts without any": Refused(
        says=("expert_parallel_degree 2", "no layer of experts that is known"), config=EXPERTS
    ),
    "an integer beside split experts": Refused(
        says=("reshards to 2 ranks, beside expert parallelism", "true or false"),
        config=EXPERTS | {"reshard_after_forward": 2},
        build=MoELanguage,
    ),
    "experts as units, which some ranks pass over": Refused(
        says=("wrap_policy makes experts separate units", "model.layers.0.mlp.experts.0", "Set idle_experts: in_order"),
        config={"wrap_policy": {"transformer_layer_cls_to_wrap": ["Layer"], "moe_experts": ["Expert"]}},
        build=with_experts,
    ),
    "towers that are no part of the model": Refused(
        says=("idle_towers", "no module 'model.layrs'", "did you mean model.layers?"),
        config={"idle_towers": ["model.layrs"]},
    ),
    "units in an MLP that is tiled": Refused(
        says=(
            "model.layers.0.mlp is computed in pieces, and model.layers.0.mlp.up",
            "make model.layers.0.mlp the unit",
        ),
        config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}},
        prepare=wrap(lambda language: {language.layers[0].mlp.up: True}),
    ),
    "an MLP that is tiled twice": Refused(
        says=("model.layers.0.mlp (MLP) is tiled already",),
        config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}},
        prepare=lambda model: tile_mlp(model, classes=[MLP], chunks=2),
    ),
    "a layer with attention, tiled": Refused(
        says=("model.layers.0 (Layer) has attention between tokens", "leave it out"),
        config={"tiled_mlp": {"classes": ["Layer"], "chunks": 2}},
    ),
}

ON_ONE_RANK: dict[str, Refused] = {
    "split on one rank alone": Refused(says=("ranks 0 and 1 decided differently",), plan=layer_plan, wrong_rank=1),
    "a wrong path on one rank": Refused(
        says=("no module 'model.embeding'", "did you mean model.embedding"),
        plan=with_plan(model__embeding=ColwiseParallel()),
        wrong_rank=2,
    ),
    "divided sequences on one rank, of an unknown attention": Refused(
        says=("no attention of Language is known",), config=CONTEXT, wrong_rank=3
    ),
    "divided sequences on one rank": Refused(
        says=("ranks 0 and 2 decided differently",), config=CONTEXT, build=Holder, wrong_rank=2
    ),
    "split experts on one rank": Refused(
        says=("ranks 0 and 1 decided differently",), config=EXPERTS, build=MoELanguage, wrong_rank=1
    ),
    "tiled on one rank": Refused(
        says=("ranks 0 and 3 decided differently",),
        config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}},
        wrong_rank=3,
    ),
    "checked on one rank": Refused(
        says=("ranks 0 and 1 decided differently",), config={"check_data": True}, wrong_rank=1
    ),
}

# Only on a torch that shards evenly with another axis; the others support them (test_carried_out.py).
IF_EVEN: dict[str, Refused] = {
    "rows that the ranks of both axes do not divide": split(
        says=("22 rows, which this torch must divide evenly into 4", "install torch 2.13"),
        build=lambda: Language(vocabulary=22),
    ),
    "the same, planned for no world size": Refused(
        says=("22 rows, which this torch must divide evenly into 4", "install torch 2.13"),
        build=lambda: Language(vocabulary=22),
        do=partial(apply_changed, plan=layer_plan()),
    ),
}

# If torch accepts it, its TP ranks differ from ours; 2.7 refuses it itself.
IF_UNEVEN: dict[str, Refused] = {
    "split by the script along an axis that is not the last": Refused(
        says=("the model is split along", "the tensor axis last"), prepare=split_by_script("tensor", "tensor", "shard")
    ),
}


@on_ranks(4)
def test_what_cannot_be_combined_is_refused_before_anything_is_touched(folder: str) -> None:
    """Each row raises our error on all ranks, instead of torch's internal error or silently wrong numbers."""
    torch.set_default_dtype(torch.float64)
    tables = [SPLIT, SHARDED, CONTEXTS, PARTS, ON_ONE_RANK, IF_EVEN if needs_even_shards() else IF_UNEVEN]
    for_each(check_refused, {name: (row,) for table in tables for name, row in table.items()})
