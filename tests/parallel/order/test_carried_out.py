"""Supported combinations: the rows of the legality tables that train, compared with one process.

Two steps of clipped gradients in float64, to 1e-12, on the installed torch. ../test_tensor.py has sequence parallelism,
ties, checkpointing and layers parallelized by a script, ../test_context.py context parallelism, and
../test_split_experts.py expert parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.experts import MoELanguage
from support.language import MLP, Language, Layer, layer_plan, sequence_plan
from support.legality import TENSOR, Carried, Expert, check_carried, with_experts, wrap
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL
from support.translations import config_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composer_fsdp2 import apply_activation_checkpointing, plan_sharding, summon_full_params
from composer_fsdp2._torch.capabilities import needs_even_shards

split = partial(Carried, plan=layer_plan, num_shared=TENSOR)


def scaled(dtype: torch.dtype, *, shape: tuple[int, ...] = (16,), trained: bool = True) -> Callable[[], Language]:
    """Each layer has one more parameter, of another dtype or shape."""

    def build() -> Language:
        model = Language(num_layers=1)
        for layer in model.model.layers:
            layer.scale = nn.Parameter(torch.full(shape, 1.25, dtype=dtype), requires_grad=trained)
            layer.mlp.scale = layer.scale
            layer.mlp.forward = ScaledMLP.forward.__get__(layer.mlp)
            del layer.scale
        return model

    return build


class ScaledMLP(MLP):
    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MLP.forward(self, x) * self.scale


def not_contiguous() -> Language:
    model = Language(num_layers=1)
    weight = model.model.head.weight.detach()
    model.model.head.weight = nn.Parameter(weight.t().contiguous().t())
    return model


def tied(**sizes: int) -> Callable[[], Language]:
    return partial(Language, tied=True, num_layers=1, **sizes)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def recomputed(model: Any) -> None:
    apply_activation_checkpointing(model)


def mesh_of(*shape: int) -> Callable[[nn.Module], Any]:
    return lambda model: init_device_mesh("cpu", shape)


SHARDED: dict[str, Carried] = {
    # On two ranks: rows that need no other axis.
    "a ModuleList as a unit": Carried(build=Language, prepare=wrap(lambda decoder: {decoder.layers: True})),
    "scalar parameters": Carried(build=scaled(torch.float64, shape=())),
    "parameters that are not contiguous": Carried(build=not_contiguous),
    "rows that the ranks do not divide": Carried(build=partial(Language, vocabulary=29, num_layers=1)),
    "two dtypes in one unit, both trained": Carried(build=scaled(torch.float32)),
    "bfloat16 that is frozen beside what is trained": Carried(build=scaled(torch.bfloat16, trained=False)),
    "a tie between two units": Carried(
        build=tied(), prepare=wrap(lambda decoder: {decoder.embedding: True, decoder.head: True})
    ),
    "recomputed by the script, before": Carried(prepare=recomputed),
}

OF_FOUR: dict[str, Carried] = {
    "fewer rows than ranks": Carried(build=scaled(torch.float64, shape=(1, 1, 1))),
    "an integer that is a factor of the ranks": Carried(config={"reshard_after_forward": 2}),
    "replicas on a mesh without names": Carried(config={"device_mesh": mesh_of(2, 2)}),
    "parameters that no unit holds": Carried(
        config={"ignored_modules": lambda model: [model.model.norm]}, num_shared=4
    ),
    "layers, then parameters, clipped and stepped over two meshes with foreach": split(optimizer=adamw),
    "sequence parallelism without split layers": Carried(plan=sequence_plan, degree=1),
    "rows of an expert that the other ranks do not divide": Carried(
        config={"expert_parallel_degree": 2}, build=partial(MoELanguage, num_experts=2, width=3, num_layers=1)
    ),
    "split and tiled": split(config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}}),
}

# Refused by a torch that shards evenly with another axis (test_refused.py).
IF_UNEVEN: dict[str, Carried] = {
    "rows that the ranks of both axes do not divide, tied": split(build=tied(vocabulary=22)),
}


def check_all_carried() -> None:
    rows = SHARDED if dist.get_world_size() == 2 else OF_FOUR | ({} if needs_even_shards() else IF_UNEVEN)
    for_each(check_carried, {name: (row,) for name, row in rows.items()})


def test_what_can_be_combined_trains_as_one_process_does():
    """Each row is a combination that torch supports alone, or that the library makes work."""
    for world_size in (2, 4):
        run_ranks(check_all_carried, world_size)


# --- submodules called directly


@on_ranks(2)
def test_a_part_that_is_called_outside_of_its_unit(folder: str) -> None:
    """torch raises at once; its error is in troubleshooting.md, whose advice works."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language()
    reference = copy.deepcopy(model)
    Carried().shard(model)
    x = torch.randn(2, 3, 16)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model.model.layers[0].mlp(x)
    with summon_full_params(model):
        ours = model.model.layers[0].mlp(x)
    torch.testing.assert_close(ours, reference.model.layers[0].mlp(x), rtol=0, atol=1e-12)


# --- supported rows with a note


def test_what_depends_on_the_data_is_told_of():
    """A risk that depends on the data raises no error; a note names the key that is right for any batch."""
    model = with_experts()
    model.model.fsdp_wrap_fn = lambda module: isinstance(module, Layer | Expert)
    notes = "\n".join(plan_sharding(model, config_of(FULL)).notes)
    assert "model.layers.0.mlp.experts.0" in notes and "set idle_experts: in_order" in notes, notes
