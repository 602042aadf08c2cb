"""Invalid values of the parallelism keys: each raises on every rank, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.experts import MoELanguage
from support.language import Language, layer_plan
from support.legality import TENSOR, state_of
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.reader import Holder
from support.training import FULL
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from composer_fsdp2 import ComposerFSDP2Error, prepare_fully_shard

pytestmark = pytest.mark.any_torch

# For 4 ranks; 2 and 4 are valid.
DEGREES = (0, -1, True, "2", "two", 1.5, None, [2], 3, 8, 10**12)

OF_SECTION: dict[str, tuple[Any, ...]] = {
    "idle_experts": (True, False, 1, "", "inorder", "IN_ORDER", [], ["in_order"], {}),
    "idle_towers": (True, 1, "", " ", [], {}, ["auto"], [1], ["a..b"], ["model.layers"], ["model.layrs"], b"auto"),
    "tiled_mlp": (
        True, 2, "MLP", [], ["MLP"], {}, {"classes": ["MLP"]}, {"chunks": 2}, {"classes": [], "chunks": 2},
        {"classes": "", "chunks": 2}, {"classes": [1], "chunks": 2}, {"classes": ["MPL"], "chunks": 2},
        *({"classes": ["MLP"], "chunks": chunks} for chunks in (1, 0, -2, True, "2", 2.0, None, [2])),
        {"classes": ["MLP"], "chunks": 2, "chunk": 2}, {"classes": ["ModuleList"], "chunks": 2},
    ),
    "context_parallel_degree": DEGREES,
    "expert_parallel_degree": DEGREES,
    "broadcast_batch": (True, 0, 1, "", "FIRST", "firsst", "false", ["first"], {}),
    "check_data": (0, 1, "", "true", [], {}),
}  # fmt: skip

# Names in the error besides the key.
NAMES: dict[str, str] = {
    "idle_experts 'inorder'": "did you mean in_order",
    "idle_towers ['model.layrs']": "did you mean model.layers",
    "idle_towers ['model.layers']": "give the paths of the modules in it",
    "tiled_mlp {'classes': ['MPL'], 'chunks': 2}": "did you mean MLP",
    "tiled_mlp {'classes': ['MLP'], 'chunks': 2, 'chunk': 2}": "did you mean chunks",
    "broadcast_batch 'firsst'": "first (",
    "expert_parallel_degree 3": "over 4 ranks, which is not a multiple of expert_parallel_degree 3; use 1, 2 or 4",
    **{f"context_parallel_degree {degree}": "world size 4 is not a multiple of" for degree in (3, 8, 10**12)},
}

HERE = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
THERE = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
# By the part of the error that names the way out.
LAYER_PLANS: dict[str, tuple[Any, ...]] = {
    "mapping from the paths": (None, {}, [], ["model.head"], "colwise", 1, ColwiseParallel),
    "give a style of torch.distributed.tensor.parallel": (
        {"model.head": "colwise"}, {"model.head": None}, {"model.head": ColwiseParallel}, {1: ColwiseParallel()},
        {None: SequenceParallel()}, {"model.head": [ColwiseParallel()]},
    ),
    "did you mean model.head": ({"model.haed": ColwiseParallel()}, {"model.heads": RowwiseParallel()}),
    "did you mean model.layers.0.mlp.up": ({"model.layers.0.mlp.upp": ColwiseParallel()},),
    "no module 'head'; did you mean model.head?": ({"head": ColwiseParallel()},),
    "no module 'layers.*.mlp.up'; did you mean model.layers.0.mlp.up?": ({"layers.*.mlp.up": ColwiseParallel()},),
    "paths begin at the model that is trained, such as 'model'": (
        {".": SequenceParallel()}, {"transformer.h.0.xyz": ColwiseParallel()},
    ),
    "nn.Linear and nn.Embedding": (
        {"model.layers": ColwiseParallel()}, {"model.layers.*": RowwiseParallel()}, {"": ColwiseParallel()},
        {"model.norm": ColwiseParallel()}, RowwiseParallel(),
    ),
    "single layer": ({"model": SequenceParallel()}, {"model.layers": SequenceParallel()}, SequenceParallel()),
    "never called": ({"model.layers": PrepareModuleInput(**HERE)}, {"model.layers": PrepareModuleOutput(**THERE)}),
    "keep one": ({"model.head": ColwiseParallel(), "model.hea?": ColwiseParallel()},),
}  # fmt: skip

TENSORS: dict[str, tuple[Any, ...]] = {
    "parallelism_config.tp is": ("tp", 2, True, [], ["tensor_parallel_degree"], dict),
    "did you mean tensor_parallel_degree": ({"tensor_paralel_degree": 2}, {"degree": 2, "tensor_parallel_degre": 2}),
}


def cases() -> Iterator[tuple[str, tuple[dict[str, Any], Any, str]]]:
    for key, values in OF_SECTION.items():
        for value in values:
            name = f"{key} {value!r}"
            yield name, ({key: value}, None, NAMES.get(name, key))
    plan = layer_plan()
    for degree in DEGREES:
        tensor = {"tensor_parallel_degree": degree, "layer_plan": plan}
        yield f"tensor_parallel_degree {degree!r}", ({}, tensor, "tensor_parallel_degree")
    for says, plans in LAYER_PLANS.items():
        for number, each in enumerate(plans):
            tensor = {"tensor_parallel_degree": TENSOR, "layer_plan": each}
            yield f"layer_plan: {says} {number}", ({}, tensor, says)
    for says, tensors in TENSORS.items():
        yield from ((f"{says} {each!r}", ({}, each, says)) for each in tensors)


def check_bad_value(model: nn.Module, before: list[Any], config: dict[str, Any], tensor: Any, says: str) -> None:
    with pytest.raises(ComposerFSDP2Error) as caught:
        prepare_fully_shard(model, None, FULL | config, device="cpu", tensor_parallel=tensor)
    assert says in str(caught.value), str(caught.value)
    assert state_of(model) == before


def check_bad_values() -> int:
    torch.manual_seed(0)
    other = Language()
    models = {"context_parallel_degree": Holder(width=96), "expert_parallel_degree": MoELanguage(num_experts=24)}
    before = {model: state_of(model) for model in (*models.values(), other)}

    def check(config: dict[str, Any], tensor: Any, says: str) -> None:
        model = next((models[key] for key in config if key in models), other)
        check_bad_value(model, before[model], config, tensor, says)

    return len(for_each(check, dict(cases())))


def test_bad_values_are_errors_on_every_rank_and_touch_nothing():
    """A typo costs one error, instead of a run that hangs or trains differently from the request."""
    assert set(run_ranks(check_bad_values, 4)) == {len(dict(cases()))}


OF_ONE_RANK: dict[str, Any] = {
    "idle_experts": "inorder",
    "idle_towers": ["model.layrs"],
    "tiled_mlp": {"classes": ["MPL"], "chunks": 2},
    "context_parallel_degree": 3,
    "expert_parallel_degree": "2",
    "broadcast_batch": "all",
    "check_data": 1,
}


@on_ranks(4)
def test_a_bad_value_on_one_rank_is_an_error_on_every_rank(folder: str) -> None:
    """Otherwise the others would wait for the rank that raised, until their process group times out."""
    rank = torch.distributed.get_rank()
    model = Language()
    before = state_of(model)
    for number, (key, value) in enumerate(OF_ONE_RANK.items()):
        config = {key: value} if rank == number % 4 else {}
        check_bad_value(model, before, config, None, key)
    for number, (says, plans) in enumerate(LAYER_PLANS.items()):
        degree = {"tensor_parallel_degree": TENSOR}
        plan = plans[0] if rank == number % 4 else layer_plan()
        check_bad_value(model, before, {}, degree | {"layer_plan": plan}, says)
